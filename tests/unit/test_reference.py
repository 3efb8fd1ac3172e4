"""The generated pages of docs/reference say what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.reference import pages


@pytest.mark.parametrize(("path", "text"), [pytest.param(path, text, id=path.name) for path, text in pages().items()])
def test_a_generated_page_is_fresh(path: Path, text: str) -> None:
    assert path.read_text(encoding="utf-8") == text, "the page is stale; run `make docs`"
