"""Trees of JAX in an elastic State: parameters, the state of an optimizer, any value with an array of JAX in it.
Importing ronde.jax registers them.

    state = ronde.elastic.State(params=params, opt_state=opt_state, data=data)
    state.params, state.opt_state = train_step(state.params, state.opt_state, batch)

Arrays of JAX never change, so at a step end they are kept by reference, which costs nothing. A step that gives away the
memory of its arguments (donate_argnums) leaves nothing of them behind when it is interrupted: then training goes on
from the last commit, whose arrays are copies.

JAX computes in the background, and a step that has failed shows it later. So State.end_step() waits for the arrays of
the state: it counts a step when its numbers are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ronde.comm.world import current_world
from ronde.elastic.state import StatePart, ValueKind, register_common_part, register_value_kind
from ronde.jax.primitive import clear_shaped_programs


class JaxTrees(ValueKind):
    """Values of a State that have arrays of JAX in them."""

    def accepts(self, value: Any) -> bool:
        return any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))

    def keep(self, value: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, value)

    def copy(self, value: Any) -> Any:
        def copy_leaf(leaf: Any) -> Any:
            if isinstance(leaf, jax.Array):
                return jnp.copy(leaf)
            return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

        return jax.tree.map(copy_leaf, value)

    def is_intact(self, kept: Any) -> bool:
        return not any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(kept))

    def has_changed(self, value: Any, kept: Any) -> bool:
        leaves, before = jax.tree.leaves(value), jax.tree.leaves(kept)
        if len(leaves) != len(before):
            return True
        pairs = zip(leaves, before, strict=True)
        return any(leaf is not other for leaf, other in pairs if isinstance(leaf, jax.Array))

    def wait(self, value: Any) -> None:
        jax.block_until_ready(value)


class ProgramsPart(StatePart):
    """The compiled programs of this process: those whose shapes depend on the number of ranks, or with a reduce_scatter
    on that of this one, are forgotten when these have changed."""

    def __init__(self) -> None:
        world = current_world("State()")
        self._rank, self._size = world.rank, world.size

    def commit(self) -> None:
        return None

    def restore(self, committed: None) -> None:
        return None

    def end_step(self) -> None:
        return None

    def undo_step(self) -> None:
        return None

    def sync(self, givers: Sequence[int]) -> None:
        return None

    def reset(self) -> None:
        world = current_world()
        if (world.rank, world.size) != (self._rank, self._size):
            self._rank, self._size = world.rank, world.size
            clear_shaped_programs()


register_value_kind(JaxTrees())
register_common_part("jax programs", lambda state: ProgramsPart())
