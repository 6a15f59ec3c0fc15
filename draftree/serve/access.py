"""Who may ask, and who is asking: API keys, names of this host, and of clients for the queue.

Knows headers and addresses, nothing of what is asked.
"""

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from typing import Final

# Names that no public name server answers for, so that no site can be reached by them.
_PRIVATE_ENDS: Final = (".localhost", ".local", ".internal", ".lan", ".home.arpa")
ANY_HOST: Final = "*"


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


class Hosts:
    """Names that requests may call this server by. A page of another site can have its own name
    lead here, and be taken for one of this server's pages; the name is what gives it away.
    """

    def __init__(self, names: Sequence[str], *, has_keys: bool) -> None:
        self._is_any = has_keys or ANY_HOST in names  # such a page does not know the key
        self._names = {name.lower().rstrip(".") for name in (*names, socket.gethostname())}

    def knows(self, host: str) -> bool:
        """host: the header, empty when there is none."""
        if self._is_any:
            return True
        name = host.lower().rpartition("]")[0].lstrip("[") or host.lower().partition(":")[0]
        name = name.rstrip(".")
        is_private = "." not in name or name.endswith(_PRIVATE_ENDS) or _is_address(name)
        return is_private or name in self._names


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def client_name(key_index: int, address: str | None) -> str:
    """Clients are told apart by key and address, so that a shared key does not make them one."""
    return f"{key_index}@{address or 'local'}" if key_index >= 0 else address or "local"


def _given_key(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
