"""Holds the package to its own rules: who imports whom, sizes, names, state, environment.

Every rule is first shown a snippet that breaks it, so that a rule that cannot fail is noticed.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.line import count_lines
from tests import architecture
from tests.architecture import SourceFile

ROOT = Path(__file__).parents[1]
TOP_LEVEL_TESTS = {"test_architecture.py", "test_needs.py", "test_readme.py", "test_makefile.py"}


def _read(folder: str) -> list[SourceFile]:
    return [
        SourceFile(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


PACKAGE = _read("draftree")
BENCHMARKS = _read("benchmarks")
TESTS = _read("tests")


def _hold(
    rule: Callable[[SourceFile], list[str]], files: list[SourceFile] = PACKAGE + BENCHMARKS
) -> None:
    problems = [problem for file in files for problem in rule(file)]
    assert not problems, "\n" + "\n".join(problems)


def test_the_package_is_found():
    assert {"draftree/core.py", "draftree/errors.py"} <= {file.path for file in PACKAGE}


def test_imports_follow_the_table():
    _hold(architecture.check_imports)


def test_no_modules_import_each_other():
    problems = architecture.find_import_cycles(PACKAGE)
    assert not problems, "\n" + "\n".join(problems)


def test_files_are_short():
    _hold(architecture.check_file_length, PACKAGE + BENCHMARKS + TESTS)


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_pages_are_short(page):
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= architecture.MAX_PAGE_LINES


def test_functions_are_short():
    _hold(architecture.check_function_length)


def test_package_is_small():
    """CUDA counts as well."""
    assert sum(count_lines(ROOT).values()) <= architecture.MAX_PACKAGE_LINES


def test_environment_is_read_in_one_place():
    _hold(architecture.check_environment)


def test_cpu_path_starts_without_torch():
    _hold(architecture.check_torch, PACKAGE)


def test_generic_code_names_no_family_gpu_or_quantisation():
    _hold(architecture.check_names, PACKAGE)


def test_every_file_says_what_it_is():
    _hold(architecture.check_docstring)


def test_comments_are_plain():
    _hold(architecture.check_comments, PACKAGE + BENCHMARKS + TESTS)


def test_classes_are_domain_nouns():
    _hold(architecture.check_class_names)


def test_state_is_an_argument():
    _hold(architecture.check_state)


def test_no_machine_paths():
    _hold(architecture.check_machine_paths)


def test_tests_mirror_the_package():
    files = PACKAGE + BENCHMARKS
    modules = {file.path.removesuffix(".py").removesuffix("/__init__") for file in files}
    problems = []
    for file in TESTS:
        path = Path(file.path)
        if not path.name.startswith("test_") or path.name in TOP_LEVEL_TESTS:
            continue
        problems += architecture.check_mirror(file.path, modules)
    assert not problems, "\n" + "\n".join(problems)


def test_every_part_is_tested():
    parts = {file.part for file in PACKAGE if "def " in file.text} - {"__init__", "__main__"}
    tested = {Path(file.path).parts[1] for file in TESTS if "def test_" in file.text}
    tested |= {name.removeprefix("test_").removesuffix(".py") for name in tested}
    missing = sorted(parts - tested)
    assert not missing, f"no tests for: {', '.join(missing)}"


LONG_BODY = "\n".join(f"    x{i} = {i}" for i in range(61))

BAD_SNIPPETS = [
    ("check_imports", "draftree/text/a.py", "from draftree.engine.engine import X"),
    ("check_imports", "draftree/text/a.py", "import draftree.models"),
    ("check_imports", "draftree/text/a.py", "def f():\n    from ..chat import Y"),
    ("check_imports", "draftree/text/a.py", "import_module('draftree.weights.hub')"),
    ("check_imports", "draftree/weights/a.py", "from draftree.kernels.cpu import dot"),
    ("check_imports", "draftree/core.py", "from draftree import env"),
    ("check_imports", "draftree/serve/a.py", "from draftree import Engine"),
    ("check_imports", "draftree/cli/a.py", "from benchmarks.app import app"),
    ("check_imports", "draftree/cli/a.py", "import tests.tiny"),
    ("check_imports", "draftree/unknown/a.py", ""),
    ("check_file_length", "draftree/core.py", "x = 1\n" * 401),
    ("check_function_length", "draftree/core.py", f"def f():\n{LONG_BODY}"),
    ("check_function_length", "draftree/core.py", f"class A:\n  def f():\n{LONG_BODY}"),
    ("check_function_length", "draftree/kernels/a.py", f"def f():\n{LONG_BODY}\n{LONG_BODY}"),
    ("check_environment", "draftree/core.py", "import os\nos.environ['A'] = 'b'"),
    ("check_environment", "draftree/core.py", "def f():\n    return os.getenv('A')"),
    ("check_environment", "draftree/core.py", "from os import environ"),
    ("check_torch", "draftree/layers/a.py", "import torch"),
    ("check_torch", "draftree/layers/a.py", "from torch.nn import Module"),
    ("check_torch", "draftree/layers/a.py", "try:\n    import torch.cuda\nexcept E:\n    pass"),
    ("check_names", "draftree/layers/a.py", "class LlamaBlock: ..."),
    ("check_names", "draftree/layers/a.py", "def f(is_qwen): ..."),
    ("check_names", "draftree/layers/a.py", "x = 'SmolLM2'"),
    ("check_names", "draftree/layers/a.py", "x = Kind.Q4_K"),
    ("check_names", "draftree/layers/a.py", "from ..kernels.quant.q8_0 import dot"),
    ("check_names", "draftree/engine/a.py", "x = 'NVIDIA H200'"),
    ("check_names", "draftree/kernels/a.py", "def dot_q4_1_rows(): ..."),
    ("check_docstring", "draftree/core.py", "x = 1"),
    ("check_docstring", "draftree/text/__init__.py", "x = 1"),
    ("check_docstring", "draftree/core.py", '"""' + "line\n" * 7 + '"""'),
    ("check_comments", "draftree/core.py", "x = 1  # TODO: better"),
    ("check_comments", "draftree/core.py", "# ------------ parts\nx = 1"),
    ("check_class_names", "draftree/core.py", "class CacheManager: ..."),
    ("check_state", "draftree/core.py", "cache = {}"),
    ("check_state", "draftree/core.py", "if x:\n    pages: list[int] = list()"),
    ("check_state", "draftree/core.py", "class A:\n    seen = set()"),
    ("check_state", "draftree/core.py", "def f():\n    global x\n    x = 1"),
    ("check_state", "draftree/core.py", "CACHE = {}\ndef f():\n    CACHE['a'] = 1"),
    ("check_state", "draftree/core.py", "CACHE = []\ndef f():\n    CACHE.append(1)"),
    ("check_state", "draftree/core.py", "sizes: Final = []\ndef f():\n    sizes.append(1)"),
    ("check_machine_paths", "draftree/core.py", "x = '/home/me/model'"),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD_SNIPPETS)
def test_rules_can_fail(rule, path, text):
    problems = getattr(architecture, rule)(SourceFile(path, text))
    assert problems
    assert all(problem.startswith(f"{path}:") for problem in problems)


GOOD_SNIPPETS = [
    ("check_imports", "draftree/weights/a.py", "from draftree.kernels.quant.formats import Q"),
    ("check_imports", "draftree/weights/a.py", "from draftree.weights import b\nimport numpy"),
    ("check_imports", "draftree/cli/a.py", "from draftree import __version__"),
    ("check_imports", "draftree/text/a.py", "from .b import c"),
    ("check_imports", "benchmarks/a.py", "from draftree.engine import engine"),
    ("check_environment", "draftree/env.py", "import os\nos.environ"),
    ("check_environment", "draftree/core.py", "import os\nos.cpu_count()"),
    ("check_torch", "draftree/layers/a.py", "def f():\n    import torch"),
    ("check_torch", "draftree/layers/a.py", "if TYPE_CHECKING:\n    import torch"),
    ("check_torch", "draftree/layers/norm_cuda.py", "import torch"),
    ("check_torch", "draftree/train/norm.py", "import torch"),
    ("check_names", "draftree/models/llama.py", "class Llama: ..."),
    ("check_names", "draftree/layers/a.py", "x = 'as in llama.cpp'\nq_k = seq4_kept"),
    ("check_docstring", "draftree/text/__init__.py", ""),
    ("check_comments", "draftree/core.py", "x = 1  # TODO https://example.org/issues/1"),
    ("check_state", "draftree/core.py", "class A:\n    tags: ClassVar[set[str]] = {'a'}"),
    ("check_state", "draftree/core.py", "SIZES = {1: 2}\n__all__ = []\nx = (1, 2)"),
    ("check_state", "draftree/core.py", "def f():\n    x = []\n    x.append(1)"),
    ("check_machine_paths", "draftree/core.py", "x = 'https://host/home/me'"),
]


@pytest.mark.parametrize(("rule", "path", "text"), GOOD_SNIPPETS)
def test_rules_let_good_code_pass(rule, path, text):
    assert getattr(architecture, rule)(SourceFile(path, text)) == []


def test_mirror_rule_can_fail():
    modules = {"draftree/text", "draftree/text/template"}
    assert architecture.check_mirror("tests/text/test_nothing.py", modules)
    assert not architecture.check_mirror("tests/text/test_template.py", modules)
    assert not architecture.check_mirror("tests/text/test_template_errors.py", modules)
    assert architecture.check_mirror("tests/benchmarks/test_template.py", modules)
    assert not architecture.check_mirror("tests/benchmarks/test_a.py", {"benchmarks/a"})


CYCLE = {
    "draftree/a.py": "from draftree import b",
    "draftree/b.py": "def f():\n    from draftree.c.d import x",
    "draftree/c/d.py": "if TYPE_CHECKING:\n    from draftree.a import y",
    "draftree/e.py": "from draftree.a import y",  # reaches the cycle, but is not in it
    "draftree/f.py": "import numpy",
}


def test_cycle_rule_can_fail():
    files = [SourceFile(path, text) for path, text in CYCLE.items()]
    problems = architecture.find_import_cycles(files)
    assert [problem.split()[0] for problem in problems] == [
        "draftree.a",
        "draftree.b",
        "draftree.c.d",
    ]
    assert problems[1] == "draftree.b is in a cycle of imports with draftree.c.d"
    for left_out in range(3):
        assert architecture.find_import_cycles(files[:left_out] + files[left_out + 1 :]) == []
