"""`draftree run` with a fake engine: what is asked of it, what is printed, how it ends."""

import json
import sys
from types import SimpleNamespace

import pytest

from draftree.cli.option import Settings
from draftree.core import SamplingParams, TokenSource


def test_streams_text_and_ends_with_one_line_on_stderr(draftree, engine):
    result = draftree("run", "--prompt", "Say hello")
    assert result.exit_code == 0
    assert result.stdout == "Hello there\n"
    (line,) = result.stderr.splitlines()
    assert line == ("2 tokens in 0.02 s (100.0 tokens per second); prompt of 3 tokens in 0.10 s")


def test_asks_the_engine_for_what_was_typed(draftree, engine):
    options = "--temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1"
    options += " --presence-penalty 0.2 --frequency-penalty 0.3 --seed 7 --stop END --stop Q -n 9"
    result = draftree("run", "some-model", "-p", "x", *options.split())
    assert result.exit_code == 0, result.stderr
    (request,) = engine.requests
    assert request == {
        "prompt": "x",
        "max_tokens": 9,
        "sampling": SamplingParams(0.5, 4, 0.9, 0.1, 1.1, 0.2, 0.3, 7),
        "stop": ("END", "Q"),
        "system": None,
        "chat": False,
    }
    assert engine.opened[0][0] == "some-model"


def test_engine_options_reach_the_config(draftree, engine):
    options = "--draft none --budget 22 --block 8 --max-ctx 512 --math exact --kv f16 --threads 2"
    options += " --ngram off --prefix-cache 64 --compress auto --compress-keep 0.1"
    options += " --compress-with some-file --chat-template own.jinja --chunk 64"
    result = draftree("run", "-p", "x", *options.split())
    assert result.exit_code == 0, result.stderr
    config = engine.opened[0][1]
    assert (config.draft, config.budget, config.block, config.max_ctx) == ("none", 22, 8, 512)
    assert (config.math, config.kv_k, config.kv_v, config.threads) == ("exact", "f16", "f16", 2)
    assert (config.ngram, config.prefix_bytes) == ("off", 64 << 20)
    compression = config.compress, config.compress_keep, config.compress_with
    assert compression == ("auto", 0.1, "some-file")
    assert (config.chat_template, config.chunk) == ("own.jinja", 64)


@pytest.mark.parametrize(
    ("options", "kv"),
    [
        ("--kv-k q8_0 --kv-v q4", ("q8_0", "q4")),
        ("--kv q8", ("q8", "q8")),
        ("--kv-f16", ("f16", "f16")),
        ("--kv-q8", ("q8_0", "q8_0")),
        ("--kv-q4 --kv-k f16", ("f16", "q4")),
        ("--kv-tq3", ("tq3_0", "tq3_0")),
        ("--kv-v tq3_0", ("auto", "tq3_0")),
    ],
)
def test_formats_of_keys_and_values(draftree, engine, options, kv):
    result = draftree("run", "-p", "x", *options.split())
    assert result.exit_code == 0, result.stderr
    config = engine.opened[0][1]
    assert (config.kv_k, config.kv_v) == kv


def test_two_formats_for_the_same_side_are_refused(draftree, engine):
    result = draftree("run", "-p", "x", "--kv-q4", "--kv", "f16")
    assert result.exit_code == 2 and "cannot be in q4 and in f16" in result.stderr
    assert not engine.opened


def test_a_plan_that_chose_a_smaller_format_says_so(draftree, engine):
    engine.plan.kv_note = "keys and values in q4: f16 would need 31.2 GiB of 24.0"
    result = draftree("run", "-p", "x")
    assert result.stderr.startswith("keys and values in q4: f16 would need 31.2 GiB of 24.0\n")


def test_options_not_given_are_left_to_the_engine(draftree, engine):
    from draftree.config import EngineConfig

    draftree("run", "-p", "x")
    assert engine.opened == [("smollm2-135m", EngineConfig())]
    assert engine.requests[0]["sampling"] == SamplingParams()


