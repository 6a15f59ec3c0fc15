"""docs/http.md names every field, as the code has it; and the code knows every field of the SDK."""

import typing
from pathlib import Path

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from benchmarks.http_page import make_reference
from draftree.serve.app import APIS, build_app
from draftree.serve.openai_fields import ChatRequest, CompletionRequest
from draftree.serve.service import ServeOptions, Service
from draftree.serve.wire import IGNORED, REFUSED, is_marked

PAGE = Path(__file__).parents[2] / "docs" / "http.md"
MODELS = [model for api in APIS for model in api.MODELS]


def test_page_is_not_stale():
    assert PAGE.read_text(encoding="utf-8") == make_reference(), "run `make docs`"


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_page_says_of_every_field_what_becomes_of_it(model):
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(f"## {model.__doc__}\n")
    section = rest.partition("\n## ")[0]
    for name, field in model.model_fields.items():
        is_required = field.is_required()
        marks = [m for m in (REFUSED, IGNORED) if is_marked(field.json_schema_extra, m)]
        word = marks[0] if marks else "honoured"
        word = "required" if is_required else word
        assert f"| `{name}` | {word} | " in section
        assert field.description and field.description in section


def test_page_names_every_route():
    page = PAGE.read_text(encoding="utf-8")
    app = build_app(Service(lambda: None, ServeOptions(model_id="x")))
    for path, methods in app.openapi()["paths"].items():
        for method in methods:
            assert f"`{method.upper()} {path.replace(':path', '')}`" in page


@pytest.mark.parametrize(
    ("model", "module"),
    [(ChatRequest, chat_create_params), (CompletionRequest, completion_create_params)],
)
def test_every_field_of_the_sdk_is_known(model, module):
    known = set(typing.get_type_hints(module.CompletionCreateParamsBase)) | {"stream"}
    assert known - set(model.model_fields) == set()
