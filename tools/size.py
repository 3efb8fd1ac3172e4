"""The budget of the code: which files, functions and packages are too long. Run by `make size`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

__all__ = ["main", "report"]

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES = 400
FUNCTION_LINES = 40
PACKAGE_LINES = 1700


def num_lines(path: Path) -> int:
    """Lines of a text file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def long_functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and length of every function over the budget, decorators not counted."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield node.name, length


def packages(root: Path) -> Iterator[tuple[str, int]]:
    """Every package of src/ronde with the lines in and below it."""
    for directory in sorted(path for path in (root / "src/ronde").iterdir() if path.is_dir()):
        lines = sum(num_lines(path) for path in directory.rglob("*.py"))
        if lines:
            yield directory.name, lines


def report(root: Path) -> Iterator[str]:
    """The budget as lines of text."""
    python = [path for part in ("src", "tests", "tools") for path in sorted((root / part).rglob("*.py"))]
    native = sorted((root / "native").rglob("*.cc")) + sorted((root / "native").rglob("*.h"))
    yield f"files over {FILE_LINES} lines"
    for path in python + native:
        if num_lines(path) > FILE_LINES:
            yield f"  {num_lines(path):5}  {path.relative_to(root)}"
    yield f"functions over {FUNCTION_LINES} lines"
    for path in python:
        for name, length in long_functions(path):
            yield f"  {length:5}  {path.relative_to(root)}: {name}"
    yield f"packages (budget {PACKAGE_LINES} lines)"
    for name, lines in packages(root):
        yield f"  {lines:5}  {name}{'  over' if lines > PACKAGE_LINES else ''}"
    yield "lines in all"
    yield f"  {sum(map(num_lines, python)):5}  Python"
    yield f"  {sum(map(num_lines, native)):5}  C++"


def main() -> None:
    """Print the report."""
    for line in report(ROOT):
        print(line)


if __name__ == "__main__":
    main()
