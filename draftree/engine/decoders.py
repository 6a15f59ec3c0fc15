"""Which decoder a request gets: whole rounds on the device, rounds of the host, or plain steps."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from draftree.config import EngineConfig
from draftree.core import Request
from draftree.decode.controller import DEVICE_SCHEDULE, HOST_SCHEDULE, ControllerPair
from draftree.decode.decoder import Decoder, Round
from draftree.decode.device_decoder import DeviceDecoder
from draftree.decode.device_tree import DeviceTreeDecoder
from draftree.decode.draft_filter import DraftFilter
from draftree.decode.host_round import SpeculationOptions, SpeculativeDecoder
from draftree.decode.plain import PlainDecoder
from draftree.decode.sampler import Sampler
from draftree.engine.parts import EngineParts

if TYPE_CHECKING:
    from draftree.decode.device_round import GpuRounds


class Decoders:
    """Holds what outlives a request: what rounds cost, and how often drafts are right."""

    def __init__(self, parts: EngineParts, config: EngineConfig) -> None:
        self._parts, self._config = parts, config
        self._budget = parts.plan.max_nodes - 1
        self._rounds = parts.new_rounds(self._budget, is_auto=config.budget == "auto")
        self.reset()

    def reset(self) -> None:
        """Know nothing of earlier requests."""
        self._host = ControllerPair.new(HOST_SCHEDULE)
        self._device = ControllerPair.new(DEVICE_SCHEDULE)
        self._device_trees = ControllerPair.new(DEVICE_SCHEDULE)  # with trees of the host
        self._filter = DraftFilter()

    def new(self, request: Request, watch: Callable[[Round], None] | None) -> Decoder:
        rounds = self._rounds
        if rounds is not None and rounds.can_serve(request):
            return self._new_device_decoder(rounds, request, watch)
        parts, is_auto = self._parts, self._config.budget == "auto"
        sampler = Sampler.for_request(request, parts.model_config.vocab_size)
        lookup = self._config.ngram
        use_lookup = lookup == "on" or (lookup == "auto" and is_auto)
        if self._budget == 0 or (
            parts.drafter is None and not use_lookup and request.grammar is None
        ):
            return PlainDecoder(parts.target, sampler, self._off_reason)
        options = SpeculationOptions(
            *(self._budget, is_auto, use_lookup, request.stop_ids, parts.plan.width)
        )
        controller = self._host[not request.sampling.is_greedy]
        decoder = SpeculativeDecoder(
            *(parts.target, sampler, parts.drafter, options), controller=controller, watch=watch
        )
        decoder.stats.host_reason = parts.host_reason
        return decoder

    @property
    def _off_reason(self) -> str:
        """Why nothing is drafted."""
        return "the budget is 0" if self._budget == 0 else "there is no draft for this model"

    def _new_device_decoder(
        self, rounds: "GpuRounds", request: Request, watch: Callable[[Round], None] | None
    ) -> DeviceDecoder:
        parts, is_sampled = self._parts, not request.sampling.is_greedy
        use_draft = parts.drafter is not None and self._budget > 0
        is_auto = self._config.budget == "auto"
        controllers = self._device[is_sampled], self._device_trees[is_sampled]
        # The device looks up what joins a draft's tree; the rest is the host's.
        is_on, has_grammar = self._config.ngram == "on", request.grammar is not None
        use_lookup = use_draft and (is_on or (self._config.ngram == "auto" and is_auto))
        use_index = is_on and self._budget > 0 and (has_grammar or not use_draft)
        is_off = self._budget == 0 or not (use_draft or has_grammar or use_index)
        off_reason = self._off_reason if is_off else None
        if has_grammar or use_index:
            return DeviceTreeDecoder(
                *(parts.target, parts.drafter, rounds, request),
                budget=self._budget,
                use_draft=use_draft,
                use_lookup=use_lookup,
                use_index=use_index,
                controllers=controllers if is_auto else None,
                draft_filter=self._filter,
                off_reason=off_reason,
                watch=watch,
            )
        return DeviceDecoder(
            *(parts.target, parts.drafter, rounds, request),
            use_draft=use_draft,
            use_lookup=use_lookup,
            controller=controllers[0] if is_auto else None,
            off_reason=off_reason,
            watch=watch,
        )
