"""`draftree inspect` on real files: what it says must be what the files hold."""

import pytest

from draftree.cli.inspect import (
    Place,
    fit_word,
    format_bytes,
    format_count,
    format_table,
    gpu_table,
    memory_table,
)
from draftree.core import DraftSize, ModelConfig
from draftree.models.model_config import read_model_config
from draftree.weights.file import open_checkpoint
from tests.golden import golden
from tests.made import make_draft
from tests.weights.gguf_bytes import small_file


def test_real_model(draftree, smollm2_path):
    result = draftree("inspect", str(smollm2_path))
    assert result.exit_code == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if line]
    lines = {row[0]: row for row in rows}
    assert lines["architecture"] == ["architecture", "llama"]
    assert lines["parameters"][1:3] == ["134.52", "million"]
    assert ["context", "8192"] in rows
    assert lines["tokenizer"][1:] == ["gpt2", "/", "smollm,", "49152", "tokens"]
    assert lines["Q4_1"] == ["Q4_1", "210", "63.3", "MiB"]
    assert lines["8192"][-4:] == ["yes"] * 4  # every GPU holds it


def test_hybrid_model(draftree):
    result = draftree("inspect", str(golden("qwen35/tiny-qwen35-A-mixed.gguf")))
    assert result.exit_code == 0, result.stderr
    assert "qwen35" in result.stdout
    assert "Q6_K        4" in result.stdout


def test_draft(draftree):
    result = draftree("inspect", str(golden("dflash/tiny-dflash-A-F16.gguf")))
    assert result.exit_code == 0, result.stderr
    assert "This is a DFlash draft" in result.stdout


@pytest.mark.parametrize("kind", ["DFlash2", "DSpark", "JetSpec"])
def test_kinds_of_drafts(draftree, kind):
    result = draftree("inspect", str(make_draft(relative=kind.lower())))
    assert result.exit_code == 0, result.stderr
    assert f"This is a {kind} draft" in result.stdout


def test_a_draft_inside_a_model(draftree):
    path = str(golden("qwen35/tiny-qwen35-C-mtp-F16.gguf"))
    lines = draftree("inspect", path).stdout.splitlines()
    assert "draft inside   MTP: --draft mtp" in lines
    planned = draftree("inspect", path, "--draft", "mtp")
    assert planned.exit_code == 0 and planned.stdout.splitlines() != lines


def test_file_that_cannot_be_run_is_described_all_the_same(draftree, tmp_path):
    path = tmp_path / "odd.gguf"
    path.write_bytes(small_file().build())
    result = draftree("inspect", str(path))
    assert result.exit_code == 0, result.stderr
    assert "Memory is not known: " in result.stdout


def test_memory_grows_with_context_and_number_format(smollm2_path):
    model_config = read_model_config(open_checkpoint(smollm2_path))
    table = memory_table(model_config, [Place("tiny", 0), Place("huge", 2**40)])
    columns = [list(column.cells) for column in table.columns]
    assert columns[0] == ["2048", "8192"]
    small, half, full = columns[1:4]
    # One token holds 30 layers of 3 heads of 64 keys and as many values.
    growth = float(half[1].split()[0]) - float(half[0].split()[0])
    assert growth == pytest.approx(6144 * 30 * 3 * 64 * 2 * 2 / 2**20, abs=0.2)
    sizes = [float(column[1].split()[0]) for column in (small, half, full)]
    assert sizes == sorted(set(sizes))
    assert columns[4] == ["no", "no"]
    assert columns[5] == ["yes", "yes"]


@pytest.mark.parametrize(
    ("room", "word"), [(4, "yes"), (3, "yes"), (2, "f16"), (1, "q8_0"), (0, "no")]
)
def test_fit_word(room, word):
    assert fit_word({"q8_0": 1, "f16": 2, "f32": 3}, room) == word


def test_formats():
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 * 2**20, 5 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "3.0 MiB",
        "5.00 GiB",
    ]
    assert [format_count(n) for n in (7, 1_500_000, 27_000_000_000)] == [
        "7",
        "1.50 million",
        "27.00 billion",
    ]


def test_the_flagship_with_its_draft_fits_a_24_gb_gpu():
    """Planned from model_config alone: 27B shapes in 4 to 6 bits, a 16-bit draft, 8K of context."""
    model_config = ModelConfig(
        *("27B", "any", 26_900_000_000, 16_500_000_000, 262144, 248320, 5120, 17408, 64, 16),
        *(4, 256, 157_000_000, 48 * 22624, True),
        window_bytes=48 * 3 * 10240 * 4,
        embedding_bytes=715_000_000,
    )
    draft = DraftSize(3_470_000_000, 5 * 2 * 8 * 128, 5 * 5120, 16, (), 4096)
    table = gpu_table(model_config, draft, [Place("16 GB", 16 * 10**9), Place("24 GB", 24 * 10**9)])
    columns = [list(column.cells) for column in table.columns]
    at = columns[0].index("8192")
    assert columns[-2][at] == "no" and columns[-1][at] == "yes"
    assert columns[-1][columns[0].index("262144")] == "no"


def test_the_longest_context_by_format():
    """As the plan has it: one token more is refused, and smaller formats reach further."""
    from draftree.config import EngineConfig, GpuInfo, resolve
    from draftree.errors import CapacityError
    from tests.test_config_kv import DRAFT, LARGE

    gpus = [Place("16 GB", 16 * 10**9), Place("24 GB", 24 * 10**9)]
    table = format_table(LARGE, DRAFT, gpus)
    names, sizes, small, large = (list(column.cells) for column in table.columns)
    assert names == ["f16", "q8_0", "q4", "tq3_0"]
    assert sizes == ["65536", "34816", "18432", "14336"]
    assert small == ["none"] * 4
    lengths = [int(cell) for cell in large]
    assert 30_000 < lengths[0] < lengths[1] < lengths[2] < lengths[3] <= 262144
    for name, length in zip(names, lengths, strict=True):
        for max_ctx, is_planned in ((length, True), (length + 1, length == 262144)):
            config = EngineConfig(max_ctx=max_ctx, kv_k=name, kv_v=name)
            try:
                resolve(config, LARGE, gpu=GpuInfo(0, "24 GB", 24 * 10**9), draft=DRAFT)
                assert is_planned
            except CapacityError:
                assert not is_planned


def test_a_format_that_cannot_hold_the_heads_reaches_nothing():
    from dataclasses import replace

    from tests.test_config_kv import LARGE

    table = format_table(replace(LARGE, head_dim=96), None, [Place("80 GB", 80 * 10**9)])
    assert list(table.columns[2].cells) == ["262144", "none", "none", "none"]
