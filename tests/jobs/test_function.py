"""ronde.run with real ranks: results and errors come back, from wherever it is called, and nothing is left."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

import ronde
from tests.commands import ROOT, output_of
from tests.jobs.kit import SshHosts, needs_hosts
from tests.limits import PATIENCE_S


def write(folder: Path, **files: str) -> Path:
    """A folder of Python files; the first one is the script."""
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return folder / f"{next(iter(files))}.py"


def run_script(script: Path, *words: str, cwd: Path, before: Sequence[str] = ()) -> str:
    return output_of([*before, sys.executable, "-W", "error", script, *words], cwd=cwd)


def test_a_closure_is_called_on_every_rank_and_results_come_by_rank(capfd: pytest.CaptureFixture[str]) -> None:
    factor = 3

    def scale(x: int, *, add: int) -> tuple[int, Any]:
        ronde.init()
        print("hello")
        return ronde.rank() * factor + x + add, ronde.allreduce(ronde.rank() + 1)

    for _ in range(20):  # on a busy machine equal lines may come too late to be one
        assert ronde.run(scale, (10,), {"add": 100}, np=2) == [(110, 3), (113, 3)]
        if (shown := capfd.readouterr().out) == "[0-1] hello\n":
            break
    assert shown == "[0-1] hello\n"


def test_the_example_in_the_guide_prints_what_it_says(tmp_path: Path) -> None:
    guide = (ROOT / "docs/guides/launching.md").read_text(encoding="utf-8")
    section = guide.partition("## From a program or a notebook\n")[2]
    example = section.partition("```python\n")[2].partition("```")[0]
    printed = example.rpartition("  # ")[2]
    assert run_script(write(tmp_path / "guide", example=example), cwd=tmp_path) == printed


def test_the_error_of_the_rank_that_failed_first_is_raised_here() -> None:
    class Odd(Exception):
        def __init__(self, what: str, *, at: int) -> None:
            super().__init__(f"no such {what}", {"at": at})  # not what it takes itself

    def step() -> None:
        ronde.init()
        if ronde.rank() == 1:
            raise Odd("step", at=7)
        ronde.barrier()

    with pytest.raises(Odd) as caught:
        ronde.run(step, np=2)
    assert caught.value.args == ("no such step", {"at": 7})
    assert "in rank 1:" in str(caught.value.__cause__) and ", in step\n" in str(caught.value.__cause__)
    assert "callee.py" not in str(caught.value.__cause__)


def _exit_with_text() -> NoReturn:
    sys.exit("enough")


def unpicklable() -> NoReturn:
    class Stubborn(Exception):
        def __init__(self) -> None:
            self.lock = threading.Lock()  # which stays where it is

    raise Stubborn


@pytest.mark.parametrize(
    ("fn", "code", "words"),
    [
        (unpicklable, 1, "rank 0 raised .*Stubborn"),
        (lambda: sys.exit(3), 3, "exited with code 3"),
        (_exit_with_text, 1, "| enough\n.*raised SystemExit: enough"),
        (lambda: os.kill(os.getpid(), signal.SIGINT), 130, "raised KeyboardInterrupt"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), 137, "killed by signal 9"),
        (lambda: os._exit(0), 1, "rank 0 exited before its function had returned"),
    ],
    ids=["unpicklable", "exit 3", "exit text", "interrupt", "killed", "left"],
)
def test_a_rank_with_no_error_to_raise_here_is_a_failed_job(fn: Any, code: int, words: str) -> None:
    with pytest.raises(ronde.JobFailed) as caught:
        ronde.run(fn, np=1)
    assert caught.value.code == code
    assert re.search(words, str(caught.value), re.DOTALL), caught.value


def test_a_result_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(TypeError, match="what the function returned cannot be sent back"):
        ronde.run(threading.Lock, np=1)


def test_a_function_that_exits_well_returns_none() -> None:
    assert ronde.run(sys.exit, np=1) == [None]


def test_large_arguments_and_results_travel() -> None:
    large = os.urandom(1 << 20) * 100
    (back,) = ronde.run(lambda data: data[::-1], (large,), np=1)
    assert back == large[::-1]


def test_it_runs_in_a_thread_and_inside_of_an_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()  # as in a notebook: text only, no file
    monkeypatch.setattr(sys, "stdout", shown)
    found: list[list[int]] = []

    async def cell() -> None:
        thread = threading.Thread(target=lambda: found.append(ronde.run(lambda: print("from a thread") or 1, np=1)))
        thread.start()
        found.append(ronde.run(lambda: print("from a loop") or 2, np=1))
        thread.join()

    asyncio.run(cell())
    assert sorted(found) == [[1], [2]]
    assert sorted(shown.getvalue().splitlines()) == ["[0] from a loop", "[0] from a thread"]


def test_a_rank_may_run_a_job_of_its_own() -> None:
    def outer() -> tuple[int, list[int]]:
        ronde.init()
        return ronde.size(), ronde.run(inner, np=2)

    def inner() -> int:
        ronde.init()
        return ronde.size() * 10 + ronde.rank()

    assert ronde.run(outer, np=1) == [(1, [20, 21])]


SCRIPT = """
    import sys
    import beside
    import ronde

    class Wrong(Exception):
        pass

    class Pair:
        def __init__(self, *both):
            self.both = both

    def work(pair):
        if pair.both == (0, 0):
            raise Wrong(pair)
        return Pair(beside.double(pair.both[0]), sys.argv[1:])

    if __name__ == "__main__":
        print("before")
        (result,) = ronde.run(work, [Pair(4, 5)], np=1)
        assert isinstance(result, Pair), result
        print(result.both)
        try:
            ronde.run(work, [Pair(0, 0)], np=1)
        except Wrong as error:
            print(error.args[0].both)
