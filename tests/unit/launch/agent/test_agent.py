"""An agent starts ranks, hands on all that they print, tells their ends, and leaves nothing of them."""

from __future__ import annotations

import errno
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from ronde.launch.agent.agent import choose_exit_reason
from ronde.launch.agent.orphans import COOKIE_VARIABLE
from ronde.launch.agent.rank import describe_spawn_error
from ronde.launch.protocol import (
    AgentHello,
    ExitReason,
    FunctionResult,
    PauseOutput,
    RankExit,
    RankOrder,
    RankOutput,
    RankStarted,
    ResizeTerminal,
    SignalRanks,
    StartRanks,
    StopAgent,
    UsageReport,
)
from ronde.net.addresses import host_identity
from ronde.types import Deadline
from tests.limits import promised_s
from tests.unit.launch.agent.watched_agent import an_agent, ends, order, python

FLOOD = "import os\nfor n in range({num}): os.write(1, b'%08d|' % n + bytes(range(256)) * 40); os.write(2, b'%08d' % n)"


def flood(num: int) -> tuple[bytes, bytes]:
    """What FLOOD prints to out and err."""
    out = b"".join(b"%08d|" % n + bytes(range(256)) * 40 for n in range(num))
    return out, b"".join(b"%08d" % n for n in range(num))


def test_a_rank_is_started_heard_and_its_end_told_in_this_order(tmp_path: Path) -> None:
    with an_agent() as watched:
        hello = watched.first(AgentHello)
        assert hello.host_identity == host_identity()
        assert 1 <= hello.effective_cpu_count <= len(hello.cpus)
        argv = ("sh", "-c", 'echo "$A in $PWD"; echo oops >&2; read x || exit 3')
        assert watched.run(order(argv, 5, env={"A": "b"}, cwd=str(tmp_path))) == {5: 3}
        assert watched.printed(5, "out") == f"b in {tmp_path}\n".encode()
        assert watched.printed(5, "err") == b"oops\n"
        kinds = [type(report) for report in watched.reports]
        assert kinds[:2] == [AgentHello, RankStarted] and kinds[-1] is RankExit


def test_an_empty_command_is_python_only_for_a_function() -> None:
    """As in `ronde run "$UNSET"`."""
    with an_agent() as watched:
        assert watched.run(order(("", "-c", ""))) == {0: 126}
    with an_agent() as watched:
        assert watched.run(order(("", "-c", "")), pickled_call=b"any") == {0: 0}


def test_a_rank_is_started_again_only_after_its_end() -> None:
    with an_agent() as watched:
        watched.run(order(("true",)))
        watched.reports.clear()
        watched.agent.handle(StartRanks((order(("sleep", "300")), order(("true",)))))
        assert "still runs" in watched.first(RankExit).detail


def test_a_rank_has_an_environment_a_group_and_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "secret")
    before = os.sched_getaffinity(0)
    text = (
        "import os; print(*sorted(os.environ), os.getsid(0) == os.getpgid(0) == os.getpid(), *os.sched_getaffinity(0))"
    )
    with an_agent() as watched:
        watched.run(RankOrder(0, python(text), {"A": "1", "LC_ALL": "C.UTF-8"}, "/", cpus=(max(before),)))
        assert watched.printed().decode().split() == ["A", "LC_ALL", COOKIE_VARIABLE, "True", str(max(before))]
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("argv", "more", "code", "words"),
    [
        (("no-such-command",), {}, 127, "there is no command 'no-such-command' on host .* check PATH"),
        (("./train.py",), {}, 126, r"train.py' may not be executed .* start it with python, or chmod \+x"),
        (("./garbage",), {}, 126, "garbage' is no program for host"),
        (("true",), {"cwd": "./nowhere"}, 127, "the working directory ./nowhere does not exist on host .* every host"),
        (("true",), {"cwd": "./train.py"}, 127, r"train.py cannot be entered \(Not a directory\)"),
        (("true", "\0"), {}, 127, "cannot be handed to a process: embedded null byte"),
        (("true", "x" * 10_000_000), {}, 127, "larger than the system allows"),
        (("true",), {"cpus": (100_000,)}, 127, r"cannot be bound to core 100000: host \S+ lets us use 0"),
    ],
    ids=["missing", "script", "garbage", "no directory", "not a directory", "null byte", "too large", "no such core"],
)
def test_what_cannot_be_started_says_why_and_the_others_run(
    argv: tuple[str, ...], more: dict[str, Any], code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print()")
    Path("garbage").write_bytes(b"\0\1\2\3")
    Path("garbage").chmod(0o755)
    before = os.sched_getaffinity(0)
    with an_agent() as watched:
        watched.agent.handle(StartRanks((order(argv, 0, **more), order(("true",), 1))))
        watched.until(lambda: len(watched.all(RankExit)) == 2)
        failed, ended = watched.all(RankExit)
        assert (failed.rank, failed.exit_code, failed.reason) == (0, code, ExitReason.NOT_STARTED)
        assert re.search(words, failed.detail)
        assert ended == RankExit(1, 0)
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EAGAIN, r"no more processes may be started; raise the limit \(ulimit -u\)"),
        (errno.EIO, "'train' could not be started on host .*: Input/output error"),
    ],
)
def test_what_the_system_lacks_is_told(number: int, words: str) -> None:
    assert re.search(words, str(describe_spawn_error(OSError(number, os.strerror(number)), order(("train",)))))


