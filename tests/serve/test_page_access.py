"""The page for those who use a keyboard or listen to it: axe-core finds no violation."""

import gzip
from pathlib import Path

import pytest

from tests.serve.browser import act, expect, in_most_views, last, say, talk
from tests.serve.viewer import PageEngine, make_round

AXE = Path(__file__).parents[1] / "data/axe/axe.min.js.gz"
RICH = (
    "## Title\n\nWords with `code`, [a link](https://example.org) and $x^2$.\n\n"
    "| a | b |\n|---|--:|\n| 1 | 2 |\n\n- one\n  - two\n\n> said\n\n$$\\frac{1}{2}$$\n\n"
    "```python\n# a comment\ndef f(x):\n    return 'text' + str(1.5)\n```\n"
)


@pytest.fixture(scope="module")
def axe():
    return gzip.decompress(AXE.read_bytes()).decode()


def find_problems(page, axe):
    """What axe finds, as short sentences; colours are looked at when nothing moves."""
    page.emulate_media(reduced_motion="reduce")
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{violation['id']}: {node['html'][:120]} {node['failureSummary'][:200]}"
        for violation in found["violations"]
        for node in violation["nodes"]
    ]


@in_most_views
def test_a_conversation(pages, axe, view):
    page = pages(**view)
    assert find_problems(page, axe) == []  # the welcome
    pages.engine.pieces = [make_round(), RICH]
    talk(page, "Hello", "And now?")
    act(page, "Again")
    expect(last(page, ".versions")).to_be_visible()
    expect(last(page, ".katex")).to_have_count(2)
    expect(last(page, ".hljs-comment")).to_have_count(1)
    assert find_problems(page, axe) == []
    act(page, "Edit", ".question")
    assert find_problems(page, axe) == []


@in_most_views
def test_the_list_the_settings_and_a_question(pages, axe, view):
    page = pages(**view)
    talk(page, "Hello")
    page.locator("#toggle-history").click()
    expect(page.locator("#list .open")).to_have_count(1)
    assert find_problems(page, axe) == []
    page.locator("#keep-nothing").click()
    expect(page.locator("#confirm")).to_be_visible()
    assert find_problems(page, axe) == []
    page.keyboard.press("Escape")
    page.locator("#close-history").click()
    page.locator("#open-settings").click()
    page.locator("#sampling summary").click()
    assert find_problems(page, axe) == []


@in_most_views
def test_errors_files_and_what_is_not_sent(pages, axe, view, tmp_path):
    (tmp_path / "notes.txt").write_text("milk")
    page = pages(expected=("400",), **view)
    talk(page, "x" * 3000)
    page.locator("#file-input").set_input_files(tmp_path / "notes.txt")
    expect(page.locator("#files li")).to_have_count(1)
    assert find_problems(page, axe) == []
    say(page, "y" * 9000)
    expect(last(page, ".error")).to_be_visible()
    assert find_problems(page, axe) == []
    last(page, ".error button").click()
    expect(page.locator(".left-out")).to_be_attached()
    expect(last(page, "footer")).to_be_visible()
    act(page, "Delete")
    expect(page.locator(".unanswered")).to_be_visible()
    expect(page.locator("#toast")).to_be_visible()
    assert find_problems(page, axe) == []


@in_most_views
def test_a_server_without_a_draft_and_one_that_is_loading(start, visit, axe, view):
    running = start(PageEngine(has_draft=False).open, aliases=("other",))
    page = visit(running.url, expected=("ERR_CONNECTION",), **view)
    expect(page.locator("body.ready")).to_be_visible()
    page.locator("#toggle-tree").click()
    assert find_problems(page, axe) == []
    running.stop()
    expect(page.locator("#banner")).to_be_visible()
    assert find_problems(page, axe) == []


def test_everything_is_reached_by_keys_alone(pages):
    """From the message backwards to the list, a conversation renamed and opened, and back."""
    page = pages()
    talk(page, "About cats")
    page.keyboard.press("Control+k")
    expect(page.locator("#search")).to_be_focused()
    for _ in range(3):  # the conversation, and its two buttons
        page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Delete About cats")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    page.keyboard.type("Felines")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Rename Felines")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#toggle-history")).to_be_focused()
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.ariaLabel || document.activeElement.id"))
    buttons = {"Copy", "Again", "Edit", "Delete", "Continue in a new chat"}
    assert buttons | {"attach", "Message", "toggle-tree", "open-settings"} <= reached


def test_a_list_that_is_drawn_anew_keeps_what_is_focused(pages):
    """A reply that ends, or another tab, must not take the keyboard away."""
    page = pages()
    talk(page, "About cats")
    page.keyboard.press("Control+k")
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.locator("body.ready")).to_be_visible()
    rename = page.get_by_role("button", name="Rename About cats")
    rename.focus()
    talk(other, "About dogs")
    expect(page.locator("#list li")).to_have_count(2)
    expect(rename).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.type("Fel")
    talk(other, "More of them")
    page.keyboard.type("ines")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Rename Felines")).to_be_focused()


def test_after_a_deletion_the_next_conversation_is_focused(pages):
    page = pages()
    for text in ("One", "Two", "Three"):
        page.locator("#new-chat").click()
        talk(page, text)
    page.keyboard.press("Control+k")
    for deleted, focused in (("Two", "One"), ("One", "Three")):
        page.get_by_role("button", name=f"Delete {deleted}").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#list .open", has_text=focused)).to_be_focused()
    page.get_by_role("button", name="Delete Three").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#search")).to_be_focused()