def test_prompt_comes_from_stdin(draftree, engine):
    assert draftree("run", stdin="two\nlines\n").exit_code == 0
    assert engine.requests[0]["prompt"] == "two\nlines"


def test_an_empty_prompt_is_refused_but_a_message_may_be_empty(draftree, engine):
    for result in (
        draftree("run", "-p", ""),
        draftree("run", stdin=""),
        draftree("run", stdin="\n"),
    ):
        assert result.exit_code == 2 and "the prompt is empty." in result.stderr
    assert engine.requests == []
    assert draftree("run", "--chat", "-p", "").exit_code == 0
    assert engine.requests[0]["prompt"] == ""


@pytest.mark.parametrize(
    ("arguments", "is_chat"),
    [((), False), (("--raw",), False), (("--chat",), True), (("--system", "Be kind."), True)],
)
def test_chat_template_is_used_when_asked_for(draftree, engine, arguments, is_chat):
    assert draftree("run", "-p", "x", *arguments).exit_code == 0
    assert engine.requests[0]["chat"] is is_chat


def test_json_is_the_last_line(draftree, engine):
    result = draftree("run", "-p", "x", "--json")
    assert result.stderr == ""
    text, line = result.stdout.splitlines()
    record = json.loads(line)
    assert text == record["text"] == "Hello there"
    assert record["finish_reason"] == "stop"
    assert record["usage"]["completion_tokens"] == 2
    assert record["tokens_per_second"] == 100.0


def test_show_tree_marks_rounds_and_names_sources(draftree, engine):
    engine.words = ["a", "b", "c", "d"]
    engine.sources = [TokenSource.CHAIN, TokenSource.SIBLING, TokenSource.BONUS, TokenSource.NGRAM]
    result = draftree("run", "-p", "x", "--show-tree")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "a|bc|d\n"
    assert "sibling" in result.stderr
    assert "AL 1.00" in result.stderr
    assert "nodes accepted" in result.stderr


def test_interrupt_stops_between_tokens(draftree, engine):
    engine.words = ["Hello", "<ctrl-c>", " never"]
    result = draftree("run", "-p", "x")
    assert result.exit_code == 130
    assert result.stdout == "Hello cut\n"
    assert "2 tokens" in result.stderr
    assert engine.generations[0].is_closed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--temperature", "-1"), "temperature must be between"),
        (("--top-p", "0"), "top_p must be"),
        (("--seed", "-1"), "seed must be"),
        (("--n-gen", "0"), "--n-gen"),
        (("--budget", "many"), "--budget is 'many'"),
        (("--compress-keep", "most"), "--compress-keep is 'most'"),
        (("--compress-keep", "1.5"), "compress keep must be auto or a number"),
        (("--compress", "on"), "compress"),
        (("--budget", "-3"), "--budget is '-3'"),
        (("--threads", "100000"), "threads must be"),
        (("--math", "fast"), "fast"),
        (("--raw", "--system", "x"), "--raw"),
        (("a-model", "--model", "b-model"), "give one of them"),
        (("--no-such-option",), "--no-such-option"),
    ],
)
def test_misuse_is_one_sentence_and_loads_nothing(draftree, engine, arguments, words):
    result = draftree("run", "-p", "x", *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert result.stdout == ""
    assert not engine.opened


@pytest.mark.parametrize("stdin", [b"", b"\n", b"\xff\xfe not text"])
def test_bad_stdin_is_refused(draftree, engine, stdin):
    result = draftree("run", stdin=stdin)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("is_terminal", [True, False])
def test_compiling_is_shown_on_a_terminal(monkeypatch, capsys, is_terminal):
    def open_engine(model, config, report):
        report(1, 2)
        report(2, 2)
        return SimpleNamespace(plan=SimpleNamespace(kv_note=""))

    monkeypatch.setattr("draftree.chat.Engine.open", open_engine)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    Settings().open_engine("a model")
    shown = "\rcompiling kernels 1/2\rcompiling kernels 2/2\n"
    assert capsys.readouterr().err == (shown if is_terminal else "")
