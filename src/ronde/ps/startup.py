"""How a rank comes to take part in a parameter server: Startup.take_part().

All members agree on what they have to choose alike, and the first one gives the servers their first values. Where they
meet depends on the job: in a mailbox of the group, or in the rounds of servers, to which a process may also come later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ronde.comm import objects
from ronde.comm.group import Group
from ronde.comm.world import current_world, is_initialized
from ronde.errors import Mismatch, OperationTimeout
from ronde.ps.commit_log.staleness import StalenessSettings, parse_mode
from ronde.ps.optimizers import Optimizer
from ronde.ps.participant import WAIT_CHECK_S, MailboxMessenger, Participant
from ronde.ps.partition import Array, Configuration, Part, TensorSpec, cut_into_parts, make_configuration
from ronde.ps.protocol import OutgoingMessage, PartCopy, make_batches
from ronde.ps.server import ServerCore, ServerSetup
from ronde.ps.server_rounds import ServerRounds, server_rounds_of_job
from ronde.ps.tables.client import check_table_states, describe_tables, make_first_rows
from ronde.ps.tables.embedding_table import EmbeddingTable, cut_tables
from ronde.text import format_rank_answers
from ronde.types import Deadline


class SharedChoices(NamedTuple):
    """What all ranks have to choose alike for a parameter server."""

    tensors: tuple[TensorSpec, ...]
    mode: str
    staleness: int
    replicate: bool
    clip_norm: float
    tables: tuple[tuple[Any, ...], ...]
    """What describe_tables() says."""
    delay_compensation: float
    compression: str

    @classmethod
    def of_setup(cls, setup: ServerSetup) -> SharedChoices:
        return cls(
            setup.tensors,
            setup.staleness.mode.value,
            setup.staleness.staleness,
            setup.replicate,
            setup.clip_norm,
            describe_tables(dict(zip(setup.table_names, setup.tables, strict=True))),
            setup.delay_compensation,
            setup.compression,
        )

    def check(self) -> None:
        if not any(tensor.size for tensor in self.tensors) and not self.tables:
            raise ValueError("a parameter server needs at least one parameter that is not empty, or a table")
        parse_mode(self.mode)
        if self.clip_norm < 0 or self.staleness < 0:
            raise ValueError(f"clip_norm and staleness must be 0 or more, got {self.clip_norm} and {self.staleness}")
        if not (self.delay_compensation >= 0 and math.isfinite(self.delay_compensation)):
            raise ValueError(f"delay_compensation must be 0 or more, got {self.delay_compensation}")

    def describe(self, servers: Sequence[int] | int = (), workers: Sequence[int] = ()) -> str:
        names = ", ".join(f"{tensor.name} {tensor.dtype}{list(tensor.shape)}" for tensor in self.tensors[:4])
        return (
            f"{len(self.tensors)} tensors ({names}{', …' if len(self.tensors) > 4 else ''}), mode {self.mode!r}, "
            f"staleness {self.staleness}, servers {servers if isinstance(servers, int) else list(servers)}, workers "
            f"{list(workers)}, replicate {self.replicate}, clip_norm {self.clip_norm:g}, tables {list(self.tables)}, "
            f"delay_compensation {self.delay_compensation:g}, compression {self.compression}"
        )


def describe_tensors(parameters: Mapping[str, Array], groups: Mapping[str, int] | None) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, array.shape, array.dtype.name, (groups or {}).get(name, 0))
        for name, array in parameters.items()
    )


class FirstValues:
    """What the servers begin with: the parameters of the first rank, or a state that it goes on from."""

    def __init__(
        self, parameters: Mapping[str, Array], tables: Mapping[str, EmbeddingTable], state: Mapping[str, Any] | None
    ) -> None:
        """Writes the parameters of a state, which state_dict() has returned, to this rank's."""
        self.version = 0
        self.tables = tables
        self._parameters = parameters
        self._states: dict[str, Array] = {}
        """Of the optimizer, by parameter."""
        self._rows: Mapping[str, Mapping[str, Array]] = {}
        """By table, the rows that a state has."""
        if state is not None:
            self._load_state(state)

    def messages(self, setup: ServerSetup, configuration: Configuration) -> Iterator[OutgoingMessage]:
        """The values and states of each part, for its replicas."""
        values = [array.reshape(-1) for array in self._parameters.values()]
        states = self._flatten_states(setup.optimizer.num_states)
        for index, part in enumerate(setup.parts):
            copy = np.concatenate([part.gather(values), *(part.gather(flat) for flat in states)])
            for to in configuration.replicas_of(index):
                yield OutgoingMessage(to, PartCopy(1, index, 0, {}), copy)
        for number, table_part in enumerate(setup.table_parts):
            index = len(setup.parts) + number
            first_rows = make_first_rows(setup, table_part, self._rows)
            for to in configuration.replicas_of(index):
                yield OutgoingMessage(to, PartCopy(1, index, 0, {}), first_rows)

    def _load_state(self, state: Mapping[str, Any]) -> None:
        missing = [key for key in ("version", "parameters", "optimizer") if key not in state]
        if missing:
            raise ValueError(
                f"state must be what state_dict() or ronde.ps.load_checkpoint() has returned; it has no {missing[0]!r}"
            )
        given = state["parameters"]
        if given.keys() != self._parameters.keys():
            differ = sorted(given.keys() ^ self._parameters.keys())
            raise ValueError(f"state must have the names of the parameters; these differ: {', '.join(differ)}")
        for name, array in self._parameters.items():
            if np.shape(given[name]) != array.shape:
                raise ValueError(
                    f"state must have the shapes of the parameters; {name} has {array.shape}, and there it has "
                    f"{np.shape(given[name])}"
                )
            array[...] = given[name]
        self._rows = check_table_states(self.tables, state.get("tables", {}))
        self._states = dict(state["optimizer"])
        self.version = int(state["version"])

    def _flatten_states(self, num_states: int) -> list[list[Array]]:
        """By state of the optimizer and tensor, its first elements: zeros, unless a state was given."""
        flattened: list[list[Array]] = []
        for number in range(num_states):
            flat = []
            for name, array in self._parameters.items():
                rows = self._states.get(name, np.zeros((num_states, *array.shape), array.dtype))
                if rows.shape != (num_states, *array.shape):
                    raise ValueError(
                        f"state has another optimizer: {len(rows)} arrays for {name}, {num_states} are needed"
                    )
                flat.append(np.ascontiguousarray(rows[number], array.dtype).reshape(-1))
            flattened.append(flat)
        return flattened


