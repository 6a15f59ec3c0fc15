"""Who may ask, and who is asking: API keys, and the name by which the queue is fair.

Knows headers and addresses, nothing of what is asked.
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence


class Keys:
    """The server's API keys; without any, everyone may ask."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def find(self, headers: Mapping[str, str]) -> int | None:
        """Which key a request carries, as an index; -1 when none is needed, None when it lacks
        one. Takes the same time for every wrong key.
        """
        if not self._digests:
            return -1
        given = _digest(_given_key(headers))
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return matches.index(True) if any(matches) else None


def client_name(key_index: int, address: str | None) -> str:
    """Clients are told apart by key and address, so that a shared key does not make them one."""
    return f"{key_index}@{address or 'local'}" if key_index >= 0 else address or "local"


def _given_key(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
