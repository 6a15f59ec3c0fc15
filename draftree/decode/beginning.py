"""How a reply begins whatever the model says: the tokens that its grammar leaves no choice about.

In: a request. Out: tokens that can be read together with the prompt, since a sampler would have
nothing else to choose. Knows no model.
"""

import numpy as np

from draftree.core import Request


def find_beginning(request: Request, vocab_size: int) -> tuple[int, ...]:
    """None where scores are asked for. What ends the reply is left to a round."""
    if request.grammar is None or request.logprobs is not None:
        return ()
    matcher = request.grammar.new_matcher()
    bits = np.zeros((vocab_size + 31) // 32, dtype=np.uint32)
    found: list[int] = []
    for token in tuple(matcher.propose_forced())[: request.max_tokens]:
        if token in request.stop_ids or not matcher.fill_mask(bits) or find_only(bits) != token:
            return tuple(found)
        matcher.advance(token)
        found.append(token)
    return tuple(found[:-1] if matcher.is_complete else found)


def find_only(bits: np.ndarray) -> int | None:
    """The token that is set, if there is just one."""
    (words,) = bits.nonzero()
    value = int(bits[words[0]]) if len(words) == 1 else 0
    is_one = value.bit_count() == 1
    return 32 * int(words[0]) + value.bit_length() - 1 if is_one else None
