"""How ranks find their round: settings that another launcher implies, the coordinator at one port or in a range of
them, and the other members. With real sockets; ranks are threads here."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ronde.comm import joining
from ronde.comm.joining import (
    complete_settings,
    expand_port_range,
    host_coordinator,
    join_round,
    settings_from_launcher,
)
from ronde.comm.launchers import LauncherEnvironment
from ronde.comm.world import World
from ronde.coordinator.round_planning import ElasticLimits
from ronde.coordinator.server import CoordinatorServer
from ronde.errors import JobFinished, LeftBehind, PeerLost, StartFailed
from ronde.net.addresses import candidate_addresses
from ronde.net.keys import JobKey, new_job_key
from ronde.net.messages import EndRound, LeaveReason
from ronde.settings import Settings, cache_dir, config_dir
from ronde.types import Deadline
from tests.forwarder import Forwarder
from tests.limits import PATIENCE_S
from tests.unit.comm.thread_ranks import KEY, free_address, run_ranks


def use(world: World) -> tuple[float, float, int, int]:
    x = np.ones(3)
    by_name, in_order = world.group.allreduce(x, name="x"), world.group.allreduce(x)
    return by_name[0], in_order[0], world.topology.local_rank, world.topology.cross_rank


# --- one port --------------------------------------------------------------------------------------------------------


def test_ranks_of_one_host_and_of_several_join_at_the_coordinator_of_rank_0() -> None:
    assert run_ranks(3, use) == [(3, 3, 0, 0), (3, 3, 1, 0), (3, 3, 2, 0)]
    assert run_ranks(3, use, lambda rank: {"host": f"host-{rank % 2}"}) == [(3, 3, 0, 0), (3, 3, 0, 1), (3, 3, 1, 0)]


def test_the_address_for_other_ranks_can_be_chosen() -> None:
    def addresses(world: World) -> list[str]:
        return [member.tcp_addresses[0].rpartition(":")[0] for member in world.topology.members]

    seen = run_ranks(2, addresses, lambda rank: {"address": f"127.0.0.{rank + 2}"})
    assert seen == [["127.0.0.2", "127.0.0.3"]] * 2


def test_a_job_of_several_ranks_needs_coordinator_and_key() -> None:
    with pytest.raises(ValueError, match=r"a job of 2 ranks needs coordinator \(RONDE_COORDINATOR\)"):
        join_round(Settings(size=2), (), 0)
    with pytest.raises(ValueError, match=r"needs key \(RONDE_KEY\)"):
        join_round(Settings(size=2, coordinator="127.0.0.1:1"), (), 0)


@pytest.mark.slow
def test_ranks_that_do_not_join_are_named() -> None:
    # The coordinator has to answer half a second before the rank gives up, on a busy machine as well.
    settings = Settings(size=3, coordinator=free_address(), key=KEY, start_s=5.0)
    with pytest.raises(StartFailed, match=r"ranks 1.* of 3 did not join"):
        join_round(settings, (), 0)


def test_ranks_that_do_not_join_are_named_by_a_coordinator_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ronde.coordinator.coordinator.START_MARGIN_S", -0.2)
    settings = Settings(size=3, coordinator=free_address(), key=KEY, start_s=0.5)
    with pytest.raises(StartFailed, match=r"ranks 1.* of 3 did not join"):
        join_round(settings, (), 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": new_job_key()}, ("did not join", "key")),
        ({"size": 3}, ("on the number of ranks|has a job of 3 ranks, the coordinator one of 2",) * 2),
        ({"num_sockets": 3}, ("on num_sockets: rank 0 gave 2; rank 1 gave 3; .*RONDE_NUM_SOCKETS",) * 2),
    ],
)
def test_ranks_that_differ_all_fail(changes: dict[str, Any], words: tuple[str, str]) -> None:
    results = run_ranks(2, use, lambda rank: changes if rank else {}, start_s=5.0)
    assert all(isinstance(result, StartFailed) for result in results), results
    assert all(re.search(each, str(result)) for each, result in zip(words, results, strict=True)), results


def test_a_rank_that_joins_while_messages_of_the_coordinator_get_lost_fails_soon() -> None:
    coordinator = CoordinatorServer("127.0.0.1", 0, 2, JobKey(KEY), settings=Settings(start_s=3600.0))
    with closing(coordinator), Forwarder(coordinator._control.port) as forwarder:
        coordinator._control.port = forwarder.port
        coordinator.start()

        def lose_messages() -> None:
            """As soon as rank 0 has asked to join. The answer could be among them."""
            while not coordinator._core._pending_round.joins:
                time.sleep(0.001)
            forwarder.swallow_to_client = True
            while not forwarder.num_swallowed:
                time.sleep(0.001)
            forwarder.cut()

        thread = threading.Thread(target=lose_messages)
        thread.start()
        settings = Settings(size=2, coordinator=coordinator.address, coordinator_hosted=True, key=KEY, start_s=3600.0)
        with pytest.raises(StartFailed, match=r"rank 0 could not join: .* messages? of the coordinator got lost"):
            join_round(settings, (), 0)
        thread.join()


def test_shared_memory_of_another_size_is_refused_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "describe_compatibility", lambda settings: {})
    results = run_ranks(2, use, lambda rank: {"slot_bytes": (4 << 20) + (1 << 20) * rank})
    assert re.search(r"rank 1 could not open channel 0.*: the shared memory of its host has \d+ bytes", str(results[1]))
    assert isinstance(results[0], PeerLost) and "rank 1" in str(results[0]), results


@pytest.mark.parametrize("of_rank_1", ["mine.json", ""])
def test_ranks_record_for_the_timeline_of_the_coordinator_and_are_told_that_another_has_no_effect(
    of_rank_1: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "trace.json")
    timelines = run_ranks(
        2, lambda world: world.settings.timeline, lambda rank: {"timeline": of_rank_1 if rank else path}
    )
    assert timelines == [path, path]
    told = f"timeline='mine.json' has no effect: the coordinator writes the timeline, and was given {path!r}."
    assert (told in caplog.text) == bool(of_rank_1)


def test_a_timeline_that_the_launcher_with_the_coordinator_does_not_know_has_no_effect_and_ranks_say_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    coordinator = CoordinatorServer("127.0.0.1", 0, 1, JobKey(KEY), settings=Settings())
    with closing(coordinator):
        coordinator.start()
        given: dict[str, Any] = {"coordinator_hosted": True, "timeline": "mine.json"}
        timelines = run_ranks(
            1, lambda world: world.settings.timeline, lambda rank: given, coordinator=coordinator.address
        )
    assert timelines == [""]
    assert "was given none. Give it to `ronde run` (--timeline)" in caplog.text


# --- a range of ports ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("a:1", ["a:1"]),
        ("a:7-9", ["a:7", "a:8", "a:9"]),
        ("a:7-7", ["a:7"]),
        ("my-host-2:7", ["my-host-2:7"]),
        ("my-host:7-8", ["my-host:7", "my-host:8"]),
        ("[::1]:7-8", ["[::1]:7", "[::1]:8"]),
        ("[fe80::1%eth-0]:7", ["[fe80::1%eth-0]:7"]),
    ],
)
def test_a_range_stands_for_its_ports(text: str, addresses: list[str]) -> None:
    assert expand_port_range(text) == addresses


@pytest.mark.parametrize("text", ["a:9-7", "a:1-5000", "a:7-x", "a:x-7", "a:7-", "a-b", "a:70000-70001", "a:-7"])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="address"):
        expand_port_range(text)


@pytest.fixture
def taken_port() -> Iterator[int]:
    """The first of a few ports in a row; another program listens on it and never answers."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


