"""The links between the pages of the documentation lead somewhere, and the code that pages name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    path
    for path in sorted((*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")))
    if path.name != "CHANGELOG.md"
]
MODULE = re.compile(
    r"`(?:src/ronde/)?((?:cli|comm|coordinator|elastic|launch|net|observe|torch|training|dash|data)/[\w/]*)(?:\.py)?`"
)
EACH = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES]


def anchor(heading: str) -> str:
    """The anchor that a forge makes from a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", EACH)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        path, _, fragment = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if fragment:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert fragment in map(anchor, headings), target


@pytest.mark.parametrize("page", [param for param in EACH if "decisions" not in str(param.id)])  # these are history
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    for name in MODULE.findall(page.read_text(encoding="utf-8")):
        path = ROOT / "src/ronde" / name.rstrip("/")
        assert path.is_dir() or path.with_suffix(".py").exists(), name


def test_every_hop_of_the_walks_exists() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    hops = re.findall(r"^\| \d+ \| `([\w/]+\.py)` \| `(\w+)(?:\.(\w+))?`", page, re.MULTILINE)
    assert len(hops) > 40
    for file, name, method in hops:
        tree = ast.parse((ROOT / "src/ronde" / file).read_text(encoding="utf-8"))
        kinds = (ast.ClassDef, ast.FunctionDef)
        (found,) = [node for node in tree.body if isinstance(node, kinds) and node.name == name]
        methods = [node.name for node in found.body if isinstance(node, ast.FunctionDef)]
        assert not method or method in methods, f"{file} has no {name}.{method}"


def test_every_page_that_the_code_names_exists() -> None:
    sources = [path for folder in ("src", "compat", "native", "tests") for path in (ROOT / folder).rglob("*.[pch]*")]
    texts = [path.read_text(encoding="utf-8") for path in sources if path.suffix in (".py", ".cc", ".h")]
    named = {page for text in texts for page in re.findall(r"\bdocs/[\w/-]+\.md\b", text)}
    assert named and [page for page in sorted(named) if not (ROOT / page).exists()] == []
