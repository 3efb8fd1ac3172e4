"""The shape of the code: imports point down, no cycles, one owner for each power, one meaning for each class name, and
the field's words in the names of files and classes.

Reads the sources with `ast` and imports nothing of ronde, so it also runs when ronde is broken. Imports inside
functions and under TYPE_CHECKING count like all others.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src/ronde"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("cli",),
    ("dash",),
    ("integrations",),
    ("predict",),
    ("search", "serve"),
    ("keras",),
    ("torch", "tensorflow", "mxnet", "jax"),
    ("ps", "data", "parallel"),
    ("training",),
    ("elastic",),
    ("ronde",),  # the module-level functions, src/ronde/__init__.py
    ("launch", "comm"),
    ("coordinator",),
    ("net",),
    ("observe",),
    ("settings",),
    ("text",),
    ("exit_codes",),
    ("types",),
    ("errors",),
    ("version",),
)
"""Top to bottom. An import may only point down; names on one line do not know each other."""

ML_LIBRARIES = {"torch", "tensorflow", "keras", "mxnet", "jax"}
OPTIONAL_PACKAGES = {*ML_LIBRARIES, "ps", "data", "search", "serve", "predict", "integrations", "dash"}
"""For those who have their libraries: `import ronde` does not import them."""
RUN_TIME = {"numpy", "zmq", "msgspec", "psutil", "cloudpickle", "rich", "yaml"}

POWERS: dict[str, tuple[str, ...]] = {
    "the environment": ("settings.py", "comm/launchers.py", "launch/"),
    "ctypes": (
        "comm/backends/native_library.py",
        "jax/ffi_library.py",
        "mxnet/engine_library.py",
        "tensorflow/op_library.py",
    ),
    "print()": ("cli/",),
    "processes": ("launch/", "cli/", "elastic/discovery.py", "training/native_self_test.py"),
    "sockets": ("net/",),
}
"""Who owns what; a path that ends with a slash is a package."""

POWER_OF_LIBRARY = {"ctypes": "ctypes", "subprocess": "processes", "multiprocessing": "processes", "socket": "sockets"}
MADE = re.compile(r"^(?:\.git|\.venv.*|build|dist|\.\w+_cache|\.hypothesis|__pycache__)$")
METAPHORS = set(
    """accord bell board course crew desk door errand flight gate ground guest knock lane meeting news place pulse
    seat site sorry story stranger stray talk ticket trouble verdict""".split()
)
"""Words that have to be learned, where the field has a word of its own; see CONTRIBUTING.md."""
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
NATIVE_CLASS = re.compile(
    r"^ *(?:class|struct|enum class)(?: (?:alignas\(\w+\)|__attribute__\(\(.*\)\)))? ([A-Z]\w*)(?: final)?(?: :.*)? \{",
    re.MULTILINE,
)
MIRRORED_CLASSES = {"Call", "CallHeader", "CallQueue", "Channel", "Deadline", "ReadyCounter", "Topology"}
"""The same thing in Python and in the native library or the extension, under the same name."""


class Import(NamedTuple):
    """One imported name: `module` or, when that is no module, an attribute of the module above it."""

    name: str
    line: int
    always: bool
    """Runs when the module is imported: not inside a function, not under TYPE_CHECKING."""
    in_function: bool


class Source:
    """One module of ronde, read but not run."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path  # below src/ronde
        self.name = ".".join(["ronde", *Path(path).with_suffix("").parts]).removesuffix(".__init__")
        self.layer = layer_of(self.name)
        self.tree = ast.parse(text)
        self.imports = [*_imports(self.tree)]
        self.classes = [node.name for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]


