"""`draftree models`: every known model, and whether it is here."""

from draftree.weights import hub
from draftree.weights.catalogue import DEFAULT_MODEL


def test_lists_every_model(draftree):
    result = draftree("models")
    assert result.exit_code == 0
    for status in hub.list_models():
        assert status.entry.name in result.stdout
    assert "yes" not in result.stdout  # the cache of a test is empty


def test_says_which_are_here(draftree, tmp_path):
    entry = hub.find_entry(DEFAULT_MODEL)
    path = tmp_path / "models" / entry.name / entry.files[0].name
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(entry.files[0].num_bytes)
    (line,) = [x for x in draftree("models").stdout.splitlines() if x.startswith(entry.name)]
    assert "yes" in line
