"""Decoding where rounds run on the device over trees that the host builds: under a grammar, with
what it forces and without what it forbids, or with text that is looked up.

Where only the largest score counts, the host checks the device's free choices along the path; else
it says what a grammar lets follow each node while the target's pass runs. Where a grammar asks
nothing, rounds are the free ones of device_decoder.py, up to the token that may change that.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from draftree.core import DraftTree, Request, TokenMatcher, TokenSource
from draftree.decode.beginning import find_only
from draftree.decode.controller import SpeculationController
from draftree.decode.decoder import Emitted, Round
from draftree.decode.device_decoder import DeviceDecoder
from draftree.decode.draft_filter import DraftFilter
from draftree.drafts.drafter import Drafter
from draftree.drafts.lookup import LookupIndex
from draftree.models.target import Target

if TYPE_CHECKING:
    import numpy as np

    from draftree.decode.device_round import GpuRounds


class DeviceTreeDecoder(DeviceDecoder):
    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        rounds: "GpuRounds",
        request: Request,
        *,
        budget: int,
        use_draft: bool,
        use_lookup: bool = False,
        use_index: bool = False,
        controllers: tuple[SpeculationController, SpeculationController] | None = None,
        draft_filter: DraftFilter | None = None,
        off_reason: str | None = None,
        watch: Callable[[Round], None] | None = None,
    ) -> None:
        """controllers: say which rounds draft, of the free ones and of the others. use_lookup: in
        free rounds; use_index: the host looks up, and there are no free rounds. draft_filter: knows
        of earlier requests.
        """
        controllers = controllers if use_draft else None
        super().__init__(
            *(target, drafter, rounds, request),
            use_draft=use_draft,
            use_lookup=use_lookup,
            controller=controllers[0] if controllers is not None else None,
            off_reason=off_reason,
            watch=watch,
        )
        self._controllers = controllers or (None, None)
        if controllers is not None:
            controllers[1].begin_request()
        grammar, self._budget = request.grammar, budget
        self._matcher = grammar.new_matcher() if grammar is not None else None
        self._lookup = LookupIndex() if use_index else None
        self._is_free = self._has_trees = False
        self._filter = draft_filter or DraftFilter()
        self._has_proposal: bool | None = None  # of the next round; None: nobody has said yet

    def start(self, anchor: int, written: Sequence[int] = ()) -> None:
        super().start(anchor, written)
        if self._matcher is not None:
            for token in written:
                self._matcher.advance(token)
        if self._lookup is not None:
            self._lookup.extend((*self._target.state.tokens, anchor))

    def rehearse(self) -> None:
        super().rehearse()
        self._rounds.begin_segment(1, self._target.state.committed, has_trees=True)

    def step(self, max_tokens: int) -> list[Emitted]:
        emitted = self._unread.popleft() if self._unread else self._next(max_tokens)
        self._note_text(emitted)
        if self._matcher is not None and self._matcher.is_complete:
            emitted[-1] = emitted[-1]._replace(is_last=True)
        return emitted

    def follow(self, logits: "np.ndarray", position: int) -> Emitted:
        emitted = super().follow(logits, position)
        self._note_text([emitted])
        return emitted

    def _note_text(self, emitted: Sequence[Emitted]) -> None:
        if self._lookup is not None:
            self._lookup.extend([one.token for one in emitted])
        if self._matcher is not None:
            for one in emitted:
                self._matcher.advance(one.token)

    def pause(self) -> None:
        """What was proposed for the next round is proposed again."""
        super().pause()
        self._is_free = self._has_trees = False
        self._has_proposal = None

    def _next(self, max_tokens: int) -> list[Emitted]:
        if not self._is_begun:
            self._begin()
        if not self._is_free:
            self._choose_segment(max_tokens)
        if not self._is_free:
            return self._step_with_tree(max_tokens)
        self._launch()
        emitted = self._read()
        if self._is_done:
            self._drain()
            self._is_free = False
        return emitted

    def finish(self) -> None:
        self._drain()
        for controller in self._controllers:
            if controller is not None:
                controller.end_request()

    def _drain(self) -> None:
        while self._under_way:
            self._read()

    def _choose_segment(self, max_tokens: int) -> None:
        """Free rounds as soon as the grammar lets them, unless text is to be looked up."""
        span = None
        if self._matcher is not None and self._lookup is None:
            span = self._matcher.find_free()
        if span is not None:
            self._is_free, self._has_trees = True, False
            self._controller = self._controllers[0]
            if span.max_tokens is not None:
                max_tokens = min(max_tokens, span.max_tokens)
            self._begin_free(max_tokens, span.end_ids)
        elif not self._has_trees:
            self._has_trees, self._has_proposal = True, None
            self._controller = self._controllers[1]
            committed = self._target.state.committed
            self._rounds.begin_segment(max_tokens, committed, has_trees=True)

    def _step_with_tree(self, max_tokens: int) -> list[Emitted]:
        if self._has_proposal is None:
            self._propose()
        size = self._rounds.sizes[-1] if self._has_proposal else 1
        tree = self._build_tree(max_tokens)
        self._rounds.verify(tree)
        if self._matcher is not None:  # else every choice stands
            self._filter.learn(tree, self._matcher.count_valid)
            if self._rounds.needs_masks:
                fill_masks(tree, self._matcher, self._rounds.masks)
            else:
                check_choices(tree, self._matcher, self._rounds)
        self._rounds.accept()
        self._under_way.append(size)
        self._propose()
        return self._read()

    def _propose(self) -> None:
        """The next round's draft runs while the last one's tokens are read."""
        self._has_proposal = self._is_draft_next()
        if self._has_proposal:
            self._rounds.propose()

    def _build_tree(self, max_tokens: int) -> DraftTree:
        state, matcher = self._target.state, self._matcher
        room = min(max_tokens - 1, state.max_ctx - state.committed - 1, self._budget)
        first: Sequence[int] = ()
        source = TokenSource.GRAMMAR
        if matcher is not None:
            first = matcher.propose_forced()[: max(room, 0)]
        if self._lookup is not None and room > 0 and not first:
            source = TokenSource.NGRAM
            first = self._lookup.propose_branch(room, has_draft=bool(self._has_proposal))
            first = first[: matcher.count_valid(first)] if matcher is not None and first else first
        drafted = self._rounds.read_proposal() if self._has_proposal else ([], [])
        count_valid = matcher.count_valid if matcher is not None else None
        return self._filter.build(
            self._anchor, drafted, self._budget, first=first, source=source, count_valid=count_valid
        )


def fill_masks(tree: DraftTree, matcher: TokenMatcher, rows: "np.ndarray") -> None:
    """rows[i] = what may follow node i, for every node that can be reached; see
    `GpuRounds.masks`. The matcher stays at the root.
    """
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node in range(1, tree.num_nodes):
        children[tree.parents[node]].append(node)
    places = [(0, matcher)]
    while places:
        node, here = places.pop()
        bits = rows[node, :-1]
        rows[node, -1] = here.is_complete
        if here.is_complete:
            continue
        if not here.fill_mask(bits):
            bits[:] = 0xFFFFFFFF
        nexts = [n for n in children[node] if bits[tree.tokens[n] // 32] >> tree.tokens[n] % 32 & 1]
        for child in nexts:
            is_kept = node == 0 or child != nexts[-1]
            place = here.copy() if is_kept else here
            place.advance(tree.tokens[child])
            places.append((child, place))


def check_choices(tree: DraftTree, matcher: TokenMatcher, rounds: "GpuRounds") -> None:
    """The accept walk over the device's free choices. The largest of all tokens is the largest of
    the allowed ones too, if it is allowed; where it is not, and several are, the walk ends with
    what the device chooses among those. The matcher stays at the root.
    """
    places, node, is_end = _find_places(tree, matcher), 0, False
    children = {edge: i for i, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    written: list[tuple[int, int]] = []
    chosen, ends = rounds.read_choices()
    free = chosen[: tree.num_nodes].tolist()
    while (following := children.get((node, free[node]))) in places:
        node = following
    place = places[node]
    while True:
        token = free[node]
        if place.count_valid((token,)) == 0:
            token, is_end = _choose_allowed(place, node, rounds)
            written.append((node, token))
        child = children.get((node, token))
        if child is None:
            break
        place.advance(token)
        if is_end or place.is_complete:
            ends[child] = 1
            break
        node = child
    chosen[: tree.num_nodes] = free  # which other choices may have overwritten
    for node, token in written:
        chosen[node] = token


def _find_places(tree: DraftTree, matcher: TokenMatcher) -> dict[int, TokenMatcher]:
    """Where the reply stands after the nodes of the tree's first branch that may be gone through,
    so that nothing has to be asked about them when the pass is over. The root is the first.
    """
    tip, places = 0, {0: matcher.copy()}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent != tip or node == 0:
            continue
        place = places[tip].copy()
        if place.count_valid((token,)) == 0:
            break
        place.advance(token)
        if place.is_complete:
            break
        tip, places[node] = node, place
    return places


def _choose_allowed(place: TokenMatcher, node: int, rounds: "GpuRounds") -> tuple[int, bool]:
    """What follows a node whose free choice is refused, and whether the walk is to end there. To
    ask about a few tokens takes less than a mask of all, which is the last resort.
    """
    if not place.propose_forced():
        for token in rounds.read_best(node):
            if place.count_valid((token,)):
                return token, False
    bits = rounds.masks[node, :-1]
    place.fill_mask(bits)
    only = find_only(bits)
    return (rounds.choose_again(node), True) if only is None else (only, False)
