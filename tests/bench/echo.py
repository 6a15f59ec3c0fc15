"""A worker for tests, run as `python -m tests.bench.echo`."""

import os
import sys

from draftree.bench.worker import serve


def repeat(text):
    print("noise that a library prints")
    os.write(1, b"and more of it\n")
    return text


def fail():
    raise ValueError("cannot")


def leave():
    print("going", file=sys.stderr)
    os._exit(3)


if __name__ == "__main__":
    serve({"repeat": repeat, "fail": fail, "leave": leave})
