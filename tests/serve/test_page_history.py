"""Conversations that the page keeps: the list, search, names, deleting, files, keeping nothing."""

import json

from tests.serve.browser import PHONE, asked, expect, in_all_views, last, reload, say, talk


def open_list(page):
    """It stays open where there is room."""
    if page.locator("#history").is_hidden():
        page.locator("#toggle-history").click()
    expect(page.locator("#history")).to_be_visible()


def names(page):
    return page.locator("#list .open span")


def start_another(page):
    page.locator("#new-chat").click()
    expect(page.locator("#welcome")).to_be_visible()


@in_all_views
def test_conversations_are_kept_and_opened_again(pages, view):
    page = pages(**view)
    talk(page, "About cats", "And dogs")
    start_another(page)
    talk(page, "About compilers")
    reload(page)
    expect(last(page, ".body")).to_have_text("Hello there")  # this tab had it open
    expect(page.locator(".question .bubble")).to_have_text(["About compilers"])
    open_list(page)
    expect(names(page)).to_have_text(["About compilers", "About cats"])
    expect(page.locator("#list [aria-current]")).to_contain_text("About compilers")
    page.locator("#list .open", has_text="cats").click()
    expect(page.locator(".question .bubble")).to_have_text(["About cats", "And dogs"])
    expect(page.locator("#prompt")).to_be_focused()
    talk(page, "And mice")
    assert [text for role, text in asked(pages.engine) if role == "user"] == [
        *("About cats", "And dogs", "And mice")
    ]
    other = page.context.new_page()  # which begins with nothing, but has the list
    other.goto(page.url)
    expect(other.locator("#welcome")).to_be_visible()
    open_list(other)
    expect(names(other)).to_have_text(["About cats", "About compilers"])


@in_all_views
def test_searching_finds_words_of_any_message(pages, view):
    page = pages(**view)
    pages.engine.pieces = ["Purring is a *Vibration*."]
    talk(page, "About cats")
    start_another(page)
    pages.engine.pieces = ["They translate."]
    talk(page, "About compilers")
    page.keyboard.press("Control+k")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.type("vibration")
    expect(names(page)).to_have_text(["About cats"])
    page.locator("#search").fill("COMPILERS")
    expect(names(page)).to_have_text(["About compilers"])
    page.locator("#search").fill("nowhere")
    expect(page.locator("#list-note")).to_have_text("Nothing was found.")
    page.locator("#search").fill("")
    expect(names(page)).to_have_count(2)
    page.keyboard.press("Escape")
    expect(page.locator("#history")).to_be_hidden()
    expect(page.locator("#toggle-history")).to_be_focused()


@in_all_views
def test_renaming_and_deleting(pages, view):
    page = pages(**view)
    talk(page, "About cats")
    open_list(page)
    row = page.locator("#list li")
    row.hover()
    row.get_by_role("button", name="Rename About cats").click()
    page.keyboard.type("Felines")
    page.keyboard.press("Enter")
    expect(names(page)).to_have_text(["Felines"])
    row.get_by_role("button", name="Rename Felines").click()
    page.keyboard.type("Nothing")
    page.keyboard.press("Escape")
    expect(names(page)).to_have_text(["Felines"])
    reload(page)
    open_list(page)
    expect(names(page)).to_have_text(["Felines"])
    row.hover()
    row.get_by_role("button", name="Delete Felines").click()
    expect(page.locator("#list-note")).to_be_visible()
    expect(page.locator("#welcome")).to_be_attached()
    expect(page.locator("article")).to_have_count(0)
    page.locator("#undo").click()
    expect(names(page)).to_have_text(["Felines"])
    expect(page.locator(".question .bubble")).to_have_text("About cats")
    row.hover()
    row.get_by_role("button", name="Delete Felines").click()
    expect(page.locator("#list-note")).to_have_text("Conversations are kept in this browser.")
    reload(page)
    expect(page.locator("#welcome")).to_be_visible()


