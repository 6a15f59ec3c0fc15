"""The rules that tests/test_architecture.py holds the package to.

Each rule takes one `SourceFile` and returns a sentence per violation, so that the rules
themselves can be tried on small bad snippets.
"""

import ast
import io
import re
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120
MAX_PACKAGE_LINES = 51_305  # Python and CUDA of draftree/
MAX_DOCSTRING_LINES = 6
MAX_PAGE_LINES = 200

# Who may import whom, as the chart in docs/architecture.md has it; every part may import itself.
# "" is the package's own namespace.
ALLOWED_IMPORTS = {
    "__init__": ("chat", "core", "errors"),
    "__main__": ("cli",),
    "errors": (),
    "env": (),
    "core": (),
    "kernels": ("env",),
    "weights": ("errors", "env", "kernels.quant"),
    "text": ("core", "errors"),
    "memory": ("core", "kernels.quant"),
    "config": ("memory", "core", "env", "errors", "kernels.quant"),
    "state": ("kernels", "core", "errors"),
    "layers": ("kernels", "state"),
    "models": ("layers", "state", "weights", "kernels", "core", "errors"),
    "drafts": ("models", "layers", "state", "weights", "kernels", "core", "errors"),
    "decode": ("drafts", "models", "state", "kernels", "core"),
    "prefill": ("drafts", "models", "state", "kernels", "core"),
    "engine": (
        *("decode", "prefill", "drafts", "models", "state", "weights", "kernels", "config", "core"),
        *("memory", "errors"),
    ),
    "compress": ("engine", "text", "config", "core", "errors"),
    "chat": ("compress", "engine", "text", "config", "core", "errors"),
    "serve": ("chat", "text", "core", "errors"),
    "cluster": ("serve", "chat", "core", "errors"),
    "train": (
        *("engine", "prefill", "drafts", "models", "state", "weights", "kernels.quant"),
        *("kernels.ops", "text", "config", "core", "errors"),
    ),
    "bench": (
        *("chat", "engine", "decode", "prefill", "kernels", "config", "memory", "core"),
        "errors",
    ),
}
ALLOWED_IMPORTS["cli"] = ("", *ALLOWED_IMPORTS)

TORCH_PLACES = ("draftree/kernels/cuda/", "draftree/train/")
NAME_PLACES = ("models", "drafts", "weights", "cli", "bench", "text")
NAME_PLACES += ("kernels/quant", "kernels/cuda")
FAMILY_NAMES = re.compile(
    r"(?<!o)llama(?!\.cpp|-quantize)|qwen|smollm|gemma|mistral|mixtral|deepseek|falcon|chatglm"
    r"|(?<![a-z0-9])(i?q[2-8]_[0-9k]|tq[1-3]_0|mxfp4|nvfp4|iq[1-4]_[a-z]+)(?![a-z0-9])"
    r"|(?<![a-z0-9])([ahbl][1-9]00|l40s?|rtx|geforce|[345]0[6-9]0|sm_?\d\d|neoverse)(?![a-z0-9])"
)
BANNED_CLASS_ENDS = ("Manager", "Helper", "Base", "Handler")
MUTABLE_CALLS = {"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict"}
MUTABLE_CALLS |= {"bytearray", "WeakKeyDictionary", "WeakValueDictionary"}
MUTATORS = {"append", "extend", "insert", "add", "update", "pop", "popitem", "clear", "remove"}
MUTATORS |= {"discard", "setdefault", "sort", "reverse", "appendleft", "popleft"}
CROSS_CUTTING = {  # tests of a whole part
    *("golden", "golden_full", "cuda_golden", "default_model", "frequencies", "mutation"),
    *("lossless", "lossless_kv", "cuda_lossless"),
}
MACHINE_PATHS = re.compile(r"(?<![\w./])/(home|root|Users|tmp|work|opt)/")


