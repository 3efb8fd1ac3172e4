"""The pages of docs/reference say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from ronde.launch.driver.monitor import JobStatus, RankStatus
from ronde.observe.stacks import RankStack
from tools.reference import FOLDER, pages


@pytest.mark.parametrize(("path", "text"), [pytest.param(path, text, id=path.name) for path, text in pages().items()])
def test_a_generated_page_is_fresh(path: Path, text: str) -> None:
    assert path.read_text(encoding="utf-8") == text, "the page is stale; run `make docs`"


@pytest.mark.parametrize(
    ("heading", "structs"),
    [("ronde top --json", [JobStatus, RankStatus]), ("ronde stack --json", [RankStack])],
    ids=["top", "stack"],
)
def test_every_field_of_the_json_output_is_documented(heading: str, structs: list[type[msgspec.Struct]]) -> None:
    page = (FOLDER / "json.md").read_text(encoding="utf-8")
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert documented == {name for struct in structs for name in struct.__struct_fields__}
