"""Python objects, in a job of one. Between ranks: tests/conformance."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ronde
from ronde import objects
from ronde.errors import NotInitialized


@pytest.fixture
def alone() -> Iterator[None]:
    ronde.init()
    yield
    ronde.shutdown()


@pytest.mark.usefixtures("alone")
def test_objects_come_back_as_they_are() -> None:
    thing = {"a": [1, 2, {3}], "f": (4.5, None)}
    assert objects.broadcast(thing) == thing
    assert objects.allgather(thing) == [thing]
    assert objects.gather(thing) == [thing]
    assert objects.alltoall([thing]) == [thing]


@pytest.mark.usefixtures("alone")
def test_mistakes_are_told() -> None:
    with pytest.raises(ValueError, match="root must be a member"):
        objects.gather(1, root=3)
    with pytest.raises(ValueError, match="needs 1 objects, one per member"):
        objects.alltoall([1, 2])


def test_they_need_a_round() -> None:
    with pytest.raises(NotInitialized, match=r"ronde\.init"):
        objects.broadcast(1)
