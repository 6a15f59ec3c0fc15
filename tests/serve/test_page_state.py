"""What the page says of the server, and asks of it: its state, queue and models, settings, keys."""

import re
import threading

import httpx2

from draftree.serve.thread import State
from draftree.text.reply import DeltaKind
from tests.serve import fake
from tests.serve.browser import expect, in_all_views, last, reload, say, talk
from tests.serve.conftest import wait_for
from tests.serve.viewer import PageEngine, make_round


def light(page):
    return page.locator("#light").evaluate("light => getComputedStyle(light).backgroundColor")


@in_all_views
def test_the_light_follows_the_server(start, visit, view):
    running = start(PageEngine().open)
    page = visit(running.url, expected=("503", "ERR_CONNECTION"), **view)
    body, banner = page.locator("body"), page.locator("#banner")
    expect(body).to_have_attribute("data-state", "ready")
    colours = [light(page)]
    for state, words in (
        (State.LOADING, "is loading the model"),
        (State.RECOVERING, "is being opened again"),
        (State.STOPPING, "is stopping"),
    ):
        running.service.thread.state = state
        expect(body).to_have_attribute("data-state", str(state))
        expect(banner).to_contain_text(words)
        assert light(page) not in colours
        running.service.thread.state = State.READY
        expect(body).to_have_attribute("data-state", "ready")
        expect(banner).to_be_hidden()
    colours.append(light(page))
    running.stop()
    expect(body).to_have_attribute("data-state", "unreachable")
    expect(banner).to_contain_text("cannot be reached")
    assert light(page) not in colours
    page.locator("#prompt").fill("Hello")
    expect(page.locator("#send")).to_be_disabled()


@in_all_views
def test_others_keep_the_server_busy_and_the_place_in_the_queue_is_shown(start, visit, view):
    go = threading.Event()
    engine = PageEngine(pieces=[lambda: go.wait(120), "Done."], parallel=1)
    running = start(engine.open)
    body = {"model": "fake", "messages": [{"role": "user", "content": "x"}]}
    others = [
        threading.Thread(
            target=httpx2.post, args=(f"{running.url}/v1/chat/completions",), kwargs={"json": body}
        )
        for _ in range(3)
    ]
    try:
        for other in others:
            other.start()
        wait_for(lambda: running.service.queue.num_waiting >= 1)
        wait_for(lambda: running.service.queue.num_waiting + running.service.num_running == 3)
        running.service.queue.note_duration(100.0)
        page = visit(running.url, **view)
        expect(page.locator("body")).to_have_attribute("data-state", "busy")
        expect(page.locator("#state")).to_have_text(
            f"busy, {running.service.queue.num_waiting} waiting"
        )
        say(page)
        progress = page.locator(".reply .progress")
        expect(progress).to_have_text(re.compile(r"Waiting: number \d in the queue, about \d min"))
    finally:
        go.set()
        for other in others:
            other.join()
    expect(last(page, ".body")).to_have_text("Done.")
    expect(progress).to_have_count(0)
    expect(page.locator("body")).to_have_attribute("data-state", "ready")


def test_how_much_of_a_prompt_was_read_is_shown(pages):
    page = pages()
    body = ": prefill 4096/65536\n\n"
    page.route("**/chat/completions", lambda route: route.fulfill(body=body, status=200))
    page.evaluate(
        "window.seen = []; new MutationObserver(() => { const one = document.querySelector"
        "('.progress'); if (one) seen.push(one.textContent); })"
        ".observe(document.querySelector('#messages'), {childList: true, subtree: true})"
    )
    say(page)
    expect(last(page, ".error")).to_contain_text("ended the reply in the middle")
    assert "Reading the prompt: 4,096 of 65,536 tokens" in page.evaluate("seen")


@in_all_views
def test_a_model_is_chosen_where_there_are_several(start, visit, view):
    running = start(PageEngine().open, aliases=("other",))
    page = visit(running.url, **view)
    choice = page.locator("#model-choice")
    expect(choice).to_be_visible()
    expect(choice.locator("option")).to_have_text(["fake", "other"])
    choice.select_option("other")
    expect(page.locator("#prompt")).to_have_attribute("placeholder", "Message other")
    with page.expect_request("**/chat/completions") as asked:
        say(page)
    assert asked.value.post_data_json["model"] == "other"
    expect(last(page, ".body")).to_have_text("Hello there")


def test_one_model_is_no_choice(pages):
    page = pages()
    expect(page.locator("#model-name")).to_have_text("fake")
    expect(page.locator("#model-choice")).to_be_hidden()


