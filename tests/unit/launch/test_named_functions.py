"""Names of functions in options: where modules are looked for, and what is said when there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ronde.launch.named_functions import load_function, module_folders, module_path, search_modules_beside


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """The working directory, and that of a job file. What was imported is forgotten."""
    here, beside = tmp_path / "here", tmp_path / "beside"
    for folder in (here, beside):
        folder.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield here, beside
    for name in set(sys.modules) - before:
        if name.startswith("named_"):
            del sys.modules[name]


def test_a_module_is_found_in_the_working_directory_first_and_then_beside_the_job_file(
    folders: tuple[Path, Path],
) -> None:
    here, beside = folders
    (beside / "named_a.py").write_text("def where(): return 'beside'")
    (beside / "named_b.py").write_text("def where(): return 'beside'")
    (here / "named_b.py").write_text("class Inner:\n    def where(): return 'here'")
    search_modules_beside("../beside/job.yaml")
    assert module_folders("../beside/job.yaml") == [str(here), str(beside)] == sys.path[:2]
    assert load_function("named_a:where")() == "beside"
    assert load_function("named_b:Inner.where")() == "here"
    assert module_path("named_a:where") == beside / "named_a.py"
    search_modules_beside("../beside/job.yaml")
    assert sys.path.count(str(beside)) == 1


def test_without_a_job_file_the_working_directory_is_enough(folders: tuple[Path, Path]) -> None:
    here, _ = folders
    (here / "named_c.py").write_text("def where(): return 'here'")
    assert module_path("named_c:where") == here / "named_c.py"  # before it was imported: fingerprints are made of it
    assert load_function("named_c:where")() == "here"
    assert module_path("named_nowhere.inner:where") is None


def test_what_is_missing_is_named_with_the_folders_that_were_searched(folders: tuple[Path, Path]) -> None:
    here, beside = folders
    (beside / "named_d.py").write_text("import no_such_library\n")
    (beside / "named_e.py").write_text("number = 3\n")
    search_modules_beside(str(beside / "job.yaml"))
    with pytest.raises(ValueError, match="there is no module 'named_nowhere' in") as error:
        load_function("named_nowhere:where")
    assert str(here) in str(error.value) and str(beside) in str(error.value)
    with pytest.raises(ValueError, match=r"named_d needs no_such_library, which is not installed"):
        load_function("named_d:where")
    with pytest.raises(ValueError, match=rf"{beside}/named_e.py has no where"):
        load_function("named_e:where")
    with pytest.raises(ValueError, match="is no function"):
        load_function("named_e:number")
    with pytest.raises(ValueError, match="must be module:function"):
        load_function("named_e")
