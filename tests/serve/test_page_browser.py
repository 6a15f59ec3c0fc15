"""The page in a real browser: asking, stopping, trees, colours, widths, keys."""

import re

import pytest

from draftree.core import FinishReason
from tests.serve.browser import PHONE, expect, last, say
from tests.serve.conftest import Running, wait_for
from tests.serve.viewer import make_chain, make_round

# Notes how the first reply grows, in the page itself: from outside it may end between two looks.
WATCH_REPLY = """
  window.grown = []; // how long the text was, each time it changed before it ended
  const messages = document.getElementById("messages");
  new MutationObserver(() => {
    const reply = document.querySelector(".reply");
    const isWriting = document.getElementById("stop").checkVisibility();
    if (!reply || reply.querySelector("footer") || !isWriting) return;
    const { length } = reply.querySelector(".body").textContent;
    if (length > (grown.at(-1) ?? 0)) grown.push(length);
  }).observe(messages, { childList: true, subtree: true, characterData: true });
"""


@pytest.fixture(scope="module")
def real(smollm2_path):
    from draftree.chat import Engine

    options = {"model_id": "smollm2-135m", "temperature": 0.0}
    running = Running(lambda: Engine.open("smollm2-135m", budget=12, max_ctx=1024), **options)
    yield running.start()
    running.stop()


def test_the_default_model_writes_and_its_trees_are_drawn(real, visit):
    page = visit(real.url)
    expect(page.locator("#model-name")).to_have_text("smollm2-135m")
    page.evaluate(WATCH_REPLY)
    page.locator("#prompt").press_sequentially("Write a Python function that adds numbers.")
    page.locator("#prompt").press("Enter")
    expect(page.locator("#tree .current .node.accepted").first).to_be_visible()
    expect(last(page, "footer")).to_be_visible()
    assert len(page.evaluate("grown")) > 3
    assert last(page, "figure.code code").first.text_content().startswith("def ")
    note = last(page, "footer span").text_content()
    tokens, al = int(note.split()[0]), float(re.search(r"AL ([\d.]+)", note)[1])
    assert al > 1.5
    assert float(page.locator("#al").text_content()) == pytest.approx(al, abs=0.01)
    assert float(page.locator("#speed").text_content()) > 0
    assert float(page.locator("#ttft").text_content()) > 0
    page.locator("#live").click()
    newest = int(page.locator("#round-title").text_content().removeprefix("Round "))
    assert newest == pytest.approx(tokens / al, abs=1)
    assert page.locator("#strip .count").count() == min(newest, 49)
    page.locator("#earlier").click()
    expect(page.locator("#round-title")).to_have_text(f"Round {newest - 1}")


def test_an_end_that_was_guessed_is_drawn_once(pages):
    pages.engine.pieces = [make_round(path=(0, 1), bonus=2), " mat"]
    page = pages()
    say(page)
    tree = page.locator("#tree .current")
    expect(tree.locator(".node.accepted")).to_have_text(["·mat", "·and"])
    expect(tree.locator(".node.bonus")).to_have_count(0)
    expect(page.locator("#detail")).to_have_text("2 tokens in one pass: 2 of 3 guesses.")


def test_a_tree_shows_what_was_accepted_and_what_was_dropped(pages):
    pages.engine.pieces = [make_round(), " rug", " purred"]
    page = pages()
    say(page)
    expect(last(page, ".body")).to_have_text("rug purred")
    tree = page.locator("#tree .current")
    expect(tree.locator(".node.root")).to_have_text("·the")
    expect(tree.locator(".node.accepted")).to_have_text(["·rug"])
    expect(tree.locator(".node.dropped")).to_have_text(["·mat", "·and"])
    expect(tree.locator(".node.bonus")).to_have_text("·purred")
    detail = page.locator("#detail")
    expect(detail).to_have_text("2 tokens in one pass: 1 of 3 guesses, and its own.")
    tree.locator(".node.dropped").last.hover()
    expect(detail).to_contain_text("dropped; the draft’s first choice, 61 % sure")
    page.locator("#log").hover()
    tree.locator(".node.root").focus()
    for key, words in (
        ("ArrowRight", "“ rug”: accepted; another choice of the draft"),
        ("ArrowUp", "“ mat”: dropped"),
        ("ArrowLeft", "where the tree begins"),
    ):
        page.keyboard.press(key)
        expect(detail).to_contain_text(words)


