"""The `draftree` command: one file per subcommand, everything heavy imported when it is needed."""

import os
import signal
from collections.abc import Sequence

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Leaves by SystemExit: 0, 1 (failed), 2 (misused), 130 (Ctrl-C) or 141 (pipe closed)."""
    try:
        from draftree.cli.app import app

        app(args=arguments, prog_name="draftree")
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None
    finally:
        # What is left is the interpreter's own end, which would show where it was interrupted.
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
