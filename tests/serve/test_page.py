"""The page's files: all served, to anyone, with a policy; and nothing in them from elsewhere.
Those of the libraries are as their authors built them.
"""

import fnmatch
import json
import re
import tomllib
from pathlib import Path

import httpx2
import pytest

from draftree.serve import page
from tests.serve import paint
from tests.serve.result import read_result
from tests.serve.test_openai import error_of
from tests.serve.viewer import PageEngine

ROOT = Path(__file__).parents[2]
FOLDER = Path(page.__file__).with_name("page")
OURS = [name for name in page.FILES if not name.startswith("vendor/")]
SCRIPTS = [name for name in OURS if name.endswith(".js")]
SOURCES = {name: (FOLDER / name).read_text(encoding="utf-8") for name in OURS}
MAX_SCRIPT_LINES = 2500
MAX_VENDOR_BYTES = 1_200_000
NAMESPACE = "http://www.w3.org/2000/svg"


def test_files_are_served_to_anyone_with_a_policy(start):
    url = start(PageEngine().open, api_keys=("secret",)).url
    kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
    kinds |= {".svg": "image/svg+xml", ".woff2": "font/woff2"}
    assert len(page.PATHS) == len(page.FILES)
    for path in page.PATHS:
        response = httpx2.get(url + path)
        name = path.removeprefix("/page/").removeprefix("/") or page.INDEX
        assert response.status_code == 200
        assert response.content == (FOLDER / name).read_bytes()
        assert response.headers["content-type"].startswith(kinds[Path(name).suffix])
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
    assert httpx2.get(f"{url}/page/nothing.js").status_code in (401, 404)


def test_a_file_that_the_browser_has_is_not_sent_again(start):
    url = f"{start(PageEngine().open).url}/page/vendor/katex.js"
    first = httpx2.get(url)
    tag = {"if-none-match": first.headers["etag"]}
    again = httpx2.get(url, headers=tag)
    assert (again.status_code, again.content) == (304, b"")
    assert httpx2.get(f"{url.removesuffix('katex.js')}tex.js", headers=tag).status_code == 200


@pytest.mark.parametrize("name", OURS)
def test_nothing_comes_from_elsewhere(name):
    text = SOURCES[name].replace(NAMESPACE, "")
    assert not re.search(r"\b(https?|wss?)://|[\"'(]//", text)


@pytest.mark.parametrize("name", SCRIPTS)
def test_text_cannot_become_markup(name):
    text = SOURCES[name]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser", text)
    assert not re.search(r"\beval\(|new Function|setTimeout\([\"'`]", text)


def test_no_script_or_style_stands_in_the_page_itself():
    text = SOURCES[page.INDEX]
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", text)


def test_every_file_is_used_and_every_file_used_is_there():
    used = {page.INDEX} | set(re.findall(r'(?:src|href)="page/([\w.]+)"', SOURCES[page.INDEX]))
    for name in SCRIPTS:
        used |= set(re.findall(r'(?:from |import\(|URL\()"\./([\w./-]+)"', SOURCES[name]))
    style = (FOLDER / "vendor/katex.css").read_text(encoding="utf-8")
    used |= {f"vendor/{font}" for font in re.findall(r"url\(([\w/-]+\.woff2)\)", style)}
    assert used == set(page.FILES)


def test_scripts_are_short():
    assert sum(len(SOURCES[name].splitlines()) for name in SCRIPTS) <= MAX_SCRIPT_LINES
    for name in SCRIPTS:
        assert len(SOURCES[name].splitlines()) <= 400, name
        assert SOURCES[name].startswith("// "), f"{name} does not say what it is"


def test_libraries_are_pinned_small_and_licensed():
    folder = FOLDER / "vendor"
    packages = json.loads((folder / "versions.json").read_text(encoding="utf-8"))
    files = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    listed = [name for package in packages for name in package["files"]]
    assert sorted(listed) == sorted(files - {"versions.json"})
    for package in packages:
        assert re.fullmatch(r"[0-9a-f]{64}", package["sha256"])
        assert re.fullmatch(r"\d+\.\d+\.\d+", package["version"])
        assert any(name.endswith(".LICENSE.txt") for name in package["files"])
    assert sum((folder / name).stat().st_size for name in files) <= MAX_VENDOR_BYTES


def test_ids_that_scripts_look_for_are_on_the_page():
    ids = set(re.findall(r'id="([\w-]+)"', SOURCES[page.INDEX]))
    scripts = "".join(SOURCES[name] for name in SCRIPTS)
    wanted = set(re.findall(r'find\("([\w-]+)"\)', scripts))
    assert len(wanted) > 30
    assert wanted <= ids


def test_files_are_part_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["*"]
    licences = [file.name for file in FOLDER.rglob("*.txt")]
    for name in [*page.FILES, *licences]:
        assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name


def test_the_engine_is_described_to_those_with_a_key(start):
    url = start(PageEngine(max_ctx=99).open, api_keys=("secret",), temperature=0.5).url
    error_of(httpx2.get(f"{url}/v1/draftree/engine"), 401)
    described = httpx2.get(f"{url}/v1/draftree/engine", headers={"x-api-key": "secret"}).json()
    assert described == {
        "model": "fake",
        "version": "0",
        "temperature": 0.5,
        "can_think": False,
        "has_draft": True,
        "budget": "auto",
        "max_budget": 64,
        "max_ctx": 99,
    }


def test_the_engine_of_a_server_that_stops_is_not_described(start):
    running = start(PageEngine().open)
    running.service.thread.engine = None
    response = httpx2.get(f"{running.url}/v1/draftree/engine")
    error_of(response, 503)
    assert response.headers["retry-after"]


def test_the_table_of_figures_is_that_of_the_results():
    result = read_result(ROOT / "results", paint.NAME)
    text = (ROOT / "docs/page.md").read_text(encoding="utf-8")
    assert f"{paint.START}{paint.render(result)}{paint.END}" in text
    assert len(result["measures"]["first_paint_ms"]["samples"]) == paint.NUM_VISITS


def test_a_slow_first_paint_is_said_to_miss_its_target():
    result = read_result(ROOT / "results", paint.NAME)
    for median, verdict in ((paint.MAX_PAINT_MS, "reached"), (paint.MAX_PAINT_MS + 1, "missed")):
        result["measures"]["first_paint_ms"]["median"] = median
        assert f"{paint.MAX_PAINT_MS} ms: {verdict}" in paint.render(result)
