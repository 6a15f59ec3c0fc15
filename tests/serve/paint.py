"""`python -m tests.serve.paint`: how soon the page is there, and how a long conversation feels.

A real browser and a fake engine on the loopback. Writes results/serve/checks/page.json and the
table of docs/page.md; a test fails when that is stale.
"""

import argparse
import statistics
from pathlib import Path

from draftree.bench.disturbance import look
from draftree.serve import page as served
from tests.serve.conftest import Running
from tests.serve.result import read_result, write_result
from tests.serve.viewer import PageEngine, make_round, open_browser

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/page.md"
START, END = "<!-- figures -->\n", "<!-- end of figures -->\n"
NAME = "page"
NUM_VISITS = 15
NUM_MESSAGES = 1000
MAX_PAINT_MS = 300
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
FRAMES = """() => {
  window.frames = [];
  let last = performance.now();
  const look = (now) => {
    frames.push(now - last);
    last = now;
    requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}"""


def measure_visit(browser, url):
    """Milliseconds to the first paint and to a page that can be asked, with nothing cached."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(url)
    page.locator("body.ready").wait_for()
    ready = page.evaluate("performance.now()")
    paint = page.evaluate(PAINT)
    context.close()
    return paint, ready


def measure_long(browser, url, engine):
    """Of a conversation of a thousand messages: the opening, and frames while a reply comes."""
    from tests.serve.browser import open_long, say, wait_until

    context = browser.new_context()
    page = context.new_page()
    page.goto(url)
    page.locator("body.ready").wait_for()
    page.evaluate(
        "document.addEventListener('click', () => { const start = performance.now();"
        " requestAnimationFrame(() => requestAnimationFrame(() =>"
        " (window.opened = performance.now() - start))); }, true)"
    )
    open_long(page, NUM_MESSAGES)
    wait_until(page, "window.opened !== undefined")
    opened = page.evaluate("window.opened")
    engine.round_s, engine.pieces = 0.01, [make_round(), *(["many words "] * 300)]
    page.evaluate(FRAMES)
    say(page, "More")
    page.locator("#messages > .reply:last-child footer").wait_for(timeout=120_000)
    frames = page.evaluate("frames")
    context.close()
    return opened, frames


def measure():
    from playwright import sync_api

    engine = PageEngine(max_ctx=10_000_000)
    running = Running(engine.open).start()
    try:
        with sync_api.sync_playwright() as playwright:
            browser = open_browser(playwright)
            measure_visit(browser, running.url)  # the browser's own first time
            visits = [measure_visit(browser, running.url) for _ in range(NUM_VISITS)]
            opened, frames = measure_long(browser, running.url, engine)
            version = browser.version
            browser.close()
    finally:
        running.stop()
    return version, {**figures_of(visits, opened, frames), "script_lines": count_lines()}


def count_lines():
    """Of our own JavaScript; that of the libraries is not."""
    folder = Path(served.__file__).with_name("page")
    names = [name for name in served.FILES if name.endswith(".js") and "/" not in name]
    return sum(len((folder / name).read_text(encoding="utf-8").splitlines()) for name in names)


def figures_of(visits, opened, frames):
    paints, readies = zip(*visits, strict=True)
    frames.sort()
    return {
        "first_paint_ms": summarize(paints),
        "ready_ms": summarize(readies),
        "long": {
            "num_messages": NUM_MESSAGES,
            "open_ms": round(opened, 1),
            "frame_ms": {
                "median": round(statistics.median(frames), 1),
                "p95": round(frames[int(0.95 * len(frames))], 1),
            },
        },
    }


def summarize(values):
    samples = [round(value, 1) for value in values]
    return {"median": statistics.median(samples), "worst": max(samples), "samples": samples}


def render(result):
    measures, machine = result["measures"], result["machine"]
    paint, ready, long = measures["first_paint_ms"], measures["ready_ms"], measures["long"]
    verdict = "reached" if paint["median"] <= MAX_PAINT_MS else "missed"
    rows = [
        (
            f"first paint, median of {len(paint['samples'])} (target {MAX_PAINT_MS} ms: {verdict})",
            f"{paint['median']:.0f} ms",
        ),
        ("slowest of these", f"{paint['worst']:.0f} ms"),
        ("until it can be asked, median", f"{ready['median']:.0f} ms"),
        (
            f"opening a conversation of {long['num_messages']:,} messages",
            f"{long['open_ms']:.0f} ms",
        ),
        ("a frame while a reply comes to it, median", f"{long['frame_ms']['median']:.0f} ms"),
        ("19 of 20 of these frames are within", f"{long['frame_ms']['p95']:.0f} ms"),
    ]
    place = f"{machine['cpu']}, {machine['num_cores']} cores, browser and server together"
    busy = f"{100 * (result['disturbance'] or 0):.0f} % of the cores' time was others'"
    head = [f"| Chromium {result['settings']['chromium']} on {place}; {busy} | |", "|---|---|"]
    return "\n".join([*head, *(f"| {name} | {value} |" for name, value in rows)]) + "\n"


def write_table(folder):
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    table = render(read_result(folder, NAME))
    PAGE.write_text(before + START + table + END + after, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="Only write the table anew.")
    folder = ROOT / "results"
    if not parser.parse_args().table:
        before = look()
        version, measures = measure()
        settings = {"chromium": version.split(".")[0], "num_visits": NUM_VISITS}
        write_result(folder, NAME, settings, measures, before)
    write_table(folder)


if __name__ == "__main__":
    main()
