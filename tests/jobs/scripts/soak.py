"""A worker of tests/jobs/soak.py: trains two small models at once, in an elastic job.

The first counts samples: its gradient for sample i is one at place i, gradients are summed up and the learning rate is
1, so after each epoch its weights say how often each sample was used. The second is a network whose loss is compared
with that of an undisturbed run. Rank 0 appends a line of JSON to a log at the end of every step. Now and then it writes
a checkpoint: when all ranks are lost at once, those that are started then go on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ronde
import ronde.elastic
import ronde.torch

SAVE_EVERY_EPOCHS = 20


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0, help="no epoch begins after so many")
    parser.add_argument("--epochs", type=int, default=0, help="exactly so many, whatever the time")
    parser.add_argument("--sample-ms", type=float, default=1.0, help="what one sample takes, while no core is used")
    return parser.parse_args()


class SampleCounter(nn.Module):
    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(num_samples))

    def forward(self, indices: Tensor) -> Tensor:
        return -self.counts[indices].sum()


def write_line(path: Path, **facts: object) -> None:
    """Append one line, in one write: a worker that is killed leaves no half of one."""
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps({"at": time.time(), **facts}).encode() + b"\n")


def main() -> None:
    flags = parse_arguments()
    torch.set_num_threads(1)
    ronde.init()
    torch.manual_seed(1)
    inputs = torch.randn(flags.samples, 16)
    targets = inputs.sin().sum(1, keepdim=True)
    counter = SampleCounter(flags.samples)
    network = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    counter_optimizer = ronde.torch.DistributedOptimizer(torch.optim.SGD(counter.parameters(), lr=1.0), op="sum")
    optimizer = ronde.torch.DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9))
    sampler = ronde.torch.ElasticBatchSampler(flags.samples, global_batch=flags.global_batch, seed=3)
    dataset = torch.utils.data.TensorDataset(torch.arange(flags.samples))
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)
    trained: dict[str, Any] = {"counter": counter, "network": network, "optimizer": optimizer, "sampler": sampler}
    checkpoints = ronde.torch.Checkpoints(f"{flags.log}.checkpoints", **trained)
    restored = checkpoints.restore()
    began = restored.extras["began"] if restored else time.time()
    state = ronde.elastic.State(counter_optimizer=counter_optimizer, began=began, is_over=False, **trained)
    write_line(flags.log, event="built", worker=os.environ.get("RONDE_WORKER", "0"), cpu_s=time.process_time())

    @ronde.elastic.run
    def train(state: ronde.elastic.State) -> None:
        while not state.is_over:
            for (indices,) in sampler.track(loader):
                for each in (counter_optimizer, optimizer):
                    each.zero_grad()
                time.sleep(len(indices) * flags.sample_ms / 1000)
                counter(indices).backward()
                loss = nn.functional.mse_loss(network(inputs[indices]), targets[indices])
                loss.backward()
                counter_optimizer.step()
                optimizer.step()
                if ronde.rank() == 0:
                    facts = {"step": state.steps, "epoch": sampler.epoch, "size": ronde.size()}
                    write_line(flags.log, event="step", **facts)
            is_late = ronde.allreduce(np.array([time.time() - state.began > flags.seconds]), op="max")[0]
            state.is_over = sampler.epoch >= flags.epochs if flags.epochs else bool(is_late)
            state.commit()
            if sampler.epoch % SAVE_EVERY_EPOCHS == 0:
                checkpoints.save(sampler.epoch, extras={"began": state.began})

    train(state)
    with torch.no_grad():
        loss = nn.functional.mse_loss(network(inputs), targets).item()
    counts = counter.counts.detach()
    facts = {"epochs": sampler.epoch, "steps": state.steps, "loss": loss}
    wrong = (counts != sampler.epoch).nonzero().flatten().tolist()
    write_line(flags.log, event="end", rank=ronde.rank() if ronde.is_initialized() else -1, wrong=wrong[:20], **facts)
    if wrong:
        raise SystemExit(
            f"{len(wrong)} samples were not used {sampler.epoch} times, such as {wrong[0]}: {counts[wrong[0]]}"
        )


if __name__ == "__main__":
    main()
