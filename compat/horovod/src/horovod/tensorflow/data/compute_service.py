"""Data that compute workers prepare for a training: send_to_data_service(), tf_data_service(), and what a worker does.

The job of the compute workers (horovod.tensorflow.data.compute_worker) writes a file with the addresses and the key of
its compute service. The processes of the training read it as a TfDataServiceConfig. Dispatchers run in either job.

TensorFlow's own servers, dispatchers and workers, listen at all interfaces and ask nobody for a key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.runner.common.service.compute_service import ComputeClient
from horovod.runner.common.util.timeout import TimeoutException
from ronde.types import Deadline

__all__ = ["TfDataServiceConfig", "compute_worker_fn", "send_to_data_service", "tf_data_service"]

SIDES = ("compute", "training")
FILE_WAIT_S = 3600.0
"""How long TfDataServiceConfig.read() waits for the file: the other job may be in a queue."""
FILE_POLL_S = 0.2
HEARTBEAT_MS = 1000
DISPATCHER_RETRY_S = 10.0
"""How long a worker tries to reach a dispatcher that has gone. A worker with data that nobody has read does so up to
three times before it stops."""

logger = logging.getLogger("horovod")


@dataclasses.dataclass(frozen=True)
class TfDataServiceConfig:
    """What a process has to know to use the service."""

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    """Where dispatchers run: in the compute job ("compute"), or in the training ("training")."""
    addresses: Mapping[str, Sequence[tuple[str, int]]]
    """Of the compute service, by interface."""
    key: bytes = dataclasses.field(repr=False)
    timeout: int = 60
    """In seconds: how long to wait for dispatchers and workers."""

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """Return a client of the compute service."""
        return ComputeClient(self.addresses, self.key, verbose=verbose)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields; the key is hexadecimal."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "key": self.key.hex()}

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> TfDataServiceConfig:
        """Return what to_dict() was made of."""
        names = {field.name for field in dataclasses.fields(TfDataServiceConfig)}
        if not names - {"timeout"} <= set(config) <= names:
            raise ValueError(f"the config of a data service has the fields {sorted(names)}, got {sorted(config)}")
        addresses = {
            name: [(str(host), int(port)) for host, port in each] for name, each in config["addresses"].items()
        }
        return TfDataServiceConfig(**{**config, "addresses": addresses, "key": bytes.fromhex(config["key"])})

    def write(self, filename: str) -> None:
        """Write the file, which nobody else can read: it holds the key. It appears with its whole content."""
        path = Path(filename)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(handle, "w") as file:  # noqa: PTH123  # a descriptor, not a path
                json.dump(self.to_dict(), file)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @staticmethod
    def read(filename: str, wait_for_file_creation: bool = False) -> TfDataServiceConfig:
        """Read what write() wrote. If asked to, wait for it, up to an hour: then TimeoutException."""
        path = Path(filename)
        deadline = Deadline(FILE_WAIT_S)
        if wait_for_file_creation and not path.exists():
            logger.warning("waiting for %s, which the job of the compute workers writes", path)
        while wait_for_file_creation and not path.exists():
            if deadline.expired:
                raise TimeoutException(
                    f"{path} was not written within {FILE_WAIT_S:g} s; is the job of the compute workers running?"
                )
            time.sleep(FILE_POLL_S)
        try:
            return TfDataServiceConfig.from_dict(json.loads(path.read_text()))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"{path} is not the config of a data service: {error}") from None


@contextlib.contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Give the address of the dispatcher of this rank of a training, when it and its workers are there. A dispatcher of
    the training's side runs in this process for as long as the context."""
    compute = compute_config.compute_client()
    dispatcher_id = rank if compute_config.dispatchers > 1 else 0
    with contextlib.ExitStack() as stack:
        if compute_config.dispatcher_side == "training" and dispatcher_id == rank:
            stack.enter_context(_run_dispatcher(compute, dispatcher_id))
        address = compute.wait_for_dispatcher_registration(dispatcher_id, compute_config.timeout)
        compute.wait_for_dispatcher_worker_registration(dispatcher_id, compute_config.timeout)
        yield address


def send_to_data_service(
    dataset: Any,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> Any:
    """Return the dataset as the compute workers prepare it. Also a method of tf.data.Dataset.

    With one dispatcher and reuse_dataset, all ranks take from one dataset: as they come, or in turn with round_robin,
    which needs `size` and a dataset without an end. Otherwise each rank has a dataset of its own.
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError(
            "the dispatchers of this data service run in the training, and would end with this call; "
            "use the context manager tf_data_service() around the training"
        )
    in_turn = reuse_dataset and round_robin
    if in_turn and size is None:
        raise ValueError("round_robin needs size, the number of ranks")
    with tf_data_service(compute_config, rank) as address:
        return dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode=processing_mode,
                service=address,
                job_name="job" if reuse_dataset else None,
                consumer_index=rank if in_turn else None,
                num_consumers=size if in_turn else None,
            )
        )


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Be a compute worker, and a dispatcher if it is this rank's part, until the compute service is shut down."""
    hvd.init()
    rank = hvd.rank()
    dispatcher_id, place = divmod(rank, compute_config.workers_per_dispatcher)
    compute = compute_config.compute_client()
    with contextlib.ExitStack() as stack:
        if compute_config.dispatcher_side == "compute" and place == 0:
            stack.enter_context(_run_dispatcher(compute, dispatcher_id))
        address = compute.wait_for_dispatcher_registration(dispatcher_id, compute_config.timeout)
        worker = tf.data.experimental.service.WorkerServer(
            tf.data.experimental.service.WorkerConfig(
                dispatcher_address=address.partition("://")[2],
                worker_address=f"{compute.local_host}:%port%",
                heartbeat_interval_ms=HEARTBEAT_MS,
                dispatcher_timeout_ms=int(min(compute_config.timeout, DISPATCHER_RETRY_S) * 1000),
            )
        )
        try:
            compute.register_worker_for_dispatcher(dispatcher_id, rank)
            logger.info("worker %d of dispatcher %d at %s is ready", rank, dispatcher_id, address)
            compute.wait_for_shutdown()
        finally:
            _stop_server(worker)
        hvd.allreduce(0.0, name="compute workers have stopped")  # before their dispatchers do


@contextlib.contextmanager
def _run_dispatcher(compute: ComputeClient, dispatcher_id: int) -> Iterator[None]:
    server = tf.data.experimental.service.DispatchServer()
    try:
        protocol, _, local_target = server.target.partition("://")
        address = f"{protocol}://{compute.local_host}:{local_target.rpartition(':')[2]}"
        compute.register_dispatcher(dispatcher_id, address)
        logger.info("dispatcher %d is at %s", dispatcher_id, address)
        yield
    finally:
        _stop_server(server)


def _stop_server(server: Any) -> None:
    server._stop()  # older versions of TensorFlow have no stop()
    server.join()
