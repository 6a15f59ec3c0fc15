"""A whole run on a tiny target: the draft learns, its files work, and it speeds decoding up."""

import json
import random
from dataclasses import replace

import pytest
import torch

from draftree.config import EngineConfig
from draftree.core import Request
from draftree.engine.engine import TokenEngine
from draftree.errors import ModelError
from draftree.train.corpus import Corpus
from draftree.train.prompt import Prompt
from draftree.train.run import train_draft
from draftree.train.settings import (
    DraftShape,
    Schedule,
    SelectorPlan,
    TextPlan,
    TrainConfig,
)
from draftree.weights.file import open_checkpoint
from tests.tiny import tiny_path
from tests.train.counting import LETTERS, make_counting, next_letter

CONFIG = TrainConfig(
    DraftShape(1, 128, block_size=6, feature_layers=(0, 1)),
    TextPlan(4000, 40, batch_size=64, held_out_share=0.1, temperatures=(0.3, 0.5)),
    Schedule(
        num_steps=45,
        batch_tokens=512,
        rows_per_token=1.0,
        learning_rate=5e-3,
        eval_every=15,
        save_every=15,
    ),
)


class Watcher:
    """Remembers what it was told."""

    def __init__(self):
        self.phases, self.notes, self.points = [], [], []

    def phase(self, name, total):
        self.phases.append(name)

    def advance(self, done, note):
        self.notes.append(note)

    def point(self, point):
        self.points.append(point)


def _prompts():
    """Texts of the circle's letters, in any order."""
    rng = random.Random(0)
    checkpoint = open_checkpoint(make_counting())
    letters = [checkpoint.metadata["tokenizer.ggml.tokens"][token] for token in LETTERS]
    assert all(len(letter) == 1 for letter in letters)
    return [Prompt("".join(rng.choices(letters, k=4)), False) for _ in range(120)]


def _train(
    folder,
    config=CONFIG,
    prompts=None,
    *,
    has_chat=False,
    start=None,
    formats=("bf16", "q8"),
    model=None,
):
    watcher = Watcher()
    checkpoint = open_checkpoint(model or make_counting(has_chat=has_chat))
    prompts = _prompts() if prompts is None else prompts
    trained = train_draft(
        *(checkpoint, prompts, config, folder, torch.device("cpu"), watcher, formats),
        *("made for a test", start),
    )
    return trained, watcher


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("run")
    return (*_train(folder), folder)


def test_the_loss_falls_and_more_is_accepted(run):
    trained, watcher, _ = run
    first, last = trained.curve[0], trained.curve[-1]
    assert last.held_out_loss < 0.7 * first.held_out_loss
    assert first.acceptance_length < 1.5 and last.acceptance_length > 2.5
    assert [point.step for point in watcher.points] == [0, 15, 30, 45]
    assert "writing text" in watcher.phases and any("loss" in note for note in watcher.notes)


def _decode(draft, model=None):
    config = EngineConfig(
        max_ctx=256, math="exact", threads=1, budget=8 if draft else 0, ngram="off"
    )
    engine = TokenEngine.open(model or make_counting(), config, draft)
    stream = engine.generate(Request((LETTERS[3], LETTERS[9]), 60))
    tokens = [event.token for event in stream]
    engine.close()
    return tokens, stream.usage.rounds


def test_the_engine_decodes_the_same_text_in_fewer_rounds(run):
    *_, folder = run
    plain, _ = _decode(None)
    assert [next_letter(token) for token in plain[:-1]] == plain[1:]
    for path in (folder, folder / "draft-bf16.gguf", folder / "draft-q8.gguf"):
        tokens, rounds = _decode(path)
        assert tokens == plain
        assert len(tokens) / rounds.num_rounds > 2.0


