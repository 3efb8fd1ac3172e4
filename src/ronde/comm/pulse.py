"""How this rank is, as the coordinator is told about once per second. Asked by the engine when a launcher watches."""

from __future__ import annotations

import msgspec

from ronde.comm.presence import Presence
from ronde.comm.work import Board
from ronde.net.messages import Visits, Vitals
from ronde.observe.recorder import Recorder
from ronde.observe.vitals import Doing

__all__ = ["Pulse"]


class Pulse:
    """Reads what others have written down. For the engine's thread."""

    def __init__(self, recorder: Recorder, presence: Presence, board: Board) -> None:
        self._recorder = recorder
        self._presence = presence
        self._board = board

    def take(self, now_ns: int, offset_ns: int) -> Vitals:
        """The sums so far, and the notes since the last call. The offset leads to the coordinator's clock."""
        doing = self._doing()
        if doing is not None:
            doing = msgspec.structs.replace(doing, since_ns=min(doing.since_ns, now_ns) + offset_ns)
        reading = self._recorder.reading(now_ns + offset_ns, doing)
        taken = ((lane, lane.notebook.take(offset_ns)) for lane in self._presence.lanes)
        return Vitals(reading, tuple(Visits(lane.channel.spec.id, lane.group, notes) for lane, notes in taken if notes))

    def _doing(self) -> Doing | None:
        """The operation in which a caller has been blocked longest."""
        found = [self._board.doing(), *(lane.doing() for lane in self._presence.lanes)]
        return min((doing for doing in found if doing is not None), key=lambda doing: doing.since_ns, default=None)
