"""Two hosts, as two network namespaces joined by a link: collectives are right, and when the link is cut, every rank on
both sides gets an error in time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ronde.launch.job import ELASTIC_HEARTBEAT_S
from ronde.net.keys import new_job_key
from tests.jobs.kit import ControlledRanks, NetworkHosts, ip, kill, needs_namespaces, script, short_folder
from tests.limits import promised_s

PORT = 29500
HEARTBEAT_S = 4.0
CUT_KNOWN_S = 3.0
"""In an elastic job."""
LATER_S = 0.5
"""Beyond the heartbeat: until what the kernel has noticed has reached everybody."""
TOLD_S = 1.0
"""From the death of a process to the error, on every other rank."""
LEAVING_S = 1.0

two_sizes = pytest.mark.parametrize("per_host", [1, 2], ids=["1+1", "2+2"])


def cut_off(hosts: NetworkHosts) -> float:
    """Take the link of the second host down; returns when that was."""
    ip("-n", hosts.names[1], "link", "set", "net0", "down")
    return time.monotonic()


@contextmanager
def ranks_on(hosts: NetworkHosts, per_host: int, heartbeat_s: float = HEARTBEAT_S) -> Iterator[ControlledRanks]:
    """ControlledRanks started by hand on both hosts; rank 0 hosts the coordinator. All collectives went well."""
    size = 2 * per_host
    shared = {
        "RONDE_SIZE": str(size),
        "RONDE_COORDINATOR": f"{hosts.addresses[0]}:{PORT}",
        "RONDE_KEY": new_job_key(),
        "RONDE_HEARTBEAT_S": str(heartbeat_s),
    }
    with short_folder() as (folder, opened):
        ranks = ControlledRanks(size, folder, opened)
        for rank, output in enumerate(ranks.outputs):
            process = subprocess.Popen(
                [*hosts.exec(rank // per_host), *script("namespaces")],
                env={**os.environ, **ranks.env, **shared, "RONDE_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            opened.callback(kill, process)
        ranks.accept()
        places = {rank: message["place"] for rank, message in ranks.receive_all(range(size), "right").items()}
        assert places == {rank: [rank % per_host, per_host, rank // per_host, 2] for rank in range(size)}
        yield ranks


@needs_namespaces
@two_sizes
def test_collectives_between_hosts_are_right(per_host: int) -> None:
    with NetworkHosts(2) as hosts, ranks_on(hosts, per_host) as ranks:
        everybody = range(2 * per_host)
        ranks.send(everybody, moment="none")
        assert all(
            message["leaving_s"] < promised_s(LEAVING_S) for message in ranks.receive_all(everybody, "left").values()
        )


@needs_namespaces
@two_sizes
@pytest.mark.parametrize("moment", ["waiting", "inside"])
def test_both_sides_of_a_cut_link_are_told(per_host: int, moment: str) -> None:
    with NetworkHosts(2) as hosts, ranks_on(hosts, per_host) as ranks:
        everybody = range(2 * per_host)
        ranks.send(everybody, moment=moment)
        ranks.receive_all(everybody, "under way")
        cut_at = cut_off(hosts)
        for rank, ended in ranks.receive_all(everybody, "ended").items():
            other_side = [other for other in everybody if other // per_host != rank // per_host]
            assert ended["error"] == "PeerLost" and ended["peer"] in other_side, (rank, ended)
            # Whichever connection the kernel gives up first: of data, or to the coordinator.
            assert "its host cannot be reached" in ended["text"], (rank, ended)
            assert ended["ended"] - cut_at < HEARTBEAT_S + promised_s(LATER_S), (rank, ended["ended"] - cut_at)
        for rank, left in ranks.receive_all(everybody, "left").items():
            assert left["leaving_s"] < promised_s(LEAVING_S), (rank, left)


@needs_namespaces
@pytest.mark.parametrize("moment", ["waiting", "inside"])
@pytest.mark.parametrize("deaf", [0, 1])
def test_with_the_heartbeat_of_elastic_jobs_a_cut_in_one_direction_is_noticed_on_both_sides_within_3_s(
    deaf: int, moment: str
) -> None:
    """Nothing arrives at host 0, which has the coordinator, or at host 1."""
    with NetworkHosts(2) as hosts, ranks_on(hosts, 2, ELASTIC_HEARTBEAT_S) as ranks:
        ranks.send(range(4), moment=moment)
        ranks.receive_all(range(4), "under way")
        with hosts.cut_one_way(deaf):
            cut_at = time.monotonic()
            for rank, ended in ranks.receive_all(range(4), "ended").items():
                # Of whom and why depends on who notices first: what one side closes or declares lost, the other hears.
                assert ended["error"] == "PeerLost", (rank, ended)
                assert ended["ended"] - cut_at < CUT_KNOWN_S + promised_s(LATER_S), (rank, ended["ended"] - cut_at)
            ranks.receive_all(range(4), "left")


@needs_namespaces
def test_a_death_on_another_host_is_told_at_once() -> None:
    with NetworkHosts(2) as hosts, ranks_on(hosts, 2) as ranks:
        ranks.send(range(4), moment="inside")
        ranks.receive_all(range(4), "under way")
        died_at = time.monotonic()
        os.kill(ranks.pids[3], signal.SIGKILL)
        for rank, ended in ranks.receive_all(range(3), "ended").items():
            assert (ended["error"], ended["peer"]) == ("PeerLost", 3), (rank, ended)
            assert ended["ended"] - died_at < promised_s(TOLD_S), (rank, ended["ended"] - died_at)
        assert all(left["leaving_s"] < promised_s(LEAVING_S) for left in ranks.receive_all(range(3), "left").values())
