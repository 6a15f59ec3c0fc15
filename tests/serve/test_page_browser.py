"""The page in a real browser: asking, stopping, trees, colours, widths, keys, errors."""

import re

import pytest
from playwright import sync_api

from draftree.core import FinishReason
from draftree.text.reply import DeltaKind
from tests.serve import fake
from tests.serve.conftest import Running, wait_for
from tests.serve.viewer import PageEngine, make_chain, make_round, open_browser

expect = sync_api.expect

PHONE = {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = open_browser(playwright)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """Opens the page, in a browser that knows nothing; no request may leave the server, and
    nothing may be complained about.
    """
    contexts, problems = [], []

    def open_page(url, expected=(), **options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)

        def note(message):
            if message.type == "error" and not any(word in message.text for word in expected):
                problems.append(message.text)

        page.on("console", note)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda r: r.url.startswith(url) or problems.append(r.url))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture(scope="module")
def served():
    engine = PageEngine()
    running = Running(engine.open).start()
    yield engine, running.url
    running.stop()


@pytest.fixture
def pages(served, visit):
    """The page of a fake engine, ready to be used."""
    engine, url = served
    engine.__init__()

    def open_page(**options):
        page = visit(url, **options)
        expect(page.locator("body.ready")).to_be_visible()
        return page

    open_page.engine = engine
    return open_page


def say(page, text="Hello"):
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")


def last(page, selector=""):
    return page.locator(f".reply:last-child {selector}")


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
    page.locator("#prompt").press_sequentially("Write a Python function that adds numbers.")
    page.locator("#prompt").press("Enter")
    expect(page.locator("#stop")).to_be_visible()
    grown = "document.querySelector('.reply .body').textContent.length"
    wait_for(lambda: page.evaluate(grown) > 20)
    assert last(page, "footer").count() == 0
    early = page.evaluate(grown)
    expect(page.locator("#tree .current .node.accepted").first).to_be_visible()
    expect(last(page, "footer")).to_be_visible(timeout=60_000)
    assert page.evaluate(grown) > early
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


def test_text_of_a_model_stays_text(pages):
    bad = "<img src=x onerror=document.title='bad'> <b>bold</b>\n\n```html\n<script>1</script>\n```"
    pages.engine.pieces = [make_round(bonus=5), *re.split("(?<=[<`])", bad)]
    page = pages()
    say(page, "<i>question</i>")
    expect(last(page, "footer")).to_be_visible()
    expect(page.locator(".question")).to_have_text("<i>question</i>")
    expect(last(page, ".body p")).to_have_text(bad.split("\n")[0])
    expect(last(page, ".body code")).to_have_text("<script>1</script>")
    assert page.locator(".reply img, .reply script, .reply b, .question i").count() == 0
    assert page.title() == "fake · draftree"


def test_markdown(pages):
    pages.engine.pieces = [
        "# Title\nSome **bold *and* `code`** 2 * 3 * 4\nsnake_case_name\n\n",
        "1. one\n2. two\n   more\n\n- a\n  - b\n\n> said\n\n---\n| a | b |\n|---|---|\n",
        "```py",
        "thon\nx = 1\n\ny\n```\nend",
    ]
    page = pages()
    say(page)
    expect(last(page, "footer")).to_be_visible()
    body = last(page, ".body")
    tags = body.evaluate("body => [...body.children].map((child) => child.localName)")
    assert tags == ["p", "p", "ol", "ul", "blockquote", "hr", "pre", "figure", "p"]
    expect(body.locator("strong")).to_have_text("bold and code")
    expect(body.locator("strong code")).to_have_text("code")
    expect(body.locator("em")).to_have_text(["and"])
    assert "2 * 3 * 4\nsnake_case_name" in body.locator("p").nth(1).text_content()
    assert body.locator("ol li").all_text_contents() == ["one", "two\nmore"]
    expect(body.locator("ul li")).to_have_class(["level-0", "level-1"])
    expect(body.locator("figcaption span")).to_have_text("python")
    assert body.locator("figure code").text_content() == "x = 1\n\ny"


