"""What the tests of the engine, of the coordinator and of groups share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ronde.comm.joining import join_round
from ronde.comm.world import World
from ronde.settings import Settings
from tests.unit.comm.scripted import ScriptedRound


@pytest.fixture
def scripted() -> Iterator[ScriptedRound]:
    made = ScriptedRound()
    yield made
    made.close()


@pytest.fixture
def alone() -> Iterator[World]:
    """A world of one rank."""
    world = World(join_round(Settings(), (), 0))
    yield world
    world.close()
