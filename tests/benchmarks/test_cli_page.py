"""The generated page is the one in docs/."""

from pathlib import Path

from benchmarks.cli_page import make_reference

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_page_is_not_stale():
    assert PAGE.read_text(encoding="utf-8") == make_reference(), "run `make docs`"


def test_page_names_every_command_and_option():
    page = make_reference()
    for words in ("## draftree run", "## draftree chat", "`--show-tree`", "`--repetition-penalty`"):
        assert words in page
