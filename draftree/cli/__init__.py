"""The `draftree` command: one file per subcommand, everything heavy imported when it is needed."""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Leaves by SystemExit: 0, 1 (failed), 2 (misused), 130 (Ctrl-C) or 141 (pipe closed)."""
    from draftree.cli.app import app

    app(args=arguments, prog_name="draftree")
