"""A worker of tests/jobs/test_mxnet.py: trains with gluon while workers are killed and come, and counts how often each
sample was used."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import mxnet as mx
from mxnet import autograd, gluon

import ronde
import ronde.mxnet as rm
from ronde.comm.world import current_world
from ronde.elastic import State, run
from tests.jobs.scripts.control import until

WORKER = int(os.environ.get("RONDE_WORKER", "-1"))
LENGTH, GLOBAL_BATCH, NUM_EPOCHS = 60, 6, 3
FAULTS: dict[str, str] = json.loads(os.environ["TEST_FAULTS"])
"""By worker, place and step, as in "1 backward 7": kill, or wait until there are 3 ranks or will be."""
FOLDER = Path(sys.argv[1])

ronde.init()


class Counter(gluon.nn.Block):  # type: ignore[misc]  # MXNet has no types
    """Its gradient counts the samples; its mean is changed by a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.counts = self.params.get("counts", shape=(LENGTH,), init="zeros")
            self.others = [self.params.get(f"other{index}", shape=(500,), init="zeros") for index in range(4)]
            self.num_forward = self.params.get("forward", shape=(1,), init="zeros", grad_req="null")

    def forward(self, indices: Any) -> Any:
        self.num_forward.set_data(self.num_forward.data() + 1.0)
        used = self.counts.data().take(indices).sum()
        return used + sum(each.data().sum() for each in self.others) / ronde.size()


net = Counter()
net.initialize()
momentum = {"learning_rate": 1.0, "momentum": 0.0}
trainer = rm.DistributedTrainer(net.collect_params(), "sgd", momentum, op="sum", bucket_mb=0.003, overlap=True)
batches = rm.ShardedBatches(LENGTH, global_batch=GLOBAL_BATCH, seed=3)
state = State(net=net, trainer=trainer, batches=batches)
sizes: list[int] = []


def at(place: str, step: int) -> None:
    """This worker is at this place now."""
    what = FAULTS.pop(f"{WORKER} {place} {step}", "")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "await 3 ranks":
        until(lambda: ronde.size() == 3 or current_world().change_wanted, "somebody who wants to join")


@run
def train(state: Any) -> None:
    sizes.append(ronde.size())
    while batches.epoch < NUM_EPOCHS:
        for indices in batches:
            at("forward", state.steps)
            with autograd.record():
                loss = net(mx.nd.array(indices, dtype="int32"))
            loss.backward()
            at("backward", state.steps)
            trainer.step(1)
            at("update", state.steps)
        state.commit()


train(state)
result = {
    "counts": sorted(set((-net.counts.data()).asnumpy().tolist())),
    "others": sorted({round(float(number)) for each in net.others for number in (-each.data()).asnumpy()}),
    "forward": int(net.num_forward.data().asscalar()),
    "updates": int(trainer.optimizer.num_update),
    "steps": state.steps,
    "sizes": sizes,
}
(FOLDER / f"worker-{WORKER}.json").write_text(json.dumps(result))
ronde.shutdown()
