"""CHANGELOG.md and the version agree: what is being built is either unreleased or the newest release."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
RELEASED = [tuple(map(int, found)) for found in re.findall(r"^## \[(\d+)\.(\d+)\.(\d+)\] - ", CHANGELOG, re.MULTILINE)]


def version() -> tuple[int, ...]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "(\d+)\.(\d+)\.(\d+)"$', text, re.MULTILINE)
    assert found
    return tuple(map(int, found.groups()))


def test_unreleased_changes_have_a_place() -> None:
    headings = re.findall(r"^## .*$", CHANGELOG, re.MULTILINE)
    assert headings[0] == "## [Unreleased]"


def test_every_other_heading_is_a_version_with_its_date() -> None:
    headings = re.findall(r"^## .*$", CHANGELOG, re.MULTILINE)[1:]
    assert [line for line in headings if not re.fullmatch(r"## \[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", line)] == []


def test_releases_are_in_order_and_none_is_newer_than_the_version() -> None:
    assert sorted(set(RELEASED), reverse=True) == RELEASED
    assert not RELEASED or RELEASED[0] <= version()
