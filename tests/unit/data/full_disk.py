"""What test_full_disk.py runs in a mount namespace of its own: `python -m tests.unit.data.full_disk FOLDER`. The folder
has `small`, on which a file system of a few KB is mounted."""

from __future__ import annotations

import contextlib
import io
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np

from ronde.cli.main import main
from ronde.comm.world import World
from ronde.data import Stream
from ronde.data.shards import INDEX_NAME
from tests.conformance.ranks import run_threads
from tests.unit.data.made_data import write_shards
from tests.unit.data.test_prepare import contents

NUM_IMAGES = 24
IMAGE_BYTES = 20_000


def resize(small: Path, num_kb: int, *, is_new: bool = False) -> None:
    options = f"{'' if is_new else 'remount,'}size={num_kb}k"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(small)], check=True)


def run(*words: str | Path) -> str:
    """The error of a command; empty if it succeeds."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = main([str(word) for word in ("data", *words)])
    return errors.getvalue().splitlines()[-1] if code else ""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def check_prepare(folder: Path, small: Path) -> None:
    """With a little more room each time, it goes on, and comes to its end."""
    random = np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        path = folder / f"photos/class/{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random.bytes(IMAGE_BYTES))
    options = ("--shard-bytes", "100000")
    assert not run("prepare", folder / "photos", folder / "whole", *options)
    num_failures = 0
    for num_kb in range(40, 2000, 90):
        resize(small, num_kb)
        error = run("prepare", folder / "photos", small / "out", *options)
        if not error:
            break
        num_failures += 1
        assert "there is no room for" in error, error
        assert f"in {small}/out" in error, error
        assert "No space left on device; make room there" in error, error
        assert not (small / "out" / INDEX_NAME).exists()
        assert not any(name.startswith(".unfinished") for name in names(small))
    assert num_failures > 5
    assert contents(small / "out") == contents(folder / "whole")


def check_download(folder: Path, small: Path) -> None:
    resize(small, 300)
    error = run("download", folder / "whole", small / "got", "--parallel", "2")
    assert f"in {small}/got/train: No space left on device; make room there" in error, error
    kept = names(small / "got")
    assert INDEX_NAME not in kept
    for path in (small / "got").rglob("*.shard"):
        assert path.read_bytes() == (folder / "whole" / path.relative_to(small / "got")).read_bytes()
    resize(small, 2000)
    assert not run("download", folder / "whole", small / "got")
    assert contents(small / "got") == contents(folder / "whole")


def check_cache(folder: Path, small: Path) -> None:
    """What does not fit is fetched each time, with one warning; when there is room, it is kept."""
    write_shards(folder / "shards", [200], block_samples=10, num_bytes=3000)
    assert not run("upload", folder / "shards", "memory://full-disk")
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ronde.data").addHandler(handler)

    def read() -> None:
        def body(world: World) -> list[int]:
            stream = Stream("memory://full-disk", global_batch=10, cache=small / "cache", group=world.group)
            return sorted(number for _ in range(2) for batch in stream for number in batch["number"].tolist())

        assert run_threads(1, body)[0] == sorted([*range(200)] * 2)

    for num_kb, num_warnings in ((300, 1), (2000, 0)):
        resize(small, num_kb)
        warnings.clear()
        read()
        expected = f"the cache {small}/cache cannot be written to"
        assert len(warnings) == num_warnings, warnings
        assert all(each.startswith(expected) and "No space left on device" in each for each in warnings), warnings
        assert not any(name.startswith(".unfinished") for name in names(small / "cache"))
    assert sum(path.stat().st_size for path in small.glob("cache/??/*")) > 200 * 3000


if __name__ == "__main__":
    given = Path(sys.argv[1])
    for check in (check_prepare, check_download, check_cache):
        (given / "small").mkdir(exist_ok=True)
        resize(given / "small", 40, is_new=True)
        check(given, given / "small")
        subprocess.run(["umount", str(given / "small")], check=True)
    print("all checks passed")