def test_a_rank_that_closes_its_output_is_still_waited_for() -> None:
    with an_agent() as watched:
        assert watched.run(order(("sh", "-c", "echo bye; exec >&- 2>&-; sleep 0.1; exit 4"))) == {0: 4}
        assert watched.printed() == b"bye\n"


def test_somebody_who_left_the_group_and_holds_the_pipe_does_not_delay_the_end() -> None:
    with an_agent() as watched:
        deadline = Deadline(promised_s(5.0))
        script = "trap '' TERM HUP; sleep 300 & echo $!; setsid sleep 300 & echo $!; echo last"
        assert watched.run(order(("sh", "-c", script))) == {0: 0}
        assert not deadline.expired
        child, daemon, last = watched.printed().split()
        assert last == b"last" and ends(int(child))
    assert ends(int(daemon))


@pytest.mark.parametrize("ptys", [False, True])
def test_pausing_makes_ranks_wait_and_loses_nothing(ptys: bool) -> None:
    with an_agent() as watched:
        watched.agent.handle(StartRanks((order(python(FLOOD.format(num=400)), output_ptys=ptys),)))
        watched.first(RankOutput)
        watched.agent.handle(PauseOutput(True))
        before = len(watched.all(RankOutput))
        ticks: list[int] = []
        watched.loop.call_later(0.2, lambda: ticks.append(1))
        watched.until(lambda: bool(ticks))
        assert len(watched.all(RankOutput)) == before
        watched.agent.handle(PauseOutput(False))
        assert watched.first(RankExit).exit_code == 0
        assert (watched.printed(0, "out"), watched.printed(0, "err")) == flood(400)


def test_a_rank_that_ends_during_a_pause_is_heard_to_its_last_word() -> None:
    with an_agent() as watched:
        watched.agent.handle(PauseOutput(True))
        watched.run(order(("sh", "-c", "echo last words")))
        assert watched.printed() == b"last words\n"


def test_signals_reach_the_ranks_that_are_meant() -> None:
    with an_agent() as watched:
        script = "trap 'exit 7' USR1; echo ready; while :; do sleep 0.01; done"
        watched.agent.handle(StartRanks(tuple(order(("sh", "-c", script), rank) for rank in range(2))))
        watched.until(lambda: all(watched.printed(rank) for rank in range(2)))
        watched.agent.handle(SignalRanks((1, 99), signal.SIGUSR1))
        end = watched.first(RankExit)
        assert (end.rank, end.exit_code) == (1, 7)
        watched.agent.handle(SignalRanks((0, 1), signal.SIGKILL))
        watched.until(lambda: len(watched.all(RankExit)) == 2)
        assert watched.all(RankExit)[1] == RankExit(0, -9)


