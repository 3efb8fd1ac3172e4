"""The public names of ronde are a list, and docs/reference/names.md shows it: adding a name shows in the diff."""

from __future__ import annotations

import re
from pathlib import Path

import ronde

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/names.md"


def documented() -> list[str]:
    """The headings of the page."""
    return re.findall(r"^## (\w+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def test_every_public_name_is_documented_and_nothing_else() -> None:
    assert sorted(documented()) == sorted(ronde.__all__)


def test_every_public_name_exists() -> None:
    assert [name for name in ronde.__all__ if not hasattr(ronde, name)] == []


def test_every_public_name_is_explained_where_it_is_written() -> None:
    public = {name: getattr(ronde, name) for name in ronde.__all__}
    assert [name for name, thing in public.items() if callable(thing) and not thing.__doc__] == []