def test_the_record_says_how_it_went(run):
    trained, _, folder = run
    record = json.loads((folder / "record.json").read_text())
    assert record["config"]["schedule"]["num_steps"] == 45
    assert record["draft"]["block_size"] == 6 and record["draft"]["sliding_window"] == 40
    assert [p["step"] for p in record["curve"]] == [p.step for p in trained.curve]
    text = record["text"]
    assert text["num_written"] >= 4000 and 0 < text["num_held_out"] < text["num_sequences"]


def test_the_card_has_the_records_figures(run):
    trained, _, folder = run
    card = (folder / "README.md").read_text()
    last = trained.curve[-1]
    assert "# Counting DFlash" in card and "made for a test" in card
    assert f"| {last.acceptance_length:.2f} |" in card and f"| {last.held_out_loss:.3f} |" in card
    assert f"{last.num_rows:,}" in card


def test_a_finished_run_is_not_repeated(run):
    trained, _, folder = run
    again, watcher = _train(folder)
    assert [p.step for p in again.curve] == [p.step for p in trained.curve]
    assert not watcher.points
    weights = trained.draft.state_dict()
    assert all(torch.equal(v, weights[name]) for name, v in again.draft.state_dict().items())


def test_another_run_does_not_go_into_the_same_folder(run):
    *_, folder = run
    with pytest.raises(ModelError, match="other settings"):
        _train(folder, replace(CONFIG, seed=1))


FOUR_BIT = replace(CONFIG, is_four_bit=True)


def test_a_draft_learns_with_four_bits(tmp_path):
    trained, _ = _train(tmp_path, FOUR_BIT, formats=("q4",))
    first, last = trained.curve[0], trained.curve[-1]
    assert last.held_out_loss < 0.7 * first.held_out_loss
    assert first.acceptance_length < 1.5 and last.acceptance_length > 2.5
    assert (
        "| matrices | rounded to four bits in every pass, as in the file |"
        in (tmp_path / "README.md").read_text()
    )
    plain, _ = _decode(None)
    for path in (tmp_path, tmp_path / "draft-q4.gguf"):
        tokens, rounds = _decode(path)
        assert tokens == plain and len(tokens) / rounds.num_rounds > 2.0
    with pytest.raises(ModelError, match="other settings"):
        _train(tmp_path)  # with all bits


def test_formats_are_looked_at_before_anything_is_written(tmp_path):
    with pytest.raises(ModelError, match="not as q3"):
        _train(tmp_path / "a", formats=("bf16", "q3"))
    assert not list(tmp_path.iterdir())


def test_blocks_begin_where_rounds_do_and_a_selector_is_learned(tmp_path):
    schedule = replace(CONFIG.schedule, round_anchor_share=0.5)
    plan = SelectorPlan(num_steps=12, top_k=8, eval_every=6)
    config = replace(FOUR_BIT, schedule=schedule, selector=plan)
    trained, watcher = _train(tmp_path, config, formats=("q4",))
    assert trained.curve[-1].acceptance_length > 2.5
    assert [point.step for point in trained.selector] == [0, 6, 12]
    assert watcher.points == [*trained.curve, *trained.selector]
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["config"]["schedule"]["round_anchor_share"] == 0.5
    assert [point["step"] for point in record["selector"]] == [0, 6, 12]
    card = (tmp_path / "README.md").read_text()
    assert "where the next round would begin | 50% of the blocks" in card
    assert "chain of best choices, greedy text" in card
    path = tmp_path / "draft-q4-selector.gguf"
    before, after = open_checkpoint(tmp_path / "draft-q4.gguf"), open_checkpoint(path)
    assert all((before.raw(name) == after.raw(name)).all() for name in before.tensors)
    tokens, rounds = _decode(path)
    assert tokens == _decode(None)[0] and len(tokens) / rounds.num_rounds > 2.0
    made = path.read_bytes()
    again, watcher = _train(tmp_path, config, formats=("q4",))
    assert again.selector == trained.selector and not watcher.points
    assert path.read_bytes() == made


def _shortened(**text):
    schedule = replace(CONFIG.schedule, num_steps=2, eval_every=1)
    return replace(CONFIG, text=replace(CONFIG.text, **text), schedule=schedule)


