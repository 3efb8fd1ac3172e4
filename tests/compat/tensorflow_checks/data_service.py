"""The tf.data service: compute workers of a job of their own, and in the ranks of the training."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.tensorflow.data import compute_worker
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service
from tests.compat.tensorflow_checks.registry import check, raises
from tests.limits import RANK_S

NUM_ELEMENTS = 64
KEPT = ("PATH", "PYTHONPATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "TF_CPP_MIN_LOG_LEVEL", "CUDA_VISIBLE_DEVICES")
"""Variables of a process that is in no job: several launchers have names of their own for rank and size."""


def make_dataset() -> tf.data.Dataset:
    return tf.data.Dataset.range(NUM_ELEMENTS).map(lambda each: each + 1).batch(4)


def elements_of_all(dataset: tf.data.Dataset) -> list[list[int]]:
    """By rank: the elements that it got."""
    return hvd.allgather_object([int(each) for batch in dataset.as_numpy_iterator() for each in batch])


@contextmanager
def config_path() -> Iterator[str]:
    """A path for the config file, the same on all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        yield hvd.broadcast_object(f"{folder}/config.json")
        hvd.allreduce(0.0)  # nobody needs it any more


@contextmanager
def compute_job(path: str, *flags: str) -> Iterator[None]:
    """A job of one compute worker, which rank 0 starts and waits for."""
    if hvd.rank() > 0:
        yield
        return
    environment = {name: os.environ[name] for name in os.environ if name in KEPT}
    command = [sys.executable, "-m", "horovod.tensorflow.data.compute_worker", path, *flags]
    with tempfile.TemporaryFile("w+") as output, subprocess.Popen(command, env=environment, stderr=output) as job:
        try:
            while job.poll() is None and not Path(path).exists():
                time.sleep(0.1)
            if Path(path).exists():
                yield
                TfDataServiceConfig.read(path).compute_client().shutdown()
                job.wait(RANK_S)
        finally:
            job.kill()
            output.seek(0)
            assert job.wait() == 0, output.read()


@check
def ranks_share_the_data_of_compute_workers_in_a_job_of_their_own() -> None:
    with config_path() as path, compute_job(path, "--timeout", str(int(RANK_S))):
        config = TfDataServiceConfig.read(path, wait_for_file_creation=True)
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600, "it holds the key"
        assert (config.dispatchers, config.workers_per_dispatcher, config.dispatcher_side) == (1, 1, "compute")
        assert {host for found in config.addresses.values() for host, _ in found} == {"127.0.0.1"}, "one host"
        assert config.key.hex() not in repr(config)
        shared = make_dataset().send_to_data_service(config, hvd.rank(), hvd.size(), reuse_dataset=True)
        found = elements_of_all(shared)
        assert sorted(found[0] + found[1]) == list(range(1, NUM_ELEMENTS + 1)), found
        own = make_dataset().send_to_data_service(config, hvd.rank())
        assert [sorted(each) for each in elements_of_all(own)] == [list(range(1, NUM_ELEMENTS + 1))] * 2
        with raises(ValueError, "round_robin needs size"):
            make_dataset().send_to_data_service(config, hvd.rank(), reuse_dataset=True, round_robin=True)


@check
def each_rank_can_have_a_dispatcher_of_its_own() -> None:
    with config_path() as path:
        arguments = (hvd.size(), "training", path, int(RANK_S))
        worker = threading.Thread(target=compute_worker.main, args=arguments, daemon=True)
        worker.start()
        config = TfDataServiceConfig.read(path, wait_for_file_creation=True)
        with raises(RuntimeError, "tf_data_service()"):
            make_dataset().send_to_data_service(config, hvd.rank())
        with tf_data_service(config, hvd.rank()) as address:
            mode = tf.data.experimental.service.ShardingPolicy.OFF
            dataset = make_dataset().apply(tf.data.experimental.service.distribute(mode, address))
            assert [sorted(each) for each in elements_of_all(dataset)] == [list(range(1, NUM_ELEMENTS + 1))] * 2
            if hvd.rank() == 0:
                config.compute_client().shutdown()
        worker.join(RANK_S)
        assert not worker.is_alive()


@check
def a_wrong_number_of_dispatchers_is_refused() -> None:
    with raises(ValueError, "must be a multiple of the dispatchers (3)"):
        compute_worker.main(3, "compute", "nowhere", 1)
    with raises(ValueError, "compute or training"):
        compute_worker.main(1, "both", "nowhere", 1)
