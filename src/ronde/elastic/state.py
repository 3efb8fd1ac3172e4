"""The state of training that survives a change of the ranks: State and its parts.

A State belongs to the end of one step. At every step end its parts keep what the next forward pass may change; after a
loss they return to that, and all members take the state of those that have come farthest (`recovery`). A part stands
for one object of a framework: ronde.torch registers the parts for models, optimizers and so on. Everything else is a
plain value, and ValuesPart has all of them.
"""

from __future__ import annotations

import copy
import io
import pickle
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from ronde.comm import objects
from ronde.comm.world import World, current_world, refused_to_candidate
from ronde.elastic.recovery import Position, Progress, choose_givers
from ronde.errors import Mismatch
from ronde.text import format_rank_answers

FRAMEWORK_BINDINGS = {
    "torch": ("ronde.torch", "state_dict"),
    "keras": ("ronde.keras", "variables"),
    "tensorflow": ("ronde.tensorflow", "assign"),
    "mxnet": ("ronde.mxnet", "context"),
}
"""By library, the package that registers parts for its objects when it is imported, and what these objects have."""
ATOMIC_TYPES = frozenset({bool, bytes, complex, float, int, range, str, type(None)})
"""Types of values that never change, so that a reference is a copy."""


class RoundChange(Exception):
    """All members leave the round at this step end, because ranks come or go. Raised by State.end_step() and
    State.commit(), and caught by ronde.elastic.run(): the training function lets it pass."""


class StatePart(Protocol):
    """One object in a State. Except for sync(), no method may wait for other ranks. A class that derives from it
    implements what it needs; a State does not call what it has left out."""

    def commit(self) -> Any:  # the part's own type
        """Return a copy of everything, for restore(). The copy before is dropped when those of all parts are made."""

    def restore(self, committed: Any) -> None:
        """Return to what commit() returned, which stays as it is: it may be used again."""

    def end_step(self) -> None:
        """A step has finished: keep what the next forward pass may change. Called in every step, so it has to be
        cheap."""

    def undo_step(self) -> None:
        """Return to what end_step() kept. Called only if can_undo_step() of all parts says so."""

    def has_stepped(self) -> bool:
        """Return whether it was changed since end_step() in a way that undo_step() cannot take back: an optimizer has
        applied gradients. Called in every step."""
        return False

    def can_undo_step(self) -> bool:
        """Return whether undo_step() leads back to the last step end. Called after a loss, which may have interrupted a
        step anywhere."""
        return not self.has_stepped()

    def is_in_step(self) -> bool:
        """Return whether a step was begun since the last step end, and nothing can be committed before its end: batches
        were handed out. Called by State.commit()."""
        return False

    def describe(self) -> str:
        """Return, in words, what has to be equal on all ranks and that sync() does not make equal. Called when a round
        begins; ranks that differ are a Mismatch."""
        return ""

    def reset(self) -> None:
        """A new round has begun: drop what is tied to the old one. Called before sync()."""
        return None

    def sync(self, givers: Sequence[int]) -> None:
        """Take the state of the givers, ranks of the world that hold the same. Collective; several givers may share the
        bytes among them. A giver's own state does not change."""


MakePart = Callable[[Any, "State"], StatePart]

_part_makers: dict[type, MakePart] = {}
_container_makers: list[tuple[Callable[[object], bool], MakePart]] = []
_common_part_makers: dict[str, Callable[[State], StatePart]] = {}
_checks: list[Callable[[State], None]] = []


def register_part(kind: type, make: MakePart) -> None:
    """Let objects of this type, and of types derived from it, become parts of a State. `make` is called with the object
    and the State."""
    _part_makers[kind] = make


def register_container_part(accepts: Callable[[object], bool], make: MakePart) -> None:
    """Let lists and tuples for which `accepts` returns True become parts of a State."""
    _container_makers.append((accepts, make))


class ValueKind(Protocol):
    """How plain values of one kind are kept in a State, if a deep copy of each at every step end would be too much."""

    def accepts(self, value: Any) -> bool:
        """Return whether a value is of this kind."""

    def keep(self, value: Any) -> Any:
        """Return what undo_step() returns to. Called at every step end, so it has to be cheap."""

    def copy(self, value: Any) -> Any:
        """Return a copy that stays as it is, whatever is done with the value."""

    def is_intact(self, kept: Any) -> bool:
        """Return whether what keep() returned can still be used."""

    def has_changed(self, value: Any, kept: Any) -> bool:
        """Return whether a value is another one than that of which keep() has returned `kept`. Called in every step."""

    def wait(self, value: Any) -> None:
        """Return when the value is computed; raise if that has failed. Called before a step is counted."""