@in_all_views
def test_export_and_import(pages, view, tmp_path):
    page = pages(**view)
    talk(page, "About cats")
    open_list(page)
    with page.expect_download() as download:
        page.locator("#export").click()
    path = tmp_path / "export.json"
    download.value.save_as(path)
    exported = json.loads(path.read_text())
    assert exported["format"] == "draftree"
    messages = exported["conversations"][0]["messages"]
    assert [message["content"] for message in messages] == ["About cats", "Hello there"]
    page.locator("#import-input").set_input_files(path)
    expect(page.locator("#toast")).to_contain_text("1 conversation imported.")
    expect(names(page)).to_have_count(1)  # it was here already

    another = pages(**view)
    open_list(another)
    another.locator("#import-input").set_input_files(path)
    expect(names(another)).to_have_text(["About cats"])
    another.locator("#list .open").click()
    expect(last(another, ".body")).to_have_text("Hello there")


def test_what_was_not_exported_is_not_imported(pages, tmp_path):
    page = pages()
    open_list(page)
    message = {"id": "a", "parent": None, "role": "user", "content": "x"}
    record = {"id": "c", "leaf": "a", "messages": [message]}
    bad = [
        "no JSON",
        "[]",
        json.dumps({"format": "draftree", "conversations": [{"id": "c"}]}),
        *(
            json.dumps({"format": "draftree", "conversations": [one]})
            for one in (
                {**record, "leaf": "b"},
                {**record, "messages": [{**message, "parent": "a"}]},
                {**record, "messages": [{**message, "role": "system"}]},
                {**record, "messages": [message, message]},
                {**record, "messages": [{**message, "files": [{"name": "x"}]}]},
            )
        ),
    ]
    path = tmp_path / "bad.json"
    for text in bad:
        page.locator("#toast-text").evaluate("text => (text.textContent = '')")
        path.write_text(text)
        page.locator("#import-input").set_input_files(path)
        expect(page.locator("#toast-text")).to_have_text(
            "That file was not exported from this page."
        )
    expect(names(page)).to_have_count(0)


@in_all_views
def test_keeping_nothing(pages, view):
    page = pages(**view)
    talk(page, "private words")
    open_list(page)
    page.locator("#keep-nothing").click()
    expect(page.locator("#confirm-text")).to_have_text(
        "Delete 1 conversation that is kept in this browser?"
    )
    page.locator("#confirm").get_by_role("button", name="Cancel").click()
    expect(page.locator("#keep-nothing")).not_to_be_checked()
    expect(names(page)).to_have_count(1)
    page.locator("#keep-nothing").click()
    page.locator("#confirm-yes").click()
    expect(names(page)).to_have_count(0)
    page.locator("#close-history").click()
    talk(page, "more private words")
    everything = """async () => {
      const asked = indexedDB.open("draftree");
      await new Promise((resolve) => asked.addEventListener("success", resolve));
      const all = asked.result.transaction("conversations").objectStore("conversations").getAll();
      await new Promise((resolve) => all.addEventListener("success", resolve));
      asked.result.close();
      return JSON.stringify([all.result, {...localStorage}, {...sessionStorage}]);
    }"""
    assert "private words" not in page.evaluate(everything)
    reload(page)
    expect(page.locator("#welcome")).to_be_visible()
    open_list(page)
    expect(page.locator("#list-note")).to_have_text("Conversations end with this tab.")
    page.locator("#keep-nothing").click()
    page.locator("#close-history").click()
    talk(page, "public words")
    assert "public words" in page.evaluate(everything)


def test_a_phone_shows_the_list_over_the_chat(pages):
    page = pages(**PHONE)
    talk(page, "About cats")
    open_list(page)
    box = page.locator("#history").bounding_box()
    assert box["x"] == 0
    assert box["width"] <= 0.9 * PHONE["viewport"]["width"]
    assert page.locator("#chat").evaluate("chat => chat.inert")
    page.mouse.click(350, 400)
    expect(page.locator("#history")).to_be_hidden()
    assert not page.locator("#chat").evaluate("chat => chat.inert")


def test_another_chat_ends_the_reply_and_keeps_it(pages):
    engine = pages.engine
    engine.round_s, engine.pieces = 0.02, ["word "] * 5000
    page = pages()
    say(page, "Count")
    expect(last(page, ".body")).to_contain_text("word word")
    page.locator("#new-chat").click()
    expect(page.locator("#welcome")).to_be_visible()
    expect(page.locator("article")).to_have_count(0)
    open_list(page)
    page.locator("#list .open", has_text="Count").click()
    expect(last(page, ".body")).to_contain_text("word word")
    expect(last(page, "footer")).to_contain_text("Stopped")
