"""Messages of the page can be changed, deleted, branched off, continued and sent again; files go
with them, and a conversation that has grown too long can be shortened.
"""

import pytest

from draftree.core import FinishReason
from draftree.text.reply import DeltaKind
from tests.serve import fake
from tests.serve.browser import (
    act,
    asked,
    expect,
    in_all_views,
    in_most_views,
    last,
    reload,
    say,
    talk,
)
from tests.serve.conftest import wait_for

LONG = "x" * 4000
NUM_KEPT = """async () => {
  const asked = indexedDB.open("draftree");
  await new Promise((resolve) => asked.addEventListener("success", resolve));
  const all = asked.result.transaction("conversations").objectStore("conversations").count();
  await new Promise((resolve) => all.addEventListener("success", resolve));
  asked.result.close();
  return all.result;
}"""


def bubbles(page):
    return page.locator(".question .bubble")


@in_all_views
def test_a_question_is_edited_and_both_versions_stay(pages, view):
    engine = pages.engine
    page = pages(**view)
    talk(page, "one", "two")
    engine.pieces = ["Changed."]
    act(page, "Edit", ".question")
    editor = page.locator(".editor textarea")
    expect(editor).to_be_focused()
    expect(editor).to_have_value("two")
    editor.fill("three")
    page.locator(".editor").get_by_role("button", name="Send").click()
    expect(last(page, ".body")).to_have_text("Changed.")
    expect(bubbles(page)).to_have_text(["one", "three"])
    assert asked(engine) == [("user", "one"), ("assistant", "Hello there"), ("user", "three")]
    versions = page.locator(".question").last.locator(".versions")
    expect(versions).to_have_text("2/2")
    versions.get_by_role("button", name="Earlier version").click()
    expect(bubbles(page)).to_have_text(["one", "two"])
    expect(last(page, ".body")).to_have_text("Hello there")
    reload(page)
    expect(bubbles(page)).to_have_text(["one", "two"])
    act(page, "Later version", ".question")
    expect(bubbles(page)).to_have_text(["one", "three"])


