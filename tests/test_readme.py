"""The README's promises: it is short, its links lead somewhere, its Python runs; tests that the
docs name are there.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_is_short():
    assert len(README.splitlines()) <= 200


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    missing = [t for t in targets if not t.startswith("http") and not (ROOT / t).exists()]
    assert not missing


def test_names_every_command():
    from draftree.cli.app import app

    names = [command.name for command in app.registered_commands]
    assert names
    assert [name for name in names if f"draftree {name}" not in README] == []


def test_names_every_architecture():
    from draftree.models.registry import READERS

    assert [name for name in READERS if f"| `{name}` |" not in README] == []


@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_python_snippet_runs(index, smollm2_path, capsys):
    exec(compile(SNIPPETS[index], f"README.md, snippet {index}", "exec"), {})
    text = capsys.readouterr().out
    assert "return" in text
    assert re.search(r"(stop|length) \d+ \d", text)


def test_there_is_a_snippet():
    assert SNIPPETS


def test_every_guarantee_names_tests_that_are_there():
    page = (ROOT / "docs/decoding.md").read_text(encoding="utf-8")
    section = page.partition("## What is guaranteed")[2].partition("\n## ")[0]
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", section)
    rows = [line for line in section.splitlines() if line.startswith(("| CPU", "| GPU"))]
    assert len(named) >= len(rows) >= 8 and all("::" in row for row in rows)
    for path, name in named:
        code = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {name}(" in code, (path, name)
        marks = code.partition(f"def {name}(")[0].rpartition("\n\n\n")[2]
        assert "@pytest.mark.long" not in marks, f"make test leaves {name} out"


def test_files_that_the_docs_name_are_there():
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    named = {
        (page.name, path)
        for page in pages
        for path in re.findall(
            r"`((?:tests|draftree|benchmarks)/[\w/.]+)[`:]", page.read_text(encoding="utf-8")
        )
    }
    assert len(named) > 50
    assert not [where for where in named if not (ROOT / where[1]).exists()]
