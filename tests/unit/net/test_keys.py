from __future__ import annotations

import pickle

import pytest
import zmq

from ronde.net.keys import JobKey, new_job_key

SEED = "0123456789abcdef" * 4


def test_every_job_gets_a_key_of_its_own() -> None:
    assert new_job_key() != new_job_key()
    JobKey(new_job_key())


def test_equal_seeds_give_equal_keys_and_others_do_not(other_key: JobKey) -> None:
    assert JobKey(SEED).server_public == JobKey(SEED.upper()).server_public
    assert JobKey(SEED).mac(b"x") == JobKey(SEED).mac(b"x")
    assert JobKey(SEED).server_public != other_key.server_public
    assert JobKey(SEED).mac(b"x") != other_key.mac(b"x")


def test_the_pairs_are_curve_pairs_and_differ_by_role(key: JobKey) -> None:
    assert zmq.curve_public(key.server_secret) == key.server_public
    assert zmq.curve_public(key.client_secret) == key.client_public
    assert len({key.server_secret, key.server_public, key.client_secret, key.client_public}) == 4


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