_value_kinds: list[ValueKind] = []


def register_value_kind(kind: ValueKind) -> None:
    """Let plain values of a State that `kind` accepts be kept as it says."""
    _value_kinds.append(kind)


class _Run:
    state: State | None = None


_current_run = _Run()
"""The ronde.elastic.run() that is under way in this process."""


@contextmanager
def running(state: State) -> Iterator[None]:
    """A context for ronde.elastic.run()."""
    _current_run.state = state
    try:
        yield
    finally:
        _current_run.state = None


def running_state() -> State | None:
    """Return the State of the ronde.elastic.run() that is under way; None if none is."""
    return _current_run.state


def register_common_part(name: str, make: Callable[[State], StatePart]) -> None:
    """Let every State that is made from now on have one more part, whatever objects it is given."""
    _common_part_makers[name] = make


def register_check(check: Callable[[State], None]) -> None:
    """Call this when ronde.elastic.run() begins. It raises ValueError if the State lacks what it must have."""
    _checks.append(check)


def check_before_run(state: State) -> None:
    for check in _checks:
        check(state)


class ValuesPart(StatePart):
    """The plain values of a State, by name.

    At every step end a value of an atomic type (a number, a string, None) costs the copy of a reference, and any other
    value a deep copy. So large arrays and long lists are better kept in an object that has a part of its own. All ranks
    take all values of one giver.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self._at_step_end = _copy_values(values, is_kept=True)

    def commit(self) -> dict[str, Any]:
        return _copy_values(self.values)

    def restore(self, committed: dict[str, Any]) -> None:
        self.values = _copy_values(committed)

    def wait(self) -> None:
        """Return when all values are computed; raise if that has failed."""
        for value in self.values.values():
            kind = _find_value_kind(value)
            if kind is not None:
                kind.wait(value)

    def end_step(self) -> None:
        values = self.values
        is_atomic = ATOMIC_TYPES.issuperset(map(type, values.values()))
        self._at_step_end = values.copy() if is_atomic else _copy_values(values, is_kept=True)

    def undo_step(self) -> None:
        self.values = _copy_values(self._at_step_end, is_kept=True)

    def has_stepped(self) -> bool:
        """Return whether a value of a registered kind was replaced: the parameters, by those of the next step."""
        if not _value_kinds:
            return False
        kept = self._at_step_end
        kinds = ((_find_value_kind(value), value, kept.get(name)) for name, value in self.values.items())
        return any(kind is not None and kind.has_changed(value, before) for kind, value, before in kinds)

    def can_undo_step(self) -> bool:
        kinds = ((_find_value_kind(value), value) for value in self._at_step_end.values())
        return all(kind is None or kind.is_intact(value) for kind, value in kinds)

    def sync(self, givers: Sequence[int]) -> None:
        self.values = objects.broadcast(self.values, root=givers[0])


class StatefulPart(StatePart):
    """An object with state_dict() and load_state_dict(), for which no other part is registered. All ranks take the
    state of one giver."""

    def __init__(self, stateful: Any, state: State) -> None:
        self._stateful = stateful
        self._at_step_end = b""
        self._copy_at_step_end: Any = None
        self.end_step()

    def commit(self) -> Any:
        return copy.deepcopy(self._stateful.state_dict())

    def restore(self, committed: Any) -> None:
        self._stateful.load_state_dict(copy.deepcopy(committed))

    def end_step(self) -> None:
        state = self._stateful.state_dict()
        try:
            self._at_step_end = _pickle_plain(state)
        except _NotPlain:
            self._at_step_end, self._copy_at_step_end = b"", copy.deepcopy(state)

    def undo_step(self) -> None:
        self._stateful.load_state_dict(
            pickle.loads(self._at_step_end) if self._at_step_end else copy.deepcopy(self._copy_at_step_end)
        )

    def sync(self, givers: Sequence[int]) -> None:
        given = objects.broadcast(self._stateful.state_dict(), root=givers[0])
        if current_world().rank not in givers:
            self._stateful.load_state_dict(given)


class State:
    """What all ranks of an elastic job have in common: `State(model=model, optimizer=optimizer, epoch=0)`.

    Every name is an attribute. Models, optimizers and other objects for which a part is registered are used in place;
    all else are plain values, which can be assigned, also under new names. All ranks give the same names in the same
    order. After a change of the ranks plain values are other objects, so read them from the state.
    """

    def __init__(self, **named: Any) -> None:  # any objects
        self._objects: dict[str, Any] = {}
        self._parts: dict[str, StatePart] = {}
        """Those of the objects by their names, and the plain values under the empty name."""
        self._steps = 0
        self._commits = 0
        self._is_at_step_end = True
        self._is_survivor = False
        self._fingerprints: dict[int, int] = {}
        """By rank of the newest round, equal for ranks whose states have the same parts."""
        self._newcomers: set[int] = set()
        """The ranks of the newest round that held no state of the job when it began."""
        self._committed: dict[str, Any] | None = None
        """By the name of a part, the copy that its commit() returned; None before the first commit."""
        self._committed_position = Position()
        self._commit_is_due = False
        """Whether commit() was called in the middle of the step under way."""
        self._reset_callbacks: list[Callable[[], object]] = []
        values: dict[str, Any] = {}
        for name, value in named.items():
            self._check_name(name)
            make = _find_part_maker(name, value)
            if make is None:
                values[name] = value
            else:
                self._objects[name] = value
                self._parts[name] = make(value, self)
        self._values = self._parts[""] = ValuesPart(values)
        for name, make_common in _common_part_makers.items():
            self._parts[f" {name}"] = make_common(self)  # no attribute has such a name
        parts = self._parts.values()
        self._end_step_calls = [part.end_step for part in parts if type(part).end_step is not StatePart.end_step]
        self._has_stepped_calls = [
            part.has_stepped for part in parts if type(part).has_stepped is not StatePart.has_stepped
        ]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            for home in (self._objects, self._values.values):
                if name in home:
                    return home[name]
        raise AttributeError(f"the state has no {name!r}; give it to State({name}=…), or assign it")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            vars(self)[name] = value
            return
        self._check_name(name)
        if name in self._objects:
            raise AttributeError(f"{name!r} is an object of the state and cannot be replaced; make another State")
        self._values.values[name] = value

    @property
    def steps(self) -> int:
        """The number of finished steps, equal on all ranks."""
        return self._steps

    @property
    def _position(self) -> Position:
        return Position(self._steps, self._commits)

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Call these functions at the start of every later round, before the state is synchronized: ronde.rank() and
        ronde.size() have changed. A process that joins a running job calls them, too."""
        self._reset_callbacks.extend(callbacks)

    def has_stepped(self) -> bool:
        """Return whether a step has been made since the last step end: an optimizer has applied gradients."""
        for has_stepped in self._has_stepped_calls:
            if has_stepped():
                return True
        return False

    def end_step(self) -> None:
        """End a step: what it has changed counts from now on. All ranks call it after the same step, and then leave the
        round if ranks come or go. Loops over `ElasticBatchSampler.track()` call it by themselves."""
        world = current_world("State.end_step()")
        if world.is_candidate:
            raise refused_to_candidate("State.end_step()")
        self._values.wait()
        self._end_step()
        if world.change_checked and not world.change_agreed:  # as nearly always
            world.change_checked = False
        else:
            self._agree_on_change(world)

    def commit(self) -> None:
        """Keep a copy of everything in memory, for restore() and for the loss of all ranks that have finished a step.
        All ranks call it at the same point, and leave the round there if ranks come or go. In the body of a loop it is
        the last call: it ends the step. If batches of a step were handed out and no optimizer has stepped, as when
        gradients of the last batch of an epoch are accumulated, the copy is made at the end of that step.

        If the copy fails, as when memory is full, the commit before stays."""
        world = current_world("State.commit()")
        self._values.wait()
        if self.has_stepped():
            if world.is_candidate:
                raise refused_to_candidate("State.commit()")
            self._commit_is_due = False  # it follows
            self._end_step()
        elif any(part.is_in_step() for part in self._parts.values()):
            self._commit_is_due = True
            return
        self._keep_commit(Position(self._steps, self._commits + 1))
        self._keep_step_end()
        self._steps, self._commits = self._committed_position
        self._agree_on_change(world)

    def restore(self) -> None:
        """Return to the last commit. All ranks call it; ronde.elastic.run() does so when it has to."""
        if self._committed is None:
            raise ValueError("nothing was committed: call State.commit(), or use the state in ronde.elastic.run()")
        for name, part in self._parts.items():
            part.restore(self._committed[name])
        self._steps, self._commits = self._committed_position  # first: parts may look at it
        self._is_at_step_end = True
        self._commit_is_due = False
        self._keep_step_end()

    def sync(self) -> None:
        """Let all ranks have the same state: that of the ranks that have come farthest. Collective. If it fails, a rank
        that was taking state returns to its last commit. Newcomers whose objects do not fit those of the others raise
        Mismatch, and are lost for the others, which raise PeerLost. Any other Mismatch is raised on all ranks."""
        try:
            self._sync()
        except Mismatch as error:
            if self._is_about_newcomers(error):
                current_world().group.barrier()  # they do not come to it: it ends when they have left
            raise

    def _is_about_newcomers(self, error: Mismatch) -> bool:
        """Whether only newcomers differ, and this rank does not. All ranks have the same error."""
        answers = error.answers or self._fingerprints
        survivors = [rank for rank in answers if rank not in self._newcomers]
        differing = {rank for rank in answers if survivors and answers[rank] != answers[survivors[0]]}
        return bool(differing) and differing <= self._newcomers and current_world().group.rank not in differing

    def _sync(self) -> None:
        if self._committed is None:
            self._keep_commit(self._position)
        world = current_world("State.sync()")
        givers = choose_givers(self._gather_progress(world))
        if world.group.rank in givers.ranks:
            if givers.from_commit:
                self.restore()
            self._sync_parts(givers.ranks)
        else:
            try:
                self._sync_parts(givers.ranks)
            except BaseException:
                self.restore()
                raise
        self._steps, self._commits = givers.position
        self._is_at_step_end = self._is_survivor = True
        self._commit_is_due = False
        self._keep_step_end()
        self._keep_commit(self._position)
        world.has_state = True

    def undo_step(self) -> None:
        """Return to the end of the last finished step, unless an optimizer has stepped since, which cannot be taken
        back; then sync() will replace everything. Called by ronde.elastic.run() after a loss."""
        self._is_at_step_end = all(part.can_undo_step() for part in self._parts.values())
        if self._is_at_step_end:
            for part in self._parts.values():
                part.undo_step()

    def reset(self) -> None:
        """A new round has begun: let the parts drop what is tied to the old one, and call the reset callbacks. Called
        by ronde.elastic.run() before sync()."""
        for part in self._parts.values():
            part.reset()
        for callback in self._reset_callbacks:
            callback()

    def _end_step(self) -> None:
        vars(self)["_steps"] += 1  # first: parts may look at it; without __setattr__, which costs a call
        self._keep_step_end()
        if self._commit_is_due:
            self._commit_is_due = False
            self._keep_commit(self._position)

    def _keep_step_end(self) -> None:
        for end_step in self._end_step_calls:
            end_step()

    def _keep_commit(self, position: Position) -> None:
        copies = {name: part.commit() for name, part in self._parts.items()}
        self._committed, self._committed_position = copies, position

    def _sync_parts(self, givers: tuple[int, ...]) -> None:
        for part in self._parts.values():
            part.sync(givers)

    def _agree_on_change(self, world: World) -> None:
        """Raise RoundChange, on all ranks, if one of them has learned that ranks come or go. The reducer of gradients
        has usually carried that along; otherwise the ranks exchange it here."""
        agreed = world.change_agreed
        if not world.change_checked:
            agreed = world.change_wanted
            if world.size > 1:
                agreed = bool(world.group.allreduce(np.array([agreed], np.uint8), op="max")[0])
        world.change_checked = False
        if agreed:
            raise RoundChange

    def _gather_progress(self, world: World) -> list[Progress]:
        """The progress of all ranks. Mismatch if their states have different names, types or settings."""
        settings = {name: part.describe() for name, part in self._parts.items()}
        parts = "\n".join(f"{name} {type(part).__name__} {settings[name]}" for name, part in self._parts.items())
        own = (*self._position, self._is_at_step_end, *self._committed_position, self._is_survivor)
        row = np.array([[zlib.crc32(parts.encode()), *own]], np.int64)
        rows = world.group.allgather(row).tolist()
        self._fingerprints = {rank: fingerprint for rank, (fingerprint, *_) in enumerate(rows)}
        self._newcomers = {rank for rank, (*_, survives) in enumerate(rows) if not survives}
        if len({fingerprint for fingerprint, *_ in rows}) > 1:
            held = objects.allgather({name: settings[name] for name in self._objects}, group=world.group)
            raise Mismatch(_describe_difference(held))
        return [
            Progress(Position(steps, commits), bool(at_end), Position(*committed), bool(survives))
            for _, steps, commits, at_end, *committed, survives in rows
        ]

    def _check_name(self, name: str) -> None:
        if name.startswith("_") or hasattr(type(self), name):
            raise AttributeError(f"{name!r} cannot be a name in a state: State has it, or it begins with an underscore")


