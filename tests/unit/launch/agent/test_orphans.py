"""What an orphan killer watches ends with the process that made it, and nothing else does."""

from __future__ import annotations

import subprocess
import sys
import time

from ronde.launch.agent.orphans import OrphanKiller
from ronde.types import Deadline
from tests.limits import promised_s
from tests.unit.launch.agent.watched_agent import ends

SLEEP = ["sleep", "300"]

HOLDER = """
import signal, subprocess, sys
from ronde.launch.agent.orphans import OrphanKiller
orphan_killer = OrphanKiller()
shell = ["sh", "-c", "trap '' TERM; sleep 300 & echo $!; wait"]  # a rank that ignores SIGTERM, with a child
ranks = [subprocess.Popen(shell, start_new_session=True, stdout=subprocess.PIPE) for _ in range(3)]
children = [int(rank.stdout.readline()) for rank in ranks]
shell = ["setsid", "sh", "-c", "sleep 300 & echo $!"]  # leaves a daemon: nobody's child, in nobody's group
children.append(int(subprocess.Popen(shell, env=orphan_killer.cookie, stdout=subprocess.PIPE).stdout.readline()))
for rank in ranks:
    orphan_killer.watch_group(rank.pid)
orphan_killer.forget_group(ranks[2].pid)
print(orphan_killer.pid, *(rank.pid for rank in ranks), *children, flush=True)
signal.pause()
"""


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(SLEEP, start_new_session=True)


def test_a_killed_process_takes_its_groups_along_within_a_second() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        orphan_killer, a, b, forgotten, child_a, child_b, child, daemon = map(int, holder.stdout.readline().split())
        holder.kill()
    deadline = Deadline(promised_s(1.0))
    assert all(ends(pid, deadline.remaining_s) for pid in (a, b, child_a, child_b, daemon, orphan_killer))
    for pid in (forgotten, child):
        assert not ends(pid, 0.0)
        subprocess.run(["kill", "-KILL", str(pid)], check=True)


def test_closing_ends_the_groups_that_are_left() -> None:
    with sleeper() as left, sleeper() as ended:
        orphan_killer = OrphanKiller()
        orphan_killer.watch_group(left.pid)
        for group in range(2**30, 2**30 + 1000):  # numbers that no process has
            orphan_killer.watch_group(group)
        orphan_killer.watch_group(ended.pid)
        orphan_killer.forget_group(ended.pid)
        orphan_killer.close()
        orphan_killer.close()
        assert left.wait(10) == -9
        assert ended.poll() is None
        ended.kill()


def test_an_orphan_killer_that_was_killed_or_stopped_holds_up_nobody() -> None:
    orphan_killer = OrphanKiller()
    subprocess.run(["kill", "-KILL", str(orphan_killer.pid)], check=True)
    assert ends(orphan_killer.pid)
    orphan_killer.watch_group(1 << 30)
    orphan_killer.close()

    orphan_killer = OrphanKiller()
    subprocess.run(["kill", "-STOP", str(orphan_killer.pid)], check=True)
    for _ in range(10_000):
        orphan_killer.watch_group(1 << 30)
    subprocess.run(["kill", "-CONT", str(orphan_killer.pid)], check=True)
    before_s = time.monotonic()
    orphan_killer.close()
    assert time.monotonic() - before_s < promised_s(5.0)