"""


def test_functions_and_classes_of_a_script_and_modules_next_to_it_are_found(tmp_path: Path) -> None:
    script = write(tmp_path / "code", script=SCRIPT, beside="def double(x):\n    return 2 * x\n")
    # Where one stands are files that must not be taken for what is installed.
    write(tmp_path / "here", pickle="raise SystemError", cloudpickle="raise SystemError", beside="raise SystemError")
    printed = run_script(script, "--fast", cwd=tmp_path / "here")
    assert printed == "before\n(8, ['--fast'])\n(0, 0)\n"


STAYING = """
    import os, time
    import ronde

    def stay():
        print("pid", os.getpid(), flush=True)
        while True:
            time.sleep(60)

    try:
        ronde.run(stay, np=2)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        raise
"""


@pytest.mark.parametrize(("number", "words"), [(signal.SIGINT, "interrupted\n"), (signal.SIGTERM, "")])
def test_what_ends_the_caller_ends_the_job_first(tmp_path: Path, number: signal.Signals, words: str) -> None:
    script = write(tmp_path / "code", script=STAYING)
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as caller:
        try:
            assert caller.stdout is not None
            pids = [int(caller.stdout.readline().split()[-1]) for _ in range(2)]
            caller.send_signal(number)
            out, err = caller.communicate(timeout=PATIENCE_S)
        finally:
            caller.kill()
    assert (caller.returncode, out) == (-number, words), err
    assert not any(psutil.pid_exists(pid) for pid in pids)


OVER_SSH = """
    import sys
    import ronde
    from ronde.launch.job import SshOptions

    def add(large):
        ronde.init()
        return ronde.cross_rank(), int(ronde.allreduce(ronde.rank() + 1)), large

    if __name__ == "__main__":
        hosts, port, identity, *options = sys.argv[1:]
        large = bytes(10_000_000)
        ssh = SshOptions(port=int(port), identity=identity, options=tuple(options))
        results = ronde.run(add, (large,), hosts=hosts, ssh=ssh)
        print([(place, total, back == large) for place, total, back in results])
"""


@needs_hosts
def test_ranks_may_be_on_other_hosts(tmp_path: Path) -> None:
    script = write(tmp_path / "code", script=OVER_SSH)
    with SshHosts(tmp_path) as hosts:
        a, b, _ = hosts.addresses
        options = (f"UserKnownHostsFile={tmp_path / 'known'}", "IdentitiesOnly=yes", "StrictHostKeyChecking=yes")
        words = (f"{a}:1,{b}:2", str(hosts.port), str(tmp_path / "user"), *options)
        printed = run_script(script, *words, cwd=tmp_path, before=hosts.exec(0))
        hosts.await_nothing_left()
    assert printed == "[(0, 6, True), (1, 6, True), (0, 6, True)]\n"
