"""ParameterServer: parameters that are trained by a parameter server, as one rank sees them.

It is the user's side of a Participant, which has the state machines and the messages. Where the members meet depends on
the job (startup). The ranks of a job of mpirun, torchrun, srun or `ronde run` are servers and workers in a mailbox of
their group, for as long as the round lasts. Where `ronde run` has started server processes, or the number of ranks may
change, they meet in the rounds of servers (server_rounds).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from ronde.comm.group import Group
from ronde.comm.world import current_world, is_initialized, resolve_group
from ronde.errors import OperationTimeout, RondeError
from ronde.ps.checkpoints import SavedFile, write_manifest
from ronde.ps.commit_log.leases import Lease
from ronde.ps.optimizers import GradientNoise, Optimizer
from ronde.ps.participant import WAIT_CHECK_S
from ronde.ps.partition import Array, Part
from ronde.ps.payloads import check_codec, decode_values, encode_values, pack_arrays
from ronde.ps.protocol import OutgoingMessage
from ronde.ps.server_rounds import describe_member
from ronde.ps.startup import FirstValues, SharedChoices, Startup, describe_tensors
from ronde.ps.tables.client import (
    TableClient,
    check_rows,
    describe_tables,
    join_rows,
)
from ronde.ps.tables.embedding_table import EmbeddingTable
from ronde.types import Deadline

SUSPECT_S = 10.0
"""A server that has not answered for so long while a worker waits is replaced by its backup, as if it were lost."""

TAKE_BYTES = 2 * 1024 * 1024
"""A waiting program writes parts of a read to the parameters when so much of it has come, while more is on its way."""

logger = logging.getLogger("ronde.ps")

_T = TypeVar("_T")


class _PushUnderWay:
    """The gradients of the next step that are there, and the parts of them that were sent."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self.gradients: dict[int, Array] = {}
        """By tensor, flattened."""
        self.staged: set[int] = set()
        """The parts that were sent."""
        self.squares: dict[int, float] = {}
        """By part, the squared norm, if it is needed."""
        self.rows: dict[str, list[tuple[Array, Array]]] = {}
        """By table, the rows that were used, and their gradients."""

    def find_complete(self, tensor: int) -> list[int]:
        """The parts with slices of the tensor whose other slices are there as well."""
        return [
            index
            for index, part in enumerate(self._parts)
            if any(piece.tensor == tensor for piece in part.slices)
            and all(piece.tensor in self.gradients for piece in part.slices)
        ]


