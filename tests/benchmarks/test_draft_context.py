"""How far back a draft looks, on tiny models; the page shows what was measured."""

import json
from pathlib import Path

from benchmarks.draft_context import (
    BoundRun,
    DraftContextOptions,
    bound_context,
    make_section,
    summarize_runs,
    write_draft_context,
)
from benchmarks.report import make_page
from draftree.core import RoundStats
from draftree.drafts.registry import read_draft_size
from draftree.weights.file import open_checkpoint
from tests.made import make_draft
from tests.tiny import tiny_path as tiny_model


def _stats(*accepted: int) -> RoundStats:
    stats = RoundStats()
    for count in accepted:
        stats.count(4, 3, count)
    return stats


def test_runs_are_added_up() -> None:
    runs = [([1, 2, 3, 4], _stats(3)), ([5, 6, 7, 8], _stats(1, 1))]
    run = summarize_runs(2048, 512, 768, runs, [[1, 2, 3, 4], [5, 6, 7, 9]])
    assert run == BoundRun(*(2048, 512, 768, 2, 1, 8, 3, 2.6667, [4.0, 2.0]), [1.0, 0.3333, 0.3333])


def test_a_bound_holds_for_all_layers() -> None:
    draft = open_checkpoint(make_draft())
    assert read_draft_size(draft).context_len == 4096
    bounded = bound_context(draft, 100)
    assert read_draft_size(bounded).context_len == 100
    assert (bounded.raw("fc.weight") == draft.raw("fc.weight")).all()


def test_bounds_on_a_tiny_model(tmp_path: Path) -> None:
    """Texts are those of plain decoding, and a bound that reaches all is none."""
    options = DraftContextOptions((60, 500), (40, 700, 0), num_texts=2, num_tokens=8, threads=1)
    draft, lines = make_draft(feature_layers=(0, 1, 2)), []
    out = tmp_path / "draft" / "tiny" / "context.json"
    runs = write_draft_context(tiny_model("llama"), draft, out, options, lines.append)
    assert [(run.depth, run.bound) for run in runs] == [
        (depth, bound) for depth in (60, 500) for bound in (40, 700, 0)
    ]
    assert all(run.num_equal == run.num_texts == 2 and run.num_tokens == 16 for run in runs)
    assert [run.ring_len for run in runs] == [256, 0, 0] * 2
    for bounded, free in ((runs[1], runs[2]), (runs[4], runs[5])):
        assert bounded.acceptance_lengths == free.acceptance_lengths
    assert "depth 500: text 2 of 2" in lines
    result = json.loads(out.read_text())
    page = make_page(tmp_path)
    assert "## Context of a draft" in page and "\n".join(make_section(result)) in page
    assert "| 40 | 256 | 1." in page and "| none | all |" in page and "4 of 4" in page