def test_output_can_look_like_a_terminals_and_stay_as_it_is() -> None:
    text = (
        "import os, sys\n"
        "assert sys.stdout.isatty() and sys.stderr.isatty() and not sys.stdin.isatty()\n"
        "os.write(1, b'%d\\n' % os.get_terminal_size(2).columns + bytes(range(256)))"
    )
    with an_agent() as watched:
        assert watched.run(order(python(text), output_ptys=True)) == {0: 0}, watched.printed(0, "err")
        assert watched.printed() == b"80\n" + bytes(range(256))
        assert watched.printed(0, "err") == b""


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_follows_the_size_of_the_drivers(terminal: bool) -> None:
    text = "import os, time\nwhile os.get_terminal_size(1) != (132, 50): print('wait'); time.sleep(0.01)"
    with an_agent() as watched:
        watched.agent.handle(StartRanks((order(python(text), tty=terminal, output_ptys=not terminal),)))
        watched.first(RankOutput)
        watched.agent.handle(ResizeTerminal(0, 50, 132))
        assert watched.first(RankExit).exit_code == 0


CALL = """
import os, sys
with open(int(os.environ["RONDE_CALL_FD"]), "rb") as file: data = file.read()
with open(int(os.environ["RONDE_RESULT_FD"]), "wb") as file: file.write({result})
"""


def test_a_call_of_many_megabytes_goes_there_and_back() -> None:
    call = os.urandom(1_000_000) * 50
    with an_agent() as watched:
        text = CALL.format(result="len(data).to_bytes(8, 'big') + data[::-1]")
        assert watched.run(order(python(text)), pickled_call=call) == {0: 0}
        assert watched.all(FunctionResult) == [FunctionResult(0, call[::-1])]
        assert isinstance(watched.reports[-1], RankExit)


def test_a_result_that_was_not_finished_is_none() -> None:
    with an_agent() as watched:
        watched.run(order(python(CALL.format(result="(1000).to_bytes(8, 'big') + b'half'"))), pickled_call=b"x")
        assert watched.all(FunctionResult) == []


def test_a_rank_that_does_not_want_its_call_ends_all_the_same() -> None:
    with an_agent() as watched:
        assert watched.run(order(("true",)), pickled_call=b"x" * 10_000_000) == {0: 0}


def test_the_load_of_a_rank_and_its_children_is_told() -> None:
    burn = "sh -c 'while :; do :; done' & while :; do :; done"
    with an_agent() as watched:
        watched.agent.handle(StartRanks((order(("sh", "-c", burn), 3), order(("sleep", "300"), 4))))
        watched.until(
            lambda: any(load.ranks[0][1] > 0.1 for load in watched.all(UsageReport))
        )  # the cores may be others'
        last = watched.all(UsageReport)[-1]
        busy, idle = last.ranks
        assert (busy[0], idle[0]) == (3, 4)
        assert idle[1] < 0.1
        assert busy[2] > 100_000 and idle[2] > 100_000
        assert isinstance(last.gpus, tuple)


@pytest.mark.parametrize(
    ("code", "killed_by_agent", "oom_killed", "reason"),
    [
        (-9, False, True, ExitReason.OOM_KILLED),
        (-9, True, True, ExitReason.EXITED),
        (-9, False, False, ExitReason.EXITED),
        (1, False, True, ExitReason.OOM_SUSPECTED),
        (0, False, True, ExitReason.EXITED),
    ],
)
def test_want_of_memory_is_named_when_it_explains_an_exit(
    code: int, killed_by_agent: bool, oom_killed: bool, reason: ExitReason
) -> None:
    assert choose_exit_reason(code, killed_by_agent=killed_by_agent, oom_killed=oom_killed) is reason


def test_closing_kills_ranks_that_do_not_want_to_end_and_their_children() -> None:
    script = "trap '' TERM INT HUP; sh -c 'trap \"\" TERM; echo $$; sleep 300; sleep 300' & wait; wait"
    with an_agent() as watched:
        watched.agent.handle(StartRanks(tuple(order(("sh", "-c", script), rank) for rank in range(3))))
        watched.until(lambda: all(watched.printed(rank) for rank in range(3)))
        watched.agent.handle(StopAgent())
        watched.agent.close()
        pids = [each.pid for each in watched.all(RankStarted)] + [int(watched.printed(rank)) for rank in range(3)]
        assert all(ends(pid, promised_s(1.0)) for pid in pids)
        watched.agent.handle(StartRanks((order(("true",)),)))
        assert not watched.all(RankExit)


def test_whoever_hears_of_a_start_may_close_the_agent() -> None:
    with an_agent() as watched:
        watched.agent.on_report = lambda report: watched.agent.close() if isinstance(report, RankStarted) else None
        watched.agent.handle(StartRanks(tuple(order(("sleep", "300"), rank) for rank in range(3))))
        assert watched.agent._ranks == {}
