"""An Ops that only writes down which operation was called on what."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Tape:
    """Arrays are strings that say how they were made."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.args: list[tuple[Any, ...]] = []
        self.options: list[dict[str, Any]] = []  # those of each call that are set

    @contextmanager
    def scope(self) -> Iterator[None]:
        yield

    def __getattr__(self, name: str) -> Any:
        def operation(*args: Any, **options: Any) -> str | tuple[str, ...]:
            self.calls.append(name)
            self.args.append(args)
            self.options.append({key: value for key, value in options.items() if value})
            if name == "linears":
                return tuple(f"linear({args[0]}, {weight})" for weight in args[1])
            return f"{name}({', '.join(str(a) for a in args)})"

        return operation
