"""Training that goes on while ranks are lost, leave and come: run() and State.

    state = ronde.elastic.State(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    @ronde.elastic.run
    def train(state):
        ...

docs/internals/elastic.md describes the protocol.
"""

from __future__ import annotations

from ronde.elastic.state import RoundChange, State, StatePart, register_common_part, register_part
from ronde.elastic.training_loop import run

__all__ = ["RoundChange", "State", "StatePart", "register_common_part", "register_part", "run"]
