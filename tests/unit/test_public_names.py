"""The public names of ronde, of its packages for frameworks, of ronde.elastic, ronde.data, ronde.search and ronde.dash
are lists that docs/reference shows. A new name shows there."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

import ronde
import ronde.dash
import ronde.data
import ronde.elastic
import ronde.predict
import ronde.ps
import ronde.search
import ronde.serve
import ronde.serve.export
import ronde.torch
from tools.reference import public_names

REFERENCE = Path(__file__).resolve().parents[2] / "docs/reference"
PAGES = pytest.mark.parametrize(
    ("module", "page"),
    [
        (ronde, "names.md"),
        (ronde.torch, "torch.md"),
        (ronde.elastic, "elastic.md"),
        (ronde.ps, "ps.md"),
        (ronde.dash, "dash.md"),
        (ronde.data, "data.md"),
        (ronde.search, "search.md"),
        (ronde.serve, "serve.md"),
        (ronde.predict, "predict.md"),
        (ronde.serve.export, "export.md"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)


@PAGES
def test_every_public_name_is_documented_and_nothing_else(module: ModuleType, page: str) -> None:
    headings = re.findall(r"^## (\w+)$", (REFERENCE / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(headings) == sorted(module.__all__)


@pytest.mark.parametrize("package", ["tensorflow", "keras", "mxnet"])
def test_every_public_name_of_a_framework_that_is_not_here_is_documented_with_its_text(package: str) -> None:
    page = (REFERENCE / f"{package}.md").read_text(encoding="utf-8")
    described = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert sorted(described) == sorted(public_names(f"ronde.{package}"))
    without_text = [
        name for name, text in described.items() if not re.sub(r"```.*?```", "", text, flags=re.DOTALL).strip()
    ]
    assert without_text == []


@PAGES
def test_every_public_function_and_class_has_a_docstring(module: ModuleType, page: str) -> None:
    public = {name: getattr(module, name) for name in module.__all__}  # fails for a name that does not exist
    assert [name for name, value in public.items() if callable(value) and not value.__doc__] == []
