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
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src/ronde"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("cli",),
    ("dash",),
    ("integrations",),
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
    ("types",),
    ("errors",),
    ("version",),
)
"""Top to bottom. An import may only point down; names on one line do not know each other."""

ML_LIBRARIES = {"torch", "tensorflow", "keras", "mxnet", "jax"}
OPTIONAL_PACKAGES = {*ML_LIBRARIES, "ps", "data", "search", "serve", "integrations", "dash"}
"""For those who have their libraries: `import ronde` does not import them."""
RUN_TIME = {"numpy", "zmq", "msgspec", "psutil", "cloudpickle", "rich", "yaml"}

POWERS: dict[str, tuple[str, ...]] = {
    "the environment": ("settings.py", "comm/launchers.py", "launch/"),
    "ctypes": ("comm/backends/native_library.py",),
    "print()": ("cli/",),
    "processes": ("launch/", "cli/"),
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
        parts = ["ronde", *Path(path).with_suffix("").parts]
        self.name = ".".join(parts).removesuffix(".__init__")
        self.layer = layer_of(self.name)
        self.tree = ast.parse(text)
        self.imports = [*_imports(self.tree, ".".join(parts[:-1]))]
        self.classes = [node.name for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]


def layer_of(module: str) -> str:
    """The first part below ronde; ronde itself for src/ronde/__init__.py."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "ronde"


def _imports(tree: ast.AST, package: str, always: bool = True, in_function: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, always, in_function)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - (node.level - 1)] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, always, in_function)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _imports(node, package, always=False, in_function=True)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(node, package, always=False, in_function=in_function)
        else:
            yield from _imports(node, package, always, in_function)


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


def shared_class_names(sources: Sequence[Source]) -> dict[str, list[str]]:
    """Names that several classes have, and where these are."""
    found = defaultdict(list)
    for source in sources:
        for name in source.classes:
            found[name].append(source.path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def metaphors(names: Iterable[str]) -> list[str]:
    """The names that hold a word of METAPHORS, in the singular or the plural."""
    parts = {name: {word.lower() for word in re.findall(r"[A-Z]+[a-z]*|[a-z]+", name)} for name in names}
    return [name for name, words in parts.items() if METAPHORS & (words | {word.removesuffix("s") for word in words})]


def test_imports_point_down() -> None:
    assert upward_imports(read_all()) == []


def test_no_modules_import_each_other() -> None:
    assert cycles(read_all()) == []


def test_libraries_are_imported_only_where_they_belong() -> None:
    assert foreign_libraries(read_all()) == []


def test_every_power_has_one_owner() -> None:
    assert stolen_powers(read_all()) == []


def test_every_module_says_what_it_is() -> None:
    assert [s.path for s in read_all() if s.tree.body and not ast.get_docstring(s.tree)] == []


def test_no_two_classes_have_one_name() -> None:
    assert shared_class_names(read_all()) == {}


def test_files_and_classes_have_the_fields_words() -> None:
    files = [str(path.relative_to(ROOT)) for place in (SOURCES, ROOT / "native") for path in place.rglob("*.*")]
    assert metaphors([*files, *(name for source in read_all() for name in source.classes)]) == []


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


def parse(**files: str) -> list[Source]:
    """Sources on top of a few empty modules; `comm__work` stands for comm/work.py."""
    given = {name.replace("__", "/") + ".py": text for name, text in files.items()}
    return [Source(path, text) for path, text in {**BELOW, **given}.items()]


@pytest.mark.parametrize(
    ("path", "text", "num_wrong"),
    [
        ("net__wire", "import ronde.comm", 1),
        ("net__wire", "from ronde import comm", 1),
        ("net__wire", "from ronde.comm import world", 1),
        ("net__wire", "from .. import comm", 1),
        ("net__wire", "from ..comm import world", 1),
        ("net__wire", "def f():\n    from ronde import launch", 1),
        ("net__wire", "if TYPE_CHECKING:\n    from ronde.comm import world", 1),
        ("net__wire", "from ronde import allreduce", 1),
        ("comm__world", "import ronde.launch", 1),
        ("comm__world", "from ronde.net import wire\nfrom ronde.errors import PeerLost", 0),
        ("utils__misc", "", 1),
    ],
)
def test_an_import_that_points_up_is_found_however_it_is_written(path: str, text: str, num_wrong: int) -> None:
    assert len(upward_imports(parse(**{path: text}))) == num_wrong


def test_a_cycle_is_shown() -> None:
    assert cycles(parse(net__a="from ronde.net import b", net__b="def f():\n    import ronde.net.a")) != []
    assert cycles(parse(net__a="from ronde.net import b", net__b="")) == []


@pytest.mark.parametrize(
    ("path", "text", "num_wrong"),
    [
        ("comm__world", "import torch", 1),
        ("comm__world", "def f():\n    import torch", 1),
        ("comm__world", "if TYPE_CHECKING:\n    import torch", 1),
        ("jax__optimizer", "import torch", 1),
        ("torch__optimizer", "import torch.nn", 0),
        ("cli__bench", "import torch", 1),
        ("cli__bench", "def f():\n    import torch", 0),
        ("comm__mpi", "import mpi4py", 1),
        ("comm__mpi", "def f():\n    from mpi4py import MPI", 0),
        ("comm__mpi", "if TYPE_CHECKING:\n    from mpi4py import MPI", 0),
        ("comm__world", "import numpy, os, msgspec", 0),
    ],
)
def test_a_library_in_the_wrong_place_is_found(path: str, text: str, num_wrong: int) -> None:
    assert len(foreign_libraries(parse(**{path: text}))) == num_wrong


@pytest.mark.parametrize(
    ("text", "owner"),
    [
        ("import os\nos.environ['A']", "settings"),
        ("import os\nos.getenv('A')", "launch__job"),
        ("from os import environ", "settings"),
        ("import ctypes", "comm__backends__native_library"),
        ("from ctypes import c_int", "comm__backends__native_library"),
        ("print(1)", "cli__main"),
        ("import subprocess", "launch__job"),
        ("from socket import socket", "net__listeners"),
    ],
)
def test_a_power_outside_of_its_owner_is_found(text: str, owner: str) -> None:
    assert len(stolen_powers(parse(observe__events=text))) == 1
    assert stolen_powers([Source(owner.replace("__", "/") + ".py", text)]) == []


def test_a_class_name_used_twice_and_a_metaphor_are_found() -> None:
    sources = parse(net__a="class Link: ...", net__b="class Link: ...\nclass Listener: ...")
    assert shared_class_names(sources) == {"Link": ["net/a.py", "net/b.py"]}
    names = ("net/doors.py", "SeatPlan", "_Tickets", "net/listener.py", "Placement", "outdoor.py")
    assert metaphors(names) == ["net/doors.py", "SeatPlan", "_Tickets"]
