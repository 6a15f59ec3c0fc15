"""How tokens are chosen: the fields that requests of several APIs share.

Knows nothing of replies or of the engine.
"""

from typing import Annotated, Any

from pydantic import Field, StringConstraints

from draftree.serve.wire import WireModel, ignored, optional, refused

StopText = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Zero = Annotated[float, Field(ge=0, le=0)]
One = Annotated[float, Field(ge=1, le=1)]
UNUSED = "Belongs to a sampler that is off."


class SamplerFields(WireModel):
    temperature: float | None = optional(
        "0 is greedy; if not given, what the server was started with.", ge=0, le=2
    )
    top_p: float | None = optional("Nucleus sampling; 1 is off.", ge=0, le=1)
    top_k: int | None = optional("Keep the k likeliest tokens; 0 and -1 are off.", ge=-1, lt=2**31)
    min_p: float | None = optional(
        "Drop tokens below this share of the likeliest; 0 is off.", ge=0, lt=1
    )
    presence_penalty: Penalty | None = optional("Subtracted once from the logit of a token seen.")
    frequency_penalty: Penalty | None = optional("Subtracted for each time that a token was seen.")
    repeat_penalty: float | None = optional(
        "Weaken every token seen so far by this factor; 1 is off.", gt=0, le=10
    )
    repeat_last_n: int | None = optional(
        "-1: penalties count all tokens seen; 0: repeat_penalty is off; others only if it is.",
        ge=-1,
        lt=2**31,
    )
    seed: int | None = optional(
        "The same seed gives the same text; random if not given.", ge=-(2**63), lt=2**63
    )
    stop: StopText | Annotated[list[StopText], Field(max_length=64)] | None = optional(
        "End before any of these texts."
    )
    typical_p: One | None = refused("Locally typical sampling; only 1, which is off.")
    tfs_z: One | None = refused("Tail-free sampling; only 1, which is off.")
    mirostat: Zero | None = refused("Only 0, which is off.")
    mirostat_tau: Any = ignored(UNUSED)
    mirostat_eta: Any = ignored(UNUSED)
