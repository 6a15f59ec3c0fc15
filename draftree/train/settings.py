"""What a training run is asked to do: how much text, which draft, which schedule.

Plain values with the defaults that `draftree train` shows; a run's record repeats them.
"""

from dataclasses import dataclass

from draftree.errors import ModelError


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The draft's sizes; 0 or () takes the target's own, or what is usual for it."""

    num_layers: int = 4
    ffn_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    feature_layers: tuple[int, ...] = ()
    block_size: int = 8
    mask_token: int = -1  # -1: a reserved token of the vocabulary
    sliding_window: int = 0  # 0: as long as the sequences it learns from; -1: none


@dataclass(frozen=True, slots=True)
class TextPlan:
    """The text that the target writes for its draft."""

    num_tokens: int = 20_000_000
    max_len: int = 512
    batch_size: int = 1024
    greedy_share: float = 0.65
    temperatures: tuple[float, float] = (0.8, 1.0)  # of the rest, drawn uniformly
    max_burn_in: int = 8  # a prompt used again starts with up to so many sampled tokens
    held_out_share: float = 0.01
    max_minutes: float = 0.0  # stop writing then, whatever num_tokens says; 0: no limit
    num_own_prompts: int = 0  # prompts that the target writes too, before its replies


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step reads batch_tokens of text and fills batch_tokens * rows_per_token block rows."""

    num_steps: int = 6000
    batch_tokens: int = 16_384
    rows_per_token: float = 2.0
    block_sizes: tuple[int, ...] = ()  # drawn per step; () is the draft's own block alone
    optimizer: str = "muon"  # or "adamw"
    learning_rate: float = 3e-3
    warmup_share: float = 0.03
    final_share: float = 0.02  # of the learning rate, at the end of the cosine
    weight_decay: float = 0.01
    max_norm: float = 1.0
    depth_decay: float = 4.0  # row i of a block weighs exp(-(i - 1) / depth_decay)
    distill_share: float = 0.0  # how much of the label is the target's own distribution
    round_anchor_share: float = 0.0  # of blocks that begin where the draft's next round would
    num_loss_tokens: int = 0  # frequent tokens that the loss tells apart; 0: the whole vocabulary
    four_bit_from: float = 0.0  # share of the schedule after which matrices are rounded, if at all
    eval_every: int = 250
    save_every: int = 500
    max_minutes: float = 0.0  # end the schedule by then; a run with it is not repeatable


@dataclass(frozen=True, slots=True)
class SelectorPlan:
    """Learning what follows what, on top of a draft that stays as it is."""

    rank: int = 32
    top_k: int = 16  # candidates of each position
    num_steps: int = 3000
    batch_blocks: int = (
        512  # of stored blocks; with a run's own corpus a step is one of its batches
    )
    learning_rate: float = 5e-4
    dropout: float = 0.25
    depth_decay: float = 4.0
    eval_every: int = 100
    max_minutes: float = 0.0  # end the schedule by then; a run with it is not repeatable

    def __post_init__(self) -> None:
        if self.rank < 32 or self.rank % 32 or self.rank > 256:
            raise ModelError("This cannot be trained: a selector's rank is 32, 64 … 256.")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    shape: DraftShape = DraftShape()
    text: TextPlan = TextPlan()
    schedule: Schedule = Schedule()
    seed: int = 0
    is_four_bit: bool = False  # learn with matrices rounded as a q4 file holds them
    selector: SelectorPlan | None = None  # learned on top of the draft when it is done

    def __post_init__(self) -> None:
        shape, text, schedule = self.shape, self.text, self.schedule
        checks = (
            (shape.num_layers >= 1, "a draft needs at least one layer"),
            (2 <= shape.block_size <= 64, "the block must have 2 to 64 tokens"),
            (
                all(2 <= size <= shape.block_size for size in schedule.block_sizes),
                "the block sizes of a schedule must be between 2 and the draft's block",
            ),
            (text.num_tokens >= 1, "there must be text to learn from"),
            (text.max_len >= 4 * shape.block_size, "sequences must be at least four blocks long"),
            (text.batch_size >= 1, "the batch must have at least one sequence"),
            (text.num_own_prompts >= 0, "the number of own prompts is not below 0"),
            (0.0 <= text.greedy_share <= 1.0, "the greedy share is a number from 0 to 1"),
            (0.0 < text.held_out_share < 1.0, "the held-out share is a number between 0 and 1"),
            (schedule.num_steps >= 1, "there must be at least one step"),
            (schedule.batch_tokens >= text.max_len, "a step must hold at least one sequence"),
            (schedule.num_loss_tokens >= 0, "the number of tokens in the loss is not below 0"),
            (0.0 <= schedule.four_bit_from < 1.0, "rounding begins at a share from 0 to below 1"),
            (schedule.optimizer in ("muon", "adamw"), "the optimizer is muon or adamw"),
            (schedule.learning_rate > 0.0, "the learning rate must be positive"),
            (0.0 <= schedule.distill_share <= 1.0, "the distill share is a number from 0 to 1"),
            (0.0 <= schedule.round_anchor_share <= 1.0, "the round share is a number from 0 to 1"),
        )
        for is_valid, sentence in checks:
            if not is_valid:
                raise ModelError(f"This cannot be trained: {sentence}.")


@dataclass(frozen=True, slots=True)
class SelectorConfig:
    text: TextPlan = TextPlan(num_tokens=300_000, batch_size=64)
    plan: SelectorPlan = SelectorPlan()
    seed: int = 0