@pytest.mark.parametrize("how", ["Escape", "button"])
def test_stopping(pages, how):
    engine = pages.engine
    engine.round_s, engine.pieces = 0.02, ["word "] * 5000
    page = pages()
    say(page)
    expect(last(page, ".body")).to_contain_text("word word")
    if how == "button":
        page.locator("#stop").click()
    else:
        page.keyboard.press("Escape")
    expect(last(page, "footer")).to_contain_text("Stopped")
    wait_for(lambda: engine.ended)
    assert engine.ended[0].finish_reason is FinishReason.CANCELLED
    engine.round_s, engine.pieces = 0.0, ["Done."]
    say(page, "Again")
    expect(last(page, ".body")).to_have_text("Done.")
    asked = engine.calls[-1]["prompt"]
    assert [message["role"] for message in asked] == ["user", "assistant", "user"]
    assert asked[1]["content"].startswith("word ")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_the_button(pages, scheme):
    page = pages(color_scheme=scheme)

    def is_dark():
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3])) < 380

    assert is_dark() == (scheme == "dark")
    page.locator("#toggle-theme").click()
    assert is_dark() == (scheme == "light")
    page.reload()
    assert is_dark() == (scheme == "light")
    page.locator("#toggle-theme").click()
    assert is_dark() == (scheme == "dark")


def test_a_phone_needs_no_scrolling_sideways(pages):
    long = "x" * 300
    pages.engine.pieces = [
        make_chain(12),
        f"{long} {long}\n\n```\n{long}\n```\n1. {long}\n\n|{long}|",
    ]
    page = pages(**PHONE)

    def is_within():
        width = page.evaluate(
            "Math.max(document.documentElement.scrollWidth, document.querySelector('#log')"
            ".scrollWidth, ...[...document.querySelectorAll('header, #panel, #composer, button')]"
            ".map((element) => element.getBoundingClientRect().right))"
        )
        return width <= PHONE["viewport"]["width"]

    assert is_within()
    say(page, long)
    expect(last(page, "footer")).to_be_visible()
    expect(page.locator("#tree .current .node.bonus")).to_be_in_viewport()
    assert is_within()
    page.locator("#toggle-tree").tap()
    expect(page.locator("#panel")).to_be_hidden()
    page.locator("#open-settings").tap()
    expect(page.locator("#settings")).to_be_in_viewport()
    assert is_within()


@pytest.mark.parametrize("size", [(360, 740), (740, 360)])
def test_on_a_phone_the_welcome_is_shown_from_its_beginning(pages, size):
    page = pages(viewport=dict(zip(("width", "height"), size, strict=True)), has_touch=True)
    top = page.evaluate("document.getElementById('log').getBoundingClientRect().top")
    heading = page.get_by_role("heading", name="Ask, and watch it guess ahead")
    assert heading.bounding_box()["y"] >= top
    say(page)
    expect(last(page, "footer")).to_be_in_viewport()
    page.locator("#new-chat").click()
    assert heading.bounding_box()["y"] >= top


def test_settings_can_be_left_without_scrolling(pages):
    page = pages(**PHONE)
    page.locator("#open-settings").click()
    page.locator("#sampling summary").click()
    expect(page.locator("#settings .main")).to_be_in_viewport(ratio=1)


def test_keys(pages):
    page = pages()
    prompt = page.locator("#prompt")
    expect(prompt).to_be_focused()
    prompt.press("Enter")
    prompt.press_sequentially("one")
    prompt.press("Shift+Enter")
    prompt.press_sequentially("two")
    prompt.press("Enter")
    expect(last(page, ".body")).to_have_text("Hello there")
    assert [call["prompt"][0]["content"] for call in pages.engine.calls] == ["one\ntwo"]
    expect(page.locator("#status")).to_contain_text("Reply finished")
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or reached[-1] in ("", "prompt")
    assert {"new-chat", "toggle-tree", "toggle-theme", "open-settings", "log"} <= set(reached)


def test_trees_that_are_not_shown_are_not_asked_for(pages):
    pages.engine.pieces = [make_round(), " rug"]
    page = pages()
    page.locator("#toggle-tree").click()
    with page.expect_request("**/chat/completions") as asked:
        say(page)
    assert asked.value.post_data_json["draftree"] == {"stats": True, "rounds": False}
    expect(last(page, "footer")).to_be_visible()
    expect(page.locator("#tree")).to_be_hidden()
