"""Scripts of others start under `ronde run` as they are: plain torch.distributed, and TensorFlow's own strategies."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from ronde.launch.driver.failure_report import FOREIGN_DEVICE
from ronde.net.addresses import find_free_ports
from tests.commands import ROOT, output_of
from tests.jobs.test_other_launchers import make_tf_configs, run_together
from tests.limits import LONG_S, LONG_TEST_S, PATIENCE_S
from tests.services import needs

TENSORFLOW = ROOT / ".venv-tensorflow/bin/python"
STRATEGIES = Path(__file__).parent / "scripts/tensorflow_strategies.py"
RUN = (sys.executable, "-m", "ronde.cli.main", "run", "--no-fold", "-np")
HOROVODRUN = (sys.executable, "-m", "horovod.runner.launch", "-np")
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


def test_a_plain_torch_distributed_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLAIN_TORCH)
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    printed = output_of([*RUN, "2", sys.executable, script], env=env, limit_s=LONG_S)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert sorted(printed.splitlines()) == [
        f"[{rank}] rank {rank} of 2: [3.0, 3.0, 3.0], {threads} thread(s)" for rank in range(2)
    ]


def test_dozens_of_ranks_have_a_tf_config_with_a_port_for_each() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    lines = output_of([*RUN, "64", "printenv", "TF_CONFIG"], env=env, limit_s=PATIENCE_S).splitlines()
    found = {int(rank.removeprefix("[")): json.loads(text) for rank, text in (line.split("] ", 1) for line in lines)}
    assert sorted(found) == [*range(64)]
    assert all(each["task"] == {"type": "worker", "index": rank} for rank, each in found.items())
    workers = found[0]["cluster"]["worker"]
    assert len({*workers}) == 64 and all(each["cluster"] == {"worker": workers} for each in found.values())


@needs("TensorFlow", missing="" if TENSORFLOW.exists() else "no .venv-tensorflow; `make build` makes it")
def test_scripts_of_tensorflows_own_strategies(tmp_path: Path) -> None:
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}

    def run(
        name: str, mode: str, library: str, *launcher: str, configs: list[dict[str, str]] | None = None
    ) -> list[dict[str, object]]:
        """What both ranks report, started by a launcher or, without one, with a TF_CONFIG for each. `library` is what
        the script uses besides TensorFlow."""
        command = [*launcher, str(TENSORFLOW), str(STRATEGIES), mode, library, str(tmp_path), name]
        variables = [{**quiet, **config} for config in configs or [{}]]
        run_together(tmp_path, *[command] * len(variables), variables=variables, limit_s=LONG_S)
        return [json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in range(2)]

    def trained(before: float, sum: float | None = 3.0) -> list[dict[str, object]]:
        """What both report that have trained together on samples 1 to 8, with weights that began so."""
        expected = {
            "replicas": 2,
            "loss": 20.0 * (before + 1),
            "weights": [[before] * 2, [before + 36] * 2],
            "sum": sum,
        }
        return [{"task": rank, **expected} for rank in range(2)]

    assert run("launched", "together", "plain", *RUN, "2") == trained(0.0, sum=None)
    by_hand = make_tf_configs(worker=[f"localhost:{port}" for port in find_free_ports("127.0.0.1", 2)])
    assert run("by-hand", "together", "ronde", configs=by_hand) == trained(36.0), "from the checkpoint of rank 0"
    assert run("old", "together", "horovod", *HOROVODRUN, "2") == trained(72.0)

    # MirroredStrategy is that of one process. In a graph it takes the devices of all workers unless it is given some.
    expected = {"replicas": 1, "loss": 20.0, "weights": [[0.0] * 2, [36.0] * 2], "sum": 3.0}
    devices = [f"/job:worker/replica:0/task:{task}/device:CPU:0" for task in range(2)]
    alone = run("alone", "alone", "ronde", *RUN, "2")
    for error in (str(found.pop("graph error")) for found in alone):
        assert all(words in error for words in FOREIGN_DEVICE), f"the report of a job would give no advice: {error}"
    assert alone == [{**expected, "graph": [[1, rank + 1.0], [2, 3.0]], "graph devices": devices} for rank in range(2)]
