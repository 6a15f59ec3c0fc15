"""The page's files: all served, to anyone, with a policy; and nothing in them from elsewhere."""

import fnmatch
import re
import tomllib
from pathlib import Path

import httpx2
import pytest

from draftree.serve import page
from tests.serve.test_openai import error_of
from tests.serve.viewer import PageEngine

ROOT = Path(__file__).parents[2]
FOLDER = Path(page.__file__).with_name("page")
SOURCES = {name: (FOLDER / name).read_text(encoding="utf-8") for name in page.FILES}
NAMESPACE = "http://www.w3.org/2000/svg"


def test_files_are_served_to_anyone_with_a_policy(start):
    url = start(PageEngine().open, api_keys=("secret",)).url
    kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
    assert len(page.PATHS) == len(SOURCES)
    for path in page.PATHS:
        response = httpx2.get(url + path)
        name = path.rpartition("/")[2] or page.INDEX
        assert response.status_code == 200
        assert response.text == SOURCES[name]
        kind = kinds.get(Path(name).suffix, "image/svg+xml")
        assert response.headers["content-type"].startswith(kind)
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
    assert httpx2.get(f"{url}/page/nothing.js").status_code in (401, 404)


@pytest.mark.parametrize("name", page.FILES)
def test_nothing_comes_from_elsewhere(name):
    text = SOURCES[name].replace(NAMESPACE, "")
    assert not re.search(r"\b(https?|wss?)://|[\"'(]//", text)


@pytest.mark.parametrize("name", [name for name in page.FILES if name.endswith(".js")])
def test_text_cannot_become_markup(name):
    text = SOURCES[name]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser", text)
    assert not re.search(r"\beval\(|new Function|setTimeout\([\"'`]", text)


def test_no_script_or_style_stands_in_the_page_itself():
    text = SOURCES[page.INDEX]
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", text)


def test_every_file_is_used_and_every_file_used_is_there():
    used = {page.INDEX} | set(re.findall(r'(?:src|href)="page/([\w.]+)"', SOURCES[page.INDEX]))
    for name, text in SOURCES.items():
        if name.endswith(".js"):
            used |= set(re.findall(r'from "\./([\w.]+)"', text))
    assert used == set(page.FILES)


def test_ids_that_scripts_look_for_are_on_the_page():
    ids = set(re.findall(r'id="([\w-]+)"', SOURCES[page.INDEX]))
    scripts = "".join(text for name, text in SOURCES.items() if name.endswith(".js"))
    wanted = set(re.findall(r'(?:find|number)\("([\w-]+)"\)', scripts))
    assert len(wanted) > 30
    assert wanted <= ids


def test_files_are_part_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["*"]
    for name in page.FILES:
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
        "has_draft": False,
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
