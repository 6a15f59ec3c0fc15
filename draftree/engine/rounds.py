"""Between decoding and a GPU that runs whole rounds: requests to words, records to rounds."""

from draftree.core import DraftTree, Request, TokenSource
from draftree.decode.draft import BlockDrafter
from draftree.decode.graph import DeviceRecord
from draftree.decode.speculative import Round
from draftree.kernels.cpu.sampling import Filters
from draftree.kernels.cuda.accept import RoundRecord
from draftree.kernels.cuda.ops import CudaOps
from draftree.kernels.cuda.program import Program
from draftree.kernels.cuda.request import MAX_STOPS, End
from draftree.kernels.cuda.round import CudaRounds, DraftParts, RoundStart, TargetParts
from draftree.kernels.ops import Ops, Runnable, narrow
from draftree.models.target import Target


class GraphRounds:
    """Rounds of a target and its draft, if there is one."""

    def __init__(
        self,
        target: Target,
        ops: Ops,
        drafter: BlockDrafter | None,
        draft_ops: Ops | None,
        budget: int,
    ) -> None:
        made = target.programs()
        parts, draft = TargetParts(narrow(ops, CudaOps), *_own(made[:3]), *made[3:]), None
        if drafter is not None:
            mine = drafter.programs()
            arrays, sizes = (mine.features, mine.logits), (mine.mask_token, mine.block_len)
            draft = DraftParts(narrow(draft_ops, CudaOps), *_own(mine[:3]), *arrays, *sizes)
        self._rounds = CudaRounds(parts, draft, budget)

    @staticmethod
    def can_serve(request: Request) -> bool:
        """Whether the device can make all of the request's choices."""
        return not (
            request.sampling.has_penalties
            or request.logit_bias
            or request.logprobs is not None
            or request.grammar is not None
            or len(request.stop_ids) > MAX_STOPS
        )

    def begin(
        self, request: Request, anchor: int, max_tokens: int, committed: int, drafted: int
    ) -> None:
        sampling = request.sampling
        filters = Filters(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        stop_ids, seed = request.stop_ids, sampling.seed
        self._rounds.begin(
            RoundStart(filters, seed, anchor, max_tokens, stop_ids, committed, drafted)
        )

    def launch(self, *, use_draft: bool) -> None:
        self._rounds.launch(use_draft=use_draft)

    def read(self) -> DeviceRecord | None:
        record, ms = self._rounds.read()
        if record is None:
            return None
        done = record.end is not End.RUNNING
        return DeviceRecord(Round(_read_tree(record), record.path, record.bonus), done, ms)


def _own(programs: tuple[Runnable, Runnable, Runnable]) -> tuple[Program, Program, Program]:
    first, second, third = (narrow(program, Program) for program in programs)
    return first, second, third


def _read_tree(record: RoundRecord) -> DraftTree:
    """A tree starts with the chain of first choices, so a node on it is numbered by its depth."""
    depths: list[int] = []
    sources: list[TokenSource] = []
    for node, parent in enumerate(record.parents):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        is_chain = depths[node] == node
        sources.append(TokenSource.CHAIN if is_chain else TokenSource.SIBLING)
    sources[0] = TokenSource.BONUS
    return DraftTree(record.tokens, record.parents, tuple(depths), tuple(sources))
