"""Parameter servers with real mailboxes, in ranks that are threads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ronde.comm.world import World
from ronde.errors import Mismatch, RondeError
from ronde.ps import SGD, Adam, GradientNoise, Optimizer, ParameterServer, load_checkpoint
from tests.conformance.ranks import run_threads

SHAPES = {"weight": (300, 400), "bias": (7,), "scalar": ()}


def make_parameters(value: float, dtype: str = "float32") -> dict[str, Any]:
    return {name: np.full(shape, value, dtype) for name, shape in SHAPES.items()}


def gradients_of(server: ParameterServer, rank: int) -> dict[str, Any]:
    """Of the loss |w - rank - 1|² / 2."""
    return {name: array - np.asarray(rank + 1, array.dtype) for name, array in server.parameters.items()}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_in_sync_mode_all_ranks_come_to_what_allreduce_comes_to(size: int) -> None:
    def body(world: World) -> None:
        expected = make_parameters(5.0, "float64")
        with ParameterServer(
            make_parameters(5.0 + world.rank, "float64"), SGD(lr=0.25, momentum=0.5), group=world.group
        ) as server:
            buffers: dict[str, Any] = {}
            for step in range(1, 6):
                own = {name: array - (world.rank + 1) for name, array in expected.items()}
                for name, array in own.items():
                    mean = world.group.allreduce(array, op="mean")
                    buffers[name] = mean if step == 1 else 0.5 * buffers[name] + mean
                    expected[name] = expected[name] - 0.25 * buffers[name]
                assert server.step(gradients_of(server, world.rank)) == step
                for name, array in server.parameters.items():
                    assert np.allclose(array, expected[name], rtol=0, atol=1e-12)
                    if size == 2:
                        assert (array == expected[name]).all()
            assert server.staleness == 0

    run_threads(size, body)


def test_in_sync_mode_three_workers_are_within_a_millionth_of_allreduce_after_100_steps() -> None:
    def body(world: World) -> None:
        generator = np.random.default_rng(world.rank)
        expected = np.linspace(-1, 1, 50_000, dtype=np.float32)
        with ParameterServer([expected.copy()], SGD(lr=0.01), group=world.group) as server:
            own = server.parameters["0"]
            for _ in range(100):
                noise = generator.standard_normal(own.size, dtype=np.float32)
                server.step([own + noise])
                expected -= np.float32(0.01) * world.group.allreduce(expected + noise, op="mean")
            assert np.abs(own - expected).max() <= 1e-6
            assert not (own == np.linspace(-1, 1, 50_000, dtype=np.float32)).any()

    run_threads(3, body)


@pytest.mark.parametrize("mode", ["sync", "bounded", "dynamic", "async"])
def test_every_sample_is_used_once_in_every_mode(mode: str) -> None:
    num_samples = 50

    def body(world: World) -> None:
        count = np.zeros(num_samples)
        with ParameterServer([count], SGD(lr=1.0), mode=mode, staleness=2, group=world.group) as server:
            for epoch in range(2):
                for indices in server.samples(num_samples, 4, epoch=epoch):
                    gradient = np.zeros(num_samples)
                    gradient[indices] = -1
                    server.step([gradient])
            server.pull()
            if mode != "sync":  # where a gradient is divided by the number of those that came together
                last = server.parameters["0"]
                assert last.max() <= 2
            world.group.barrier()
            server.pull()
            if mode != "sync":
                assert (server.parameters["0"] == 2).all()

    run_threads(3, body)


def test_ranks_may_be_servers_or_workers_only() -> None:
    def body(world: World) -> None:
        array = np.zeros(100_000)
        server = ParameterServer(
            [array], Adam(), mode="async", servers=[2, 3], workers=[0, 1], group=world.group, clip_norm=1.0
        )
        assert (server.is_worker, server.is_server) == (world.rank < 2, world.rank >= 2)
        if server.is_worker:
            for _ in range(3):
                server.step([np.ones_like(array)])
            server.push([np.ones_like(array)])
        else:
            with pytest.raises(ValueError, match="is a server and no worker"):
                server.pull()
            server.serve()
        server.close()
        assert server.servers == (2, 3)

    run_threads(4, body)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_global_norm_of_an_update_is_clipped(mode: str) -> None:
    """In sync mode that of the mean, else that of each push. The parts are on several servers."""

    def body(world: World) -> None:
        parameters = [np.zeros(30_000), np.zeros((100, 300))]
        with ParameterServer(parameters, SGD(lr=1.0), mode=mode, clip_norm=2.0, group=world.group) as server:
            signs = [np.where(np.arange(array.size).reshape(array.shape) % 2, 3.0, -1.0) for array in parameters]
            if world.rank:
                signs = [np.ones_like(array) for array in signs]
            server.step(signs)  # the norms of the pushes and of their mean are far above the limit
            world.group.barrier()
            server.pull()
            gradients = [[np.where(np.arange(60_000) % 2, 3.0, -1.0)], [np.ones(60_000)] * (world.size - 1)]
            pushes = [each for some in gradients for each in some]
            pushes = [np.mean(pushes, axis=0)] if mode == "sync" else pushes
            expected = -sum(push * 2.0 / (np.linalg.norm(push) + 1e-6) for push in pushes)
            values = np.concatenate([array.reshape(-1) for array in server.parameters.values()])
            assert np.allclose(values, expected, rtol=1e-12)
            small = [np.full_like(array, 1e-6) for array in parameters]
            before = values[0]
            server.step(small)  # and this one is not
            world.group.barrier()
            server.pull()
            assert np.isclose(server.parameters["0"][0], before - 1e-6 * (1 if mode == "sync" else world.size))

    run_threads(3, body)


def test_training_goes_on_from_a_state_on_another_number_of_servers() -> None:
    def train(world: World, steps: int, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        first = make_parameters(4.0 + world.rank, "float64")
        with ParameterServer(first, Adam(lr=0.1), group=world.group, **options) as server:
            for _ in range(steps):
                server.step(gradients_of(server, world.rank))
            state = server.state_dict()
            assert state["version"] == server.version
            assert all((state["parameters"][name] == array).all() for name, array in server.parameters.items())
            return state, server.parameters

    def body(world: World) -> None:
        state, _ = train(world, 3)
        _, resumed = train(world, 3, servers=[1], state=state)
        _, whole = train(world, 6)
        assert all((resumed[name] == whole[name]).all() for name in SHAPES)
        with pytest.raises(ValueError, match="state must have the names of the parameters; these differ: 0, bias"):
            ParameterServer([np.zeros(3)], Adam(), state=state, group=world.group)

    run_threads(3, body)


class SignDescent(Optimizer):
    """An optimizer of a user."""

    num_states = 1
    needs_whole_tensors = True

    def compute(self, values: Any, gradient: Any, states: Any, step: int) -> Any:
        assert values.size in (120_000, 7, 1)
        states[0] += 1
        assert (states[0] == step).all()
        return values - 0.5**step * np.sign(gradient)


def test_an_optimizer_may_be_written_in_python_and_only_that_of_the_first_rank_counts() -> None:
    def body(world: World) -> None:
        optimizer = SignDescent() if world.rank == 0 else SGD(lr=7.0)
        with ParameterServer(make_parameters(2.0), optimizer, group=world.group) as server:
            for _ in range(3):
                server.step({name: np.ones_like(array) for name, array in server.parameters.items()})
            assert all((array == 2.0 - 0.875).all() for array in server.parameters.values())

    run_threads(2, body)


class Failing(SignDescent):
    def compute(self, values: Any, gradient: Any, states: Any, step: int) -> Any:
        if gradient[0] == 1:
            raise ArithmeticError("no such step")
        return np.zeros(1)


@pytest.mark.parametrize(
    ("gradient", "why"),
    [
        (1.0, "no such step"),
        (2.0, r"compute\(\) of Failing must return an array of .*\(7,\).* one of \(1,\)"),
    ],
)
def test_an_optimizer_that_fails_is_an_error_on_all_ranks(gradient: float, why: str) -> None:
    def body(world: World) -> None:
        server = ParameterServer([np.zeros(7)], Failing(), group=world.group, servers=[1])
        with pytest.raises(RondeError, match=rf"^the parameter server cannot go on: the server of rank 1 .*{why}"):
            server.step([np.full(7, gradient)])
        world.group.barrier()

    run_threads(2, body)


def test_threads_that_use_one_parameter_server_at_once_are_refused_and_no_update_is_lost() -> None:
    def body(world: World) -> None:
        values = np.zeros(3)
        server = ParameterServer([values], SGD(lr=1.0), mode="async", group=world.group)
        num_steps, refusals = [0, 0], set[str]()

        def use(index: int) -> None:
            for _ in range(200):
                try:
                    server.step([np.full(3, -1.0)])
                    num_steps[index] += 1
                except RondeError as error:
                    refusals.add(str(error))

        threads = [threading.Thread(target=use, args=(index,)) for index in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all("only one thread may use a parameter server at a time" in each for each in refusals)
        server.pull()
        assert (values == sum(num_steps)).all()
        server.close()

    run_threads(1, body)


def test_gradients_may_be_staged_one_by_one_and_get_noise_that_depends_on_the_seed_only() -> None:
    noise = GradientNoise(eta=0.5, gamma=1.0, seed=3)

    def body(world: World) -> list[Any]:
        results = []
        for _ in range(2):
            server = ParameterServer(make_parameters(1.0), SGD(lr=9.0), noise=noise, group=world.group)
            with server:
                for name in reversed(SHAPES):
                    server.stage(name, np.zeros(SHAPES[name], np.float32))
                with pytest.raises(ValueError, match="the gradient of bias was staged already"):
                    server.stage("bias", np.zeros(7))
                with pytest.raises(ValueError, match="give them to one of both"):
                    server.step(make_parameters(0.0))
                server.step(lrs=[1.0])
                server.stage("bias", np.zeros(7))
                with pytest.raises(ValueError, match="no gradient was given for weight, scalar"):
                    server.step()
                results.append(server.parameters["weight"].copy())
        assert (results[0] == results[1]).all()
        return results

    weights = run_threads(2, body)[0][0]
    changes = 1.0 - weights  # the mean of two, each with the variance 0.5
    assert abs(changes.mean()) < 0.02 and abs(changes.var() - 0.25) < 0.01


def test_a_step_may_be_started_and_each_parameter_waited_for() -> None:
    """In sync mode it gives the same numbers as step(); what is not waited for is finished by the next step."""
    shapes = {"first": (300, 1000), "second": (1000, 1500), "third": (5,)}

    def body(world: World) -> None:
        own = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        with ParameterServer(own, SGD(lr=0.5), group=world.group) as server:
            for step in range(1, 5):
                gradients = {name: np.full(shape, -step - world.rank, np.float32) for name, shape in shapes.items()}
                server.start_step(gradients)
                for each in gradients.values():
                    each[...] = np.nan  # it was copied
                expected = 0.5 * sum(each + 0.5 for each in range(1, step + 1))
                for name in shapes if step % 2 else ("first",):
                    server.wait_for(name)
                    assert (server.parameters[name] == np.float32(expected)).all()
            assert server.finish_step() == 4
            assert all((each == np.float32(expected)).all() for each in server.parameters.values())

    run_threads(2, body)


def test_in_async_mode_the_next_gradients_may_be_sent_before_the_parameters_have_come() -> None:
    def body(world: World) -> None:
        values = np.zeros(200_000)
        with ParameterServer([values], SGD(lr=1.0), mode="async", group=world.group) as server:
            for _ in range(10):
                server.start_step([np.full(200_000, -1.0)])
            server.finish_step()
            world.group.barrier()
            assert server.pull() == 10 * world.size
            assert (values == 10 * world.size).all()

    run_threads(2, body)


def server_state(values: Any) -> dict[str, Any]:
    return {"version": 1, "parameters": {"0": values}, "optimizer": {}}


def test_mistakes_are_named() -> None:
    def body(world: World) -> None:
        group = world.group
        with pytest.raises(TypeError, match="parameter 0 must be an array of float32 or float64, got int64"):
            ParameterServer([np.zeros(3, np.int64)], SGD(lr=1.0), group=group)
        with pytest.raises(ValueError, match="mode must be one of sync, bounded, dynamic, async, got 'fast'"):
            ParameterServer([np.zeros(3)], SGD(lr=1.0), mode="fast", group=group)
        with pytest.raises(ValueError, match=r"servers must be different ranks of .* got \[0, 7\]"):
            ParameterServer([np.zeros(3)], SGD(lr=1.0), servers=[0, 7], group=group)
        with pytest.raises(Mismatch, match=r"ranks disagree on a parameter server: rank 0 gave .*float64\[2\]"):
            ParameterServer([np.zeros(2 + world.rank)], SGD(lr=1.0), group=group)
        with ParameterServer({"w": np.zeros(3)}, SGD(lr=1.0), group=group) as server:
            with pytest.raises(ValueError, match="these differ: v, w"):
                server.step({"v": np.zeros(3)})
            with pytest.raises(ValueError, match="the gradient of w must have the shape"):
                server.step([np.zeros(4)])
            server.step([np.ones(3)])
        with pytest.raises(ValueError, match="is closed"):
            server.pull()
        with pytest.raises(ValueError, match="is closed"):
            next(server.samples(10, 1))
        state = server_state(np.zeros(1))  # it would be spread over three elements
        with pytest.raises(ValueError, match=r"shapes of the parameters; 0 has \(3,\), and there it has \(1,\)"):
            ParameterServer([np.zeros(3)], SGD(lr=1.0), state=state, group=group)
        with pytest.raises(ValueError, match="it has no 'optimizer'"):
            ParameterServer([np.zeros(3)], SGD(lr=1.0), state={"version": 1, "parameters": {}}, group=group)

    run_threads(2, body)


def test_workers_may_save_one_version_at_the_same_time(tmp_path: Path) -> None:
    def body(world: World) -> None:
        values = np.arange(300_000.0)
        with ParameterServer([values], SGD(lr=1.0, momentum=0.9), group=world.group) as server:
            server.step([np.ones_like(values)])
            for _ in range(5):
                loaded = load_checkpoint(server.save(tmp_path))
                assert loaded["version"] == 1 and (loaded["parameters"]["0"] == values).all()
            world.group.barrier()

    run_threads(3, body)
    assert [path.suffix for path in tmp_path.glob("*/*") if path.suffix not in (".json", ".npy")] == []
