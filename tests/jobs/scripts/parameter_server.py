"""A rank of tests/jobs/test_parameter_server.py: trains parameters that count how often each sample was used.

The test may tell a rank to kill itself when it has sent so many messages: so it dies at any moment of a push, as a
worker and as a server.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np

import ronde
from ronde.comm.mailbox import Mailbox
from ronde.ps import SGD, EmbeddingTable, ParameterServer, UniformRows
from tests.jobs.scripts.control import ControlSocket

NUM_TENSORS = 4
ZERO = UniformRows(0.0)


def kill_after(num_messages: int) -> None:
    """End this process when it is about to send this message of a mailbox."""
    post, sent = Mailbox.post, [0]

    def count_and_post(self: Mailbox, *args: Any, **options: Any) -> Any:
        sent[0] += 1
        if sent[0] == num_messages:
            os.kill(os.getpid(), signal.SIGKILL)
        return post(self, *args, **options)

    Mailbox.post = count_and_post  # type: ignore[method-assign]


def train(test: ControlSocket, server: ParameterServer, wanted: dict[str, Any]) -> None:
    num_samples, longest_s, steps = wanted["num_samples"], 0.0, 0
    staleness = 0
    for epoch in range(wanted["epochs"]):
        for indices in server.samples(num_samples, wanted["batch"], epoch=epoch):
            gradient = np.zeros(num_samples)
            gradient[indices % num_samples] = -1.0
            rows = server.rows("counts", indices)
            assert (rows[:, 0] == server.parameters["0"][indices]).all(), "rows are of another version"
            server.stage_rows("counts", indices, -np.ones((len(indices), 1)))
            begun_s = time.monotonic()
            server.step([gradient] * NUM_TENSORS)
            longest_s = max(longest_s, time.monotonic() - begun_s)
            steps += 1
            staleness = max(staleness, server.staleness)
            values = [*server.parameters.values()]
            assert all((values[0] == each).all() for each in values), "versions are mixed"
            if steps == wanted.get("report_at"):
                test.send("training")
                test.receive()
    server.pull()
    counts = [*server.parameters.values()]
    counts.append(server.rows("counts", np.arange(num_samples))[:, 0])
    is_exact = all((each == wanted["epochs"]).all() for each in counts)
    test.send("trained", exact=is_exact, longest_s=longest_s, steps=steps, staleness=staleness, servers=server.servers)


def main() -> None:
    with ControlSocket() as test:
        wanted = test.receive()
        ronde.init()
        parameters = [np.zeros(wanted["num_samples"]) for _ in range(NUM_TENSORS)]
        server = ParameterServer(
            parameters,
            SGD(lr=1.0),
            tables={"counts": EmbeddingTable(num_rows=wanted["num_samples"], dim=1, dtype="float64", initializer=ZERO)},
            mode=wanted["mode"],
            staleness=2,
            servers=wanted["servers"],
            workers=wanted["workers"],
            suspect_s=wanted.get("suspect_s", 10.0),
        )
        if ronde.rank() == wanted.get("victim"):
            kill_after(wanted["after"])
        if server.is_worker:
            train(test, server, wanted)
        test.receive()
        server.close()
        test.send("closed", servers=server.servers)
        ronde.shutdown()


if __name__ == "__main__":
    main()
