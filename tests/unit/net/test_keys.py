"""The job's key and the user's secret."""

from __future__ import annotations

import pickle
import stat
import threading
from pathlib import Path

import pytest

from ronde.errors import StartFailed
from ronde.net.keys import JobKey, derive_job_key, load_user_secret, new_job_key

SEED = "0123456789abcdef" * 4


def test_equal_seeds_give_equal_keys_and_others_do_not(other_key: JobKey) -> None:
    assert JobKey(SEED).server_public == JobKey(SEED.upper()).server_public
    assert JobKey(SEED).mac(b"x") == JobKey(SEED).mac(b"x")
    assert JobKey(SEED).server_public != other_key.server_public
    assert JobKey(SEED).mac(b"x") != other_key.mac(b"x")
    assert JobKey(new_job_key()).mac(b"x") != JobKey(new_job_key()).mac(b"x")


def test_moving_a_byte_between_parts_changes_the_mac(key: JobKey) -> None:
    macs = {key.mac(b"ab", b"c"), key.mac(b"a", b"bc"), key.mac(b"abc"), key.mac(b"abc", b""), key.mac(b"", b"abc")}
    assert len(macs) == 5


def test_the_seed_is_in_no_text_and_no_pickle() -> None:
    key = JobKey(SEED)
    for text in (repr(key), str(key), f"{key}", repr([key])):
        assert SEED[:8] not in text
        assert key.server_secret.decode() not in text
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(key)


@pytest.mark.parametrize("wrong", ["", SEED[:-1], SEED + "0", SEED[:-1] + "g", " " + SEED[:-1], "é" * 64])
def test_a_malformed_key_is_refused_without_being_repeated(wrong: str) -> None:
    with pytest.raises(ValueError, match="64 hexadecimal digits") as caught:
        JobKey(wrong)
    assert not wrong or wrong not in str(caught.value)


def test_a_secret_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "ronde"
    secret = load_user_secret(folder)
    assert len(secret) == 32
    assert load_user_secret(folder) == secret
    assert [path.name for path in folder.iterdir()] == ["secret"]
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert load_user_secret(tmp_path / "b") != secret


def test_ranks_that_make_it_at_the_same_time_agree(tmp_path: Path) -> None:
    found: list[bytes] = []
    together = threading.Barrier(8)

    def one() -> None:
        together.wait()
        found.append(load_user_secret(tmp_path / "ronde"))

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1
    assert [path.name for path in (tmp_path / "ronde").iterdir()] == ["secret"]


def test_keys_of_jobs_are_keys_and_differ(tmp_path: Path) -> None:
    secret = load_user_secret(tmp_path)
    JobKey(derive_job_key(secret, "job 1"))
    assert derive_job_key(secret, "job 1") == derive_job_key(secret, "job 1") != derive_job_key(secret, "job 2")
    assert derive_job_key(b"other", "job 1") != derive_job_key(secret, "job 1")


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        ("00" * 32, 0o640, r"read by nobody else \(it has owner \d+ and mode 0640\).*RONDE_KEY"),
        ("nonsense", 0o600, "does not hold 64 hexadecimal digits; remove it"),
    ],
)
def test_a_secret_that_others_can_read_or_that_is_none_is_refused_and_not_shown(
    tmp_path: Path, content: str, mode: int, words: str
) -> None:
    (tmp_path / "secret").write_text(content)
    (tmp_path / "secret").chmod(mode)
    with pytest.raises(StartFailed, match=words) as caught:
        load_user_secret(tmp_path)
    assert content not in str(caught.value)


@pytest.mark.parametrize("folder", ["/dev/null/ronde", "/proc/ronde"])
def test_where_no_file_can_be_kept_the_way_out_is_named(folder: str) -> None:
    with pytest.raises(StartFailed, match=r"cannot keep a secret .*; give all ranks the same RONDE_KEY"):
        load_user_secret(Path(folder))