def test_a_hybrid_with_its_draft_writes_the_same_text(tmp_path):
    model = tiny_path("qwen35-mtp")
    trained, _ = _train(tmp_path, _shortened(num_tokens=300), model=model)
    assert trained.curve[-1].held_out_loss < trained.curve[0].held_out_loss
    plain, _ = _decode(None, model)
    for path in (tmp_path, tmp_path / "draft-q8.gguf"):
        tokens, rounds = _decode(path, model)
        assert tokens == plain and rounds.num_drafted > len(tokens)


def test_the_target_writes_its_own_prompts(tmp_path):
    config = _shortened(num_own_prompts=12, num_tokens=300, max_len=120, batch_size=32)
    trained, watcher = _train(tmp_path, config, [], has_chat=True)
    assert watcher.phases.index("writing prompts") < watcher.phases.index("writing text")
    lines = [line for path in tmp_path.glob("own-prompts-*") for line in path.open()]
    assert len(lines) >= 12 and all(json.loads(line)["prompt"] for line in lines)
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["config"]["text"]["num_own_prompts"] == 12 and record["start"] is None
    assert "12 that the target wrote itself" in (tmp_path / "README.md").read_text()
    with pytest.raises(ModelError, match="other settings"):
        _train(tmp_path, _shortened(num_own_prompts=13), [], has_chat=True)
    assert _train(tmp_path, config, [], has_chat=True)[0].curve == trained.curve


def test_own_prompts_come_besides_the_others(tmp_path):
    config = _shortened(num_own_prompts=8, num_tokens=900)
    _train(tmp_path, config, _prompts()[:12], has_chat=True)
    corpora = [Corpus.load(path) for path in tmp_path.glob("text-*")]
    has_template = [
        510 in corpus.ids[start : start + prompt_len]  # which the given prompts do not have
        for corpus in corpora
        for start, prompt_len in zip(corpus.starts, corpus.prompt_lens, strict=False)
    ]
    assert any(has_template) and not all(has_template)


def test_a_draft_goes_on_from_another(run, tmp_path):
    trained, _, folder = run
    for number, path in enumerate((folder, folder / "draft-q8.gguf")):
        out = tmp_path / str(number)
        again, _ = _train(out, _shortened(num_tokens=1000), start=open_checkpoint(path))
        first = again.curve[0]
        assert first.step == 0 and first.acceptance_length > 2.5
        assert first.held_out_loss < 1.2 * trained.curve[-1].held_out_loss
        assert json.loads((out / "record.json").read_text())["start"] == path.name
        assert f"| started from | {path.name} |" in (out / "README.md").read_text()
    with pytest.raises(ModelError, match="other settings"):
        _train(tmp_path / "0", _shortened(num_tokens=1000))


def test_what_is_left_open_is_that_of_the_draft_to_go_on_from(tmp_path):
    """Its layers of features are not those that would be usual here."""
    odd = replace(CONFIG, shape=replace(CONFIG.shape, feature_layers=(0,), mask_token=300))
    first = replace(odd, schedule=replace(CONFIG.schedule, num_steps=2))
    _train(tmp_path / "a", first)
    left = replace(_shortened(num_tokens=300), shape=replace(CONFIG.shape, feature_layers=()))
    again, _ = _train(tmp_path / "b", left, start=open_checkpoint(tmp_path / "a"))
    assert again.draft.spec.feature_layers == (0,) and again.draft.spec.mask_token == 300


def test_a_draft_of_another_shape_is_refused_before_anything_is_written(run, tmp_path):
    *_, folder = run
    shape = replace(CONFIG.shape, num_layers=2)
    with pytest.raises(ModelError, match=r"another shape .* layers 1, not 2"):
        _train(tmp_path, replace(_shortened(), shape=shape), start=open_checkpoint(folder))
    assert not list(tmp_path.glob("text-*"))
