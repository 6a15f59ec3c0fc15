"""`draftree selector`: add a selector to a draft. Its new file goes to stdout,
how it is going to stderr.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from draftree.cli.train import Out, Prompts, Seed, collect_prompts, panel_option, watch
from draftree.errors import require_packages

Model = Annotated[str, typer.Argument(metavar="MODEL", help="The target: a name or a GGUF file.")]
Draft = Annotated[
    Path,
    typer.Argument(metavar="DRAFT", help="Its DFlash draft: a GGUF file or a folder. It stays so."),
]
Device = Annotated[Literal["auto", "cuda", "cpu"], typer.Option(help="Where to run the target.")]
OwnPrompts = Annotated[
    int, panel_option("Text", "Prompts that the target writes; with --prompts, besides.", min=0)
]
Tokens = Annotated[int, panel_option("Text", "Tokens that the target writes.", min=1)]
MaxLen = Annotated[int, panel_option("Text", "Longest sequence, prompt included.", min=32)]
Greedy = Annotated[float, panel_option("Text", "Share written greedily.", min=0, max=1)]
WriteLimit = Annotated[float, panel_option("Text", "Stop writing after this; 0 is never.", min=0)]
Steps = Annotated[int, panel_option("Training", "Steps.", min=1)]
Rank = Annotated[int, panel_option("Training", "Width of its tables: 32, 64 … 256.", min=32)]
TrainLimit = Annotated[
    float, panel_option("Training", "End the schedule by then; 0 is after all steps.", min=0)
]


def selector(
    model: Model,
    draft: Draft,
    out: Out = Path("selector"),
    prompts: Prompts = None,
    device: Device = "auto",
    seed: Seed = 0,
    own_prompts: OwnPrompts = 0,
    tokens: Tokens = 300_000,
    max_len: MaxLen = 512,
    greedy_share: Greedy = 0.65,
    write_minutes: WriteLimit = 0.0,
    steps: Steps = 3000,
    rank: Rank = 32,
    train_minutes: TrainLimit = 0.0,
) -> None:
    """Add scores for pairs of neighbouring candidates to a draft; its own weights stay."""
    require_packages("Training", "train", "torch", "gguf")
    from draftree.drafts.registry import find_kind
    from draftree.train.selector_run import add_selector
    from draftree.train.settings import SelectorConfig, SelectorPlan, TextPlan
    from draftree.weights.file import open_checkpoint
    from draftree.weights.hub import resolve

    text = TextPlan(
        *(tokens, max_len, 64, greedy_share),
        max_minutes=write_minutes,
        num_own_prompts=own_prompts,
    )
    plan = SelectorPlan(rank=rank, num_steps=steps, max_minutes=train_minutes)
    checkpoint, own_draft = open_checkpoint(resolve(model)), open_checkpoint(draft)
    find_kind(own_draft)  # refuses any other file before prompts are read
    texts, source = collect_prompts(prompts or [], seed, has_own=own_prompts > 0)
    config = SelectorConfig(text, plan, seed)
    with watch() as watcher:
        path = add_selector(checkpoint, own_draft, texts, config, out, device, watcher, source)
    print(path)
