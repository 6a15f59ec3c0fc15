"""`draftree selector`: add a selector to a draft. Its new file goes to stdout,
how it is going to stderr.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from draftree.cli import train
from draftree.errors import require_packages

Draft = Annotated[
    Path,
    typer.Argument(metavar="DRAFT", help="Its DFlash draft: a GGUF file or a folder. It stays so."),
]
Device = Annotated[Literal["auto", "cuda", "cpu"], typer.Option(help="Where to run the target.")]
OwnPrompts = Annotated[
    int,
    train.panel_option("Text", "Prompts that the target writes; with --prompts, besides.", min=0),
]
MaxLen = Annotated[int, train.panel_option("Text", "Longest sequence, prompt included.", min=32)]
Rank = Annotated[int, train.panel_option("Training", "Width of its tables: 32, 64 … 256.", min=32)]


def selector(
    model: train.Model,
    draft: Draft,
    out: train.Out = Path("selector"),
    prompts: train.Prompts = None,
    device: Device = "auto",
    seed: train.Seed = 0,
    own_prompts: OwnPrompts = 0,
    tokens: train.Tokens = 300_000,
    max_len: MaxLen = 512,
    greedy_share: train.Greedy = 0.65,
    write_minutes: train.WriteLimit = 0.0,
    steps: train.Steps = 3000,
    rank: Rank = 32,
    train_minutes: train.TrainLimit = 0.0,
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
    texts, source = train.collect_prompts(prompts or [], seed, has_own=own_prompts > 0)
    config = SelectorConfig(text, plan, seed)
    with train.watch() as watcher:
        path = add_selector(checkpoint, own_draft, texts, config, out, device, watcher, source)
    print(path)
