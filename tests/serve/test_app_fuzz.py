"""A few requests made up from the OpenAPI schema; `python -m tests.serve.fuzz` makes thousands."""

from tests.serve import fuzz, result
from tests.serve.fuzz import RIGHT, WRONG, Found


def test_a_few_dozen(brief):
    right, wrong = Found(), Found()
    fuzz.fuzz(brief, RIGHT, 4, 1, right)
    fuzz.fuzz(brief, WRONG, 4, 2, wrong)
    paths = {path for path, status in right.statuses if status == 200}
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"} <= paths
    assert len({path for path, _ in wrong.statuses}) >= 5
    assert all(400 <= status < 500 for _, status in wrong.statuses)
    assert right.figures["num_cases"] + wrong.figures["num_cases"] >= 60


def test_right_requests_with_parts_replaced(brief):
    found = Found()
    fuzz.fuzz_bodies(brief, 3, 5, found)
    assert found.figures["num_cases"] == 3 * len(fuzz.BODIES)
    assert found.figures["num_failed"] == found.figures["num_hung"] == 0


def test_the_figures_are_of_thousands_and_the_page_shows_them():
    measures = result.read_result(result.ROOT / "results", "fuzz")["measures"]
    assert measures["num_cases"] >= 10_000
    assert measures["num_failed"] == measures["num_hung"] == 0
    assert measures["rss_mb"]["end"] - measures["rss_mb"]["warm"] < 64
    assert measures["paths"].keys() >= fuzz.BODIES.keys()
    assert measures["slowest_s"] < fuzz.PATIENCE_S
    load = result.read_result(result.ROOT / "results", "load")
    assert load["settings"] == {"streams": 200, "seconds": 120.0, "model": "smollm2-135m"}
    assert load["measures"]["num_faults"] == 0
    page = result.PAGE.read_text(encoding="utf-8")
    assert result.render(load, measures) in page
