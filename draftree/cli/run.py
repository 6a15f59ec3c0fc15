"""`draftree run`: continue one prompt and stream the text to stdout.

What the reply cost goes to stderr, or with --json to the last line of stdout.
"""

import sys
from contextlib import closing
from typing import Annotated

import typer

from draftree.cli.interrupt import consume
from draftree.cli.option import Model, Settings, with_settings
from draftree.cli.printer import PlainPrinter, TreePrinter
from draftree.cli.summary import json_line, round_lines, summary_line

_DIM, _NORMAL = "\x1b[2m", "\x1b[22m"


@with_settings
def run(
    settings: Settings,
    model: Model = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="What to continue; stdin if not given.")
    ] = None,
    use_chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Take the prompt as a message, or as text to continue; raw, unless --system.",
            show_default=False,
        ),
    ] = None,
    show_tree: Annotated[
        bool, typer.Option("--show-tree", help="Colour every token by who proposed it.")
    ] = False,
    use_json: Annotated[
        bool, typer.Option("--json", help="End stdout with a line of JSON: text and statistics.")
    ] = False,
) -> None:
    """Continue a prompt."""
    if settings.system is not None and use_chat is False:
        raise typer.BadParameter("--system needs the chat template, so it cannot go with --raw.")
    is_message = bool(use_chat) or settings.system is not None
    sampling = settings.read_sampling()
    text = read_prompt(prompt, is_message)
    with closing(settings.open_engine(settings.choose_model(model))) as engine:
        generation = engine.generate(
            text,
            max_tokens=settings.n_gen,
            sampling=sampling,
            stop=tuple(settings.stop or ()),
            system=settings.system,
            chat=is_message,
        )
        printer: TreePrinter | PlainPrinter = TreePrinter() if show_tree else PlainPrinter()
        if isinstance(printer, PlainPrinter) and sys.stdout.isatty() and not is_message:
            printer.write_text(text, _DIM, _NORMAL)
        try:
            was_interrupted = consume(generation, printer.write)
        finally:
            printer.end()
        if use_json:
            reason = generation.finish_reason
            print(json_line(engine.name, generation.text, reason, generation.usage))
        else:
            lines = [*(round_lines(generation.usage) if show_tree else ())]
            print(*lines, summary_line(generation.usage), sep="\n", file=sys.stderr)
    if was_interrupted:
        raise KeyboardInterrupt


def read_prompt(prompt: str | None, is_message: bool) -> str:
    """The prompt as given, or all of stdin without its last line end. A message may be empty."""
    if prompt is None:
        if sys.stdin.isatty():
            raise typer.BadParameter("there is no prompt; give --prompt, or pipe one in.")
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise typer.BadParameter(f"the prompt on stdin is not UTF-8: {error.reason}.") from None
    if not prompt and not is_message:
        raise typer.BadParameter("the prompt is empty.")
    return prompt
