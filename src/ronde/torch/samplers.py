"""The samplers: ShardedSampler gives each rank its share of a dataset, and ElasticBatchSampler cuts global batches for
any number of ranks. Both can say, exactly, where training stands.

    sampler = ShardedSampler(dataset, seed=1)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4)
    while sampler.epoch < num_epochs:
        for batch in sampler.track(loader):
            ...                      # a checkpoint made here, after optimizer.step(), counts this batch as used

    sampler = ElasticBatchSampler(dataset, global_batch=256, seed=1)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)

With the second, a step uses the next `global_batch` samples of the epoch's order, whatever the number of ranks. So the
position of training is one number, and after a loss a step that was not finished is done again, on the same samples, by
those that are left. ronde.elastic.State makes that happen; without one, the sampler only counts.

Which samples a rank gets is in training/sample_sharding.py and training/global_batches.py, for all frameworks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, TypeVar

import torch.utils.data

from ronde.comm.group import Group
from ronde.comm.world import current_world, is_initialized, resolve_group
from ronde.elastic.state import State, running_state
from ronde.torch.optimizer import count_steps_of
from ronde.training.global_batches import GlobalBatches, SpeedShares, equal_shares
from ronde.training.gradients.steps import inner_sample_counts, set_sample_counts
from ronde.training.sample_sharding import SamplePosition, SampleShard, count_steps, epoch_order

Batch = TypeVar("Batch")

ENDS = ("uneven", "drop")
SHARES = ("equal", "speed")


class ShardedSampler(SampleShard, torch.utils.data.Sampler[int]):
    """A sampler that gives each rank its share of a dataset, in an order that depends only on the seed and the epoch.

    `ends` says what happens when the samples cannot be divided evenly: "pad" (default) repeats a few so that every rank
    has equally many; "drop" leaves a few out; "uneven" gives every sample to exactly one rank, so that some ranks run
    out one batch earlier than others: those call ronde.join() after their loop, which gives zeros to the collectives of
    the others until all have joined. Use "uneven" for evaluation, with average_metrics(…, count=…).
    """

    def _check_loader(self, loader: object) -> None:
        # With a forgotten `sampler=`, every rank would see all of the data. A sampler of an unknown class is accepted,
        # since it may draw from this one.
        batches = getattr(loader, "batch_sampler", None)
        source = getattr(loader if batches is None else batches, "sampler", None)
        if source is not self and isinstance(source, INDEPENDENT_SAMPLERS):
            raise ValueError(
                f"track(): this loader draws from a {type(source).__name__}, not from this sampler; "
                "make it with DataLoader(…, sampler=sampler)"
            )


INDEPENDENT_SAMPLERS = (
    ShardedSampler,
    torch.utils.data.SequentialSampler,
    torch.utils.data.RandomSampler,
    torch.utils.data.DistributedSampler,
)
"""Samplers that do not draw from another sampler."""


class ElasticBatchSampler(torch.utils.data.Sampler[list[int]]):
    """A batch sampler that gives each rank its part of every global batch, for `DataLoader(…, batch_sampler=sampler)`.

    Either the `global_batch` is given, which stays the same when ranks come and go, or the `per_rank_batch`, with which
    it grows and shrinks. Parts need not be equally large: DistributedOptimizer weighs gradients such that their mean is
    the mean over all samples of the step, if each rank's loss is the mean over its own (with op="sum": the sum).

    `ends` says what happens to the last samples of an epoch, when they make no whole global batch: "uneven" (default)
    makes a smaller one, in which every sample is used exactly once; a rank that gets none computes one that another
    rank has, and its gradient does not count. "drop" leaves them out.

    `shares="speed"` gives slow ranks smaller parts, by measured step times; only the sum of all parts stays the same.
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        global_batch: int | None = None,
        per_rank_batch: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        ends: str = "uneven",
        shares: str = "equal",
        group: Group | None = None,
    ) -> None:
        self.length = data if isinstance(data, int) else len(data)
        """Number of samples, of all ranks together."""
        if self.length < 0 or seed < 0:
            raise ValueError(f"the number of samples and seed must be 0 or more, got {self.length} and {seed}")
        if (global_batch is None) == (per_rank_batch is None):
            raise ValueError("give either global_batch or per_rank_batch")
        batch = per_rank_batch if global_batch is None else global_batch
        if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
            raise ValueError(f"global_batch and per_rank_batch must be whole numbers from 1, got {batch!r}")
        if ends == "pad":
            raise ValueError(
                "ends='pad' uses some samples twice, and which ones depends on the number of ranks, so that an elastic "
                "run could not use every sample once; take ends='uneven', or 'drop' to leave the rest out"
            )
        if ends not in ENDS or shares not in SHARES:
            allowed = f"ends must be one of {', '.join(ENDS)} and shares one of {', '.join(SHARES)}"
            raise ValueError(f"{allowed}, got {ends!r} and {shares!r}")
        self.shuffle = shuffle
        self.seed = seed
        self.ends = ends
        self._global_batch = global_batch
        self._per_rank_batch = per_rank_batch or 0
        self._follows_speed = shares == "speed"
        self._speed_shares: SpeedShares | None = None
        self._group = group
        self._shares_of: Group | None = None  # the group that _speed_shares are for
        self._state: State | None = None
        self._position = SamplePosition()
        self._num_jumps = 0  # how often the position was set to another than that behind a step
        self._num_pending = 0  # samples of batches that were handed out and have not been counted
        self._carried_from: SamplePosition | None = None
        """The position in the epoch before, if its last batches are a part of a step that has not finished."""
        self._num_steps_counted: int | None = None  # of the optimizers, when batches were last counted
        self._batches: GlobalBatches | None = None  # those of the loop that began last
        self._finished_from: SamplePosition | None = None  # from where a loop without track() ran to its end

    @property
    def epoch(self) -> int:
        """The epoch that is under way, from 0. The end of a loop over track() begins the next."""
        return self._position.epoch

    @property
    def consumed(self) -> int:
        """How many samples of this epoch are in the parameters: those of all steps that have finished."""
        return self._current_position().consumed

    @property
    def global_batch(self) -> int:
        """The number of samples of a step, on all ranks together."""
        return self._global_batch or self._per_rank_batch * self._members().size

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch. It does nothing for the current epoch, so a resumed one continues."""
        if epoch != self.epoch:
            self._set_position(SamplePosition(epoch), self._carried_from)
        self._finished_from = None

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's parts of the batches from the present position on; after a whole loop without track(), those of
        the next epoch."""
        if self._finished_from == self._position:
            self.go_to(SamplePosition(self.epoch + 1))
        members = self._members()
        assert members.rank is not None
        if self._follows_speed and self._shares_of is not members:
            self._shares_of = members
            self._speed_shares = SpeedShares(members, equal_shares(members.size))
        speed_shares = self._speed_shares
        batches = self._batches = GlobalBatches(
            epoch_order(self.length, epoch=self.epoch, seed=self.seed, shuffle=self.shuffle),
            self._position,
            global_batch=self.global_batch,
            drops_last=self.ends == "drop",
            member=members.rank,
            shares=equal_shares(members.size) if speed_shares is None else speed_shares.shares,
        )
        start = self._position

        def one_epoch() -> Iterator[list[int]]:
            yield from batches
            self._finished_from = start

        return one_epoch()

    def __len__(self) -> int:
        """Return how many steps are left in this epoch."""
        return count_steps(self.length - self.consumed, self.global_batch, self.ends)

    def track(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate over the batches of the loader, and count each when its step has finished: when the loop comes back
        for the next one, if an optimizer has stepped since. Several batches that make one step count together. At the
        end the next epoch begins.

        If the sampler is in an elastic State, this ends the State's steps, too; in ronde.elastic.run() it has to be in
        that of the run. Leave the loop early and a new track() goes on behind the last finished step. What sets the
        position, such as State.restore(), has to be followed by a new track(), or ValueError is raised.
        """
        batch_sampler = getattr(loader, "batch_sampler", self)
        if batch_sampler is not self and (
            batch_sampler is None or type(batch_sampler) is torch.utils.data.BatchSampler
        ):
            raise ValueError(
                "track(): this loader does not draw from this sampler; make it with "
                "DataLoader(dataset, batch_sampler=sampler)"
            )
        if not getattr(loader, "in_order", True):
            raise ValueError(
                "track(): a DataLoader with in_order=False returns batches in the order in which its workers finish, "
                "so ranks would train on parts of different batches; leave in_order=True"
            )
        if running_state() not in (None, self._state):
            where = "in no State" if self._state is None else "in another State than that of this run()"
            raise ValueError(
                f"track(): the sampler is {where}, so ranks would not agree on the position after a loss; make one "
                "State(sampler=sampler, …). A validation loops over the loader itself, without track()"
            )
        self._end_finished_step()  # a loop may have been left behind its last step
        self._set_position(self._position, self._carried_from)
        members, epoch = self._members(), self.epoch
        iterator = iter(loader)
        num_jumps = self._num_jumps
        with inner_sample_counts(members):
            try:
                for batch in iterator:
                    batches = self._batches
                    assert batches is not None  # else the loader has no batches
                    counts = batches.hand_out()
                    set_sample_counts(members, counts)
                    self._num_pending += sum(counts)
                    yield batch
                    if self._num_jumps != num_jumps or self._batches is not batches:
                        raise ValueError(
                            "track(): in the body of the loop the position was set, as restore() does, or another loop "
                            "over this sampler began, so the loader's next batch is not the one to train on; leave the "
                            "loop, and begin another"
                        )
                    if self._state is None:
                        self._end_finished_batch()
                    elif self._state.has_stepped():
                        self._state.end_step()
                    if self._speed_shares is not None:
                        assert members.rank is not None
                        self._speed_shares.batch_done(counts[members.rank], _waited_s(), batches)
            finally:
                del iterator  # an error that has this frame would keep the loader's workers
            set_sample_counts(members, (1,) * members.size)
        self._set_position(SamplePosition(epoch + 1), self.position if self._num_pending else self._carried_from)

    def state_dict(self) -> dict[str, Any]:
        """Return seed, epoch and the number of used samples; the same on every rank. In the loop's body it counts the
        present batch after optimizer.step(), and not before."""
        position = self._current_position() if self._has_stepped() else self.position
        return {**position._asdict(), **self._order_settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state_dict(), with any number of ranks."""
        self.go_to(SamplePosition.load(state, self._order_settings()))

    # --- for the part of an elastic State --------------------------------------------------------------------------

    def join_state(self, state: State) -> None:
        # From now on the steps of this State decide which batches count.
        self._state = state

    def describe(self) -> str:
        # The settings, which have to be the same on all ranks.
        batch = f"global_batch={self._global_batch}" if self._global_batch else f"per_rank_batch={self._per_rank_batch}"
        order = ", ".join(f"{name}={value}" for name, value in self._order_settings().items())
        shares = "speed" if self._follows_speed else "equal"
        return f"{order}, {batch}, ends={self.ends!r}, shares={shares!r}"

    @property
    def position(self) -> SamplePosition:
        # Behind the batches that have been counted.
        return self._carried_from or self._position

    @property
    def is_in_step(self) -> bool:
        # Whether batches were handed out and have not been counted.
        return self._num_pending > 0 or self._carried_from is not None

    def go_to(self, position: SamplePosition) -> None:
        # Batches that were handed out and not counted are forgotten.
        self._set_position(position, None)

    def end_step(self) -> SamplePosition:
        # A step has finished: the batches that were handed out count. The new position is returned.
        self._carried_from = None
        epoch, consumed = self._position
        self._position = position = SamplePosition(epoch, consumed + self._num_pending)
        self._num_pending = 0
        if self._state is None:
            self._num_steps_counted = self._count_optimizer_steps()
        return position

    # --- inside ----------------------------------------------------------------------------------------------------

    def _set_position(self, position: SamplePosition, carried_from: SamplePosition | None) -> None:
        self._position = position
        self._carried_from = carried_from
        self._num_jumps += 1
        self._num_pending = 0
        self._num_steps_counted = self._count_optimizer_steps()
        self._finished_from = None

    def _end_finished_batch(self) -> None:
        """The loop has come back for the next batch, and no State looks at optimizers."""
        if self._num_steps_counted is None:  # nobody can tell whether an optimizer has stepped
            self.end_step()
        else:
            self._end_finished_step()

    def _end_finished_step(self) -> None:
        """Count the batches that were handed out, if an optimizer has stepped since batches were last counted."""
        if not self._has_stepped():
            return
        if self._state is None:
            self.end_step()
        else:
            self._state.end_step()

    def _current_position(self) -> SamplePosition:
        return self._position.after_samples(self._num_pending if self._has_stepped() else 0)

    def _has_stepped(self) -> bool:
        if self._state is not None:
            return self._state.has_stepped()
        return self._num_steps_counted is not None and self._count_optimizer_steps() != self._num_steps_counted

    def _count_optimizer_steps(self) -> int | None:
        """How many steps optimizers have made, if there are any to look at, and no State looks at them."""
        if self._state is not None or not (is_initialized() or self._group is not None):
            return None
        return count_steps_of(self._members())

    def _order_settings(self) -> dict[str, Any]:
        return {"length": self.length, "seed": self.seed, "shuffle": self.shuffle}

    def _members(self) -> Group:
        """The ranks among which batches are divided. A new round has others, so they are not kept."""
        group = resolve_group(self._group)
        if group.rank is None:
            raise ValueError(f"this rank is not a member of {group!r}, among which the samples are shared out")
        return group


def _waited_s() -> float:
    """How long this rank has waited for others and moved data so far."""
    if not is_initialized():
        return 0.0
    activity = current_world().recorder.sample_activity(0, None)
    return (activity.waiting_ns + activity.moving_ns) / 1e9
