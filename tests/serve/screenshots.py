"""`python -m tests.serve.screenshots`: the pictures of docs/page.md, of the page with the default
model.
"""

import argparse
from pathlib import Path

from PIL import Image

from draftree.chat import Engine
from tests.serve.conftest import Running
from tests.serve.viewer import open_browser

IMAGES = Path(__file__).parents[2] / "docs/images"
MODEL = "smollm2-135m"
PROMPT = "Write a Python function that returns the n-th Fibonacci number."
WIDE = {"viewport": {"width": 1280, "height": 800}, "device_scale_factor": 1.5}
PHONE = {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 2}
PICTURES = {
    "page-light": {**WIDE, "color_scheme": "light"},
    "page-dark": {**WIDE, "color_scheme": "dark"},
    "page-phone": {**PHONE, "color_scheme": "light", "has_touch": True},
}
WITH_LIST = ("page-dark",)  # the list of conversations is open
EARLIER = ("List the planets of the solar system.", "What does a compiler do?")


def take(browser, url, path, options):
    """Ask, wait for the end, and look at a round of which something was dropped."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.goto(url)
    page.locator("body.ready").wait_for()
    if path.stem in WITH_LIST:
        for prompt in EARLIER:
            page.locator("#prompt").fill(prompt)
            page.locator("#prompt").press("Enter")
            page.locator(".reply .body > p").first.wait_for(timeout=240_000)
            page.locator("#new-chat").click()  # which stops the reply
        page.locator("#toggle-history").click()
    page.locator("#prompt").fill(PROMPT)
    page.locator("#prompt").press("Enter")
    page.locator("#messages > .reply:last-child footer").wait_for(timeout=240_000)
    for _ in range(14):
        page.get_by_role("button", name="Earlier round").click()
    page.locator("#prompt").focus()
    page.wait_for_timeout(500)
    page.screenshot(path=path)
    context.close()
    image = Image.open(path)
    image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def main():
    from playwright import sync_api

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=IMAGES)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    served = {"model_id": MODEL, "temperature": 0.0}
    # A budget of its own: the one that is chosen depends on how busy the machine is.
    running = Running(lambda: Engine.open(MODEL, budget=8, max_ctx=2048), **served).start()
    try:
        with sync_api.sync_playwright() as playwright:
            browser = open_browser(playwright)
            for name, options in PICTURES.items():
                take(browser, running.url, folder / f"{name}.png", options)
            browser.close()
    finally:
        running.stop()


if __name__ == "__main__":
    main()