@in_all_views
def test_the_gauge_shows_how_much_of_the_context_is_used(pages, view):
    page = pages(**view)
    gauge, text = page.locator("#gauge"), page.locator("#gauge-text")
    expect(gauge).to_be_hidden()
    page.locator("#prompt").fill("x" * 4000)
    expect(text).to_have_text("1,000 of 10,000 tokens")  # an estimate
    page.locator("#prompt").fill("")
    expect(gauge).to_be_hidden()
    talk(page, "Hello")
    expect(text).to_have_text("5 of 10,000 tokens")  # as the server counted
    page.locator("#prompt").fill("x" * 40_000)
    expect(gauge).to_have_attribute("aria-valuenow", "100")
    expect(gauge).to_have_class("full")


def test_the_context_of_a_model_is_taken_from_its_entry(start, visit):
    running = start(PageEngine().open)
    page = visit(running.url)
    entry = {"id": "fake", "object": "model", "context_length": 2048}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [entry]}))
    reload(page)
    page.locator("#prompt").fill("x" * 400)
    expect(page.locator("#gauge-text")).to_have_text("100 of 2,048 tokens")


@in_all_views
def test_without_a_draft_the_panel_is_closed_and_says_why(start, visit, view):
    engine = PageEngine(has_draft=False)
    page = visit(start(engine.open).url, **view)
    expect(page.locator("body.ready")).to_be_visible()
    expect(page.locator("#panel")).to_be_hidden()
    expect(page.locator("#welcome")).to_contain_text("Ask anything")
    expect(page.get_by_text("watch it guess ahead")).to_be_hidden()
    with page.expect_request("**/chat/completions") as asked:
        talk(page, "Hello")
    assert asked.value.post_data_json["draftree"]["rounds"] is False
    page.locator("#toggle-tree").click()
    expect(page.locator("#detail")).to_contain_text("draftree train makes one")
    expect(page.locator("#detail code")).to_have_text(["draftree models", "draftree train"])
    expect(page.locator("#tree")).to_be_hidden()
    engine.pieces = [make_round(), " rug"]  # looked up in the text
    talk(page, "More")
    expect(page.locator("#tree .current .node.accepted")).to_have_text("·rug")
    reload(page)
    expect(page.locator("#panel")).to_be_visible()  # as it was asked for


def test_a_phone_on_its_side_has_room_for_the_text(pages):
    pages.engine.pieces = [make_round(), " rug", " purred"]
    size = {"width": 740, "height": 360}
    page = pages(viewport=size, has_touch=True)
    talk(page, "Hello")
    log, panel = page.locator("#log").bounding_box(), page.locator("#panel").bounding_box()
    assert log["height"] > 0.5 * size["height"]
    assert log["width"] > 0.5 * size["width"]
    assert panel["x"] >= log["x"] + log["width"]
    expect(page.locator("#tree .current .node.bonus")).to_be_in_viewport()
    expect(page.locator("#prompt")).to_be_in_viewport()


@in_all_views
def test_settings_are_sent_and_kept(pages, view):
    page = pages(**view)
    page.locator("#open-settings").click()
    expect(page.locator("#facts")).to_contain_text("up to 64 nodes")
    page.locator("#system").fill("Be brief.")
    page.locator("#sampling summary").click()
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
    values = {"temperature": "0.3", "max-tokens": "77", "top-p": "0.9", "top-k": "40"}
    values |= {"min-p": "0.05", "seed": "5", "stop-texts": "END\n\n###", "schema": schema}
    for name, value in values.items():
        page.locator(f"#{name}").fill(value)
    page.locator("#settings .main").click()
    expect(page.locator("#settings")).to_be_hidden()
    for _ in range(2):
        with page.expect_request("**/chat/completions") as asked:
            talk(page, "Hello")
        sent = asked.value.post_data_json
        assert sent["response_format"]["json_schema"]["schema"]["type"] == "object"
        call = pages.engine.calls[-1]
        assert call["prompt"][0] == {"role": "system", "content": "Be brief."}
        sampling = call["sampling"]
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.3, 0.9, 40)
        assert (sampling.min_p, sampling.seed, call["max_tokens"]) == (0.05, 5, 77)
        assert list(sent["stop"]) == ["END", "###"]
        reload(page)
        expect(page.locator("body.ready")).to_be_visible()


def test_a_schema_that_is_none_is_not_taken(pages):
    page = pages()
    page.locator("#open-settings").click()
    page.locator("#sampling summary").click()
    page.locator("#schema").fill("{not JSON")
    page.locator("#settings .main").click()
    expect(page.locator("#settings")).to_be_visible()
    expect(page.locator("#schema:invalid")).to_be_focused()
    page.keyboard.press("Escape")
    with page.expect_request("**/chat/completions") as asked:
        talk(page, "Hello")
    assert "response_format" not in asked.value.post_data_json


def test_a_key_is_prefetched_and_kept_for_the_tab_alone(start, visit):
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


def test_a_server_that_is_gone_is_reported(start, visit):
    running = start(PageEngine().open)
    page = visit(running.url, expected=("ERR_CONNECTION",))
    expect(page.locator("body.ready")).to_be_visible()
    running.stop()
    say(page)
    expect(last(page, ".error")).to_contain_text("cannot be reached")


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
