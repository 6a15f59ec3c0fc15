"""For tests of the page: a browser where there is one, and a fake engine that shows trees."""

import shutil
from dataclasses import dataclass
from types import SimpleNamespace

from draftree.core import DraftTree, TokenSource
from tests.needs import BROWSERS
from tests.serve import fake

WORDS = (" the", " mat", " and", " rug", " purred", " a_rather_long_token_indeed")


def make_round(path=(0, 3), bonus=4):
    """Root and two branches: mat, and; rug."""
    tree = DraftTree(
        (0, 1, 2, 3),
        (-1, 0, 1, 0),
        (0, 1, 2, 1),
        (TokenSource.BONUS, TokenSource.CHAIN, TokenSource.CHAIN, TokenSource.SIBLING),
    )
    return SimpleNamespace(tree=tree, path=path, bonus=bonus, path_log_probs=(-0.5, -1.0, -1.2))


def make_chain(length):
    """A long chain, all of it accepted."""
    nodes = tuple(range(length))
    sources = (TokenSource.BONUS, *[TokenSource.NGRAM] * (length - 1))
    tree = DraftTree((5,) * length, tuple(n - 1 for n in nodes), nodes, sources)
    return SimpleNamespace(tree=tree, path=nodes, bonus=5, path_log_probs=(-0.1,) * (length - 1))


@dataclass(eq=False)
class PageEngine(fake.Engine):
    """Pieces may be rounds as well."""

    max_ctx: int = 10_000
    has_draft: bool = True
    vocab_size = len(WORDS)

    @property
    def plan(self):
        return SimpleNamespace(max_ctx=self.max_ctx, max_nodes=65, parallel=self.parallel)

    @property
    def tokens(self):
        drafter = object() if self.has_draft else None
        return SimpleNamespace(drafter=drafter, config=SimpleNamespace(budget="auto"))

    def token_bytes(self, token):
        return WORDS[token].encode()

    def _start(self, length, options, prompt):
        pieces, watchers = self.pieces, []
        self.pieces = [
            (lambda one=piece: [watch(one) for watch in watchers])
            if isinstance(piece, SimpleNamespace)
            else piece
            for piece in pieces
        ]
        generation = super()._start(length, options, prompt)
        generation.watch_trees = watchers.append
        self.pieces = pieces
        return generation


def open_browser(playwright):
    """Whatever Chromium there is."""
    from playwright.sync_api import Error

    found = [path for name in BROWSERS if (path := shutil.which(name))]
    reasons = []
    for path in (None, *found):
        try:
            return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except Error as error:
            reasons.append(str(error).strip().splitlines()[0])
    raise RuntimeError(f"there is no Chromium that starts: {'; '.join(reasons)}")
