"""What a rank that something else started makes of its surroundings."""

from __future__ import annotations

from pathlib import Path

import pytest

from ronde.comm.joining import complete_settings, settings_from_launcher
from ronde.comm.launchers import LauncherEnvironment
from ronde.errors import StartFailed
from ronde.net.addresses import candidate_addresses
from ronde.net.keys import new_job_key
from ronde.settings import Settings

HERE = LauncherEnvironment(launcher="srun", rank=1, size=2, job="srun 7", host="127.0.0.1", is_one_host=True)
AWAY = LauncherEnvironment(launcher="srun", rank=1, size=2, job="srun 7", host="192.0.2.7")
MPI = LauncherEnvironment(launcher="Open MPI", rank=1, size=2, rank_variable="OMPI_COMM_WORLD_RANK")


@pytest.fixture(autouse=True)
def nobody_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RONDE_RANK", "RONDE_SIZE"):
        monkeypatch.delenv(name, raising=False)


def torch_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)


def test_nobody_around_is_a_job_of_one() -> None:
    assert complete_settings({}) == Settings()


def test_the_place_comes_from_the_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_around(monkeypatch)
    settings = complete_settings({"stall_s": 5.0})
    assert (settings.rank, settings.size, settings.stall_s) == (1, 2, 5.0)
    assert settings.coordinator == "127.0.0.1:29501-29516"
    assert len(settings.key) == 64


@pytest.mark.parametrize("name", ["rank", "size"])
def test_whoever_tells_the_rank_or_the_size_tells_the_whole_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_around(monkeypatch)
    assert complete_settings({name: int(name == "size")}) == Settings()
    monkeypatch.setenv(f"RONDE_{name.upper()}", str(int(name == "size")))
    assert complete_settings({}) == Settings()


def test_a_job_of_one_needs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch_around(monkeypatch)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert complete_settings({}) == Settings()
    assert not list(tmp_path.iterdir()), "not even a secret"


def test_ranks_agree_on_key_and_meeting_place_without_a_word() -> None:
    first = settings_from_launcher(Settings(), HERE)
    assert first == settings_from_launcher(Settings(), HERE)
    assert first.coordinator.startswith("127.0.0.1:2")
    other = settings_from_launcher(
        Settings(), LauncherEnvironment(launcher="srun", rank=1, size=2, job="srun 8", host="127.0.0.1")
    )
    assert other.key != first.key and other.coordinator != first.coordinator


def test_a_given_coordinator_or_key_stays() -> None:
    key = new_job_key()
    settings = settings_from_launcher(Settings(coordinator="a:1", key=key), HERE)
    assert (settings.rank, settings.size, settings.coordinator, settings.key) == (1, 2, "a:1", key)


def test_several_hosts_do_not_meet_on_the_loopback_that_a_hosts_own_name_may_stand_for() -> None:
    zero = LauncherEnvironment(launcher="srun", rank=0, size=2, job="srun 7", host="localhost")
    assert settings_from_launcher(Settings(), AWAY).coordinator.startswith("192.0.2.7:")
    host, _, ports = settings_from_launcher(Settings(), zero).coordinator.rpartition(":")
    assert ports == settings_from_launcher(Settings(), AWAY).coordinator.rpartition(":")[2]
    assert host == candidate_addresses()[0]


def test_a_host_that_nobody_knows_is_named() -> None:
    lost = LauncherEnvironment(launcher="srun", rank=0, size=2, job="srun 7", host="no-such-host.invalid")
    with pytest.raises(StartFailed, match=r"no-such-host\.invalid"):
        settings_from_launcher(Settings(), lost)


def test_an_mpi_on_several_hosts_is_asked_itself() -> None:
    def ask(settings: Settings) -> Settings:
        assert (settings.rank, settings.size) == (1, 2)
        return Settings(rank=1, size=2, coordinator="from:1", key="0" * 64)

    assert settings_from_launcher(Settings(), MPI, from_mpi=ask).coordinator == "from:1"


def test_when_mpi_cannot_be_asked_the_way_out_is_named() -> None:
    def ask(settings: Settings) -> Settings:
        raise StartFailed("mpi4py is not there")

    with pytest.raises(StartFailed, match=r"Open MPI started 2 ranks.*mpi4py is not there.*RONDE_COORDINATOR="):
        settings_from_launcher(Settings(), MPI, from_mpi=ask)


def test_with_a_coordinator_an_mpi_need_not_be_asked_and_hosts_agree_on_the_key() -> None:
    def ask(settings: Settings) -> Settings:
        raise AssertionError("asked")

    settings = settings_from_launcher(Settings(coordinator="a:1"), MPI, from_mpi=ask)
    assert settings.coordinator == "a:1"
    assert settings.key == settings_from_launcher(Settings(coordinator="a:1"), MPI, from_mpi=ask).key
    assert settings.key != settings_from_launcher(Settings(coordinator="a:2"), MPI, from_mpi=ask).key
