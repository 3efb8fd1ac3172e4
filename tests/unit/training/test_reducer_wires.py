"""The reducer with something between gradients and the wire: codecs of one and of several wires, and Adasum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ronde.comm.buffers import Array
from ronde.comm.world import World
from ronde.training.adapter import ParameterInfo
from ronde.training.buckets import GradientBucket
from ronde.training.compression import BFLOAT16, FLOAT16, Codec, WireArray
from ronde.training.exchange import GradientSettings
from tests.conformance.ranks import run_threads
from tests.unit.training.arrays import ONE_EACH, ArrayTraining, Weight, weights


@pytest.mark.parametrize("codec", [FLOAT16, BFLOAT16])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_codec_stands_between_gradients_and_the_wire(codec: Codec, overlap: bool) -> None:
    def body(world: World) -> list[object]:
        given = [Weight("a"), Weight("b", dtype="float64")]
        training = ArrayTraining(world.group, given, ONE_EACH, codec=codec, overlap=overlap)
        for _ in range(3):
            training.clear()
            training.backward(b=1.5, a=[1.0, 2.0, 3.0, world.rank])
        training.training_step.close()
        return [training.grad("a"), training.grad("b")]

    assert run_threads(2, body) == [[[1.0, 2.0, 3.0, 0.5], 1.5]] * 2


class Halving:
    """Two wires: first the mean size, then the gradients in units of it; keeps what rounding to whole units lost."""

    name = "halving"

    def open(self, bucket: GradientBucket, parameters: Sequence[ParameterInfo]) -> _Halving:
        return _Halving(bucket.count)


class _Halving:
    def __init__(self, count: int) -> None:
        self.wires = (WireArray(1, "float32"), WireArray(count, "float32"))
        self._lost = np.zeros(count, np.float32)

    def encode(self, number: int, gradients: Array, wires: Sequence[Array]) -> None:
        if number == 0:
            wires[0][0] = np.abs(gradients).mean()
        else:
            wanted = gradients / wires[0][0] + self._lost
            np.round(wanted, out=wires[1])
            self._lost = wanted - wires[1]

    def decode(self, wires: Sequence[Array], gradients: Array) -> None:
        gradients[:] = wires[1] * wires[0][0]


def test_a_codec_may_use_several_wires_and_remember_what_it_lost() -> None:
    def body(world: World) -> list[object]:
        training = ArrayTraining(world.group, weights("a", "b"), ONE_EACH, codec=Halving())
        seen = []
        for _ in range(2):
            training.clear()
            training.backward(b=2.0 + world.rank, a=[4.0, 2.8, 0.0, 1.2])
            seen += [training.grad("a"), training.grad("b")]
        training.training_step.close()
        return seen

    first, second = run_threads(2, body)
    assert first == second
    assert first[0] == [4.0, 2.0, 0.0, 2.0]
    assert first[2] == [4.0, 4.0, 0.0, 0.0]  # together with the first step: on average what was given


def test_adasum_weighs_every_parameter_by_itself() -> None:
    def body(world: World) -> list[object]:
        training = ArrayTraining(world.group, weights("a", "b"), GradientSettings(op="adasum"))
        mine = [1.0, 0.0, 0.0, 0.0] if world.rank == 0 else [0.0, 2.0, 0.0, 0.0]
        training.backward(b=3.0, a=mine)
        training.training_step.close()
        return [training.grad("a"), training.grad("b")]

    assert run_threads(2, body) == [[[1.0, 2.0, 0.0, 0.0], 3.0]] * 2
