"""Print the size of the code: modules, classes and lines of each package, class names that are used twice, and modules
that are too long. Run by `make size`."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

__all__ = ["main", "report"]

ROOT = Path(__file__).resolve().parent.parent
MAX_MODULE_LINES = 700
PARTS = ("src/ronde", "compat/horovod/src", "tests", "benchmarks", "examples", "tools")


def count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def class_names(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def report(root: Path) -> Iterator[str]:
    sources = sorted((root / "src/ronde").rglob("*.py"))
    groups: dict[str, list[Path]] = defaultdict(list)
    where: dict[str, list[str]] = defaultdict(list)
    for path in sources:
        groups[str(path.parent.relative_to(root / "src"))].append(path)
        for name in class_names(path):
            where[name].append(str(path.relative_to(root / "src/ronde")))
    for part in PARTS:
        groups[f"all of {part}"] = sorted((root / part).rglob("*.py"))
    native = sorted(path for kind in ("*.cc", "*.h", "*.inc") for path in (root / "native").rglob(kind))
    yield "modules  classes  lines"
    for name, paths in groups.items():
        num_classes = sum(len(class_names(path)) for path in paths)
        num_modules = sum(name.startswith("all of") or path.name != "__init__.py" for path in paths)
        yield f"{num_modules:7}  {num_classes:7}  {sum(map(count_lines, paths)):5}  {name}"
    yield f"{len(native):7}           {sum(map(count_lines, native)):5}  all of native"
    yield from (f"class {name} is in {', '.join(paths)}" for name, paths in sorted(where.items()) if len(paths) > 1)
    for path in (*sources, *native):
        if count_lines(path) > MAX_MODULE_LINES:
            yield f"{path.relative_to(root)} has {count_lines(path)} lines, more than {MAX_MODULE_LINES}"


def main() -> None:
    for line in report(ROOT):
        print(line)


if __name__ == "__main__":
    main()