def test_code_can_be_copied(pages):
    pages.engine.pieces = ["```\none\ntwo\n```"]
    page = pages(permissions=["clipboard-read", "clipboard-write"])
    say(page)
    last(page, "figure button").click()
    expect(last(page, "figure button")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "one\ntwo"


def test_reasoning_is_folded(pages):
    thought = fake.Delta("Let me see.", kind=DeltaKind.REASONING)
    pages.engine.pieces, pages.engine.thinks = [thought, "Four."], True
    page = pages()
    page.locator("#open-settings").click()
    page.locator("#think").uncheck()
    page.keyboard.press("Escape")
    say(page)
    expect(last(page, ".body")).to_have_text("Four.")
    expect(last(page, "details p")).to_be_hidden()
    last(page, "summary").click()
    expect(last(page, "details p")).to_have_text("Let me see.")
    assert pages.engine.calls[-1]["thinking"] is False


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
    page = pages(viewport=PHONE, has_touch=True)

    def is_within():
        width = page.evaluate(
            "Math.max(document.documentElement.scrollWidth, document.querySelector('#log')"
            ".scrollWidth, ...[...document.querySelectorAll('header, #panel, #composer, button')]"
            ".map((element) => element.getBoundingClientRect().right))"
        )
        return width <= PHONE["width"]

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


def test_settings_are_sent_and_kept(pages):
    page = pages()
    page.locator("#open-settings").click()
    expect(page.locator("#facts")).to_contain_text("up to 64 nodes")
    page.locator("#system").fill("Be brief.")
    page.locator("#temperature").fill("0.3")
    page.locator("#max-tokens").fill("77")
    page.locator("#keep").check()
    page.locator("#settings .main").click()
    say(page)
    expect(last(page, "footer")).to_be_visible()
    call = pages.engine.calls[-1]
    assert call["prompt"][0] == {"role": "system", "content": "Be brief."}
    assert (call["sampling"].temperature, call["max_tokens"]) == (0.3, 77)
    page.reload()
    expect(last(page, ".body")).to_have_text("Hello there")
    page.locator("#new-chat").click()
    page.reload()
    expect(page.locator("#welcome")).to_be_visible()
    assert page.locator("article").count() == 0


def test_a_conversation_is_forgotten_unless_it_is_to_be_kept(pages):
    page = pages()
    say(page, "private words")
    expect(last(page, "footer")).to_be_visible()
    assert "private words" not in page.evaluate("JSON.stringify({...localStorage})")
    page.reload()
    expect(page.locator("#welcome")).to_be_visible()


def test_a_key_is_asked_for_and_kept_for_the_tab_alone(start, visit):
    engine = PageEngine()
    page = visit(start(engine.open, api_keys=("secret",)).url, expected=("401",))
    expect(page.locator("#key-note")).to_have_text("This server asks for an API key.")
    expect(page.locator("#key")).to_be_focused()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-note")).to_have_text("The API key is wrong.")
    page.locator("#key").fill("secret")
    page.keyboard.press("Enter")
    expect(page.locator("body.ready")).to_be_visible()
    say(page)
    expect(last(page, ".body")).to_have_text("Hello there")
    assert "secret" in page.evaluate("JSON.stringify({...sessionStorage})")
    assert "secret" not in page.evaluate("JSON.stringify({...localStorage})")


def test_errors_are_shown_and_the_reply_can_be_asked_for_again(pages):
    engine = pages.engine
    engine.pieces = ["Half a ", fake.Broken("the card fell off")]
    page = pages(expected=("400",))
    say(page)
    expect(last(page, ".error")).to_contain_text("the card fell off")
    expect(last(page, ".body")).to_have_text("Half a")
    engine.pieces = ["Whole."]
    last(page, ".error button").click()
    expect(last(page, ".body")).to_have_text("Whole.")
    expect(page.locator(".error")).to_have_count(0)
    say(page, "x" * 20_000)
    expect(last(page, ".error")).to_contain_text("maximum context length is 10000 tokens")
    say(page, "short")
    expect(last(page, ".body")).to_have_text("Whole.")
    assert [message["content"] for message in engine.calls[-1]["prompt"]] == [
        *("Hello", "Whole.", "short")
    ]


def test_a_server_that_is_gone_is_reported(start, visit):
    running = start(PageEngine().open)
    page = visit(running.url, expected=("ERR_CONNECTION",))
    expect(page.locator("body.ready")).to_be_visible()
    running.stop()
    say(page)
    expect(last(page, ".error")).to_contain_text("cannot be reached")
