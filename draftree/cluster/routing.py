"""Which replica a request goes to: where its beginning has been read, else to the least busy one.

In: bodies of requests, names of replicas. Out: keys of a conversation, replicas in order. Knows
neither HTTP nor Ray.
"""

import hashlib
import json
import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

_CONVERSATIONS: Final = ("messages", "input")  # members of a body that grow at their end
_OPENINGS: Final = ("tools", "system", "instructions")  # members that stand before them
_BLOCK: Final = 1024  # characters of a prompt that count together
_MAX_BYTES: Final = 2**22  # of a body that is looked into; objects are much larger than their text
_MAX_KEYS: Final = 2**16
_MAX_LEAD: Final = 4  # requests that a replica may have more than the least busy one


def find_keys(body: bytes) -> tuple[bytes, ...]:
    """A key for each beginning of a conversation, shortest first; empty for other requests. What
    stands before the first user's message is shared by many, and has no key.
    """
    try:
        members = json.loads(body) if len(body) <= _MAX_BYTES else None
    except (ValueError, RecursionError):
        return ()
    if not isinstance(members, dict):
        return ()
    digest = hashlib.blake2b(_dump([members.get(name) for name in _OPENINGS]), digest_size=16)
    keys = []
    for part, is_key in _split(members):
        digest.update(_dump(part))
        if is_key:
            keys.append(digest.digest())
    return tuple(keys)


def _split(members: Mapping[str, Any]) -> Iterable[tuple[Any, bool]]:
    turns = next((members[name] for name in _CONVERSATIONS if members.get(name)), None)
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]  # as it comes back in a longer conversation
    if isinstance(turns, list):
        has_user = False
        for turn in turns:
            has_user = has_user or not isinstance(turn, dict) or turn.get("role") == "user"
            yield turn, has_user
        return
    prompt = members.get("prompt")
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    for start in range(0, len(text) - _BLOCK + 1, _BLOCK):
        yield text[start : start + _BLOCK], True


def _dump(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


class Places:
    """Which replica has read which beginning, of the latest conversations."""

    def __init__(self, max_keys: int = _MAX_KEYS) -> None:
        self.num_known = 0  # requests whose beginning some replica had read
        self.num_hits = 0  # of those, that went there
        self._max_keys = max_keys
        self._replicas: OrderedDict[bytes, str] = OrderedDict()

    def find(self, keys: Sequence[bytes]) -> str:
        """The replica that has read most of it, or ""."""
        return next((self._replicas[key] for key in reversed(keys) if key in self._replicas), "")

    def record(self, keys: Sequence[bytes], replica: str, preferred: str) -> None:
        """A request went to this replica; preferred: what `find` had said."""
        self.num_known += bool(preferred)
        self.num_hits += bool(preferred) and preferred == replica
        for key in keys:
            self._replicas[key] = replica
            self._replicas.move_to_end(key)
        while len(self._replicas) > self._max_keys:
            self._replicas.popitem(last=False)


def rank_replicas(
    queue_lens: Mapping[str, int], prefers: str, avoids: Sequence[str]
) -> list[list[str]]:
    """Groups of replicas, best first; of a group, the least busy one is to be taken. A replica that
    is much busier than others is no longer preferred: reading again is faster than waiting.
    """
    least = min(queue_lens.values(), default=0)
    fresh = [name for name in queue_lens if name not in avoids]
    random.shuffle(fresh)  # so that equals share
    is_first = prefers in fresh and queue_lens[prefers] - least <= _MAX_LEAD
    first = [prefers] if is_first else []
    groups = [first, [name for name in fresh if name not in first]]
    groups.append([name for name in queue_lens if name in avoids])
    return [group for group in groups if group]