class ParameterServer:
    """Parameters that several workers train, each at its own pace or in step. Made by all members of a group alike.

    `parameters` are arrays by name, or a list of them; the values of the first rank are those that training begins
    with. They are written in place by step() and pull(). float32 and float64 are possible. `optimizer` takes the steps,
    on the servers (ronde.ps.SGD, Adam, …, or one of your own); that of the first rank is used. `mode` says how
    synchronous training is: "sync", "bounded" (no worker is more than `staleness` steps ahead of the slowest),
    "dynamic" (so, with a bound that is moved by measured speeds, up to `staleness`), or "async". `servers` and
    `workers` are the ranks that hold parameters and those that train; by default all ranks do both. With `replicate`,
    each part of the parameters is on two servers, and no update is lost when one of them is. `clip_norm` scales
    gradients down whose global norm is larger. `groups` gives tensors other options of the optimizer by name: they are
    in the group with this number. `noise` is added to all gradients.

    `tables` are embedding tables by name (ronde.ps.EmbeddingTable). They are on the servers only: rows() reads rows,
    and stage_rows() gives the gradients of those that were used. `delay_compensation` corrects gradients for what
    others have changed since the worker's read (DC-ASGD): g + delay_compensation * g * g * (w_now - w_read); the
    servers then keep the parameters as each worker has read them. `compression` is what gradients and parameters travel
    as: "none", "float16" or "bfloat16". `state` is what state_dict() of another parameter server has returned: the
    first rank's goes on from there.
    """

    def __init__(
        self,
        parameters: Mapping[str, Array] | Sequence[Array],
        optimizer: Optimizer,
        *,
        mode: str = "sync",
        staleness: int = 4,
        servers: Iterable[int] | None = None,
        workers: Iterable[int] | None = None,
        replicate: bool = True,
        clip_norm: float = 0.0,
        groups: Mapping[str, int] | None = None,
        noise: GradientNoise | None = None,
        tables: Mapping[str, EmbeddingTable] | None = None,
        delay_compensation: float = 0.0,
        compression: str | None = None,
        state: Mapping[str, Any] | None = None,
        suspect_s: float = SUSPECT_S,
        group: Group | None = None,
    ) -> None:
        self._group = resolve_group(group)
        assert self._group.rank is not None
        self.rank = self._group.ranks[self._group.rank]
        """This rank of the world."""
        self._suspect_s = suspect_s
        self._noise = noise
        named = parameters if isinstance(parameters, Mapping) else {str(i): each for i, each in enumerate(parameters)}
        self.parameters: dict[str, Array] = {name: _check_array(name, array) for name, array in named.items()}
        """The arrays, by name."""
        self._flat = [array.reshape(-1) for array in self.parameters.values()]
        self._indices = {name: index for index, name in enumerate(self.parameters)}
        self.tables = dict(tables or {})
        """The embedding tables, by name."""
        choices = SharedChoices(
            describe_tensors(self.parameters, groups),
            mode,
            staleness,
            replicate,
            clip_norm,
            describe_tables(self.tables),
            delay_compensation,
            check_codec(compression),
        )
        startup = Startup(self._group, choices, optimizer, FirstValues(self.parameters, self.tables, state))
        self._participant = startup.take_part(servers, workers)
        self._rounds = startup.rounds
        """Where servers and workers meet, if the job has server processes or is elastic."""
        self._instance = startup.instance
        self._messenger = startup.messenger
        """In a mailbox of the group, if they meet there."""
        setup = self._setup = self._participant.setup
        self.mode = setup.staleness.mode.value
        self.is_worker = self._rounds is not None or self.rank in setup.workers
        """Whether this rank trains."""
        self._parts_of = [
            {index for index, part in enumerate(setup.parts) if any(piece.tensor == tensor for piece in part.slices)}
            for tensor in range(len(self.parameters))
        ]
        """By tensor, the parts that have some of it."""
        self._step = 0
        self._push_under_way = _PushUnderWay(setup.parts)
        self._open_leases: list[int] = []
        """Leases whose samples were handed out since the last push."""
        self._worker = self._participant.worker
        """Of a rank that is only a server, it takes what is told to all members."""
        self._changed = self._participant.changed
        """Guards the WorkerCore, and tells that it has changed."""
        self.tables = dict(zip(setup.table_names, setup.tables, strict=True))
        self._version = setup.version
        self._table_client = TableClient(
            setup, self._worker, self._changed, send=self._participant.send, wait_until=self._wait_until
        )
        self._kept: Sequence[OutgoingMessage] = ()
        """The last part that was staged, if it is not sent yet."""
        self._is_step_under_way = False
        """Whether a step was started whose read has not been taken."""
        self._is_pushing = False
        """Whether a call of this object is in the middle of a push."""
        self._is_closed = False
        if self.is_worker and not self._worker.is_finished:
            self.pull()

    # --- training --------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The number of updates in the parameters that this rank has read."""
        return self._version

    @property
    def staleness(self) -> int:
        """How many updates of other workers there were between this rank's last read and its last push."""
        return self._worker.staleness

    @property
    def is_finished(self) -> bool:
        """Whether training is over: all workers have left. So it is for a process that came too late, too."""
        return self._worker.is_finished

    @property
    def is_server(self) -> bool:
        """Whether this rank holds parts of the parameters."""
        return self._participant.number in self.servers

    @property
    def servers(self) -> tuple[int, ...]:
        """The servers now, the sequencer first: ranks, or the numbers of processes in an elastic job and of server
        processes."""
        return self._worker.configuration.servers

    def stage(self, name: str, gradient: Array) -> None:
        """Send the gradient of one parameter ahead of step() or push(), which then need not get it. Its elements are
        copied, and count when the step is committed. For use in a backward pass, with each gradient when it is ready.
        """
        self._check_worker()
        if name not in self._indices:
            raise ValueError(f"there is no parameter {name!r}")
        index = self._indices[name]
        if index in self._push_under_way.gradients:
            raise ValueError(f"the gradient of {name} was staged already; call step() first")
        self._push_under_way.gradients[index] = self._check_gradient(name, gradient)
        self._stage_parts(self._push_under_way.find_complete(index))
        self._send_behind(())

    def rows(self, table: str, rows: Array) -> Array:
        """The values of rows of a table, given by their numbers, in an array with one more dimension. They are of the
        same version as `parameters`: that of this rank's last step() or pull(), whatever others have pushed since."""
        self._check_worker()
        self.finish_step()
        return self._table_client.read(table, self._check_rows(table, rows))

    def prefetch_rows(self, table: str, rows: Array) -> None:
        """Ask for rows of the version that the next step() or pull() reads, ahead of it, so that rows() has them."""
        self._check_worker()
        self._table_client.prefetch(table, self._check_rows(table, rows))

    def stage_rows(self, table: str, rows: Array, gradients: Array) -> None:
        """Give the gradients of rows of a table, ahead of step() or push(); one vector for each row. Those of a row
        that is there several times are added. They are kept, and sent with the step."""
        self._check_worker()
        numbers = self._check_rows(table, rows).reshape(-1)
        values = np.asarray(gradients)
        shape = (*np.shape(rows), self.tables[table].dim)
        if values.shape != shape:
            raise ValueError(f"the gradients of rows of {table} must have the shape {shape}, got {values.shape}")
        values = values.astype(self.tables[table].dtype, copy=True).reshape(len(numbers), -1)
        self._push_under_way.rows.setdefault(table, []).append((numbers, values))

    def step(
        self,
        gradients: Mapping[str, Array] | Sequence[Array] | None = None,
        *,
        lrs: Sequence[float] = (),
    ) -> int:
        """Push gradients, and read the parameters for the next step into `parameters`. Return their version.

        Without gradients, all of them were given to stage(). Those of rows of tables are given to stage_rows(). `lrs`
        are learning rates by group of tensors, in place of the optimizer's own; in "sync" mode those of the first
        worker count. It returns when the push is committed and cannot be lost any more, and, unless the mode is
        "async", when no worker is too far behind. Gradients are not copied: after an error (a timeout, an interrupt)
        they may be on their way, and must not be changed before finish_step() has returned.
        """
        self._push(gradients, lrs, read=True, copy=False)
        return self.finish_step()

    def start_step(
        self, gradients: Mapping[str, Array] | Sequence[Array] | None = None, *, lrs: Sequence[float] = ()
    ) -> None:
        """As step(), without waiting. Gradients are copied. The parameters change only in finish_step(), wait_for()
        and the next call that pushes or reads, which finishes this step when its own gradients are on their way.

        In "async" mode a worker can so compute and send the next gradients while the parameters are on their way to it:
        they are then one step older. In the other modes call wait_for() or finish_step() before parameters are used.
        """
        self._push(gradients, lrs, read=True)

    def finish_step(self) -> int:
        """Wait until the step that was started last is committed and its read is in `parameters`. Return the version of
        the parameters."""
        if self._is_step_under_way:
            self._read_until(self._is_stepped, f"step {self._step}")
            self._is_step_under_way = False
            self._group.recorder.record_push(self.staleness)
        return self.version

    def wait_for(self, name: str) -> None:
        """Wait until one parameter has the values of the step that was started last. Others may be on their way: call
        it ahead of each layer in a forward pass. If a server is lost meanwhile, the read begins anew, and layers that
        have run have used the values of the first one."""
        if self._is_step_under_way:
            read = self._worker.read
            parts = self._parts_of[self._indices[name]]
            assert read is not None
            if read.untaken and not parts.isdisjoint(read.untaken):
                self._read_until(lambda: self._has_parts(parts), f"{name} in step {self._step}")

    def push(
        self, gradients: Mapping[str, Array] | Sequence[Array] | None = None, *, lrs: Sequence[float] = ()
    ) -> None:
        """As step(), without reading: return when the gradients are committed."""
        self._push(gradients, lrs, read=False)
        self._wait_until(lambda: self._worker.committed_step == self._step, f"the push of step {self._step}")
        self._group.recorder.record_push(self.staleness)

    def pull(self) -> int:
        """Read the parameters, all of one version, into `parameters`. Return the version."""
        self._check_worker()
        self.finish_step()
        with self._changed:
            self._participant.send(self._worker.begin_read())
        self._read_until(self._has_read, "a read of the parameters")
        return self.version

    def state_dict(self) -> dict[str, Any]:
        """The parameters and the states of the optimizer, all of one version, as arrays by name: what is needed to go
        on with training later, also on another number of servers (the argument `state`). Called by one worker or
        several, whenever they like; `parameters` are not changed.
        """
        self._check_worker()
        self.finish_step()
        with self._changed:
            self._participant.send(self._worker.begin_read(with_states=True))
        self._wait_until(self._has_read, "a read of the parameters and their states")
        with self._changed:
            read = self._worker.read
            assert read is not None
            parts, read.values = read.values, {}
        tables = {name: join_rows(self._setup, number, parts) for number, name in enumerate(self.tables)}
        num_states = self._setup.optimizer.num_states
        values = {name: np.empty_like(array) for name, array in self.parameters.items()}
        states = {name: np.empty((num_states, *each.shape), each.dtype) for name, each in self.parameters.items()}
        flat_values = [array.reshape(-1) for array in values.values()]
        for index, part in enumerate(self._setup.parts):
            copy = parts[index]
            rows = copy.reshape(1 + num_states, part.size)
            part.scatter(rows[0], flat_values)
            for number in range(num_states):
                part.scatter(rows[1 + number], [each.reshape(num_states, -1)[number] for each in states.values()])
        return {"version": read.version, "parameters": values, "optimizer": states, "tables": tables}

    def save(self, directory: str | os.PathLike[str]) -> str:
        """Let each server write its parts of the parameters and of the states of the optimizer, all of one version, to
        a folder that all of them reach under this path. Return the folder of this checkpoint, inside of it, which
        ronde.ps.load_checkpoint() reads. Called by one worker, whenever it likes; the others train on."""
        self._check_worker()
        self.finish_step()
        path = str(Path(directory).absolute())
        with self._changed:
            self._participant.send(self._worker.begin_read(with_states=True, save_to=path))
        self._wait_until(self._has_read, "saving of the parameters")
        with self._changed:
            read = self._worker.read
            assert read is not None
            told = read.take()
        files = [msgspec.json.decode(told[index].tobytes(), type=SavedFile) for index in sorted(told)]
        return str(write_manifest(path, read.version, self._setup, list(self.tables), files))

    def samples(self, num_samples: int, batch_size: int, *, epoch: int = 0) -> Iterator[Array]:
        """Yield indices of samples to train on, batch_size at a time, until every sample of the epoch is used.

        Each sample is used exactly once: a push acknowledges all samples that were yielded before it, and what a lost
        worker has not acknowledged is given to others. A program that pushes once for several batches has to push what
        is left when this has ended. Epochs are counted up by one.
        """
        if self._worker.is_finished and not self._is_closed:
            return
        self._check_worker()
        if batch_size < 1 or num_samples < 0:
            raise ValueError(f"samples: needs a batch_size of 1 or more, got {batch_size} of {num_samples} samples")
        while True:
            lease = self._take_lease(epoch, num_samples, batch_size)
            if not lease.ranges:
                return
            self._open_leases.append(lease.number)
            yield np.concatenate([np.arange(each.start, each.stop) for each in lease.ranges])

    def serve(self) -> None:
        """Wait until all workers have left. For a rank that is a server and no worker."""
        with self._changed:
            while not self._worker.is_finished:
                self._participant.check()
                self._changed.wait(WAIT_CHECK_S)

    def close(self) -> None:
        """Leave, and wait until all workers have; the parts of this rank are served until then. Idempotent."""
        if self.is_worker and not self._worker.has_left:
            self.finish_step()
            if self._open_leases:
                logger.warning(
                    "rank %d leaves a parameter server without a push of its last %d batches of samples",
                    self.rank,
                    len(self._open_leases),
                )
            with self._changed:
                self._participant.send(self._worker.leave())
        self.serve()
        if is_initialized() and current_world().joined_round.is_elastic and not current_world().is_candidate:
            world = current_world()  # all have left: nobody has to be started for those that were lost
            world.control_thread.finish(Deadline(world.settings.shutdown_s))
        self._is_closed = True
        if self._messenger is not None:
            self._messenger.close()
        if self._rounds is not None:
            self._rounds.release(self._instance)

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error this rank serves on until its round ends: then the others learn that it is gone.
        if kind is None:
            self.close()

    def __repr__(self) -> str:
        servers = ", ".join(map(describe_member, self.servers)) if self._rounds is not None else str(self.servers)
        return f"<ParameterServer: {len(self._setup.parts)} parts on {servers}>"

    # --- what a worker does ----------------------------------------------------------------------------------------

    def _push(
        self,
        gradients: Mapping[str, Array] | Sequence[Array] | None,
        lrs: Sequence[float],
        *,
        read: bool,
        copy: bool = True,
    ) -> None:
        """Send what is not staged yet, and commit it. Gradients that are not copied must not be changed until the read
        has come: then nobody here needs them any more."""
        self._check_worker()
        if self._is_pushing:
            raise RondeError(
                "this process is in the middle of another step or push: only one thread may use a parameter server at "
                "a time, and no signal handler inside of its calls"
            )
        self._is_pushing = True
        try:
            self._push_alone(gradients, lrs, read=read, copy=copy)
        finally:
            self._is_pushing = False

    def _push_alone(
        self, gradients: Mapping[str, Array] | Sequence[Array] | None, lrs: Sequence[float], *, read: bool, copy: bool
    ) -> None:
        under_way = self._push_under_way
        if gradients is not None:
            if under_way.gradients:
                raise ValueError("gradients were given to stage() and to step(); give them to one of both")
            under_way.gradients.update(enumerate(self._check_gradients(gradients)))
        if len(under_way.gradients) < len(self.parameters):
            missing = [name for name, index in self._indices.items() if index not in under_way.gradients]
            raise ValueError(f"no gradient was given for {', '.join(missing)}")
        if lrs and len(lrs) <= max(part.group for part in self._setup.all_parts):
            raise ValueError(f"lrs must have one learning rate for each group of tensors, got {list(lrs)}")
        unstaged = [index for index in range(len(self._setup.parts)) if index not in under_way.staged]
        self._stage_parts(unstaged, copy=copy)
        for name, pushes in under_way.rows.items():
            for index, rows, values in self._table_client.cut_push(name, pushes):
                self._stage_piece(index, values, rows)
        if self._is_step_under_way:
            self._send_behind(())
            self.finish_step()  # the one before; these gradients are on their way meanwhile
        norm = math.sqrt(sum(under_way.squares[index] for index in sorted(under_way.squares)))
        self._step += 1
        self._push_under_way = _PushUnderWay(self._setup.parts)
        leases, self._open_leases = self._open_leases, []
        self._is_step_under_way = read
        with self._changed:
            self._send_behind(self._worker.commit(self._step, read=read, leases=leases, norm=norm, lrs=lrs))

    def _send_behind(self, messages: Iterable[OutgoingMessage], *, keep: Sequence[OutgoingMessage] = ()) -> None:
        """Send messages behind those that were kept, and keep others: the last part of a push travels together with
        the entry that commits it."""
        kept, self._kept = self._kept, keep
        self._participant.send([*kept, *messages])

    def _stage_parts(self, indices: Iterable[int], *, copy: bool = True) -> None:
        """Send parts whose gradients are all there."""
        for index in indices:
            piece = self._setup.parts[index].gather(
                self._push_under_way.gradients, copy=copy or self._noise is not None
            )
            self._stage_piece(index, piece)

    def _stage_piece(self, index: int, piece: Array, rows: Array | None = None) -> None:
        """Send the gradients of a part, or of some rows of a part of a table. They are this object's own memory, if
        noise is added."""
        under_way, step = self._push_under_way, self._step + 1
        if self._noise is not None:
            self._noise.add_to(piece, self._participant.number, step, index)
        if self._setup.clip_norm and self.mode != "sync":  # there the norm of the mean counts, which servers know
            under_way.squares[index] = float(np.dot(piece, piece))
        under_way.staged.add(index)
        payload = encode_values(piece, self._setup.compression)
        if rows is not None:
            payload = pack_arrays([rows, payload.reshape(len(rows), -1)])
        with self._changed:
            self._send_behind((), keep=self._worker.stage(step, index, payload))

    def _check_rows(self, table: str, rows: Array) -> Array:
        if table not in self.tables:
            raise ValueError(f"there is no table {table!r}")
        return check_rows(table, self.tables[table], rows)

    def _check_gradients(self, gradients: Mapping[str, Array] | Sequence[Array]) -> list[Array]:
        if isinstance(gradients, Mapping):
            if gradients.keys() != self.parameters.keys():
                differ = sorted(gradients.keys() ^ self.parameters.keys())
                raise ValueError(f"gradients must have the names of the parameters; these differ: {', '.join(differ)}")
            gradients = [gradients[name] for name in self.parameters]
        if len(gradients) != len(self.parameters):
            raise ValueError(f"there are {len(self.parameters)} parameters, and {len(gradients)} gradients were given")
        return [self._check_gradient(name, each) for name, each in zip(self.parameters, gradients, strict=True)]

    def _check_gradient(self, name: str, gradient: Array) -> Array:
        parameter, array = self.parameters[name], np.asarray(gradient)
        if array.shape == parameter.shape and array.dtype == parameter.dtype:
            return array.reshape(-1)
        if array.shape != parameter.shape:
            raise ValueError(f"the gradient of {name} must have the shape {parameter.shape}, got {array.shape}")
        return array.astype(parameter.dtype, copy=False).reshape(-1)

    def _has_read(self) -> bool:
        read = self._worker.read
        return read is not None and not read.missing

    def _is_stepped(self) -> bool:
        return self._has_read() and self._worker.committed_step == self._step

    def _has_parts(self, parts: Collection[int]) -> bool:
        """Whether these parts of the read are there, or in the parameters already."""
        read = self._worker.read
        return read is not None and read.missing.isdisjoint(parts)

    def _has_much(self) -> bool:
        read, parts = self._worker.read, self._setup.parts
        return read is not None and sum(parts[index].num_bytes for index in read.values) >= TAKE_BYTES

    def _read_until(self, is_done: Callable[[], bool], what: str) -> None:
        """Wait, and write what has come of the read to the parameters meanwhile."""
        is_over = False
        while not is_over:
            self._wait_until(lambda: is_done() or self._has_much(), what)
            with self._changed:
                is_over, read = is_done(), self._worker.read
                assert read is not None
                values = read.take()
            for index, array in values.items():
                part = self._setup.parts[index]
                part.scatter(decode_values(array, part.dtype), self._flat)
            if is_over and not read.missing:
                self._version = read.version
                self._table_client.begin_step(read.number, read.version)

    def _take_lease(self, epoch: int, num_samples: int, count: int) -> Lease:
        with self._changed:
            request, sends = self._worker.take_lease(epoch, num_samples, count)
            self._participant.send(sends)
        leases, rejections = self._worker.leases, self._worker.rejections
        self._wait_until(lambda: request in leases or request in rejections, f"samples of epoch {epoch}")
        if request in rejections:
            raise ValueError(f"samples: {rejections.pop(request)}")
        return leases.pop(request)

    def _wait_until(self, is_done: Callable[[], bool], what: str) -> None:
        """Wait for answers of the servers. Servers that are silent for long are suspected."""
        deadline, ping_at_s = Deadline(self._group.operation_timeout_s), time.monotonic() + self._suspect_s / 2
        while True:
            with self._changed, _listed(self._participant.awaited, is_done):
                while not is_done():
                    self._participant.check()
                    if deadline.expired:
                        raise OperationTimeout(
                            f"{what} of rank {self.rank} was not answered within {deadline.timeout_s:g} s; the servers "
                            f"are ranks {self.servers}, and workers wait for each other in mode {self.mode!r}"
                        )
                    if time.monotonic() >= ping_at_s:
                        break
                    self._changed.wait(WAIT_CHECK_S)
                else:
                    return
                sends = self._worker.ping()
                ping_at_s = time.monotonic() + self._suspect_s / 2
            self._participant.send(sends)

    def _check_worker(self) -> None:
        if not self.is_worker:
            raise ValueError(f"rank {self.rank} is a server and no worker: it can only serve()")
        if self._worker.has_left:
            raise ValueError("the parameter server is closed")


@contextmanager
def _listed(items: list[_T], item: _T) -> Iterator[None]:
    items.append(item)
    try:
        yield
    finally:
        items.remove(item)


def _check_array(name: str, array: Any) -> Array:
    if not isinstance(array, np.ndarray) or array.dtype.name not in ("float32", "float64"):
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"parameter {name} must be an array of float32 or float64, got {kind}")
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError(f"parameter {name} must be contiguous and writeable, because it is written in place")
    return array
