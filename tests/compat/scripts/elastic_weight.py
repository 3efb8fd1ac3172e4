"""An elastic training of one weight, which every batch makes smaller by exactly 1: it tells how many batches count.

Called with a file, into which every process writes what happens, and a plan: what is to happen at which batch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import horovod.torch as hvd

NUM_BATCHES = 10
LOG, PLAN = sys.argv[1], json.loads(sys.argv[2])
WORKER = int(os.environ.get("RONDE_WORKER", "0"))


def note(event: str) -> None:
    found = {"event": event, "worker": WORKER, "rank": hvd.rank(), "size": hvd.size(), "batch": state.batch}
    with Path(LOG).open("a") as file:
        file.write(json.dumps({**found, "weight": model.weight.item()}) + "\n")


def follow_plan() -> None:
    """Do what the plan says about the batch that is to come."""
    for name, batch, *values in PLAN:
        if batch != state.batch:
            continue
        if name == "kill" and WORKER in values:
            os.kill(os.getpid(), signal.SIGKILL)
        elif name == "raise" and WORKER in values:
            raise ValueError("as planned")
        elif name == "hosts" and hvd.rank() == 0:
            path = Path(f"{LOG}.hosts")
            path.with_suffix(".new").write_text(values[0])
            path.with_suffix(".new").replace(path)
        elif name == "wait":  # for a number of processes
            while hvd.size() != values[0]:
                time.sleep(0.05)
                state.check_host_updates()


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    note("train")
    while state.batch < NUM_BATCHES:
        follow_plan()
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        state.batch += 1
        if state.batch % 2 == 0:
            state.commit()


torch.set_num_threads(1)
hvd.init()
model = nn.Linear(1, 1, bias=False)
with torch.no_grad():
    model.weight.zero_()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, batch=0)
state.register_reset_callbacks([lambda: note("reset")])
train(state)
assert hvd.allgather_object(model.weight.item()) == [-float(NUM_BATCHES)] * hvd.size()
note("end")