def _describe_difference(held: Sequence[dict[str, str]]) -> str:
    """Say how the states of ranks differ: in their objects, or in the settings of the first one that does. `held` has
    the settings by name, for each rank."""
    if all(each.keys() == held[0].keys() for each in held):
        for name in held[0]:
            if any(each[name] != held[0][name] for each in held):
                answers = format_rank_answers({rank: each[name] for rank, each in enumerate(held)})
                return f"{name} of the state differs between ranks: {answers}; make it with the same settings on all"
    answers = format_rank_answers({rank: ", ".join(each) or "plain values only" for rank, each in enumerate(held)})
    return f"ranks have states of different objects: {answers}; give State() the same on all"


def count_progress(state: State) -> int:
    """Return how far training has come: the number of finished steps and of calls of commit()."""
    return sum(state._position)


def _find_part_maker(name: str, value: object) -> MakePart | None:
    """Who makes the part of an object; None for a plain value. A type's own maker counts before that of its base."""
    kinds = type(value).__mro__
    libraries = {kind.__module__.partition(".")[0] for kind in kinds}
    known = next((kind for kind in kinds if kind in _part_makers), None)
    for library, (binding, attribute) in FRAMEWORK_BINDINGS.items():
        # A model of Keras may be a module of PyTorch, too, for which there is a part that does not fit.
        is_missing = known is None or (library == "keras" and binding not in sys.modules)
        if library in libraries and is_missing and hasattr(value, attribute):
            raise TypeError(f"{name} is a {type(value).__name__} of {library}: import {binding} before State() is made")
    if known is not None:
        return _part_makers[known]
    if isinstance(value, list | tuple):
        return next((make for accepts, make in _container_makers if accepts(value)), None)
    is_stateful = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return StatefulPart if is_stateful else None