def port_range(first: int) -> str:
    return f"127.0.0.1:{first}-{min(first + 9, 65535)}"


def make(rank: int, coordinator: str, start_s: float = 10.0) -> Settings:
    return Settings(rank=rank, size=2, coordinator=coordinator, key=KEY, start_s=start_s)


def test_rank_0_takes_the_first_free_port_and_the_others_find_it(taken_port: int) -> None:
    sums = run_ranks(2, lambda world: float(world.group.allreduce(np.ones(1))[0]), coordinator=port_range(taken_port))
    assert sums == [2.0, 2.0]


def test_a_coordinator_that_is_not_there_is_named_in_time() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # nobody listens
        first = sock.getsockname()[1]
        for coordinator in (f"127.0.0.1:{first}", f"127.0.0.1:{first}-{first}", port_range(first)):
            with pytest.raises(StartFailed) as caught:
                join_round(make(1, coordinator, start_s=0.2), (), 0)
            assert f"127.0.0.1:{first}" in str(caught.value)
    assert "did not find the coordinator of rank 0" in str(caught.value)


def test_a_wrong_key_in_the_whole_range_is_reported_even_if_its_coordinator_has_ended(
    taken_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ronde.comm.joining.FIRST_CONNECT_TIMEOUT_S", 2.0)
    other = host_coordinator(make(0, port_range(taken_port)), JobKey(new_job_key()), Deadline(0))
    errors: list[str] = []

    def search() -> None:
        with pytest.raises(StartFailed) as caught:
            join_round(make(1, port_range(taken_port + 1), start_s=3.0), (), 0)
        errors.append(str(caught.value))

    thread = threading.Thread(target=search)
    thread.start()
    while not other._listener.num_refused and thread.is_alive():
        time.sleep(0.001)  # who spins keeps the other threads from the interpreter
    other.close()
    thread.join()
    assert re.search(r"refused the job's key.*the same RONDE_KEY, or a home directory", errors[0])


def test_a_range_without_a_free_port_or_of_an_unknown_host_is_reported_at_once(taken_port: int) -> None:
    with pytest.raises(StartFailed, match="cannot listen on"):
        host_coordinator(make(0, f"127.0.0.1:{taken_port}-{taken_port}"), JobKey(KEY), Deadline(0))
    deadline = Deadline(30)
    with pytest.raises(StartFailed, match="unknown"):
        join_round(make(1, "no-such-host.invalid:7-9", start_s=30.0), (), 0)
    assert deadline.remaining_s > 20


# --- settings that another launcher implies --------------------------------------------------------------------------


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RONDE_RANK", "RONDE_SIZE", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def torch_variables(no_launcher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("torch_variables")
def test_rank_size_coordinator_and_key_come_from_the_launcher() -> None:
    settings = complete_settings({"stall_s": 5.0})
    assert (settings.rank, settings.size, settings.stall_s) == (1, 2, 5.0)
    assert settings.coordinator == "127.0.0.1:29501-29516"
    assert len(settings.key) == 64


@pytest.mark.usefixtures("torch_variables")
@pytest.mark.parametrize("name", ["rank", "size"])
def test_a_given_rank_or_size_replaces_all_that_the_launcher_implies(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert complete_settings({name: int(name == "size")}) == Settings()
    monkeypatch.setenv(f"RONDE_{name.upper()}", str(int(name == "size")))
    assert complete_settings({}) == Settings()


@pytest.mark.usefixtures("torch_variables")
def test_a_job_of_one_makes_no_secret(no_launcher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert complete_settings({}) == Settings()
    assert not list(no_launcher.iterdir())


@pytest.mark.usefixtures("no_launcher")
def test_ranks_of_a_tf_config_meet_at_the_first_task_and_at_no_port_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = '{"chief": ["192.0.2.7:2222"], "worker": ["192.0.2.8:2222", "192.0.2.8:2224"]}'
    found = []
    for task in ('"type": "chief", "index": 0', '"type": "worker", "index": 1'):
        monkeypatch.setenv("TF_CONFIG", f'{{"cluster": {cluster}, "task": {{{task}}}}}')
        found.append(complete_settings({}))
    assert [(each.rank, each.size, each.coordinator) for each in found] == [
        (rank, 3, "192.0.2.7:2225-2240") for rank in (0, 2)
    ]
    assert found[0].key == found[1].key != ""
    monkeypatch.setenv("RONDE_RANK", "1")  # a rank of `ronde run`, which has a TF_CONFIG, too
    monkeypatch.setenv("RONDE_SIZE", "2")
    assert complete_settings({}) == Settings(rank=1, size=2)


def test_the_users_folder_follows_the_convention() -> None:
    assert config_dir({"XDG_CONFIG_HOME": "/c"}) == Path("/c/ronde")
    assert config_dir({"XDG_CONFIG_HOME": "relative"}) == Path.home() / ".config/ronde"
    assert cache_dir({"XDG_CACHE_HOME": "/c"}) == Path("/c/ronde")
    assert cache_dir({}) == Path.home() / ".cache/ronde"


def srun(rank: int = 1, job: str = "srun 7", host: str = "127.0.0.1", is_one_host: bool = False) -> LauncherEnvironment:
    return LauncherEnvironment(launcher="srun", rank=rank, size=2, job=job, host=host, is_one_host=is_one_host)


@pytest.mark.usefixtures("no_launcher")
def test_ranks_derive_the_same_key_and_ports_from_the_same_job() -> None:
    first = settings_from_launcher(Settings(), srun(is_one_host=True))
    assert first == settings_from_launcher(Settings(), srun(is_one_host=True))
    assert first.coordinator.startswith("127.0.0.1:2")
    other = settings_from_launcher(Settings(), srun(job="srun 8"))
    assert other.key != first.key and other.coordinator != first.coordinator
    given = settings_from_launcher(Settings(coordinator="a:1", key=KEY), srun())
    assert (given.rank, given.size, given.coordinator, given.key) == (1, 2, "a:1", KEY)


@pytest.mark.usefixtures("no_launcher")
def test_several_hosts_never_use_the_loopback_that_a_hosts_own_name_may_stand_for() -> None:
    elsewhere = settings_from_launcher(Settings(), srun(host="192.0.2.7")).coordinator
    host, _, ports = settings_from_launcher(Settings(), srun(rank=0, host="localhost")).coordinator.rpartition(":")
    assert elsewhere == f"192.0.2.7:{ports}"
    assert host == candidate_addresses()[0]
    with pytest.raises(StartFailed, match=r"no-such-host\.invalid"):
        settings_from_launcher(Settings(), srun(rank=0, host="no-such-host.invalid"))


MPI = LauncherEnvironment(launcher="Open MPI", rank=1, size=2, rank_variable="OMPI_COMM_WORLD_RANK")


def test_an_mpi_on_several_hosts_is_asked_for_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_mpi(settings: Settings) -> Settings:
        if settings.stall_s:
            raise StartFailed("mpi4py is not there")
        return settings.replace(coordinator="from:1", key="0" * 64)

    monkeypatch.setattr(joining, "settings_from_mpi", from_mpi)
    found = settings_from_launcher(Settings(stall_s=0.0), MPI)
    assert (found.rank, found.size, found.coordinator) == (1, 2, "from:1")
    with pytest.raises(StartFailed, match=r"Open MPI started 2 ranks.*mpi4py is not there.*RONDE_COORDINATOR="):
        settings_from_launcher(Settings(stall_s=1.0), MPI)


@pytest.mark.usefixtures("no_launcher")
def test_with_a_coordinator_mpi_is_not_asked_and_the_key_follows_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "settings_from_mpi", None)
    first, again, other = (
        settings_from_launcher(Settings(coordinator=coordinator), MPI) for coordinator in ("a:1", "a:1", "a:2")
    )
    assert first.coordinator == "a:1"
    assert first.key == again.key != other.key


# --- elastic jobs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def elastic(monkeypatch: pytest.MonkeyPatch) -> Iterator[ElasticJob]:
    identity = threading.local()
    monkeypatch.setattr(joining, "worker_identity", lambda: identity.own)
    job = ElasticJob(identity)
    yield job
    job.close()


class ElasticJob:
    """A job that starts with two ranks. Its workers are threads, each with an identity of its own."""

    def __init__(self, identity: threading.local) -> None:
        limits = ElasticLimits(start_ranks=2, timeout_s=PATIENCE_S)
        self.settings = Settings(size=2, key=KEY, coordinator_hosted=True, elastic=True, elastic_timeout_s=PATIENCE_S)
        self.coordinator = CoordinatorServer(
            "127.0.0.1", 0, 2, JobKey(KEY), settings=self.settings, rounds=None, limits=limits
        )
        self.coordinator.start()
        self.settings = self.settings.replace(coordinator=self.coordinator.address)
        self._identity = identity
        self._pool = ThreadPoolExecutor(8)
        self.worlds: dict[int, World] = {}

    def join(self, worker: int, *, ready: bool = False, timeout_s: float = PATIENCE_S) -> Future[World]:
        settings = self.settings.replace(worker=worker, elastic_timeout_s=timeout_s)

        def join() -> World:
            self._identity.own = f"worker{worker}"
            self.worlds[worker] = World(join_round(settings, (), 0, ready=ready))
            return self.worlds[worker]

        return self._pool.submit(join)

    def start(self, *workers: int) -> list[World]:
        return [joined.result(PATIENCE_S) for joined in [self.join(worker) for worker in workers]]

    def close(self) -> None:
        for world in self.worlds.values():
            world.close()
        self._pool.shutdown()
        self.coordinator.close()


def test_the_ranks_of_an_elastic_job_are_given_by_the_coordinator(elastic: ElasticJob) -> None:
    worlds = elastic.start(7, 3)
    assert sorted((world.rank, world.size) for world in worlds) == [(0, 2), (1, 2)]
    assert [world.can_rejoin and not world.is_candidate for world in worlds] == [True, True]
    sums = [world.group.allreduce(np.ones(1), wait=False) for world in worlds]
    assert [work.wait().tolist() for work in sums] == [[2.0]] * 2


def test_who_comes_later_is_a_world_of_one_until_it_is_ready(elastic: ElasticJob) -> None:
    members = elastic.start(0, 1)
    candidate = elastic.join(2).result(PATIENCE_S)
    assert (candidate.rank, candidate.size, candidate.is_candidate, candidate.can_rejoin) == (2, 3, True, True)
    assert candidate.group.allreduce(np.ones(2)).tolist() == [1.0, 1.0]
    assert candidate.group.broadcast(np.ones(2), root=0).tolist() == [1.0, 1.0]
    assert not any(world.change_wanted for world in members)
    candidate.close()
    joining = [elastic.join(2, ready=True)]
    deadline = Deadline(PATIENCE_S)
    while not all(world.change_wanted for world in members):
        assert not deadline.expired
        time.sleep(0.001)
    for number in (0, 1):
        elastic.worlds[number].close(LeaveReason.REJOINING)
        joining.append(elastic.join(number, ready=True))
    assert [(world.rank, world.size) for world in (each.result(PATIENCE_S) for each in joining)] == [
        (2, 3),
        (0, 3),
        (1, 3),
    ]


def test_who_comes_when_the_job_is_finished_is_told_so(elastic: ElasticJob) -> None:
    for world in elastic.start(0, 1):
        world.close(LeaveReason.FINISHED)
    with pytest.raises(JobFinished, match="the job is finished"):
        elastic.join(2).result(PATIENCE_S)


def test_who_has_left_for_good_is_not_taken_back(elastic: ElasticJob) -> None:
    _, leaving = elastic.start(0, 1)
    leaving.close(LeaveReason.PREEMPTED)
    number = next(number for number, world in elastic.worlds.items() if world is leaving)
    with pytest.raises(LeftBehind, match="the others have gone on without it"):
        elastic.join(number, ready=True).result(PATIENCE_S)


def test_while_the_coordinator_answers_it_decides_how_long_a_worker_waits(
    elastic: ElasticJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "ANSWER_GRACE_S", 0.0)
    elastic.start(0, 1)
    elastic.worlds[1].close(LeaveReason.REJOINING)
    joined = elastic.join(1, ready=True, timeout_s=3.0)
    with pytest.raises(TimeoutError):
        joined.result(4.0)  # worker 0 is busy, and longer than worker 1 would wait for an answer
    elastic.worlds[0].close(LeaveReason.REJOINING)
    other = elastic.join(0, ready=True)
    assert [each.result(PATIENCE_S).size for each in (joined, other)] == [2, 2]


def test_a_worker_whose_coordinator_does_not_answer_says_which_one_it_is(
    elastic: ElasticJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "ANSWER_GRACE_S", 0.0)
    monkeypatch.setattr(joining, "RankHeartbeatReply", EndRound)  # so that no answer counts
    with pytest.raises(StartFailed, match=r"worker 5 got no answer .* within 0.5 s; .*RONDE_ELASTIC_TIMEOUT_S"):
        elastic.join(5, timeout_s=0.5).result(PATIENCE_S)


def test_a_coordinator_that_was_there_before_is_not_waited_for_long() -> None:
    settings = Settings(size=2, key=KEY, coordinator=free_address(), coordinator_hosted=True, heartbeat_s=0.1)
    with pytest.raises(StartFailed, match=r"nobody listens there .*for 0\.1 s"):
        join_round(settings, (), 1, ready=True, address=settings.coordinator)
