"""Fixtures of the tests that look at the page in a real browser, and what they do all the time."""

import json
import time

import pytest
from playwright import sync_api

from tests.serve.conftest import Running
from tests.serve.viewer import PageEngine, open_browser

expect = sync_api.expect
expect.set_options(timeout=60_000)  # a busy machine is not a failure

WIDE = {"viewport": {"width": 1280, "height": 800}}
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True}
LIGHT, DARK = {"color_scheme": "light"}, {"color_scheme": "dark"}
VIEWS = {
    "wide-light": {**WIDE, **LIGHT},
    "phone-dark": {**PHONE, **DARK},
    "wide-dark": {**WIDE, **DARK},
    "phone-light": {**PHONE, **LIGHT},
}

# The page opens its database for every request to it, and closes it when that is done.
COUNT_OPEN = """
  window.numOpen = 0;
  const { open } = IDBFactory.prototype, { close } = IDBDatabase.prototype;
  IDBFactory.prototype.open = function (...given) {
    numOpen += 1;
    return open.apply(this, given);
  };
  IDBDatabase.prototype.close = function () {
    numOpen -= 1;
    return close.call(this);
  };
"""


def _in_views(num_short):
    """All of them, the first ones also in a short run."""
    marks = [() if i < num_short else pytest.mark.long for i in range(len(VIEWS))]
    views = [
        pytest.param(view, id=name, marks=mark)
        for (name, view), mark in zip(VIEWS.items(), marks, strict=True)
    ]
    return pytest.mark.parametrize("view", views)


in_all_views = _in_views(1)
in_most_views = _in_views(2)  # also on a phone, and in the dark, each time


@pytest.fixture(scope="session")
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
        context.add_init_script(COUNT_OPEN)
        page = context.new_page()
        page.set_default_timeout(120_000)

        def note(message):
            if message.type == "error" and not any(word in message.text for word in expected):
                problems.append(message.text)

        page.on("console", note)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda r: r.url.startswith((url, "blob:")) or problems.append(r.url))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not problems, problems


@pytest.fixture(scope="session")
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
    """Sends a message."""
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")


def talk(page, *texts):
    """Sends messages, each when the reply before has ended."""
    for text in texts:
        say(page, text)
        expect(last(page, "footer")).to_be_visible()
        expect(page.locator(".question").last).to_have_text(text)


def reload(page):
    """When all that was said and done is kept; on a busy machine that takes a moment."""
    wait_until(page, "numOpen === 0")
    page.reload()


def wait_until(page, expression):
    """Asked from outside: the page's policy forbids it to evaluate texts by itself."""
    deadline = time.monotonic() + 120.0
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"{expression} did not come true"
        page.wait_for_timeout(10)


def last(page, selector=""):
    """Of the last reply."""
    return page.locator(f"#messages > .reply:last-child {selector}")


def act(page, label, article=".reply"):
    """Presses a button of the last message of a kind."""
    chosen = page.locator(f"{article} >> nth=-1")
    chosen.hover()
    chosen.get_by_role("button", name=label, exact=True).click()


def asked(engine):
    """The messages of the last request, as (role, content)."""
    return [(message["role"], message["content"]) for message in engine.calls[-1]["prompt"]]


def open_long(page, num_messages):
    """A conversation of this many messages, through an import."""
    code = "```python\nx = {0}\n```"
    texts = ("Question {0}", f"Reply **{{0}}**\n\n- a\n- b\n\n{code}")
    messages = [
        {
            "id": f"m{i}",
            "parent": f"m{i - 1}" if i else None,
            "role": ("user", "assistant")[i % 2],
            "content": texts[i % 2].format(i),
        }
        for i in range(num_messages)
    ]
    record = {"id": "long", "created": 1, "updated": 1, "messages": messages}
    record |= {"leaf": messages[-1]["id"], "title": "Long", "start": None}
    text = json.dumps({"format": "draftree", "version": 1, "conversations": [record]})
    page.locator("#toggle-history").click()
    file = {"name": "long.json", "mimeType": "application/json", "buffer": text.encode()}
    page.locator("#import-input").set_input_files(file)
    page.locator("#list .open").first.click()
    expect(page.locator("#messages article")).to_have_count(num_messages)
