"""The compute service, among threads: who registers, who waits, and who has no business there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from horovod.runner.common.service.compute_service import ComputeClient, ComputeService
from horovod.runner.common.util.secret import make_secret_key
from horovod.runner.common.util.timeout import TimeoutException
from tests.limits import PATIENCE_S

KEY = make_secret_key()
GRPC = "grpc://host:1"


@contextmanager
def service(dispatchers: int = 1, workers: int = 1) -> Iterator[ComputeService]:
    found = ComputeService(dispatchers, workers, KEY, nics=["lo"])
    try:
        yield found
    finally:
        found.shutdown()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as found:
        yield found


def client_of(found: ComputeService, key: bytes = KEY) -> ComputeClient:
    return ComputeClient(found.addresses(), key)


def waiting_for(found: ComputeService, number: int, *futures: Future[Any]) -> None:
    """Wait until so many clients wait."""
    done = threading.Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        if found._thread.call(lambda: len(found._waiting)) == number:
            return
        done.wait(0.01)
    raise AssertionError(f"{number} clients were to wait: {futures}")


def test_those_that_wait_are_told_when_others_register(pool: ThreadPoolExecutor) -> None:
    with service(2, 2) as found:
        client = client_of(found)
        dispatchers = [pool.submit(client.wait_for_dispatcher_registration, i, PATIENCE_S) for i in range(2)]
        workers = [pool.submit(client.wait_for_dispatcher_worker_registration, i, PATIENCE_S) for i in range(2)]
        waiting_for(found, 4)
        client.register_dispatcher(1, "grpc://host:2")
        assert dispatchers[1].result(PATIENCE_S) == "grpc://host:2"
        client.register_dispatcher(0, GRPC)
        assert dispatchers[0].result(PATIENCE_S) == GRPC
        assert client.wait_for_dispatcher_registration(0, 0) == GRPC, "one that is late does not wait"
        client.register_worker_for_dispatcher(0, 0)
        client.register_worker_for_dispatcher(0, 0)  # the same one again
        client.register_worker_for_dispatcher(1, 2)
        assert not workers[0].done() and not workers[1].done()
        client.register_worker_for_dispatcher(0, 1)
        workers[0].result(PATIENCE_S)
        assert not workers[1].done(), "dispatchers have workers of their own"
        client.register_worker_for_dispatcher(1, 3)
        workers[1].result(PATIENCE_S)
        waiting_for(found, 0)


def test_a_mistake_is_an_error_of_the_client() -> None:
    with service(2, 1) as found:
        client = client_of(found)
        calls: list[Callable[[int], object]] = [
            lambda i: client.register_dispatcher(i, GRPC),
            lambda i: client.wait_for_dispatcher_registration(i, 0.1),
            lambda i: client.register_worker_for_dispatcher(i, 0),
            lambda i: client.wait_for_dispatcher_worker_registration(i, 0.1),
        ]
        for call in calls:
            for index in (-1, 2):
                with pytest.raises(IndexError, match=f"from 0 to 1, got {index}"):
                    call(index)
        client.register_dispatcher(0, GRPC)
        client.register_dispatcher(0, GRPC)
        with pytest.raises(ValueError, match=f"different address {GRPC}: grpc://other:1"):
            client.register_dispatcher(0, "grpc://other:1")
        with pytest.raises(ValueError, match="number of seconds"):
            client.wait_for_dispatcher_registration(0, float("nan"))


def test_a_wait_ends_in_time() -> None:
    with service() as found:
        client = client_of(found)
        with pytest.raises(TimeoutException, match=r"waiting for dispatcher 0 .* Timeout after 0.1 seconds"):
            client.wait_for_dispatcher_registration(0, 0.1)
        with pytest.raises(TimeoutException, match=r"waiting for workers for dispatcher 0 .* after 0.1 seconds"):
            client.wait_for_dispatcher_worker_registration(0, timeout=0.1)


def test_a_shutdown_ends_all_waits(pool: ThreadPoolExecutor) -> None:
    with service() as found:
        client = client_of(found)
        ended = pool.submit(client.wait_for_shutdown)
        awaited = pool.submit(client.wait_for_dispatcher_registration, 0, PATIENCE_S)
        waiting_for(found, 2)
        client.shutdown()
        ended.result(PATIENCE_S)
        with pytest.raises(RuntimeError, match="was shut down"):
            awaited.result(PATIENCE_S)
        client.wait_for_shutdown()  # of one that is late
        with pytest.raises(RuntimeError, match="was shut down"):
            client.register_worker_for_dispatcher(0, 0)


def test_the_end_of_a_service_is_its_shutdown(pool: ThreadPoolExecutor) -> None:
    with service() as found:
        client = client_of(found)
        ended = pool.submit(client.wait_for_shutdown)
        waiting_for(found, 1)
        found.shutdown()
        ended.result(PATIENCE_S)
        client.wait_for_shutdown()
        with pytest.raises(ConnectionError, match="is the job of its compute workers running"):
            client.register_dispatcher(0, GRPC)


def test_a_client_that_gives_up_is_forgotten() -> None:
    with service() as found:
        client = client_of(found)
        assert client.local_host == "127.0.0.1"  # it connects, and closes
        waiting_for(found, 0)


def test_who_has_another_key_changes_nothing() -> None:
    with service() as found:
        with pytest.raises(ConnectionError, match="key"):
            client_of(found, make_secret_key()).register_dispatcher(0, GRPC)
        with pytest.raises(TimeoutException):
            client_of(found).wait_for_dispatcher_registration(0, 0)
        with pytest.raises(ValueError, match="at least 16 bytes"):
            client_of(found, b"short")


def test_what_is_no_request_is_refused() -> None:
    with service() as found:
        (address,) = found.addresses()["lo"]
        with socket.create_connection(address, PATIENCE_S) as sock:
            sock.sendall(b"\x80\x04cos\nsystem\n" * 10)
            try:
                assert sock.recv(100) == b""
            except ConnectionResetError:  # not all that it sent was read
                pass
        client_of(found).register_dispatcher(0, GRPC)


def test_an_answer_that_was_changed_on_its_way_is_refused() -> None:
    with service() as found, socket.create_server(("127.0.0.1", 0)) as relay:
        (address,) = found.addresses()["lo"]

        def forward() -> None:
            inside, _ = relay.accept()
            with inside, socket.create_connection(address, PATIENCE_S) as outside:
                thread = threading.Thread(target=copy, args=(inside, outside))
                thread.start()
                while data := outside.recv(4096):
                    inside.sendall(data.replace(b"host:1", b"evil:1"))
                inside.shutdown(socket.SHUT_RDWR)
                thread.join()

        def copy(source: socket.socket, target: socket.socket) -> None:
            while data := source.recv(4096):
                target.sendall(data)

        client_of(found).register_dispatcher(0, GRPC)
        thread = threading.Thread(target=forward)
        thread.start()
        client = ComputeClient({"lo": [relay.getsockname()]}, KEY)
        with pytest.raises(ConnectionError, match="changed on its way"):
            client.wait_for_dispatcher_registration(0, PATIENCE_S)
        thread.join()


def test_it_listens_where_it_is_told_to() -> None:
    with service() as found:
        assert list(found.addresses()) == ["lo"]
        assert found.get_port() == found.addresses()["lo"][0][1]
    with pytest.raises(ValueError, match="nothing0"):
        ComputeService(1, 1, KEY, nics=["nothing0"])
    for numbers in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            ComputeService(*numbers, KEY)
