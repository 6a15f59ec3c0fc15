"""A conversation: messages so far, the system message, and the `/` commands on them.

In: what the user said. Out: replies as Generations, and text to show for commands. Knows nothing of
terminals.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from draftree.cli.summary import round_lines, summary_line
from draftree.core import SamplingParams, Usage

if TYPE_CHECKING:
    from draftree.chat import Delta, Engine, Message

HELP: Final = """\
/help           this list
/clear          forget the messages, keep the system message
/system TEXT    set the system message and start anew; without TEXT, remove it
/stats          what the last reply cost
/exit           leave (so does Ctrl-D)
Ctrl-C stops a reply, and what was said is kept. Alt-Enter starts a new line."""


@dataclass(slots=True)
class Conversation:
    """Messages alternate user, assistant; the system message stands before them."""

    engine: "Engine"
    sampling: SamplingParams
    max_tokens: int
    stop: tuple[str, ...] = ()
    system: str | None = None
    messages: "list[Message]" = field(default_factory=list)
    usage: Usage | None = None  # of the last reply

    def say(
        self, text: str, write: "Callable[[Delta], None]", consume: "Callable[..., bool]"
    ) -> bool:
        """Answer one message; True when the reply was cut short. A failed reply leaves no trace."""
        question = {"role": "user", "content": text}
        generation = self.engine.generate(
            [*self.messages, question],
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            stop=self.stop,
            system=self.system,
            chat=True,
        )
        was_cut = consume(generation, write)
        self.messages += [question, {"role": "assistant", "content": generation.text}]
        self.usage = generation.usage
        return was_cut

    def command(self, line: str) -> str | None:
        """Carry out a `/` command and say what it did; None means leave."""
        name, _, rest = line.partition(" ")
        match name:
            case "/help":
                return HELP
            case "/clear":
                self.messages.clear()
                return "The conversation starts anew."
            case "/system":
                self.system = rest.strip() or None
                self.messages.clear()
                did = "set" if self.system else "removed"
                return f"The system message is {did}; the conversation starts anew."
            case "/stats":
                return self.statistics()
            case "/exit" | "/quit":
                return None
        return f"There is no {name}; /help lists the commands."

    def statistics(self) -> str:
        if self.usage is None:
            return "There has been no reply yet."
        return "\n".join((summary_line(self.usage), *round_lines(self.usage)))