@dataclass(frozen=True)
class SourceFile:
    """One Python file: its path from the repository root, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def comments(self) -> list[tuple[int, str]]:
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return [(t.start[0], t.string) for t in tokens if t.type == tokenize.COMMENT]

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def part(self) -> str:
        """The row of the table that the file belongs to."""
        return PurePosixPath(self.path).parts[1].removesuffix(".py")

    @property
    def module(self) -> str:
        dotted = self.path.removesuffix(".py").replace("/", ".")
        return dotted.removesuffix(".__init__")

    def at(self, node: ast.AST | int, message: str) -> str:
        line = node if isinstance(node, int) else getattr(node, "lineno", 1)
        return f"{self.path}:{line}: {message}"


def imported_modules(file: SourceFile) -> list[tuple[int, str]]:
    """Every module of ours that a file imports, by statement or by import_module("...")."""
    found: list[tuple[int, str]] = []
    package = file.module if file.path.endswith("__init__.py") else file.module.rpartition(".")[0]
    for node in file.nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            # `from draftree import chat` imports draftree.chat, `... import Engine` the
            # namespace.
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and _called_name(node) in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                found.append((node.lineno, first.value))
    ours = ("draftree", "benchmarks", "tests")
    return [(line, name) for line, name in found if name.split(".")[0] in ours]


def check_imports(file: SourceFile) -> list[str]:
    if file.path.startswith("benchmarks/"):
        return []  # it may import everything, and nothing of the package imports it
    if file.part not in ALLOWED_IMPORTS:
        return [file.at(1, f"{file.part} is not a part that the import table knows")]
    allowed = ALLOWED_IMPORTS[file.part]
    problems = []
    for line, name in imported_modules(file):
        inner = name.removeprefix("draftree").removeprefix(".")
        part = inner.split(".")[0]
        if part in ("benchmarks", "tests"):
            is_allowed = False
        elif part not in ALLOWED_IMPORTS:
            is_allowed = "" in allowed
        else:
            rules = (file.part, *filter(None, allowed))
            is_allowed = any(f"{inner}.".startswith(f"{rule}.") for rule in rules)
        if not is_allowed:
            may = ", ".join(rule or "draftree" for rule in allowed) or "nothing of ours"
            problems.append(file.at(line, f"imports {name}; {file.part} may import {may}"))
    return problems


def find_import_cycles(files: Sequence[SourceFile]) -> list[str]:
    """Modules that import each other, directly or not; imports inside functions count too."""
    modules = {file.module for file in files}
    imports = {file.module: _targets(file, modules) for file in files}
    # Modules that import no others that are left cannot be in a cycle.
    while done := {module for module, found in imports.items() if not found & imports.keys()}:
        imports = {module: found for module, found in imports.items() if module not in done}
    # Nor can those that no others that are left import.
    while True:
        wanted = set().union(*imports.values()) if imports else set()
        if imports.keys() <= wanted:
            break
        imports = {module: found for module, found in imports.items() if module in wanted}
    return [
        f"{module} is in a cycle of imports with {', '.join(sorted(found & imports.keys()))}"
        for module, found in sorted(imports.items())
    ]


def _targets(file: SourceFile, modules: set[str]) -> set[str]:
    """The modules that a file imports: `from a import b` is a.b where that is one, else a."""
    found = set()
    for _, name in imported_modules(file):
        while name and name not in modules:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {file.module, ""}


def check_file_length(file: SourceFile) -> list[str]:
    if file.num_lines <= MAX_FILE_LINES:
        return []
    return [file.at(1, f"{file.num_lines} lines, at most {MAX_FILE_LINES} are allowed")]


def check_function_length(file: SourceFile) -> list[str]:
    limit = MAX_KERNEL_LINES if file.part == "kernels" else MAX_FUNCTION_LINES
    return [
        file.at(node, f"{node.name} has {length} lines, at most {limit} are allowed")
        for node in file.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > limit
    ]


def check_environment(file: SourceFile) -> list[str]:
    if file.path == "draftree/env.py":
        return []
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    problems = []
    for node in file.nodes:
        from_os = isinstance(node, ast.ImportFrom) and node.module == "os"
        if (from_os and any(alias.name in names for alias in node.names)) or (
            isinstance(node, ast.Attribute)
            and node.attr in names
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
        ):
            problems.append(file.at(node, "uses the environment; only draftree/env.py may"))
    return problems


def check_torch(file: SourceFile) -> list[str]:
    stem = PurePosixPath(file.path).stem
    if file.path.startswith(TORCH_PLACES) or "cuda" in stem or "torch" in stem:
        return []
    problems = []
    for node in _module_level(file.tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        else:
            continue
        if any(module.split(".")[0] == "torch" for module in modules):
            message = "imports torch when it is imported; the CPU path must start without torch"
            problems.append(file.at(node, message))
    return problems


def check_names(file: SourceFile) -> list[str]:
    inner = file.path.removeprefix("draftree/")
    if any(inner.startswith(f"{place}/") for place in NAME_PLACES):
        return []
    problems = []
    for node in file.nodes:
        for word in _words(node):
            if match := FAMILY_NAMES.search(word.lower()):
                places = ", ".join(f"{place}/" for place in NAME_PLACES)
                message = f"names {match.group()!r}; such names belong in {places}"
                problems.append(file.at(node, message))
    return problems


def check_docstring(file: SourceFile) -> list[str]:
    if file.path.endswith("__init__.py") and not file.text.strip():
        return []
    docstring = ast.get_docstring(file.tree)
    if not docstring:
        return [file.at(1, "has no docstring that says what the file is")]
    num_lines = sum(bool(line.strip()) for line in docstring.splitlines())
    if num_lines > MAX_DOCSTRING_LINES:
        return [file.at(1, f"docstring of {num_lines} lines, at most {MAX_DOCSTRING_LINES}")]
    return []


def check_comments(file: SourceFile) -> list[str]:
    problems = []
    for line, comment in file.comments:
        if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", comment) and "http" not in comment:
            problems.append(file.at(line, "a TODO needs a link to an issue"))
        if re.search(r"([-=#*_~])\1{3,}", comment):
            problems.append(file.at(line, "a banner; a smaller file needs none"))
    return problems


def check_class_names(file: SourceFile) -> list[str]:
    return [
        file.at(node, f"class {node.name}: name what it is, not Manager, Helper, Base or Handler")
        for node in file.nodes
        if isinstance(node, ast.ClassDef) and node.name.endswith(BANNED_CLASS_ENDS)
    ]


def check_state(file: SourceFile) -> list[str]:
    """No mutable container at module or class level, unless it is a constant.

    A constant is UPPER_CASE or annotated Final or ClassVar, and is never changed in its file.
    Caches of pure functions (functools.cache) are not state in this sense.
    """
    problems = []
    constants = set()
    for scope in (file.tree, *(n for n in file.nodes if isinstance(n, ast.ClassDef))):
        for node in _module_level(scope):
            if not isinstance(node, ast.Assign | ast.AnnAssign) or not _is_mutable(node.value):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            note = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
            is_fixed = note.startswith(("Final", "ClassVar"))
            for name in (t.id for t in targets if isinstance(t, ast.Name)):
                if is_fixed or re.fullmatch(r"_*[A-Z][A-Z0-9_]*", name):
                    constants.add(name)
                elif not re.fullmatch(r"__\w+__", name):
                    message = f"{name} is mutable state outside any function; make it an argument"
                    problems.append(file.at(node, message))
    for node in file.nodes:
        if isinstance(node, ast.Global):
            problems.append(file.at(node, "global changes a module's state; make it an argument"))
        name = _changed_name(node)
        if name in constants and node not in file.tree.body:
            problems.append(file.at(node, f"changes the constant {name}"))
    return problems


def check_machine_paths(file: SourceFile) -> list[str]:
    return [
        file.at(line, "names a path of one machine")
        for line, text in enumerate(file.text.splitlines(), start=1)
        if MACHINE_PATHS.search(text)
    ]


def check_mirror(test_path: str, modules: set[str]) -> list[str]:
    """tests/<part>/test_<name>(_*).py must belong to a <name>.py somewhere in draftree/<part>/, and
    tests/benchmarks/test_<name>(_*).py to benchmarks/<name>.py.
    """
    path = PurePosixPath(test_path)
    above = () if path.parts[1] == "benchmarks" else ("draftree",)
    folder = "/".join((*above, *path.parts[1:-1]))
    stem = path.stem.removeprefix("test_")
    if stem in CROSS_CUTTING:
        return []
    words = stem.split("_")
    wanted = {"_".join(words[:count]) for count in range(1, len(words) + 1)}
    if any(m.startswith(f"{folder}/") and m.rpartition("/")[2] in wanted for m in modules):
        return []
    return [f"{test_path}: there is no {stem}.py in {folder}/ for it to test"]


def _called_name(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _module_level(scope: ast.AST) -> list[ast.stmt]:
    """Statements that run when a module or class is created, without TYPE_CHECKING blocks."""
    found: list[ast.stmt] = []
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            found += [inner for part in node.orelse for inner in [part, *_module_level(part)]]
            continue
        if isinstance(node, ast.stmt):
            found.append(node)
        if isinstance(node, ast.stmt | ast.ExceptHandler):
            found += _module_level(node)
    return found


def _is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return _called_name(value) in MUTABLE_CALLS
    return isinstance(
        value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    )


def _changed_name(node: ast.AST) -> str | None:
    """The name whose value a node changes in place."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        is_change = node.func.attr in MUTATORS and isinstance(node.func.value, ast.Name)
        return node.func.value.id if is_change else None  # type: ignore[attr-defined]
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        return node.value.id if isinstance(node.value, ast.Name) else None
    if isinstance(node, ast.AugAssign):
        return node.target.id if isinstance(node.target, ast.Name) else None
    return None


def _words(node: ast.AST) -> list[str]:
    """The identifiers and strings that one syntax node carries."""
    fields = (getattr(node, name, None) for name in ("id", "attr", "arg", "name", "asname"))
    words = [word for word in fields if isinstance(word, str)]
    if isinstance(node, ast.ImportFrom) and node.module:
        words.append(node.module)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        words.append(node.value)
    return words
