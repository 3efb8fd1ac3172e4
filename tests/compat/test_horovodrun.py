"""The command horovodrun and horovod.run, with real processes: output, exit codes, results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import horovod
from tests.commands import PROGRAMS, run_command


def horovodrun(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return run_command([PROGRAMS / "horovodrun", *words])


def test_what_processes_print_is_shown_and_filed_as_ever(tmp_path: Path) -> None:
    code = "import os, sys; print('out', os.environ['HOROVOD_RANK']); print('err', file=sys.stderr)"
    done = horovodrun("-np", "2", "--cycle-time-ms", "1", "--output-filename", tmp_path, sys.executable, "-c", code)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>:out 0", "[1]<stdout>:out 1"]
    note = "horovodrun: --cycle-time-ms has no effect: there is no cycle: operations start when every process is ready"
    assert sorted(done.stderr.splitlines()) == ["[0]<stderr>:err", "[1]<stderr>:err", note]
    assert (tmp_path / "rank.1" / "stdout").read_text() == "out 1\n"
    assert (tmp_path / "rank.0" / "stderr").read_text() == "err\n"


def test_it_starts_as_a_module_too() -> None:
    done = run_command([sys.executable, "-W", "error", "-m", "horovod.runner.launch", "--version"])
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{horovod.__version__}\n", "")


@pytest.mark.parametrize(("action", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 128 + 9)])
def test_the_exit_code_is_that_of_the_process_that_failed(action: str, code: int) -> None:
    script = f"import os, sys\nif os.environ['HOROVOD_RANK'] == '1': {action}"
    done = horovodrun("-np", "2", sys.executable, "-c", script)
    assert done.returncode == code
    assert "rank 1" in done.stderr


def test_a_function_is_called_by_every_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def place(prefix: str, *, times: int) -> list[str]:
        import os

        print("here")
        return [prefix + os.environ["HOROVOD_RANK"]] * times

    results = horovod.run(place, ("rank ",), {"times": 2}, num_proc=2, output_filename=str(tmp_path))
    assert results == [["rank 0"] * 2, ["rank 1"] * 2]
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0]<stdout>:here", "[1]<stdout>:here"]
    assert (tmp_path / "rank.0" / "stdout").read_text() == "here\n"


def test_what_a_function_raises_is_the_reason_of_a_runtime_error() -> None:
    def fail() -> None:
        raise KeyError("lost")

    with pytest.raises(RuntimeError, match="KeyError: 'lost'") as caught:
        horovod.run(fail, num_proc=1)
    assert isinstance(caught.value.__cause__, KeyError)


def test_arguments_of_run_that_are_old_or_wrong() -> None:
    for arguments, words in [
        ({"hosts": "a:1", "hostfile": "b"}, "not both"),
        ({"use_gloo": True, "use_mpi": True}, "not both"),
        ({"hosts": "a:1", "host_discovery_script": "b"}, "not both"),
    ]:
        with pytest.raises(ValueError, match=words):
            horovod.run(print, **arguments)  # type: ignore[arg-type]
    with pytest.warns(DeprecationWarning, match="use num_proc"), pytest.warns(UserWarning, match="--mpi has no effect"):
        assert horovod.run(int, np=1, use_mpi=True) == [0]