def test_editing_by_keys(pages):
    page = pages()
    talk(page, "one")
    page.locator("#prompt").press("ArrowUp")
    expect(page.locator(".editor textarea")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator(".editor")).to_have_count(0)
    expect(page.locator(".question [aria-label=Edit]")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("End")
    page.keyboard.type(" more")
    page.keyboard.press("Control+Enter")
    expect(bubbles(page)).to_have_text(["one more"])


@in_all_views
def test_another_reply_stands_beside_the_first(pages, view):
    page = pages(**view)
    talk(page, "one")
    pages.engine.pieces = ["Second."]
    act(page, "Again")
    expect(last(page, ".body")).to_have_text("Second.")
    expect(last(page, ".versions")).to_have_text("2/2")
    act(page, "Earlier version")
    expect(last(page, ".body")).to_have_text("Hello there")
    talk(page, "two")
    assert asked(pages.engine)[1] == ("assistant", "Hello there")


@in_all_views
def test_a_reply_is_edited_and_continued(pages, view):
    page = pages(**view)
    talk(page, "one")
    act(page, "Edit")
    page.locator(".editor textarea").fill("Once upon")
    page.locator(".editor").get_by_role("button", name="Keep").click()
    expect(last(page, ".body")).to_have_text("Once upon")
    assert len(pages.engine.calls) == 1
    pages.engine.pieces = [" a time"]
    last(page).get_by_role("button", name="Continue", exact=True).click()
    expect(last(page, ".body")).to_have_text("Once upon a time")
    expect(last(page, "footer")).to_be_visible()
    assert asked(pages.engine) == [("user", "one"), ("assistant", "Once upon")]
    assert pages.engine.calls[-1]["continue_final"]
    reload(page)
    expect(last(page, ".body")).to_have_text("Once upon a time")


def test_a_reply_that_was_cut_off_can_be_continued(pages):
    pages.engine.finish_reason = FinishReason.LENGTH
    page = pages()
    talk(page, "one")
    pages.engine.finish_reason, pages.engine.pieces = FinishReason.STOP, [", friend."]
    last(page).get_by_role("button", name="Continue", exact=True).click()
    expect(last(page, ".body")).to_have_text("Hello there, friend.")
    expect(last(page, ".resume")).to_have_count(0)
    pages.engine.pieces = ["More"]
    talk(page, "two")
    sent = [("user", "one"), ("assistant", "Hello there, friend."), ("user", "two")]
    assert asked(pages.engine) == sent
    assert pages.engine.calls[-1]["continue_final"] is False


def test_only_the_last_reply_can_be_continued(pages):
    pages.engine.finish_reason = FinishReason.LENGTH
    page = pages()
    talk(page, "one", "two")
    expect(page.locator(".resume")).to_have_count(2)
    expect(page.locator(".resume").first).to_be_hidden()
    expect(page.locator(".resume").last).to_be_visible()


def test_a_model_that_thinks_goes_on_without_thinking_again(pages):
    engine = pages.engine
    thought = fake.Delta("Let me see.", kind=DeltaKind.REASONING)
    engine.thinks, engine.finish_reason, engine.pieces = True, FinishReason.LENGTH, [thought]
    page = pages()
    talk(page, "one")
    expect(page.locator(".resume")).to_have_count(0)  # the text has not begun
    engine.pieces = [thought, "It is"]
    act(page, "Again")
    expect(last(page, ".resume")).to_be_visible()
    assert engine.calls[-1]["thinking"] is True
    engine.finish_reason, engine.pieces = FinishReason.STOP, [" four."]
    last(page, ".resume").click()
    expect(last(page, ".body")).to_have_text("It is four.")
    assert asked(engine) == [("user", "one"), ("assistant", "It is")]
    assert engine.calls[-1]["thinking"] is None
    last(page, "summary").click()
    expect(last(page, "details p")).to_have_text("Let me see.")


@in_all_views
def test_messages_are_deleted_and_put_back(pages, view):
    page = pages(**view)
    talk(page, "one", "two")
    act(page, "Delete", ".question")
    expect(bubbles(page)).to_have_text(["one"])
    expect(page.locator(".reply")).to_have_count(1)
    expect(page.locator("#prompt")).to_be_focused()
    page.locator("#undo").click()
    expect(bubbles(page)).to_have_text(["one", "two"])
    act(page, "Delete")
    expect(page.locator(".reply")).to_have_count(1)
    expect(page.locator(".unanswered")).to_be_visible()
    act(page, "Delete", ".question")
    act(page, "Delete", ".question")
    expect(page.locator("#welcome")).to_be_visible()
    wait_for(lambda: page.evaluate(NUM_KEPT) == 0)
    reload(page)
    expect(page.locator("#welcome")).to_be_visible()


@in_all_views
def test_a_message_begins_a_chat_of_its_own(pages, view):
    page = pages(**view)
    talk(page, "one", "two")
    page.locator(".reply").first.hover()
    fork = page.locator(".reply").first.get_by_role("button", name="Continue in a new chat")
    fork.click()
    expect(bubbles(page)).to_have_text(["one"])
    talk(page, "three")
    assert asked(pages.engine) == [("user", "one"), ("assistant", "Hello there"), ("user", "three")]
    page.locator("#toggle-history").click()
    expect(page.locator("#list .open")).to_have_count(2)
    page.locator("#list .open").last.click()
    expect(bubbles(page)).to_have_text(["one", "two"])


@in_all_views
def test_a_question_without_a_reply_is_sent_again(pages, view):
    engine = pages.engine
    engine.round_s, engine.pieces = 0.05, [lambda: None] * 2000
    page = pages(**view)
    say(page, "one")
    expect(page.locator(".reply.writing")).to_be_visible()
    page.locator("#stop").click()
    expect(page.locator(".reply")).to_have_count(0)
    expect(page.locator(".unanswered")).to_contain_text("No reply yet.")
    reload(page)
    expect(page.locator("body.ready")).to_be_visible()
    engine.round_s, engine.pieces = 0.0, ["Here."]
    page.get_by_role("button", name="Send again").click()
    expect(last(page, ".body")).to_have_text("Here.")
    expect(page.locator(".unanswered")).to_have_count(0)
    assert asked(engine) == [("user", "one")]


@in_all_views
def test_files_go_with_a_message(pages, view, tmp_path):
    (tmp_path / "notes.txt").write_text("Buy ``` milk")
    (tmp_path / "data.csv").write_text("a,b\n1,2")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\x00")
    page = pages(**view)
    files = [tmp_path / name for name in ("notes.txt", "data.csv", "picture.png")]
    with page.expect_file_chooser() as chooser:
        page.locator("#attach").click()
    chooser.value.set_files(files)
    expect(page.locator("#toast")).to_contain_text(
        "picture.png is not a text file of at most 4 MB."
    )
    expect(page.locator("#files li span")).to_have_text(["notes.txt", "data.csv"])
    expect(page.locator("#send")).to_be_enabled()
    page.get_by_role("button", name="Remove data.csv").click()
    expect(page.locator("#files li")).to_have_count(1)
    say(page, "What is missing?")
    expect(last(page, "footer")).to_be_visible()
    expect(page.locator("#files")).to_be_hidden()
    content = "notes.txt:\n````\nBuy ``` milk\n````\n\nWhat is missing?"
    assert asked(pages.engine) == [("user", content)]
    page.locator(".file summary").click()
    expect(page.locator(".file pre")).to_have_text("Buy ``` milk")


def test_files_are_dropped_on_the_page(pages):
    page = pages()
    transfer = page.evaluate_handle(
        "() => { const data = new DataTransfer();"
        " data.items.add(new File(['some words'], 'dropped.txt', {type: 'text/plain'}));"
        " return data; }"
    )
    page.dispatch_event("#log", "dragover", {"dataTransfer": transfer})
    expect(page.locator("#drop-note")).to_be_visible()
    page.dispatch_event("#log", "drop", {"dataTransfer": transfer})
    expect(page.locator("#drop-note")).to_be_hidden()
    expect(page.locator("#files li span")).to_have_text(["dropped.txt"])
    page.locator("#send").click()
    expect(last(page, "footer")).to_be_visible()
    assert asked(pages.engine)[0][1].startswith("dropped.txt:\n```\nsome words")


@in_all_views
def test_a_conversation_that_is_too_long_shortens_itself(pages, view):
    engine = pages.engine
    page = pages(expected=("400",), **view)
    talk(page, LONG, "two")
    say(page, LONG + LONG)
    error = last(page, ".error")
    expect(error).to_contain_text("longer than the 10,000 tokens that the model can read")
    assert "--" not in error.text_content()
    error.get_by_role("button", name="Leave out the oldest messages").click()
    expect(last(page, ".body")).to_have_text("Hello there")
    assert LONG not in [text for _, text in asked(engine)]
    expect(page.locator(".left-out")).to_contain_text("no longer sent")
    talk(page, "more")
    assert LONG not in [text for _, text in asked(engine)]
    reload(page)
    expect(page.locator(".left-out")).to_be_attached()
    page.get_by_role("button", name="Send all").click()
    expect(page.locator(".left-out")).to_have_count(0)


def test_of_a_conversation_the_message_that_is_too_long_alone_can_be_edited(pages):
    """Leaving out what came before would not help."""
    page = pages(expected=("400",))
    talk(page, "Hello")
    say(page, LONG * 11)
    error = last(page, ".error")
    expect(error).to_contain_text("This message is longer than the 10,000 tokens")
    expect(page.locator("#round-title")).to_have_text("How to read it")
    error.get_by_role("button", name="Shorten the message").click()
    expect(page.locator(".editor textarea")).to_be_focused()


def test_one_message_that_is_too_long_can_be_edited(pages):
    page = pages(expected=("400",))
    say(page, LONG * 3)
    last(page, ".error").get_by_role("button", name="Shorten the message").click()
    editor = page.locator(".editor textarea")
    expect(editor).to_be_focused()
    editor.fill("short")
    page.keyboard.press("Control+Enter")
    expect(last(page, ".body")).to_have_text("Hello there")
    assert asked(pages.engine) == [("user", "short")]


def test_errors_are_shown_and_the_reply_can_be_asked_for_again(pages):
    engine = pages.engine
    engine.pieces = ["Half a ", fake.Broken("the card fell off")]
    page = pages(expected=("500", "503"))
    say(page)
    expect(last(page, ".error")).to_contain_text("the card fell off")
    expect(last(page, ".body")).to_have_text("Half a")
    engine.pieces = ["Whole."]
    expect(page.locator("body.ready")).to_be_visible()
    last(page, ".error button").click()
    expect(last(page, ".body")).to_have_text("Whole.")
    expect(page.locator(".error")).to_have_count(0)
    talk(page, "short")
    assert [text for _, text in asked(engine)] == ["Hello", "Whole.", "short"]


@pytest.mark.parametrize("ending", ["Escape", "error"])
def test_a_reply_that_does_not_come_leaves_the_earlier_one(pages, ending):
    engine = pages.engine
    page = pages(expected=("500", "503"))
    talk(page, "one")
    engine.pieces = [fake.Broken("the card fell off")]
    if ending == "Escape":
        engine.round_s, engine.pieces = 0.05, [lambda: None] * 2000
    act(page, "Again")
    if ending == "Escape":
        expect(page.locator(".reply.writing")).to_be_visible()
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Show the earlier reply").click()
    expect(last(page, ".body")).to_have_text("Hello there")
    expect(page.locator(".unanswered, .error")).to_have_count(0)


@in_most_views
def test_an_offer_to_send_again_covers_no_button(pages, view):
    page = pages(**view)
    talk(page, "Hello")
    act(page, "Delete")
    offer = page.locator(".unanswered").bounding_box()
    for button in page.locator(".question footer button").all():
        box = button.bounding_box()
        assert box["y"] + box["height"] <= offer["y"] + 1
