"""Scripts of others start under `ronde run` as they are: plain torch.distributed, and TensorFlow's own strategy."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.commands import ROOT, output_of
from tests.limits import LONG_S, LONG_TEST_S
from tests.services import needs

TENSORFLOW = ROOT / ".venv-tensorflow/bin/python"
RUN = (sys.executable, "-m", "ronde.cli.main", "run", "--no-fold", "-np", "2")
pytestmark = pytest.mark.timeout(LONG_TEST_S)

PLAIN_TORCH = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(x)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {x.tolist()}, {torch.get_num_threads()} thread(s)")
dist.destroy_process_group()
"""

PLAIN_TENSORFLOW = """
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    weight = tf.Variable([1.0, 2.0])

@tf.function
def step():
    context = tf.distribute.get_replica_context()
    mine = weight * tf.cast(context.replica_id_in_sync_group + 1, tf.float32)
    return context.all_reduce("sum", mine)

task = strategy.cluster_resolver.task_id
total = strategy.experimental_local_results(strategy.run(step))[0].numpy().tolist()
print(f"worker {task} of {strategy.num_replicas_in_sync}: {total}")
"""


def run(flags: Sequence[str], python: str, script: str, folder: Path) -> list[str]:
    """The lines that the ranks print, when all is well."""
    path = folder / "train.py"
    path.write_text(script)
    clean = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "TF_CONFIG")}
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    printed = output_of([*RUN, *flags, python, path], env={**clean, **quiet}, limit_s=LONG_S)
    return sorted(printed.splitlines())


def test_a_plain_torch_distributed_script(tmp_path: Path) -> None:
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert run([], sys.executable, PLAIN_TORCH, tmp_path) == [
        f"[{rank}] rank {rank} of 2: [3.0, 3.0, 3.0], {threads} thread(s)" for rank in range(2)
    ]


@needs("TensorFlow", missing="" if TENSORFLOW.exists() else "no .venv-tensorflow; `make build` makes it")
def test_a_plain_script_of_tensorflows_multi_worker_strategy(tmp_path: Path) -> None:
    assert run(["--tf-config"], str(TENSORFLOW), PLAIN_TENSORFLOW, tmp_path) == [
        f"[{rank}] worker {rank} of 2: [3.0, 6.0]" for rank in range(2)
    ]
