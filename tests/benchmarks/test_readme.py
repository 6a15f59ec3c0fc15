"""The README's tables are those of the results."""

from pathlib import Path

from benchmarks.readme import BEGIN, END, fill_readme, make_tables

ROOT = Path(__file__).parents[2]


def test_the_readme_shows_the_results() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert make_tables(ROOT / "results") in readme, "make it anew: python -m benchmarks report"
    assert fill_readme(readme, ROOT / "results") == readme


def test_only_what_is_between_the_marks_changes() -> None:
    filled = fill_readme(f"before\n{BEGIN}\nold\n{END}\nafter\n", ROOT / "results")
    assert filled.startswith(f"before\n{BEGIN}\n|") and filled.endswith(f"\n{END}\nafter\n")
    assert "old" not in filled
