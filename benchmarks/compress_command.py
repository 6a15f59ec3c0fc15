"""Commands that measure prompt compression."""

from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from benchmarks.gpu_command import LimitS
from draftree.cli.bench import RESULTS, Device, Model, NGen, Results, Rounds
from draftree.cli.measurement import finish, progress
from draftree.cli.option import DEFAULT_MODEL

MaxCtx = Annotated[int, typer.Option(min=1024, help="Of the target.")]


def compress(
    model: Model = DEFAULT_MODEL,
    drafter: Annotated[
        list[str] | None, typer.Option(help="A model that scores; may be given several times.")
    ] = None,
    chars: Annotated[
        list[int] | None,
        typer.Option(min=4000, help="Characters of a text; several take turns. 10,000 if none."),
    ] = None,
    share: Annotated[
        list[float] | None,
        typer.Option(help="A share that is kept; may be given several times. Four if none."),
    ] = None,
    original: Annotated[
        list[float] | None,
        typer.Option(help="A share that is read at original positions as well."),
    ] = None,
    cases: Annotated[int, typer.Option(min=0, help="Texts of each kind.")] = 4,
    replies: Annotated[int, typer.Option(min=0, help="Of those, that are answered.")] = 2,
    auto_cases: Annotated[
        int, typer.Option(min=0, help="Texts of each kind read whole and by `auto`, if more.")
    ] = 0,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="A kind of question; the others stay as the result file has them."),
    ] = None,
    own: Annotated[bool, typer.Option(help="Score by the target's own keys as well.")] = True,
    device: Device = "cpu",
    max_ctx: MaxCtx = 8192,
    limit_s: LimitS = 36_000.0,
    results: Results = RESULTS / "compress",
) -> None:
    """Whether prompt compression keeps what a question needs, and whether it is answered."""
    from benchmarks.compress import SHARES, CompressOptions, name_model, write_compress
    from benchmarks.compress_case import KINDS
    from benchmarks.parts import Deadline

    if unknown := set(kind or ()) - set(KINDS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: kinds are {', '.join(KINDS)}")
    options = CompressOptions(
        model,
        tuple(drafter or (DEFAULT_MODEL,)),
        num_chars=tuple(chars or (10_000,)),
        num_cases=cases,
        num_replies=min(replies, cases),
        num_auto=auto_cases,
        use_own=own,
        shares=tuple(share or SHARES),
        original_shares=tuple(original or ()),
        device=device,
        max_ctx=max_ctx,
        kinds=tuple(kind or KINDS),
    )
    with progress() as say:
        out = results / name_model(model) / "quality.json"
        write_compress(out, options, Deadline(limit_s), say)
    finish({"file": str(out)})


def compress_session(
    model: Model = DEFAULT_MODEL,
    drafter: Annotated[str, typer.Option(help="The model that scores, or `self`.")] = DEFAULT_MODEL,
    mode: Annotated[Literal["auto", "always"], typer.Option(help="As `--compress`.")] = "auto",
    turns: Annotated[int, typer.Option(min=2, max=24, help="Turns of the session.")] = 24,
    n_gen: NGen = 64,
    scale: Annotated[int, typer.Option(min=1, help="Length of the files.")] = 12,
    rounds: Rounds = 3,
    device: Device = "auto",
    max_ctx: MaxCtx = 32_768,
    limit_s: LimitS = 60.0,
    results: Results = RESULTS / "compress",
) -> None:
    """A coding agent's session, whole, compressed, with the prefix cache, and with both."""
    from benchmarks.compress import name_model
    from benchmarks.compress_session import ReplayOptions, write_session
    from benchmarks.parts import Deadline
    from draftree.chat import Engine

    options = ReplayOptions(mode, n_gen, turns, scale, rounds)
    out: Path = results / name_model(model) / "session.json"
    deadline = Deadline(limit_s)
    with progress() as say:
        say("opening the model")
        engine = Engine.open(model, draft="none", device=device, max_ctx=max_ctx, warm_up=True)
        try:
            finish(write_session(out, engine, model, drafter, options, deadline, say))
        finally:
            engine.close()


COMMANDS: Final = (compress, compress_session)
