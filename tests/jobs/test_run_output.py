"""What ranks print, as the user of `ronde run` gets it: on a pipe, on a terminal, in files. However much it is, nothing
is lost and nothing reordered within a rank."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.kit import RONDE, Terminal, run, script
from tests.jobs.scripts import ronde_run
from tests.limits import LONG_S, LONG_TEST_S
from tests.services import needs


def attempts() -> range:
    """Equal lines are one if ranks print them within a moment of each other, which a busy machine may prevent."""
    return range(20)


def unfolded(shown: str) -> list[str]:
    """The lines of two ranks, sorted, each with its rank: on a busy machine equal ones may come too late to be one."""
    return sorted(
        f"[{rank}] {line.removeprefix('[0-1] ')}" if line.startswith("[0-1] ") else line
        for line in shown.splitlines()
        for rank in ((0, 1) if line.startswith("[0-1] ") else (0,))
    )


# --- very much -----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(LONG_TEST_S)
def test_64_ranks_meet_and_equal_lines_are_one() -> None:
    program = (
        "import ronde; ronde.init(); ronde.barrier(); print('hello'); print('I am', ronde.rank()); ronde.shutdown()"
    )
    words = ("-np", "64", "--start-s", str(LONG_S), sys.executable, "-c", program)
    wanted = ["[0-63] hello", *sorted(f"[{rank}] I am {rank}" for rank in range(64))]
    for _ in attempts():
        done = run(*words, limit_s=LONG_S)
        assert (done.code, done.err) == (0, "")
        if (shown := sorted(done.out.splitlines(), key=lambda line: ("hello" not in line, line))) == wanted:
            return
    assert shown == wanted


@pytest.mark.timeout(LONG_TEST_S)
def test_floods_garbage_and_a_line_of_50_megabytes_come_through_whole(tmp_path: Path) -> None:
    done = run("-np", "4", "--output", str(tmp_path), *script("ronde_run", "write"), limit_s=LONG_S)
    assert (done.code, done.summary) == (0, [])
    for rank in range(4):
        out, err = ronde_run.printed(rank)
        assert (tmp_path / f"rank-{rank}.out").read_bytes() == out, "byte for byte"
        assert (tmp_path / f"rank-{rank}.err").read_bytes() == err
    pieces = [line for line in done.out.split("\n") if line.startswith("[0] ")]
    assert "".join(piece.removeprefix("[0] ") for piece in pieces) == "x" * ronde_run.LONG_LINE_BYTES
    for rank in (2, 3):
        for shown, printed in zip((done.out, done.err), ronde_run.printed(rank), strict=True):
            wanted = printed.decode().rstrip("\n").split("\n")
            assert lines_of(rank, shown) == wanted, "nothing lost, nothing reordered"


def lines_of(rank: int, shown: str) -> list[str]:
    """What is shown of this rank alone; garbage of others may hold anything but the number at the begin of a line."""
    begin = f"[{rank}] "
    return [line[len(begin) :] for line in shown.split("\n") if line.startswith(begin)]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@needs("mounted file systems")
def test_a_full_disk_is_told_and_the_job_goes_on(tiny_disk: Path) -> None:
    program = "for number in range(2000): print(f'line {number} ' + 'x' * 100)\nprint('over')"
    done = run("-np", "2", "--output", str(tiny_disk), sys.executable, "-c", program)
    assert done.code == 0
    first, last = done.err.splitlines()
    assert re.fullmatch(rf"\[ronde\] cannot write {tiny_disk}/rank-\d.out: No space left on device; .*", first)
    assert last == f"[ronde] incomplete output files: {tiny_disk}/rank-0.out, {tiny_disk}/rank-1.out" or (
        last == f"[ronde] incomplete output files: {tiny_disk}/rank-1.out, {tiny_disk}/rank-0.out"
    )
    assert done.out.count("over") == len(re.findall(r"\[0-1\] over|\[\d\] over", done.out)) >= 1
    wanted = "".join(f"line {number} {'x' * 100}\n" for number in range(2000)).encode()
    for rank in range(2):
        written = (tiny_disk / f"rank-{rank}.out").read_bytes()
        assert len(written) < len(wanted) and wanted.startswith(written), "a true beginning"


# --- its form ------------------------------------------------------------------------------------------------------

SAME = ("sh", "-c", 'echo same; echo "rank $RANK"; echo trouble >&2')


def test_equal_lines_are_folded_or_not_and_streams_stay_apart() -> None:
    wanted = ("[0-1] trouble\n", ["[0-1] same", "[0] rank 0", "[1] rank 1"])
    for _ in attempts():
        done = run("-np", "2", *SAME)
        assert unfolded(done.err) == ["[0] trouble", "[1] trouble"]
        assert unfolded(done.out) == ["[0] rank 0", "[0] same", "[1] rank 1", "[1] same"]
        if (shown := (done.err, sorted(done.out.splitlines()))) == wanted:
            break
    assert shown == wanted
    done = run("-np", "2", "--no-fold", *SAME)
    assert sorted(done.err.splitlines()) == ["[0] trouble", "[1] trouble"]
    assert lines_of(0, done.out) == ["same", "rank 0"] and lines_of(1, done.out) == ["same", "rank 1"]


def test_timestamps_on_request() -> None:
    done = run("-np", "1", "--timestamps", "echo", "hello")
    assert re.fullmatch(r"\[0\] (\S+ )?\d\d:\d\d:\d\d\.\d{3} hello\n", done.out), done.out


BAR = """
import pathlib, sys, time
for step in range(101):
    sys.stderr.write(f"\\rstep {step} %")
    sys.stderr.flush()
    while step == 50 and not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)
    if step == 50:
        print("half way", flush=True)
sys.stderr.write("\\n")
print("terminal" if sys.stderr.isatty() else "no terminal")
"""


def test_of_a_bar_a_pipe_gets_the_end(tmp_path: Path) -> None:
    wanted = (0, "[0-1] step 100 %\n", "[0-1] half way\n[0-1] no terminal\n")
    bar = "".join(f"\rstep {step} %" for step in range(101)) + "\n"
    for attempt in attempts():
        folder = tmp_path / str(attempt)
        done = run("-np", "2", "--output", str(folder), sys.executable, "-c", BAR, str(tmp_path))
        assert unfolded(done.err) == ["[0] step 100 %", "[1] step 100 %"]
        assert (folder / "rank-1.err").read_bytes() == bar.encode()
        if (done.code, done.err, done.out) == wanted:
            break
    assert (done.code, done.err, done.out) == wanted


def test_on_a_terminal_bars_are_live_and_lines_pass_them(tmp_path: Path) -> None:
    for attempt in attempts():
        go_on = tmp_path / f"go on {attempt}"
        command = [RONDE, "run", "-np", "2", "--no-color", sys.executable, "-c", BAR, str(go_on)]
        with Terminal(command) as terminal:
            drawn = terminal.read_until("[0-1] step 50 %")
            assert "step 50 %\r\n" not in drawn, "a row that is still to change"
            go_on.touch()
            assert terminal.result() == 0
        after = terminal.shown.removeprefix(drawn)
        if "[0-1] step 100 %" in after:  # otherwise one rank's row has ended before the other printed its line
            break
    erased, line = after.index("\r\x1b[J"), after.index("half way\r\n")
    assert erased < line < after.index("step 100 %\r\n"), "the row makes room for the line, and stays at its end"
    assert "[0] terminal\r\n" in after and "[1] no terminal\r\n" in after
