"""`draftree chat`: talk to a model, in a terminal or line by line through a pipe.

Replies go to stdout; everything else goes to stderr, so that a pipe carries replies alone.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from draftree import env
from draftree.cli.conversation import Conversation
from draftree.cli.interrupt import consume
from draftree.cli.option import Model, Settings, with_settings
from draftree.cli.printer import PlainPrinter
from draftree.errors import CapacityError, ModelError

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

_PROMPT = "> "


@with_settings
def chat(settings: Settings, model: Model = None) -> None:
    """Talk to a model."""
    sampling = settings.read_sampling()
    is_terminal = sys.stdin.isatty()
    with closing(settings.open_engine(settings.choose_model(model))) as engine:
        if not engine.has_template:
            raise ModelError(f"{engine.name} has no chat template; use `draftree run` with it.")
        conversation = Conversation(
            engine, sampling, settings.n_gen, tuple(settings.stop or ()), settings.system
        )
        if is_terminal:
            print(f"{engine.name}: /help for help, Ctrl-D to leave", file=sys.stderr)
        for line in _terminal_lines() if is_terminal else _piped_lines():
            if not answer(conversation, line):
                return


def answer(conversation: Conversation, line: str) -> bool:
    """Answer a message or carry out a command; False when the user wants to leave."""
    if line.startswith("/"):
        words = conversation.command(line)
        if words is not None:
            print(words, file=sys.stderr)
        return words is not None
    printer = PlainPrinter()
    problem = None
    try:
        conversation.say(line, printer.write, consume)
    except CapacityError as error:
        problem = f"{error} /clear starts anew."
    except KeyboardInterrupt:
        problem = "The reply was dropped."
    printer.end()
    if problem:
        print(problem, file=sys.stderr)
    return True


def _piped_lines() -> Iterator[str]:
    return (line.strip() for line in sys.stdin if line.strip())


def _terminal_lines() -> Iterator[str]:
    """Lines with editing and history; Ctrl-C empties the line, Ctrl-D ends."""
    read = _line_reader()
    while True:
        try:
            line = read().strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if line:
            yield line


def _line_reader() -> Callable[[], str]:
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession(
        history=_open_history(), key_bindings=_key_bindings(), prompt_continuation="  "
    )
    return lambda: session.prompt(_PROMPT)


def _open_history() -> "History":
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = env.cache_dir() / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


def _key_bindings() -> "KeyBindings":
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("escape", "enter")
    def _(event: "KeyPressEvent") -> None:
        event.current_buffer.insert_text("\n")

    return bindings