class _NotPlain(Exception):
    pass


class _PlainPickler(pickle.Pickler):
    """Refuses all but numbers, strings, None, and the lists, tuples, sets and dictionaries of Python."""

    def reducer_override(self, obj: object) -> Any:  # not called for any of those
        raise _NotPlain


def _pickle_plain(value: object) -> bytes:
    """A copy, made several times as fast as by copy.deepcopy(). _NotPlain if there are other objects in it."""
    file = io.BytesIO()
    _PlainPickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def _find_value_kind(value: object) -> ValueKind | None:
    if type(value) in ATOMIC_TYPES:
        return None
    return next((kind for kind in _value_kinds if kind.accepts(value)), None)


def _copy_values(values: dict[str, Any], *, is_kept: bool = False) -> dict[str, Any]:
    """Copies of the values. What two of them share is shared by the copies as well. With is_kept, values of a
    registered kind are kept as that says."""
    if ATOMIC_TYPES.issuperset(map(type, values.values())):
        return dict(values)
    kinds = {name: kind for name, value in values.items() if (kind := _find_value_kind(value)) is not None}
    if kinds:
        others = _copy_values({name: value for name, value in values.items() if name not in kinds})
        copies = {name: kind.keep(values[name]) if is_kept else kind.copy(values[name]) for name, kind in kinds.items()}
        return {name: copies[name] if name in copies else others[name] for name in values}
    try:
        return copy.deepcopy(values)
    except (TypeError, RuntimeError) as error:  # PyTorch raises the latter
        name = next((name for name, value in values.items() if not _can_be_copied(value)), "")
        raise TypeError(
            f"the value {name!r} of the state cannot be copied ({error}); keep it outside of the state, or assign what "
            "can be copied, such as loss.item()"
        ) from None


def _can_be_copied(value: object) -> bool:
    try:
        copy.deepcopy(value)
    except (TypeError, RuntimeError):
        return False
    return True