def layer_of(module: str) -> str:
    """The first part below ronde; ronde itself for src/ronde/__init__.py."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "ronde"


def _imports(tree: ast.AST, always: bool = True, in_function: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, always, in_function)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            for alias in node.names:
                yield Import(f"{node.module}.{alias.name}", node.lineno, always, in_function)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _imports(node, always=False, in_function=True)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(node, always=False, in_function=in_function)
        else:
            yield from _imports(node, always, in_function)


@functools.cache
def read_all() -> tuple[Source, ...]:
    """Every module of ronde."""
    paths = sorted(SOURCES.rglob("*.py"))
    return tuple(Source(str(path.relative_to(SOURCES)), path.read_text(encoding="utf-8")) for path in paths)


def targets(source: Source, modules: set[str]) -> Iterator[tuple[str, Import]]:
    """The modules of ronde that a module imports."""
    for found in source.imports:
        if found.name.split(".")[0] == "ronde":
            yield (found.name if found.name in modules else found.name.rpartition(".")[0] or "ronde"), found


Rule: TypeAlias = Callable[[Sequence[Source]], list[str]]


def upward_imports(sources: Sequence[Source]) -> list[str]:
    """Imports that point up or aside, and modules that no layer knows."""
    height = {name: index for index, line in enumerate(LAYERS) for name in line}
    wrong = [
        f"{s.path}: {s.layer} is in no layer" for s in sources if s.layer not in height and s.name != "ronde.__main__"
    ]
    modules = {source.name for source in sources}
    for source in sources:
        for target, found in targets(source, modules):
            here, there = source.layer, layer_of(target)
            if source.name == "ronde.__main__" or here == there or here not in height:
                continue
            if height.get(there, -1) <= height[here]:
                wrong.append(f"{source.path}:{found.line}: {here} must not know {there}")
    return wrong


def cycles(sources: Sequence[Source]) -> list[str]:
    """A cycle of modules that import each other, if there is one."""
    modules = {source.name for source in sources}
    graph = {source.name: {target for target, _ in targets(source, modules)} for source in sources}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" → ".join(reversed(error.args[1]))]
    return []


def foreign_libraries(sources: Sequence[Source]) -> list[str]:
    """Libraries imported where `import ronde` must not need them, and ML libraries outside of their package."""
    wrong = []
    for source in sources:
        for found in source.imports:
            library = found.name.split(".")[0]
            if library in sys.stdlib_module_names or library in RUN_TIME or library in ("ronde", source.layer):
                continue
            if source.path == f"serve/export/{library}.py":
                continue
            if library in ML_LIBRARIES and not (source.layer == "cli" and found.in_function):
                wrong.append(f"{source.path}:{found.line}: {library} belongs into {library}/ only")
            elif found.always and source.layer not in OPTIONAL_PACKAGES:
                wrong.append(f"{source.path}:{found.line}: {library} is optional, import it where it is used")
    return wrong


def uses_of_powers(source: Source) -> Iterator[tuple[str, int]]:
    """Which powers a module uses, and where."""
    for found in source.imports:
        library, _, name = found.name.partition(".")
        if library in POWER_OF_LIBRARY:
            yield POWER_OF_LIBRARY[library], found.line
        if library == "os" and name in ENVIRONMENT_NAMES:
            yield "the environment", found.line
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os" and node.attr in ENVIRONMENT_NAMES:
            yield "the environment", node.lineno
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield "print()", node.lineno


def stolen_powers(sources: Sequence[Source]) -> list[str]:
    """Powers used outside of their owners."""
    return [
        f"{source.path}:{line}: {power} belongs to {' and '.join(POWERS[power])}"
        for source in sources
        for power, line in uses_of_powers(source)
        if not source.path.startswith(POWERS[power])
    ]


def shared_class_names(sources: Sequence[Source]) -> list[str]:
    """Names that several classes have."""
    counts = Counter(name for source in sources for name in source.classes)
    return [name for name, count in counts.items() if count > 1]


def native_classes() -> set[str]:
    """The classes of the native library, and of the extension `hot_calls`."""
    paths = sorted(path for path in (ROOT / "native/src").rglob("*.*") if path.suffix in (".h", ".cc", ".inc"))
    names = {name for path in paths for name in NATIVE_CLASS.findall(path.read_text(encoding="utf-8"))}
    stub = Source("hot_calls.pyi", (SOURCES / "comm/backends/hot_calls.pyi").read_text(encoding="utf-8"))
    return names.union(stub.classes)


def missing_docstrings(sources: Sequence[Source]) -> list[str]:
    return [source.path for source in sources if source.tree.body and not ast.get_docstring(source.tree)]


def metaphors(names: Iterable[str]) -> list[str]:
    """The names that hold a word of METAPHORS, in the singular or the plural."""
    parts = {name: {word.lower() for word in re.findall(r"[A-Z]+[a-z]*|[a-z]+", name)} for name in names}
    return [name for name, words in parts.items() if METAPHORS & (words | {word.removesuffix("s") for word in words})]


RULES = [upward_imports, cycles, foreign_libraries, stolen_powers, shared_class_names, missing_docstrings]


@pytest.mark.parametrize("rule", RULES)
def test_the_sources_keep_the_rule(rule: Rule) -> None:
    assert rule(read_all()) == []


def test_a_class_name_means_the_same_in_python_and_in_the_native_library() -> None:
    assert len(native_classes()) > 60
    assert {name for source in read_all() for name in source.classes} & native_classes() == MIRRORED_CLASSES


def test_files_and_classes_have_the_fields_words() -> None:
    files = [str(path.relative_to(ROOT)) for place in (SOURCES, ROOT / "native") for path in place.rglob("*.*")]
    classes = [*native_classes(), *(name for source in read_all() for name in source.classes)]
    assert metaphors([*files, *classes]) == []


def written_files() -> Iterator[Path]:
    """The files of the repository that somebody wrote: not the environments, not what was built."""
    for directory, directories, files in os.walk(ROOT):
        directories[:] = [name for name in directories if not MADE.match(name)]
        yield from (Path(directory, name) for name in sorted(files) if not name.endswith(".so") and name != ".git")


def test_no_file_mentions_a_path_of_the_machine_it_was_written_on() -> None:
    machine = re.compile(rf"(?<![\w.])/(?:work|root)/[\w.]|{re.escape(str(ROOT))}\b")
    wrong = []
    for path in written_files():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            if machine.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}")
    assert wrong == []


# The rules themselves, each with sources that break it.

BELOW = {"errors.py": "", "net/__init__.py": "", "net/wire.py": "", "comm/__init__.py": "", "launch/__init__.py": ""}


@pytest.mark.parametrize(
    ("rule", "path", "text", "num_wrong"),
    [
        (upward_imports, "net/wire.py", "import ronde.comm", 1),
        (upward_imports, "net/wire.py", "from ronde import comm", 1),
        (upward_imports, "net/wire.py", "from ronde.comm import world", 1),
        (upward_imports, "net/wire.py", "def f():\n    from ronde import launch", 1),
        (upward_imports, "net/wire.py", "if TYPE_CHECKING:\n    from ronde.comm import world", 1),
        (upward_imports, "net/wire.py", "from ronde import allreduce", 1),
        (upward_imports, "comm/world.py", "import ronde.launch", 1),
        (upward_imports, "comm/world.py", "from ronde.net import wire\nfrom ronde.errors import PeerLost", 0),
        (upward_imports, "utils/misc.py", "", 1),
        (cycles, "net/wire.py", "def f():\n    import ronde.net.wire", 1),
        (cycles, "net/wire.py", "import ronde.net", 0),
        (foreign_libraries, "comm/world.py", "import torch", 1),
        (foreign_libraries, "comm/world.py", "def f():\n    import torch", 1),
        (foreign_libraries, "comm/world.py", "if TYPE_CHECKING:\n    import torch", 1),
        (foreign_libraries, "jax/optimizer.py", "import torch", 1),
        (foreign_libraries, "torch/optimizer.py", "import torch.nn", 0),
        (foreign_libraries, "serve/export/torch.py", "import torch", 0),
        (foreign_libraries, "serve/export/torch.py", "import keras", 1),
        (foreign_libraries, "cli/bench.py", "import torch", 1),
        (foreign_libraries, "cli/bench.py", "def f():\n    import torch", 0),
        (foreign_libraries, "comm/mpi.py", "import mpi4py", 1),
        (foreign_libraries, "comm/mpi.py", "def f():\n    from mpi4py import MPI", 0),
        (foreign_libraries, "comm/mpi.py", "if TYPE_CHECKING:\n    from mpi4py import MPI", 0),
        (foreign_libraries, "comm/world.py", "import numpy, os, msgspec", 0),
        (stolen_powers, "observe/events.py", "import os\nos.environ['A']", 1),
        (stolen_powers, "settings.py", "import os\nos.environ['A']", 0),
        (stolen_powers, "observe/events.py", "import os\nos.getenv('A')", 1),
        (stolen_powers, "launch/job.py", "import os\nos.getenv('A')", 0),
        (stolen_powers, "observe/events.py", "from os import environ", 1),
        (stolen_powers, "observe/events.py", "from ctypes import c_int", 1),
        (stolen_powers, "comm/backends/native_library.py", "import ctypes", 0),
        (stolen_powers, "observe/events.py", "print(1)", 1),
        (stolen_powers, "cli/main.py", "print(1)", 0),
        (stolen_powers, "observe/events.py", "import subprocess", 1),
        (stolen_powers, "net/listeners.py", "from socket import socket", 0),
        (shared_class_names, "net/wire.py", "class Link: ...\nclass Link: ...\nclass Listener: ...", 1),
        (missing_docstrings, "net/wire.py", "import os", 1),
    ],
)
def test_what_breaks_a_rule_is_found(rule: Rule, path: str, text: str, num_wrong: int) -> None:
    assert len(rule([Source(each, content) for each, content in {**BELOW, path: text}.items()])) == num_wrong


def test_a_native_class_is_found_where_it_is_defined() -> None:
    text = """class Link;
class Link final : public Carrier {
struct alignas(64) MemberState {
  struct Inner {
enum class Form { kInput, kResult };
struct __attribute__((packed)) Unaligned {
struct rd_work {
  return struct Wrong;"""
    assert NATIVE_CLASS.findall(text) == ["Link", "MemberState", "Inner", "Form", "Unaligned"]


def test_a_metaphor_is_found() -> None:
    names = ("net/doors.py", "SeatPlan", "_Tickets", "net/listener.py", "Placement", "outdoor.py")
    assert metaphors(names) == ["net/doors.py", "SeatPlan", "_Tickets"]
