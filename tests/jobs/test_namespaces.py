"""Two hosts, as two network namespaces joined by a link: collectives are right, and when the link is cut, every rank on
both sides is told in time.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ronde.net.keys import new_job_key
from tests.jobs.jobs import Ranks, folder_of_ranks, program
from tests.limits import PATIENCE_S, promised_s
from tests.services import needs

ADDRESSES = ("10.77.0.1", "10.77.0.2")
"""Exist only inside of the namespaces."""
PORT = 29500
HEARTBEAT_S = 4.0
LATER_S = 0.5
"""Beyond the heartbeat: until what the kernel has noticed has reached everybody."""
TOLD_S = 1.0
"""From the death of a process to the error, on every other rank."""
LEAVING_S = 1.0

CAN_HAVE_NAMESPACES = os.geteuid() == 0 and shutil.which("ip")
needs_namespaces = needs(
    "network namespaces", missing="" if CAN_HAVE_NAMESPACES else "network namespaces need root and the command ip"
)
two_sizes = pytest.mark.parametrize("per_host", [1, 2], ids=["1+1", "2+2"])


def ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, timeout=PATIENCE_S, capture_output=True)


class Hosts:
    """Two namespaces and the link between them."""

    def __init__(self) -> None:
        self.names = [f"ronde-{os.getpid()}-{index}" for index in range(2)]
        self._links = [f"rt{os.getpid()}-{index}" for index in range(2)]

    def __enter__(self) -> Hosts:
        try:
            for name in self.names:
                ip("netns", "add", name)
            ip("link", "add", self._links[0], "type", "veth", "peer", "name", self._links[1])
            for name, link, address in zip(self.names, self._links, ADDRESSES, strict=True):
                ip("link", "set", link, "netns", name)
                ip("-n", name, "address", "add", f"{address}/24", "dev", link)
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", link, "up")
        except subprocess.CalledProcessError as error:
            self.__exit__()
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # The link goes with the namespaces; before it has moved there it is still ours.
        for words in (("link", "del", self._links[0]), *(("netns", "del", name) for name in self.names)):
            subprocess.run(("ip", *words), check=False, timeout=PATIENCE_S, capture_output=True)

    def cut(self) -> float:
        """Take the link down; when that was."""
        ip("-n", self.names[1], "link", "set", self._links[1], "down")
        return time.monotonic()


@contextmanager
def ranks_on(hosts: Hosts, per_host: int) -> Iterator[Ranks]:
    """Ranks started by hand on both hosts; rank 0 hosts the coordinator. All collectives went well."""
    size = 2 * per_host
    shared = {
        "RONDE_SIZE": str(size),
        "RONDE_COORDINATOR": f"{ADDRESSES[0]}:{PORT}",
        "RONDE_KEY": new_job_key(),
        "RONDE_HEARTBEAT_S": str(HEARTBEAT_S),
    }
    with folder_of_ranks() as (folder, opened):
        ranks = Ranks(size, folder, opened)
        for rank, output in enumerate(ranks.outputs):
            process = subprocess.Popen(
                ["ip", "netns", "exec", hosts.names[rank // per_host], *program("namespaces")],
                env={**os.environ, **ranks.env, **shared, "RONDE_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            opened.callback(end, process)
        ranks.meet()
        places = {rank: heard["place"] for rank, heard in ranks.hear_all(range(size), "right").items()}
        assert places == {rank: [rank % per_host, per_host, rank // per_host, 2] for rank in range(size)}
        yield ranks


def end(process: subprocess.Popen[bytes]) -> None:
    """However the test went."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(PATIENCE_S)


@needs_namespaces
@two_sizes
def test_collectives_between_hosts_are_right(per_host: int) -> None:
    with Hosts() as hosts, ranks_on(hosts, per_host) as ranks:
        everybody = range(2 * per_host)
        ranks.tell(everybody, moment="none")
        assert all(heard["leaving_s"] < promised_s(LEAVING_S) for heard in ranks.hear_all(everybody, "left").values())


@needs_namespaces
@two_sizes
@pytest.mark.parametrize("moment", ["waiting", "inside"])
def test_both_sides_of_a_cut_link_are_told(per_host: int, moment: str) -> None:
    with Hosts() as hosts, ranks_on(hosts, per_host) as ranks:
        everybody = range(2 * per_host)
        ranks.tell(everybody, moment=moment)
        ranks.hear_all(everybody, "under way")
        cut_at = hosts.cut()
        for rank, ended in ranks.hear_all(everybody, "ended").items():
            other_side = [other for other in everybody if other // per_host != rank // per_host]
            assert ended["error"] == "PeerLost" and ended["peer"] in other_side, (rank, ended)
            # Whichever connection the kernel gives up first: of data, or to the coordinator.
            assert "its host cannot be reached" in ended["text"], (rank, ended)
            assert ended["ended"] - cut_at < HEARTBEAT_S + promised_s(LATER_S), (rank, ended["ended"] - cut_at)
        for rank, left in ranks.hear_all(everybody, "left").items():
            assert left["leaving_s"] < promised_s(LEAVING_S), (rank, left)


@needs_namespaces
def test_a_death_on_another_host_is_told_at_once() -> None:
    with Hosts() as hosts, ranks_on(hosts, 2) as ranks:
        ranks.tell(range(4), moment="inside")
        ranks.hear_all(range(4), "under way")
        died_at = time.monotonic()
        os.kill(ranks.pids[3], signal.SIGKILL)
        for rank, ended in ranks.hear_all(range(3), "ended").items():
            assert (ended["error"], ended["peer"]) == ("PeerLost", 3), (rank, ended)
            assert ended["ended"] - died_at < promised_s(TOLD_S), (rank, ended["ended"] - died_at)
        assert all(left["leaving_s"] < promised_s(LEAVING_S) for left in ranks.hear_all(range(3), "left").values())
