"""What can be seen of the members from where the coordinator is, beyond what they say. Used by the coordinator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ronde.net.addresses import host_identity, host_name
from ronde.net.messages import Join
from ronde.observe.stacks import pid_namespace, process_state
from ronde.types import Member

__all__ = ["Sight"]


class Sight:
    """Of one coordinator."""

    def __init__(self) -> None:
        self.host_names: Sequence[str] = ()
        """By rank, what the launcher's user calls the hosts; empty without a launcher."""
        self._visible: frozenset[Member] = frozenset()
        """Members whose process can be seen from here."""

    def begin(self, joins: Iterable[Join]) -> None:
        """A round begins with these. A process of another host, or of another container here, cannot be seen: its
        id may be anybody's here."""
        here, namespace = host_identity(), pid_namespace()
        self._visible = frozenset(
            join.member for join in joins if join.member.host == here and join.pid_namespace == namespace != ""
        )

    def host_name(self, member: Member) -> str:
        """What people call its host."""
        return self.host_names[member.rank] if self.host_names else host_name(member.host)

    def state(self, member: Member) -> str:
        """What its process is doing, or "" if it cannot be seen from here."""
        return process_state(member.pid) if member in self._visible else ""
