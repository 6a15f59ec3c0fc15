"""The options that `run`, `chat` and `serve` share, and what is made of them.

In: what the user typed. Out: SamplingParams, EngineConfig, an open Engine. A value out of range
becomes a usage error; what "auto" means is not decided here.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_type_hints

import typer

from draftree.core import SamplingParams

if TYPE_CHECKING:
    from draftree.chat import Engine
    from draftree.config import EngineConfig

DEFAULT_MODEL: Final = "smollm2-135m"
MAX_TOKENS: Final = 512
_SAMPLING: Final = SamplingParams()
KvName = Literal["auto", "f32", "f16", "q8_0", "q8", "q4", "tq3_0"]


def _sampling(help_text: str, **details: Any) -> Any:
    return typer.Option(help=help_text, rich_help_panel="Sampling", **details)


def _engine(help_text: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel="Engine", show_default=False)


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help=f"A name (see `draftree models`) or a GGUF file; {DEFAULT_MODEL} if not given.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user typed, field by option; None is "not given"."""

    model_option: Annotated[
        str | None,
        typer.Option("--model", "-m", help="The same as MODEL, as an option.", show_default=False),
    ] = None
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None
    n_gen: Annotated[
        int, typer.Option("--n-gen", "-n", min=1, help="Most tokens to generate in a reply.")
    ] = MAX_TOKENS

    temperature: Annotated[float, _sampling("0 is greedy.")] = _SAMPLING.temperature
    top_k: Annotated[int, _sampling("Keep the k likeliest tokens; 0 is off.")] = _SAMPLING.top_k
    top_p: Annotated[
        float, _sampling("Keep the likeliest tokens up to this probability; 1 is off.")
    ] = _SAMPLING.top_p
    min_p: Annotated[
        float, _sampling("Drop tokens below this share of the likeliest one; 0 is off.")
    ] = _SAMPLING.min_p
    repetition_penalty: Annotated[
        float, _sampling("Weaken every token seen so far by this factor; 1 is off.")
    ] = _SAMPLING.repetition_penalty
    presence_penalty: Annotated[
        float, _sampling("Subtract this once from the logit of a token seen; 0 is off.")
    ] = _SAMPLING.presence_penalty
    frequency_penalty: Annotated[
        float, _sampling("Subtract this for each time that a token was seen; 0 is off.")
    ] = _SAMPLING.frequency_penalty
    seed: Annotated[
        int, _sampling("The same seed gives the same text, with or without a draft.")
    ] = _SAMPLING.seed
    stop: Annotated[
        list[str] | None,
        _sampling("End before this text; may be given several times.", show_default=False),
    ] = None

    draft: Annotated[
        str | None,
        _engine(
            "Draft: a file, a folder or a name; `mtp`: the block for multi-token prediction in the "
            "model's own file; `none` decodes plainly. By default the model's own, if there is one."
        ),
    ] = None
    budget: Annotated[
        str | None,
        _engine(
            "Most nodes of a draft tree besides its root: a number, on a GPU at most 63, or `auto` "
            "(default)."
        ),
    ] = None
    ngram: Annotated[
        Literal["auto", "on", "off"] | None,
        _engine("Also propose what followed earlier in the text (n-gram lookup); `auto` if unset."),
    ] = None
    block: Annotated[
        int | None, _engine("Tokens that the draft fills in one pass; as trained by default.")
    ] = None
    max_ctx: Annotated[
        int | None,
        _engine(
            "Longest sequence, prompt and reply together; 8,192 by default, or what the model was "
            "trained for if that is less."
        ),
    ] = None
    chunk: Annotated[
        int | None,
        _engine(
            "Tokens of a prompt that one pass reads; by default 128 on a CPU, on a GPU up to 4,096 "
            "as memory allows."
        ),
    ] = None
    window: Annotated[
        int | None,
        _engine(
            "Sliding window: attend to the system prompt, the tools and this many latest tokens. "
            "Faster on long texts, but changes the reply. Off by default."
        ),
    ] = None
    math: Annotated[
        Literal["auto", "exact"] | None,
        _engine("`exact` computes in float32 on decoded weights; `auto` is faster."),
    ] = None
    kv: Annotated[KvName | None, _engine("Format of cached keys and values alike.")] = None
    kv_k: Annotated[
        KvName | None,
        _engine(
            "Format of cached keys: `f16`, `q8_0`, `q4` or `tq3_0` (3 bits), on a CPU also `f32`. "
            "By default the best that fits a GPU, down to `q4`. On a CPU `q4` and `tq3_0` only "
            "round: they save no memory there."
        ),
    ] = None
    kv_v: Annotated[KvName | None, _engine("Format of cached values, likewise.")] = None
    kv_f16: Annotated[bool, _engine("The same as `--kv f16`.", "--kv-f16")] = False
    kv_q8: Annotated[bool, _engine("The same as `--kv q8_0`.", "--kv-q8")] = False
    kv_q4: Annotated[bool, _engine("The same as `--kv q4`.", "--kv-q4")] = False
    kv_tq3: Annotated[bool, _engine("The same as `--kv tq3_0`.", "--kv-tq3")] = False
    threads: Annotated[int | None, _engine("CPU threads; all usable cores by default.")] = None
    device: Annotated[
        Literal["auto", "cpu", "cuda"] | None,
        _engine("Where to run; `auto` takes a GPU where there is one."),
    ] = None
    gpu_memory: Annotated[
        float | None, _engine("GiB of the GPU's memory that may be used; all of it by default.")
    ] = None
    compress: Annotated[
        Literal["off", "auto", "always"] | None,
        _engine(
            "Leave out parts of long messages that the question does not look at; `auto` only "
            "above 4,096 tokens. Off by default: a reply may miss what was left out."
        ),
    ] = None
    compress_keep: Annotated[
        str | None,
        _engine("Share of a long message to keep, above 0, or `auto`: 0.2, with `self` 0.3."),
    ] = None
    compress_with: Annotated[
        str | None,
        _engine(
            "What scores the parts of a message: a small model's name or file, or `self`, the "
            "model itself (default)."
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        _engine(
            "Chat template in place of the model's own: a Jinja file, Jinja text, or a name: "
            "`chatml`, `command-r`, `granite`, `llama3`, `phi3`, `phi4`."
        ),
    ] = None
    prefix_cache: Annotated[
        int | None,
        _engine(
            "MiB of main memory for the prefix cache (earlier conversations); 0 is off; by default "
            "an eighth of what is left, at most 4096."
        ),
    ] = None
    prefix_cache_dir: Annotated[
        str | None,
        _engine("Folder that keeps the prefix cache across restarts, of that size; none if unset."),
    ] = None

    def choose_model(self, argument: str | None) -> str:
        if argument and self.model_option and argument != self.model_option:
            raise typer.BadParameter(
                f"MODEL is {argument}, but --model is {self.model_option}; give one of them."
            )
        return argument or self.model_option or DEFAULT_MODEL

    def read_sampling(self) -> SamplingParams:
        names = (field.name for field in fields(SamplingParams))
        try:
            return SamplingParams(**{name: getattr(self, name) for name in names})
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    def read_config(self) -> "EngineConfig":
        """What was not given is left to the engine."""
        from draftree.config import EngineConfig

        names = (
            *("draft", "ngram", "block", "max_ctx", "chunk", "window", "math", "threads"),
            *("device", "gpu_memory", "compress", "compress_with", "chat_template"),
        )
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        both = self._read_kv()
        given |= {"kv_k": self.kv_k or both, "kv_v": self.kv_v or both}
        given["budget"] = _read_budget(self.budget)
        given["compress_keep"] = _read_share(self.compress_keep)
        if self.prefix_cache is not None:
            given["prefix_bytes"] = self.prefix_cache * 2**20
        given["prefix_dir"] = self.prefix_cache_dir
        try:
            return EngineConfig(**{name: v for name, v in given.items() if v is not None})
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    def _read_kv(self) -> str | None:
        """The format of both sides, which may be said in several ways."""
        flags = {"f16": self.kv_f16, "q8_0": self.kv_q8, "q4": self.kv_q4, "tq3_0": self.kv_tq3}
        given = [name for name, is_given in flags.items() if is_given]
        given += [self.kv] if self.kv else []
        if len(given) > 1:
            raise typer.BadParameter(f"keys and values cannot be in {' and in '.join(given)}.")
        return given[0] if given else None

    def open_engine(self, model: str, *, warm_up: bool = False, **fields: Any) -> "Engine":
        """fields: more of EngineConfig's. warm_up: the first request is not to wait for what later
        ones find made.
        """
        config = replace(self.read_config(), warm_up=warm_up, **fields)
        from draftree.chat import Engine

        engine = Engine.open(model, config, report=_show_progress)
        if engine.plan.kv_note:
            print(engine.plan.kv_note, file=sys.stderr)
        return engine


def _show_progress(number: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if number == total else ""
        print(f"\rcompiling kernels {number}/{total}", end=end, file=sys.stderr, flush=True)


def with_settings(
    command: Callable[..., None], *, is_engine_only: bool = False
) -> Callable[..., None]:
    """Give a command an option for every field of the dataclasses that it takes; of Settings, for
    all or for those alone that a model is opened with.
    """
    keyword, own = inspect.Parameter.KEYWORD_ONLY, []
    groups: dict[str, tuple[Any, list[inspect.Parameter]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = parameter.annotation
        if not is_dataclass(kind):
            own.append(parameter.replace(kind=keyword))
            continue
        hints = get_type_hints(kind, include_extras=True)
        groups[parameter.name] = (
            kind,
            [
                inspect.Parameter(
                    each.name, keyword, default=each.default, annotation=hints[each.name]
                )
                for each in fields(kind)
                if kind is not Settings
                or not is_engine_only
                or each.name == "model_option"
                or _is_engine(hints[each.name])
            ],
        )

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        made = {
            name: kind(**{option.name: values.pop(option.name) for option in options})
            for name, (kind, options) in groups.items()
        }
        command(**made, **values)

    every = [*own, *(option for _, options in groups.values() for option in options)]
    # typer reads the signature and the annotations, and both must show the added options.
    del wrapper.__wrapped__
    wrapper.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {option.name: option.annotation for option in every}
    return wrapper


def _is_engine(hint: Any) -> bool:
    return bool(hint.__metadata__[0].rich_help_panel == "Engine")


def _read_budget(text: str | None) -> int | str | None:
    if text is None or text == "auto":
        return text
    if not (text.isascii() and text.isdecimal()):
        raise typer.BadParameter(f"--budget is {text!r}; it must be a number or `auto`.")
    return int(text)


def _read_share(text: str | None) -> float | str | None:
    if text is None or text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        sentence = f"--compress-keep is {text!r}; it must be a number or `auto`."
        raise typer.BadParameter(sentence) from None
