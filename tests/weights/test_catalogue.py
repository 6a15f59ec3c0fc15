"""The drafts that come with the package: small, whole, and found by their target."""

from pathlib import Path

import pytest

from draftree.weights import hub
from draftree.weights.catalogue import CATALOGUE, PACKAGED_DRAFTS
from draftree.weights.file import open_checkpoint

MAX_BYTES = 30_000_000


@pytest.mark.parametrize("target", PACKAGED_DRAFTS)
def test_packaged_drafts_are_found_by_their_target(target: str, tmp_path: Path) -> None:
    (entry,) = [entry for entry in CATALOGUE if entry.name == target]
    path = hub.draft_for(target, root=tmp_path)
    assert path is not None and path.name == PACKAGED_DRAFTS[target]
    assert hub.draft_for(f"/elsewhere/{entry.files[0].name}", root=tmp_path) == path
    assert path.stat().st_size <= MAX_BYTES
    assert path.with_suffix("").with_suffix(".md").is_file()  # its model card
    checkpoint = open_checkpoint(path)
    assert checkpoint.architecture == "dflash"
    assert sum(info.nbytes for info in checkpoint.tensors.values()) <= path.stat().st_size


def test_other_targets_have_none(tmp_path: Path) -> None:
    assert hub.draft_for("qwen3-0.6b", root=tmp_path) is None
