"""A rank of tests/jobs/test_forks.py: it forks, and reports what its child can do and what becomes of itself."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import ronde
from ronde.comm.buffers import Array
from tests.jobs.scripts.control import ControlSocket

MAX_REPORT_BYTES = 1 << 16
LARGE = 100_000
"""So many numbers travel through memory that two ranks share."""


def try_all(attempts: dict[str, Callable[[], object]]) -> dict[str, str]:
    """By attempt, the error in words; empty if there was none."""
    errors = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            errors[name] = ""
        except ronde.RondeError as error:
            errors[name] = str(error)
    return errors


def try_in_a_child(
    x: Array, plan: ronde.Plan, works: list[ronde.Work], mailbox: ronde.Mailbox, ending: str
) -> dict[str, Any] | None:
    """What a child of this rank can do; None in the child, which is to end as scripts do."""
    group = ronde.world()
    attempts: dict[str, Callable[[], object]] = {
        "allreduce": lambda: group.allreduce(x),
        "allreduce in the background": lambda: ronde.allreduce(x, wait=False),
        "named": lambda: ronde.allreduce(x, name="other"),
        "send": lambda: ronde.send(x, 1),
        "receive": lambda: ronde.receive(x),
        "receive in the background": lambda: ronde.receive(x, wait=False),
        "message": works[2].wait,
        "post": lambda: mailbox.post(1),
        "request": lambda: mailbox.request(1),
        "mailbox": lambda: group.open_mailbox(),
        "work": works[0].wait,
        "named work": works[1].wait,
        "bucket": lambda: plan.run(0),
        "bucket in the background": lambda: plan.start(0),
        "plan": lambda: ronde.plan([ronde.Bucket(1)]),
        "object": lambda: ronde.objects.broadcast(1),
        "group": lambda: ronde.add_group([0]),
        "timeline": lambda: ronde.start_timeline("/dev/null"),
        "join": ronde.join,
        "init": ronde.init,
    }
    report, report_end = os.pipe()
    child = os.fork()
    if child:
        os.close(report_end)
        answers: dict[str, Any] = json.loads(os.read(report, MAX_REPORT_BYTES))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return answers
    answers = {
        "initialized": ronde.is_initialized(),
        "place": [ronde.rank(), ronde.size(), ronde.local_rank(), ronde.cross_size(), group.rank],
        "operations": ronde.metrics().total.operations,
        "pid": os.getpid(),
        "errors": try_all(attempts),
    }
    os.write(report_end, json.dumps(answers).encode())
    plan.arrays[0][:] = 100  # memory that the ranks of a host share
    plan.close()
    if ending == "shutdown":
        ronde.shutdown()
        assert not ronde.is_initialized()
    elif ending == "os._exit":
        os._exit(0)
    return None


def use_what_was_inherited(test: ControlSocket, ending: str) -> None:
    """Rank 0 forks while it has operations under way. Then both ranks finish them, and report the sums."""
    x = np.ones(3)
    ronde.allreduce(x)  # the next ones take the shortest path
    plan = ronde.plan([ronde.Bucket(4, op="sum")])
    plan.arrays[0][:] = 1
    mailbox = ronde.world().open_mailbox(lambda message: message.reply(payload=2 * message.payload))
    mailbox.request(1 - test.rank, payload=x)
    if test.rank == 1:
        test.receive()
    works = [ronde.allreduce(x, wait=False), ronde.allreduce(x, name="named", wait=False)]
    works.append(ronde.receive(np.empty(3), wait=False))
    if test.rank == 0:
        answers = try_in_a_child(x, plan, works, mailbox, ending)
        if answers is None:
            return
        test.send("forked", **answers)
    ronde.send(2 * x, 1 - test.rank)
    sums = [works[0].wait(), works[1].wait(), plan.run(0), ronde.allreduce(x), works[2].wait()[0]]
    sums.append(mailbox.request(1 - test.rank, payload=x).payload)
    ronde.barrier()
    test.send("sums", sums=[each.tolist() for each in sums])
    plan.close()
    ronde.shutdown()


def keep_a_payload(test: ControlSocket) -> None:
    """Rank 0 has an array that came by a mailbox. Its child still has it when the rank has let it go and got others."""
    ronde.init()
    mailbox = ronde.world().open_mailbox(lambda message: message.reply(payload=2 * message.payload))
    if test.rank == 0:
        kept = mailbox.request(1, payload=np.ones(LARGE)).payload
        may_look, may_look_end = os.pipe()
        report, report_end = os.pipe()
        if os.fork() == 0:
            os.read(may_look, 1)
            os.write(report_end, json.dumps(np.unique(kept).tolist()).encode())
            os._exit(0)
        del kept
        for _ in range(3):
            mailbox.request(1, payload=np.full(LARGE, 100.0))
        os.write(may_look_end, b".")
        test.send("kept", values=json.loads(os.read(report, MAX_REPORT_BYTES)))
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    ronde.barrier()
    ronde.shutdown()


class Numbers:
    """A dataset: every item is what a worker of the loader says about the rank."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[int]:
        import horovod.torch as hvd

        return [os.getpid(), ronde.rank(), hvd.rank(), hvd.local_size()]


def load_until_killed(test: ControlSocket, victim: int, settings: dict[str, Any]) -> None:
    """The victim starts the workers of a DataLoader and is killed; the others wait for it in an operation."""
    from torch.utils.data import DataLoader

    import horovod.torch  # noqa: F401  # so that the workers find it loaded

    ronde.init(**settings)
    ronde.barrier()
    if test.rank == victim:
        loader: DataLoader[list[int]] = DataLoader(
            Numbers(),  # type: ignore[arg-type]
            batch_size=None,
            num_workers=2,
            persistent_workers=True,
        )
        test.send("loaded", items=list(loader))
        test.receive()  # until the end
    else:
        test.send("waits")
        try:
            ronde.allreduce(np.ones(3))
        except ronde.PeerLost as error:
            test.send("lost", peer=error.peer, why=error.why)
        ronde.shutdown()


def train(test: ControlSocket) -> None:
    """Rank 0 forks between two training steps; its child tries to train on, with everything that it inherited."""
    import torch

    import ronde.torch as rt

    ronde.init()
    model = torch.nn.Linear(3, 1, bias=False)
    rt.broadcast_parameters(model)
    optimizer = rt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))

    def step(value: float) -> list[float]:
        optimizer.zero_grad()
        model(torch.full((1, 3), value)).sum().backward()
        optimizer.step()
        assert model.weight.grad is not None
        return model.weight.grad.flatten().tolist()

    gradients = [step(test.rank + 1.0)]
    if test.rank == 0:
        report, report_end = os.pipe()
        if os.fork() == 0:
            assert model.weight.grad is not None
            model.weight.grad.fill_(1000)
            os.write(report_end, try_all({"step": lambda: step(100.0)})["step"].encode())
            return
        error = os.read(report, MAX_REPORT_BYTES).decode()
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        assert model.weight.grad is not None
        test.send("forked", error=error, kept=model.weight.grad.flatten().tolist())
    gradients.append(step(test.rank + 2.0))
    test.send("trained", gradients=gradients)


def main() -> None:
    warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
    with ControlSocket() as test:
        wanted = test.receive()
        if wanted.get("train"):
            train(test)
        elif wanted.get("keep"):
            keep_a_payload(test)
        elif "victim" in wanted:
            load_until_killed(test, wanted["victim"], wanted["settings"])
        else:
            ronde.init(**wanted["settings"])
            use_what_was_inherited(test, wanted["ending"])


if __name__ == "__main__":
    main()
