"""`horovodrun -np N python -m horovod.tensorflow.data.compute_worker CONFIGFILE`: a job of N compute workers.

It ends when a process of the training shuts the compute service down.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import horovod.tensorflow as hvd
from horovod.runner.common.service.compute_service import LOOPBACK, ComputeService, find_interfaces
from horovod.runner.common.util import secret
from horovod.tensorflow.data.compute_service import SIDES, TfDataServiceConfig, compute_worker_fn


def main(
    dispatchers: int,
    dispatcher_side: str,
    configfile: str,
    timeout: int,
    network_interfaces: Iterable[str] | None = None,
) -> None:
    """Run this rank's worker. Rank 0 has the compute service and writes the config file for the training.

    The service listens at these network interfaces; without them, at the loopback interface if all workers are on one
    host, and at all otherwise.
    """
    hvd.init()
    size = hvd.size()
    if dispatchers <= 0 or size % dispatchers:
        raise ValueError(f"the number of processes ({size}) must be a multiple of the dispatchers ({dispatchers})")
    if dispatcher_side not in SIDES:
        raise ValueError(f"dispatcher_side must be compute or training, got {dispatcher_side!r}")
    service = config = None
    try:
        if hvd.rank() == 0:
            key = secret.make_secret_key()
            if network_interfaces is None and hvd.local_size() == size:
                network_interfaces = [name for name, hosts in find_interfaces(None).items() if LOOPBACK in hosts]
            service = ComputeService(dispatchers, size // dispatchers, key, network_interfaces)
            config = TfDataServiceConfig(
                dispatchers, size // dispatchers, dispatcher_side, service.addresses(), key, timeout
            )
            config.write(configfile)
        compute_worker_fn(hvd.broadcast_object(config, name="TfDataServiceConfig"))
    finally:
        if service is not None:
            service.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m horovod.tensorflow.data.compute_worker", description=__doc__)
    parser.add_argument("configfile", help="where to write what the training has to know; it holds a key")
    parser.add_argument("--dispatchers", type=int, default=1, help="1, or as many as the training has processes")
    parser.add_argument("--dispatcher-side", default="compute", choices=SIDES, help="in which job dispatchers run")
    parser.add_argument("--timeout", type=int, default=60, help="seconds to wait for dispatchers and workers")
    parser.add_argument(
        "--network-interfaces",
        help="where the compute service of rank 0 listens, such as lo,eth0; without it, at loopback if all workers are "
        "on one host, and at all interfaces otherwise",
    )
    arguments = parser.parse_args()
    interfaces = arguments.network_interfaces.split(",") if arguments.network_interfaces else None
    main(arguments.dispatchers, arguments.dispatcher_side, arguments.configfile, arguments.timeout, interfaces)
