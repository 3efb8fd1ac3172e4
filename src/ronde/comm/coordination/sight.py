"""What can be seen of the members from where the coordinator is, beyond what they say. Used by the coordinator."""

from __future__ import annotations

from collections.abc import Sequence

from ronde.net.addresses import host_identity, host_name
from ronde.observe.stacks import process_state
from ronde.types import Member

__all__ = ["Sight"]


class Sight:
    """Of one coordinator."""

    def __init__(self) -> None:
        self.host_names: Sequence[str] = ()
        """By rank, what the launcher's user calls the hosts; empty without a launcher."""

    def host_name(self, member: Member) -> str:
        """What people call its host."""
        return self.host_names[member.rank] if self.host_names else host_name(member.host)

    def state(self, member: Member) -> str:
        """What its process is doing. Only processes of this host can be seen."""
        return process_state(member.pid) if member.host == host_identity() else ""