class Startup:
    """One rank's way into a parameter server. Nobody needs it when that rank takes part."""

    def __init__(self, group: Group, choices: SharedChoices, optimizer: Optimizer, first_values: FirstValues) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be one of ronde.ps, such as ronde.ps.SGD, got {type(optimizer).__name__}")
        choices.check()
        assert group.rank is not None
        self._group = group
        self._rank = group.ranks[group.rank]
        self._choices = choices
        self._optimizer = optimizer
        self._first_values = first_values
        self.rounds: ServerRounds | None = None
        """Where servers and workers meet, if the job has server processes or is elastic."""
        self.instance = 0
        """The number of the parameter server there."""
        self.messenger: MailboxMessenger | None = None
        """Of the mailbox of the group, if they meet there."""

    def take_part(self, servers: Iterable[int] | None, workers: Iterable[int] | None) -> Participant:
        """Collective: all members of the group make the parameter server together."""
        self.rounds = self._find_rounds(servers, workers)
        if self.rounds is None:
            return self._meet_in_group(servers, workers)
        self.instance = self.rounds.new_instance()
        if current_world().is_candidate:
            own = (self.rounds.number,)
            return self._join_late(self.rounds, lambda: self._agree(servers=own, workers=own))
        return self._meet_servers(self.rounds)

    def _find_rounds(self, servers: Iterable[int] | None, workers: Iterable[int] | None) -> ServerRounds | None:
        """The rounds in which this rank meets servers, if the job has them."""
        rounds = server_rounds_of_job() if is_initialized() else None
        is_whole = servers is None and workers is None and self._group.id == 0
        if rounds is not None and not is_whole:
            if rounds.num_servers or current_world().is_candidate:
                raise ValueError(
                    "all ranks of a job with server processes, and those that come to an elastic one later, make a "
                    "parameter server alike: leave out servers, workers and group"
                )
            return None
        return rounds

    def _agree(self, *, servers: Sequence[int] | int, workers: Sequence[int]) -> ServerSetup:
        """What all members have to know alike. Raises Mismatch on all of them if they differ. `servers` are the ranks,
        or how many processes there are."""
        choices, ranks = self._choices, self._group.ranks
        described = objects.allgather((choices, servers, workers), group=self._group)
        if any(each != described[0] for each in described):
            answers = {
                rank: theirs.describe(*members) for rank, (theirs, *members) in zip(ranks, described, strict=True)
            }
            raise Mismatch(f"ranks disagree on a parameter server: {format_rank_answers(answers)}")
        optimizer: Optimizer
        first = (self._optimizer, self._first_values.version, self._first_values.tables)
        optimizer, version, tables = objects.broadcast(first, root=ranks[0], group=self._group)
        num_servers = servers if isinstance(servers, int) else len(servers)
        keep_whole, in_host = optimizer.needs_whole_tensors, self._is_in_host()
        parts = cut_into_parts(choices.tensors, num_servers, keep_whole=keep_whole, in_host=in_host)
        return ServerSetup(
            parts or (Part((), "float32", 0),),  # with nothing but tables, a read still has its version
            tuple(sorted(workers)),
            StalenessSettings(parse_mode(choices.mode), choices.staleness),
            optimizer,
            choices.clip_norm,
            version,
            choices.replicate,
            choices.tensors,
            tuple(tables.values()),
            tuple(tables),
            cut_tables(tables, optimizer, num_servers),
            choices.delay_compensation,
            choices.compression,
            self.rounds is not None,
        )

    def _is_in_host(self) -> bool:
        """Whether all ranks are on one host. Server processes are expected there, too."""
        if not is_initialized():
            return False
        hosts = current_world().topology.host_indices
        return len({hosts[rank] for rank in self._group.ranks}) == 1

    def _meet_in_group(self, servers: Iterable[int] | None, workers: Iterable[int] | None) -> Participant:
        """Take part in a parameter server whose servers are ranks, as long as the round lasts."""
        ranks = self._group.ranks
        server_ranks = ranks if servers is None else tuple(servers)
        worker_ranks = ranks if workers is None else tuple(workers)
        for what, chosen in (("servers", server_ranks), ("workers", worker_ranks)):
            if not chosen or len({*chosen}) < len(chosen) or not {*chosen} <= {*ranks}:
                raise ValueError(f"{what} must be different ranks of {self._group!r}, got {list(chosen)}")
        setup = self._agree(servers=server_ranks, workers=worker_ranks)
        configuration = make_configuration(setup.all_parts, server_ranks, replicate=setup.replicate)
        server = ServerCore(self._rank, setup, configuration) if self._rank in server_ranks else None
        participant = Participant(self._rank, setup, configuration, server)
        self.messenger = MailboxMessenger(participant, self._group)
        if self._rank == ranks[0]:
            for each in self._first_values.messages(setup, configuration):
                for batch in make_batches((each,)):
                    self.messenger.post(*batch)
        deadline = Deadline(self._group.operation_timeout_s)
        while server is not None and not server.is_ready:  # made so by the thread of the mailbox
            participant.check()
            if deadline.expired:
                raise OperationTimeout(f"rank {self._rank} did not get the first values of its parts in time")
            participant.is_served.wait(WAIT_CHECK_S)
        self._group.barrier()
        return participant

    def _meet_servers(self, rounds: ServerRounds) -> Participant:
        """Make a parameter server together with the other workers, in the rounds of servers. The first rank does it.

        If all that were in the first round of an elastic job are lost, others may train: those that came later. Then
        there is a parameter server already, and these workers join it as all do that come later."""
        made = objects.allgather((rounds.number, self.instance), group=self._group)
        numbers = tuple(number for number, _ in made)
        self.instance = max(instance for _, instance in made)  # a process that is new has made none yet
        rounds.use_instance(self.instance)
        setup = self._agree(servers=rounds.num_servers or numbers, workers=numbers)
        rounds.want(self.instance)
        deadline = Deadline(self._group.operation_timeout_s)
        configuration: Configuration | None = None
        if self._rank == self._group.ranks[0] and not rounds.is_made(self.instance, {*numbers}, deadline):
            configuration = rounds.create(
                self.instance,
                setup,
                lambda servers: make_configuration(setup.all_parts, servers or numbers, replicate=setup.replicate),
                lambda configuration: self._first_values.messages(setup, configuration),
                deadline,
            )
        configuration = objects.broadcast(configuration, root=self._group.ranks[0], group=self._group)
        if configuration is None:
            return self._join_late(rounds, lambda: setup)
        return rounds.add(self.instance, setup, configuration)

    def _join_late(self, rounds: ServerRounds, make_setup: Callable[[], ServerSetup]) -> Participant:
        """Take part in a parameter server that the others made before this process came."""
        deadline = Deadline(self._group.operation_timeout_s)
        participant = rounds.join(self.instance, deadline)
        if participant is None:  # this process has come too late
            return rounds.make_finished(self.instance, make_setup())
        theirs = SharedChoices.of_setup(participant.setup)
        if self._choices != theirs:
            raise Mismatch(
                f"this process makes another parameter server than the others, to which it came later: "
                f"{self._choices.describe()}; they have {theirs.describe()}"
            )
        worker = participant.worker
        with participant.changed:
            sends = worker.join()
        participant.send(sends)
        with participant.changed:
            while not (worker.has_joined or worker.is_finished or worker.rejections):
                participant.check()
                if deadline.expired:
                    raise OperationTimeout("the servers did not answer a worker that came later in time")
                participant.changed.wait(WAIT_CHECK_S)
            worker.is_finished = worker.is_finished or not worker.has_joined
            worker.has_left = worker.is_finished
        return participant
