"""A process of tests/jobs/test_workers.py: the rank that the test wants it to be, round after round, or one whose round
is over and that speaks nevertheless.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import zmq

import ronde
from ronde.comm.world import current_world
from ronde.errors import StartFailed
from ronde.net.connect import connect_authenticated
from ronde.net.control_connection import ControlClient
from ronde.net.keys import JobKey
from ronde.net.listener import ConnectionRequest
from ronde.net.messages import VERSION, AnnounceOperations, JoinRound, LeaveReason, LeaveRound, OperationRequest
from ronde.types import Deadline, DType, Member, OperationKind
from tests.jobs.scripts.control import ControlSocket
from tests.limits import RANK_S


def describe_round() -> dict[str, Any]:
    world = current_world()
    member, control = world.topology.members[world.rank], world.joined_round.control
    assert isinstance(control, ControlClient)
    return {
        "rank": world.rank,
        "worker": member.worker,
        "round": world.topology.round,
        "listener": member.tcp_addresses[0],
        "control": control._socket.get_string(zmq.LAST_ENDPOINT).removeprefix("tcp://"),
        "name": control._socket.get_string(zmq.ROUTING_ID),
    }


def use_round(number: int) -> dict[str, Any]:
    """Ordered and named operations, a group's, and messages: each tells which process is which rank."""
    rank, size = ronde.rank(), ronde.size()
    mine = np.array([number])
    numbers = [ronde.allgather(mine), ronde.allgather(mine, name="numbers"), ronde.groups()[1].allgather(mine)]
    work = ronde.send(mine, to=(rank + 1) % size, wait=False)
    received = ronde.receive(np.zeros_like(mine), source=(rank - 1) % size)
    work.wait()
    return {"numbers": [found.tolist() for found in numbers], "before": int(received[0])}


def speak_late(key: str, control: str, listeners: list[str], mine: dict[str, Any]) -> list[str]:
    """What a process does that has not noticed the end of its round. Returns what the listeners say to it."""
    client = ControlClient(control, JobKey(key), mine["name"])
    client.round = mine["round"]
    request = OperationRequest(0, "numbers", OperationKind.ALLGATHER, DType.INT64, ((1,),))
    member = Member(mine["rank"], "here", 1, "", worker=mine["worker"])
    for message in (AnnounceOperations((request,)), JoinRound(VERSION, 2, member), LeaveRound(LeaveReason.FAILED)):
        client.send(message)
    client.close(flush_s=RANK_S)
    answers = []
    for address in listeners:
        stale = ConnectionRequest("0/ordered 1", mine["rank"], worker=mine["worker"], round=mine["round"])
        try:
            connect_authenticated(address, JobKey(key), stale, Deadline(RANK_S))[0].close()
            answers.append("accepted")
        except StartFailed as error:
            answers.append(str(error))
    return answers


def main() -> None:
    with ControlSocket() as test:
        last: dict[str, Any] = {}
        while True:
            wanted = test.receive()
            if wanted["do"] == "init":
                ronde.init(groups=[[0, 1]], **wanted["settings"])
                last = describe_round()
                test.send("in", **last)
            elif wanted["do"] == "use":
                test.send("used", **use_round(test.rank))
            elif wanted["do"] == "shutdown":
                ronde.shutdown()
                test.send("out")
            elif wanted["do"] == "speak late":
                test.send("spoke", answers=speak_late(wanted["key"], wanted["control"], wanted["listeners"], last))
            else:
                break


if __name__ == "__main__":
    main()
