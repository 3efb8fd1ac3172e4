"""The position in data that are dealt out to ranks in global batches, for data sets of TensorFlow, Keras and JAX.

The samples of an epoch have one order, the same on every rank, and the step at position `consumed` uses the next
`global_batch` of them, whatever the number of ranks. So one number says where training stands. A batch counts when its
step has finished: ronde.elastic.State decides that, or without one, the loop that comes back for the next batch.

At the end of an epoch fewer than `global_batch` samples may be left. There are three policies, which say what the ranks
get of them:

    pad      all of them, divided; a rank for which there is none gets one that another rank has
    drop     none
    uneven   all of them, divided; a rank for which there is none has one batch less than others
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ronde.comm import objects
from ronde.comm.group import Group
from ronde.comm.world import resolve_group
from ronde.elastic.state import State, StatePart, register_part, running_state
from ronde.training.global_batches import equal_shares
from ronde.training.sample_sharding import (
    TAIL_POLICIES,
    SamplePosition,
    count_steps,
    epoch_order,
    part_of_batch,
    share_out,
)


class DataPosition:
    """What data sets that deal out global batches have in common: their settings, and how far training has come."""

    def __init__(
        self,
        *,
        global_batch: int | None,
        per_rank_batch: int | None,
        shuffle: object,
        seed: int,
        ends: str,
        group: Group | None,
        length: int | None,
    ) -> None:
        """`length` is the number of samples of an epoch, None if it is not known."""
        if (global_batch is None) == (per_rank_batch is None):
            raise ValueError("give either global_batch or per_rank_batch")
        batch = per_rank_batch if global_batch is None else global_batch
        if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
            raise ValueError(f"global_batch and per_rank_batch must be whole numbers from 1, got {batch!r}")
        if not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed must be a whole number from 0, got {seed!r}")
        if ends not in TAIL_POLICIES:
            raise ValueError(f"ends must be one of {', '.join(TAIL_POLICIES)}, got {ends!r}")
        self.seed = seed
        self.ends = ends
        self.length = length
        """Number of samples of an epoch, of all ranks together; None while it is not known."""
        self._shuffle = shuffle
        self._global_batch = global_batch
        self._per_rank_batch = per_rank_batch or 0
        self._group = group
        self._position = SamplePosition()
        self._num_pending = 0  # samples of batches that were handed out and have not been counted
        self._num_reductions = 0  # of gradients, before the first of them was handed out
        self._carried_from: SamplePosition | None = None
        """The position in the epoch before, if its last batches are a part of a step that has not finished."""
        self._ended: SamplePosition | None = None  # where an epoch was found to have no more batches
        self._num_jumps = 0  # how often the position was set to another than that behind a step
        self._state: State | None = None

    @property
    def epoch(self) -> int:
        """The epoch that is under way, from 0. It is the next one when no batch is left."""
        return self._next_position().epoch

    @property
    def consumed(self) -> int:
        """How many samples of this epoch were used in steps that have finished."""
        return self._next_position().consumed

    @property
    def global_batch(self) -> int:
        """The number of samples of a step, on all ranks together."""
        size = self._members().size
        batch = self._global_batch or self._per_rank_batch * size
        if batch < size:
            raise ValueError(f"global_batch={batch} is less than one sample for each of {size} ranks; make it larger")
        return batch

    def __len__(self) -> int:
        """Return how many steps are left in this epoch. TypeError if the number of samples is not known."""
        if self.length is None:
            raise TypeError("the number of elements is not known, so the number of steps is not, either")
        return count_steps(self.length - self.consumed, self.global_batch, self.ends)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch. It does nothing for the current epoch, so a resumed one continues."""
        if epoch != self.epoch:
            self.go_to(SamplePosition(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what the order depends on; the same on every rank. In the body of a loop the present
        batch counts after its step: when an optimizer of the State has stepped or, without a State, when gradients of
        TensorFlow were reduced, or a Stream's batch was used by DistributedOptimizer.step() of PyTorch."""
        position = self._next_position()
        if self._num_pending and self._has_stepped():
            position = self._position.after_samples(self._num_pending)
        return {**position._asdict(), **self._order_settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state_dict(), with any number of ranks."""
        self.go_to(SamplePosition.load(state, self._order_settings()))

    # --- for loops, callbacks and the part of a State ----------------------------------------------------------------

    def begin_loop(self) -> None:
        # A loop over the batches begins. Batches that were handed out and not counted are handed out again.
        if running_state() not in (None, self._state):
            where = "in no State" if self._state is None else "in another State than that of this run()"
            raise ValueError(
                f"the data set is {where}, so ranks would not agree on the position after a loss; make one "
                "State(data=data, …)"
            )
        self._set(self._next_position(), self._carried_from)

    def loop_over(self, batches: Iterable[Any]) -> Iterator[Any]:
        # The batches from the position to the end of the epoch, each of which counts when its step has finished.
        self.begin_loop()
        num_jumps, num_batches = self.num_jumps, 0
        for batch in batches:
            self.hand_out()
            num_batches += 1
            yield batch
            if self.num_jumps != num_jumps:
                raise ValueError(
                    "in the body of the loop the position was set, as restore() does, or another loop over this data "
                    "began, so the next batch is not the one to train on; leave the loop, and begin another"
                )
            self.end_batch()
        if not num_batches and not self._position.consumed and self.ends == "drop":
            raise ValueError(
                f"there is less than one global batch of {self.global_batch} samples, and ends='drop' leaves them out; "
                "make the batch smaller, or use ends='pad'"
            )
        self.end_epoch()

    def hand_out(self, num_batches: int = 1) -> None:
        # The training loop has got so many global batches.
        if not self._num_pending:
            self._num_reductions = self._count_reductions()
        self._num_pending += num_batches * self.global_batch

    def end_batch(self) -> None:
        # The body of a loop has ended: the step has, too, if an optimizer has stepped or nobody can tell.
        if self._state is None:
            self.end_step()
        elif self._state.has_stepped():
            self._state.end_step()

    def end_step(self) -> SamplePosition:
        # A step has finished: the batches that were handed out count. The new position is returned.
        self._carried_from = None
        self._position = self._position.after_samples(self._num_pending)
        self._num_pending = 0
        return self._position

    def end_data(self) -> None:
        # There were no more batches in this epoch.
        self._ended = self._position.after_samples(self._num_pending)

    def end_epoch(self) -> None:
        # The next epoch begins.
        carried = self.position if self._num_pending else self._carried_from
        self._set(SamplePosition(self._position.epoch + 1), carried)

    @property
    def num_jumps(self) -> int:
        # Changes when the position is set, so that a loop that goes on would hand out other batches.
        return self._num_jumps

    @property
    def position(self) -> SamplePosition:
        # Behind the batches that have been counted.
        return self._carried_from or self._position

    @property
    def is_in_step(self) -> bool:
        # Whether batches were handed out and have not been counted.
        return self._num_pending > 0 or self._carried_from is not None

    @property
    def ended(self) -> SamplePosition | None:
        # Where an epoch was found to have no more batches, if its length is not known.
        return self._ended

    @ended.setter
    def ended(self, ended: SamplePosition | None) -> None:
        self._ended = ended

    def go_to(self, position: SamplePosition) -> None:
        # Batches that were handed out and not counted are forgotten.
        self._set(position, None)

    def join_state(self, state: State) -> None:
        # From now on the steps of this State decide which batches count.
        self._state = state

    def describe(self) -> str:
        # The settings, which have to be the same on all ranks.
        batch = f"global_batch={self._global_batch}" if self._global_batch else f"per_rank_batch={self._per_rank_batch}"
        return f"seed={self.seed}, shuffle={self._shuffle}, {batch}, ends={self.ends!r}"

    # --- inside ------------------------------------------------------------------------------------------------------

    def _has_stepped(self) -> bool:
        """Whether there was a step with the batches that were handed out, as far as one can know."""
        if self._state is not None:
            return self._state.has_stepped()
        return self._count_reductions() != self._num_reductions

    def _count_reductions(self) -> int:
        """How many times gradients were reduced in this process; always 0 where nobody counts."""
        return 0

    def _next_position(self) -> SamplePosition:
        """From where the next loop goes on."""
        position, ended = self._position, self._ended
        is_over = ended is not None and ended.epoch == position.epoch and position.consumed >= ended.consumed
        if position.consumed and self.length is not None:
            num_left = max(0, self.length - position.consumed)
            is_over = not count_steps(num_left, self.global_batch, self.ends)
        return SamplePosition(position.epoch + 1) if is_over else position

    def _set(self, position: SamplePosition, carried_from: SamplePosition | None) -> None:
        self._position = position
        self._carried_from = carried_from
        self._num_pending = 0
        self._num_jumps += 1

    def _order_settings(self) -> dict[str, Any]:
        return {"seed": self.seed, "shuffle": self._shuffle}

    def _members(self) -> Group:
        """The ranks among which batches are divided. A new round has others, so they are not kept."""
        group = resolve_group(self._group)
        if group.rank is None:
            raise ValueError(f"this rank is not a member of {group!r}, among which the samples are dealt out")
        return group


class ShardedRows(DataPosition):
    """The position in arrays whose number of rows is known: which rows belong to this rank in which batch."""

    def __init__(self, *, length: int, **options: Any) -> None:
        super().__init__(length=length, **options)
        self._order_epoch = -1
        self._order: Any = None

    def _count_batches(self, start: SamplePosition) -> int:
        """The number of batches that this rank has from there to the end of the epoch."""
        assert self.length is not None
        num_remaining = self.length - start.consumed
        num_steps = count_steps(num_remaining, self.global_batch, self.ends)
        rest = num_remaining % self.global_batch
        if self.ends == "uneven" and num_steps and rest:
            members = self._members()
            num_steps -= not share_out(rest, equal_shares(members.size))[members.rank or 0]
        return num_steps

    def _get_rows(self, start: SamplePosition, index: int) -> Any:
        """The rows of this rank in a batch, counted from there."""
        assert self.length is not None
        members, global_batch = self._members(), self.global_batch
        first = start.consumed + index * global_batch
        counts = share_out(min(global_batch, self.length - first), equal_shares(members.size))
        begin, end = part_of_batch(counts, members.rank or 0)
        return self._get_order(start.epoch)[first + begin : first + end]

    def _get_order(self, epoch: int) -> Any:
        if self._order_epoch != epoch:
            assert self.length is not None
            self._order = epoch_order(self.length, epoch=epoch, seed=self.seed, shuffle=bool(self._shuffle))
            self._order_epoch = epoch
        return self._order


class DataPositionPart(StatePart):
    """The position in the data, as a part of a State."""

    def __init__(self, data: DataPosition, state: State) -> None:
        self._data = data
        data.join_state(state)
        self._state = state
        self._num_steps = state.steps
        self._kept = data.position

    def commit(self) -> SamplePosition:
        return self._data.position

    def restore(self, committed: SamplePosition) -> None:
        self._data.go_to(committed)

    def end_step(self) -> None:
        steps = self._state.steps
        if steps == self._num_steps:  # a commit or a new round
            self._kept = self._data.position
        else:
            self._num_steps = steps
            self._kept = self._data.end_step()

    def undo_step(self) -> None:
        self._data.go_to(self._kept)

    def is_in_step(self) -> bool:
        return self._data.is_in_step

    def describe(self) -> str:
        return self._data.describe()

    def sync(self, givers: Sequence[int]) -> None:
        data = self._data
        position, ended = objects.broadcast((tuple(data.position), data.ended and tuple(data.ended)), givers[0])
        data.go_to(SamplePosition(*position))
        data.ended = ended and SamplePosition(*ended)


register_part(DataPosition, DataPositionPart)
