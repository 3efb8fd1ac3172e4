"""Delay compensation against plain NumPy, 16 bits on the wire, and noise that can be made again."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.comm.world import World
from ronde.ps import SGD, EmbeddingTable, GradientNoise, ParameterServer, UniformRows
from ronde.ps.payloads import decode_values, encode_values
from tests.conformance.ranks import run_threads
from tests.limits import PATIENCE_S

STRENGTH, LR = 0.5, 0.25


class Turns:
    """Lets threads of ranks act one after the other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn = 0

    def wait(self, turn: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._turn >= turn, PATIENCE_S)

    def end(self) -> None:
        with self._changed:
            self._turn += 1
            self._changed.notify_all()


def compensate(gradient: Any, now: Any, read: Any) -> Any:
    return gradient + STRENGTH * gradient * gradient * (now - read)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_late_gradient_is_compensated_as_the_formula_says(mode: str) -> None:
    """Rank 1 reads, then rank 0 takes two steps, then rank 1 pushes. In sync mode there is no delay."""
    turns = Turns()

    def gradient(step: int) -> Any:
        return np.random.default_rng(step).standard_normal(30)

    def body(world: World) -> None:
        tables = {"t": EmbeddingTable(num_rows=10, dim=3, dtype="float64", initializer=UniformRows(1.0))}
        first, rows = np.linspace(-1, 1, 30), np.arange(10)
        with ParameterServer(
            {"w": first.copy()},
            SGD(lr=LR),
            mode=mode,
            tables=tables,
            delay_compensation=STRENGTH,
            group=world.group,
        ) as server:
            first_rows = server.rows("t", rows)

            def step(number: int) -> None:
                server.stage_rows("t", rows, gradient(number).reshape(10, 3))
                server.step({"w": gradient(number)})

            if mode == "sync":
                step(world.rank)
                mean = (gradient(0) + gradient(1)) / 2
                assert np.allclose(server.parameters["w"], first - LR * mean, rtol=0, atol=1e-14)
                return
            if world.rank == 0:
                step(0)
                step(1)
                turns.end()
                turns.wait(2)
                server.pull()
            else:
                turns.wait(1)
                step(2)
                turns.end()
            for begin, values in ((first, server.parameters["w"]), (first_rows, server.rows("t", rows))):
                one, two, late = (gradient(number).reshape(begin.shape) for number in range(3))
                now = begin - LR * one - LR * two  # rank 0 has read all that there was: nothing to compensate
                assert np.allclose(values, now - LR * compensate(late, now, begin), rtol=0, atol=1e-13)

    run_threads(2, body)


@given(st.lists(st.floats(width=32, allow_nan=True)))
def test_bfloat16_is_the_nearest_with_eight_bits_and_float16_that_of_numpy(numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    decoded = decode_values(encode_values(values, "bfloat16"), "float32")
    assert (np.isnan(decoded) == np.isnan(values)).all()
    finite = np.isfinite(values) & np.isfinite(decoded)
    with np.errstate(over="ignore", under="ignore"):
        assert (np.abs(decoded[finite] - values[finite]) <= np.abs(values[finite]) * 2.0**-8 + 1e-40).all()
        half = values.astype(np.float16).astype(np.float32)
    got = decode_values(encode_values(values, "float16"), "float32")
    assert ((got == half) | np.isnan(values)).all()
    assert (encode_values(values, "none") is values) and decode_values(values, "float32") is values


@pytest.mark.parametrize("codec", ["float16", "bfloat16"])
def test_training_with_16_bits_on_the_wire_stays_near_and_is_the_same_on_all_ranks(codec: str) -> None:
    """In sync mode all ranks read the same rounded values, and the servers keep exact ones."""

    def train(world: World, compression: str | None) -> tuple[Any, Any, Any]:
        target = np.linspace(-2, 2, 50_000, dtype=np.float32)
        tables = {"t": EmbeddingTable(num_rows=100, dim=8, initializer=UniformRows(1.0))}
        with ParameterServer(
            [np.zeros_like(target)], SGD(lr=0.3), tables=tables, compression=compression, group=world.group
        ) as server:
            rows = np.arange(world.rank, 100, 3)
            for _ in range(20):
                server.stage_rows("t", rows, server.rows("t", rows) - 1)
                server.step([server.parameters["0"] - target])
            state = server.state_dict()
            everything = np.arange(100)
            return server.parameters["0"].copy(), server.rows("t", everything), state["parameters"]["0"]

    def body(world: World) -> tuple[Any, Any, Any]:
        exact, exact_rows, _ = train(world, None)
        values, rows, kept = train(world, codec)
        assert np.abs(values - exact).max() < 0.05 and np.abs(rows - exact_rows).max() < 0.05
        assert (kept != values).any() and np.abs(kept - values).max() < 0.01
        return values, rows, kept

    results = run_threads(3, body)
    for one, other in zip(results[0], results[2], strict=True):
        assert (one == other).all()


def test_options_that_are_wrong_are_named() -> None:
    def body(world: World) -> None:
        with pytest.raises(ValueError, match="compression must be one of none, float16, bfloat16, got 'zip'"):
            ParameterServer([np.zeros(3)], SGD(lr=1.0), compression="zip", group=world.group)
        with pytest.raises(ValueError, match="delay_compensation must be 0 or more, got -1"):
            ParameterServer([np.zeros(3)], SGD(lr=1.0), delay_compensation=-1.0, group=world.group)

    run_threads(1, body)


@given(st.integers(0, 2**63 - 1), st.integers(0, 1000), st.integers(1, 10**6), st.integers(0, 500))
def test_noise_is_the_same_for_a_worker_and_step_and_another_one_for_every_other(
    seed: int, worker: int, step: int, part: int
) -> None:
    noise = GradientNoise(eta=1.0, gamma=0.0, seed=seed)

    def make(*key: int) -> Any:
        gradient = np.zeros(8)
        noise.add_to(gradient, *key)
        return gradient

    own = make(worker, step, part)
    assert (own == make(worker, step, part)).all()
    for other in ((worker + 1, step, part), (worker, step + 1, part), (worker, step, part + 1)):
        assert (own != make(*other)).all()
