"""The typer application: its subcommands, and how every kind of failure ends.

In: arguments. Out: an exit status, and one sentence on stderr when it is not 0. Knows nothing of
what the subcommands do.
"""

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from draftree import __version__
from draftree.cli import (
    bench,
    chat,
    cluster,
    export,
    inspect,
    models,
    pull,
    run,
    selector,
    serve,
    stop,
    train,
)
from draftree.errors import DraftreeError

FAILED, MISUSED, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141


class CommandLine(TyperGroup):
    """A group of subcommands whose failures are sentences, not tracebacks."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        # Text of a model may hold any character; a terminal may not be able to show it.
        for output in (sys.stdout, sys.stderr):
            if hasattr(output, "reconfigure"):
                output.reconfigure(errors="replace")
        try:
            status = super().main(*args, **{**kwargs, "standalone_mode": False})
        except typer.TyperException as error:
            where = getattr(getattr(error, "ctx", None), "command_path", "draftree")
            _say(f"{_sentence(error.format_message())} Try `{where} --help`.")
            raise SystemExit(error.exit_code) from None
        except typer.Abort:
            raise SystemExit(FAILED) from None
        raise SystemExit(status if isinstance(status, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except (typer.TyperException, typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            _drop_stdout()
            raise typer.Exit(PIPE_CLOSED) from None
        except Exception as error:
            if ctx.params.get("debug"):
                raise
            _say(_explain(error))
            raise typer.Exit(FAILED) from None


app = typer.Typer(
    cls=CommandLine,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.run)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("cluster")(cluster.cluster)
app.command("stop")(stop.stop)
app.command("inspect")(inspect.inspect)
app.command("pull")(pull.pull)
app.command("models")(models.models)
app.command("train")(train.train)
app.command("selector")(selector.selector)
app.command("export")(export.export)
app.add_typer(bench.app, name="bench")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"draftree {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback when something fails.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Run GGUF language models fast, with the same output as plain decoding."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def _say(sentence: str) -> None:
    print(f"error: {sentence}", file=sys.stderr)


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _explain(error: Exception) -> str:
    if isinstance(error, DraftreeError):
        return _sentence(str(error))
    if isinstance(error, MemoryError):
        return "There is not enough memory; try a smaller --max-ctx or a smaller model."
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return _sentence(f"{where}{error.strerror}")
    kind = type(error).__name__
    return _sentence(f"Internal error ({kind}: {error}); `draftree --debug ...` shows where")


def _drop_stdout() -> None:
    """Point stdout nowhere, so that the interpreter's last flush does not fail as well."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return
