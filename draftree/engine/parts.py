"""What an engine is made of, opened as the plan says: device, target, and the draft bound to it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftree.config import EngineConfig, Plan, resolve
from draftree.core import ModelConfig
from draftree.drafts.drafter import Drafter
from draftree.drafts.registry import find_kind, read_draft_size
from draftree.engine.device import Device, open_device
from draftree.engine.gpu import find_gpu
from draftree.kernels.ops import Ops
from draftree.models.load import load_model
from draftree.models.model_config import read_model_config
from draftree.models.target import Target
from draftree.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from draftree.decode.device_round import GpuRounds


@dataclass(frozen=True, slots=True)
class EngineParts:
    model_config: ModelConfig
    plan: Plan
    device: Device
    target: Target
    ops: Ops  # the target's
    drafter: Drafter | None = None
    draft_ops: Ops | None = None

    @property
    def host_reason(self) -> str | None:
        """Why the host runs the rounds, where the device could."""
        if self.plan.gpu is None or self.drafter is None or self.drafter.programs() is not None:
            return None
        return "a GPU cannot run whole rounds with this kind of draft"

    def new_rounds(self, budget: int, *, is_auto: bool = False) -> "GpuRounds | None":
        """Rounds of at most so many nodes, where the device runs them itself; 0: without the
        draft. is_auto: or of fewer.
        """
        drafter = self.drafter if budget else None
        if drafter is not None and drafter.programs() is None:
            return None
        parts = self.target, self.ops, drafter, self.draft_ops
        return self.device.new_rounds(*parts, budget, is_auto=is_auto)


def open_parts(
    checkpoint: Checkpoint, config: EngineConfig, draft: Checkpoint | None
) -> EngineParts:
    model_config = read_model_config(checkpoint)
    if config.budget == 0:
        draft = None  # nobody would ask it
    size = read_draft_size(draft) if draft is not None else None
    plan = resolve(config, model_config, gpu=find_gpu(config.device), draft=size)
    device = open_device(plan)
    ops = device.new_ops()
    model = load_model(checkpoint, ops, plan.window)
    if draft is None or size is None:
        return EngineParts(model_config, plan, device, Target(model, ops, plan.max_ctx), ops)
    kind = find_kind(draft)
    kind.check_fit(draft, checkpoint, model)
    if config.block == 1 or config.block > size.block_len:
        raise ValueError(f"block must be between 2 and the {size.block_len} trained")
    target = Target(model, ops, plan.max_ctx, size.feature_layers)
    draft_ops = device.new_draft_ops(config.block or size.block_len, size.context_len)
    drafter = kind.load(
        draft, model, draft_ops, block_len=config.block, use_draft_vocab=plan.gpu is None
    )
    return EngineParts(model_config, plan, device, target, ops, drafter, draft_ops)
