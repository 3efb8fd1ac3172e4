"""How fast `ronde serve` answers, against a plain Starlette application with as many processes, and whether requests
fail while replicas are killed.

    python benchmarks/serving.py --seconds 8 --rounds 3

Both serve the same model (a multilayer perceptron) with one thread per process, to the same clients: wrk for throughput
and for one client at a time; for the latency at 70 % of what a client of our own can get out of it, one that sends at
random moments whether or not the replies have come, so that a slow reply is not hidden by fewer requests
(`sent_late_p99_ms` is what of the 99th percentile may be that client's own: it shares the cores). The service has a
front and two replicas, and the application as many workers as that are processes, and for comparison as many as
replicas. Rounds take turns, and the median counts. At last a replica is killed every few seconds, under the load of wrk
and of Triton's client. Needs wrk.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import itertools
import json
import math
import os
import random
import re
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
from onnx import TensorProto, helper, numpy_helper

from ronde.net.addresses import find_free_ports

PATH = "/v2/models/mlp/infer"
START_S = 60.0
TFD_TIMER_ABSTIME = 1
NUM_OPEN = 64
"""Connections that a client has before it begins to count."""
TOKEN = "a-token-for-the-benchmark-only"


def make_model(path: Path, hidden: int, num_inputs: int = 784) -> None:
    rng = np.random.default_rng(0)
    sizes = (num_inputs, hidden, hidden, 10)
    nodes, weights, last = [], [], "x"
    for index, (rows, columns) in enumerate(itertools.pairwise(sizes)):
        values = (rng.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)
        weights.append(numpy_helper.from_array(values, f"w{index}"))
        is_last = index == len(sizes) - 2
        product = "y" if is_last else f"p{index}"
        nodes.append(helper.make_node("MatMul", [last, f"w{index}"], [product]))
        if not is_last:
            nodes.append(helper.make_node("Relu", [product], [f"h{index}"]))
            last = f"h{index}"
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", num_inputs])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 10])]
    graph = helper.make_graph(nodes, "mlp", inputs, outputs, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))


def make_body() -> tuple[bytes, int]:
    data = np.random.default_rng(1).standard_normal((1, 784)).astype(np.float32).tobytes()
    tensor = {"name": "x", "shape": [1, 784], "datatype": "FP32", "parameters": {"binary_data_size": len(data)}}
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return text + data, len(text)


@contextlib.contextmanager
def server(command: Sequence[str], port: int, env: Mapping[str, str], log: Path) -> Iterator[psutil.Process]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, env={**os.environ, **env}, stdout=output, stderr=output)
        try:
            wait_until_ready(port, process, log)
            yield psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(START_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    import http.client

    body, length = make_body()
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            with contextlib.closing(connection):
                connection.request("POST", PATH, body, make_headers(length))
                if connection.getresponse().status == 200:
                    return
        time.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{log.read_text()}")


def make_headers(length: int) -> dict[str, str]:
    return {
        "Inference-Header-Content-Length": str(length),
        "Content-Type": "application/octet-stream",
        "Authorization": f"Bearer {TOKEN}",
    }


def run_wrk(folder: Path, port: int, connections: int, seconds: float) -> dict[str, float]:
    """Requests a second, the median latency in milliseconds, and failures."""
    body, length = make_body()
    (folder / "body").write_bytes(body)
    headers = "".join(f'wrk.headers["{name}"] = "{value}"\n' for name, value in make_headers(length).items())
    script = f'wrk.method = "POST"\nwrk.body = io.open("{folder}/body", "rb"):read("*a")\n{headers}'
    (folder / "post.lua").write_text(script)
    command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "60s", "--latency"]
    command += ["-s", str(folder / "post.lua"), f"http://127.0.0.1:{port}{PATH}"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rate = float(re.search(r"Requests/sec:\s+([\d.]+)", text)[1])  # type: ignore[index]
    median, unit = re.search(r"50%\s+([\d.]+)(us|ms|s)", text).groups()  # type: ignore[union-attr]
    bad = re.search(r"Non-2xx or 3xx responses: (\d+)", text)
    errors = re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", text)
    failures = int(bad[1]) if bad else 0
    failures += sum(map(int, errors.groups())) if errors else 0
    return {"rate": rate, "p50_ms": float(median) * {"us": 1e-3, "ms": 1, "s": 1e3}[unit], "failures": failures}


class Connection(asyncio.Protocol):
    """One connection of a client that costs little. All replies are equally long, so only their bytes are counted."""

    def __init__(self, num_reply_bytes: int, on_reply: Callable[[Connection, float], None]) -> None:
        """`on_reply` is told how long a reply took: forever, if the request has failed."""
        self._num_reply_bytes = num_reply_bytes
        self._on_reply = on_reply
        self._num_missing = 0
        self._due_s = 0.0
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def ask(self, request: bytes, due_s: float) -> None:
        self._due_s, self._num_missing = due_s, self._num_reply_bytes
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._num_missing -= len(data)
        is_good = not data.startswith(b"HTTP/1.1 ") or data.startswith(b"HTTP/1.1 200")
        if not is_good or self._num_missing < 0:
            self.transport.abort()
            self._on_reply(self, math.inf)
        elif not self._num_missing:
            self._on_reply(self, time.perf_counter() - self._due_s)


def make_request() -> bytes:
    body, length = make_body()
    lines = [f"POST {PATH} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in make_headers(length).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def measure_reply(port: int) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(make_request())
    head = await reader.readuntil(b"\r\n\r\n")
    found = re.search(rb"\r\ncontent-length: (\d+)", head, re.IGNORECASE)
    assert found is not None, head
    await reader.readexactly(int(found[1]))
    writer.close()
    return len(head) + int(found[1])


async def find_capacity(port: int, connections: int, seconds: float) -> float:
    """Replies a second, when each connection asks again as soon as it is answered."""
    request, loop, count = make_request(), asyncio.get_running_loop(), 0
    end_s = time.perf_counter() + seconds

    def on_reply(connection: Connection, latency_s: float) -> None:
        nonlocal count
        if latency_s == math.inf:
            return
        count += 1
        if time.perf_counter() < end_s:
            connection.ask(request, 0.0)

    num_reply_bytes = await measure_reply(port)
    opened = []
    for _ in range(connections):
        transport, connection = await loop.create_connection(
            lambda: Connection(num_reply_bytes, on_reply), "127.0.0.1", port
        )
        opened.append(transport)
        connection.ask(request, 0.0)
    await asyncio.sleep(seconds)
    for transport in opened:
        transport.close()
    return count / seconds


class ExactTimer:
    """Wakes a coroutine at a time of time.perf_counter(), by a timerfd: timers of event loops count milliseconds, and
    would send the requests of a millisecond together."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._library.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        self._waiter: asyncio.Future[None] | None = None
        asyncio.get_running_loop().add_reader(self._descriptor, self._on_expired)

    def _on_expired(self) -> None:
        os.read(self._descriptor, 8)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait_until(self, due_s: float) -> None:
        seconds, fraction = divmod(due_s, 1.0)
        value = struct.pack("qqqq", 0, 0, int(seconds), max(1, int(1e9 * fraction)))
        self._waiter = asyncio.get_running_loop().create_future()
        if self._library.timerfd_settime(self._descriptor, TFD_TIMER_ABSTIME, value, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        await self._waiter

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)


async def send_at_random_moments(port: int, rate: float, seconds: float, seed: int) -> tuple[list[float], list[float]]:
    """Latencies in milliseconds of requests that come by chance, `rate` a second: from when each should be sent. And
    how much later than that each was sent: what of the latencies is the client's own."""
    request, loop, chance = make_request(), asyncio.get_running_loop(), random.Random(seed)
    latencies: list[float] = []
    late: list[float] = []
    idle: list[Connection] = []
    num_reply_bytes = await measure_reply(port)

    def on_reply(connection: Connection, latency_s: float) -> None:
        latencies.append(1000 * latency_s)
        if latency_s < math.inf:
            idle.append(connection)

    opened = []

    async def connect() -> None:
        transport, connection = await loop.create_connection(
            lambda: Connection(num_reply_bytes, on_reply), "127.0.0.1", port
        )
        opened.append(transport)
        idle.append(connection)

    for _ in range(NUM_OPEN):
        await connect()
    timer = ExactTimer()
    gc.collect()
    gc.disable()  # nothing here is in a cycle
    due_s = time.perf_counter()
    end_s = due_s + seconds
    while due_s < end_s:
        due_s += chance.expovariate(rate)
        if due_s > time.perf_counter():
            await timer.wait_until(due_s)
        elif not len(late) % 32:
            await asyncio.sleep(0)  # replies are read also when requests are late
        if not idle:
            await connect()
        late.append(1000 * (time.perf_counter() - due_s))
        idle.pop().ask(request, due_s)
    while len(latencies) < len(late):
        await asyncio.sleep(0.01)
    gc.enable()
    timer.close()
    for transport in opened:
        transport.close()
    return latencies, late


def run_in_loop(main: Any) -> Any:
    import uvloop

    loop = uvloop.new_event_loop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(folder: Path, port: int, seconds: float, connections: int, seed: int) -> dict[str, float]:
    run_wrk(folder, port, connections, 1)  # warms up
    alone = run_wrk(folder, port, 1, seconds / 2)
    many = run_wrk(folder, port, connections, seconds)
    capacity = run_in_loop(find_capacity(port, connections, seconds / 2))
    latencies, late = run_in_loop(send_at_random_moments(port, 0.7 * capacity, seconds, seed))
    return {
        "rate": many["rate"],
        "load": 0.7 * capacity,
        "alone_p50_ms": alone["p50_ms"],
        "load_p50_ms": percentile(latencies, 0.5),
        "load_p99_ms": percentile(latencies, 0.99),
        "sent_late_p99_ms": percentile(late, 0.99),
        "failures": alone["failures"] + many["failures"] + latencies.count(math.inf),
    }


def measure_kills(folder: Path, port: int, service: psutil.Process, seconds: float, every_s: float) -> dict[str, Any]:
    """Requests and failures of wrk and of Triton's client, while a replica is killed every few seconds."""
    import tritonclient.http

    stop = threading.Event()
    counts = {"triton": 0, "kills": 0}
    failures: list[str] = []

    def ask() -> None:
        client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{port}", network_timeout=60.0)
        values = np.random.default_rng(2).standard_normal((2, 784)).astype(np.float32)
        given = tritonclient.http.InferInput("x", values.shape, "FP32")
        given.set_data_from_numpy(values)
        while not stop.is_set():
            try:
                result = client.infer("mlp", [given], headers={"Authorization": f"Bearer {TOKEN}"})
                assert result.as_numpy("y").shape == (2, 10)
                counts["triton"] += 1
            except Exception as error:
                failures.append(repr(error))
        client.close()

    def kill() -> None:
        while not stop.wait(every_s):
            replicas = [
                each for each in service.children(recursive=True) if "function_rank" in " ".join(each.cmdline())
            ]
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                random.choice(replicas).kill()
                counts["kills"] += 1

    threads = [threading.Thread(target=each) for each in (ask, ask, kill)]
    for thread in threads:
        thread.start()
    found = run_wrk(folder, port, 16, seconds)
    stop.set()
    for thread in threads:
        thread.join()
    return {**counts, "wrk": int(found["rate"] * seconds), "failures": int(found["failures"]) + len(failures)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Serving against plain Starlette.")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=2048, help="units of each of the two hidden layers")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kill-seconds", type=float, default=20.0)
    parser.add_argument("--kill-every", type=float, default=4.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "mlp.onnx"
        make_model(model, options.hidden)
        ports = iter(find_free_ports("127.0.0.1", 3 * options.rounds + 1))
        serve = [sys.executable, "-m", "ronde.cli.main", "serve", str(model), "--replicas", str(options.replicas)]
        serve += ["--threads", "1", "--max-batch", "32"]
        here = str(Path(__file__).parent)
        peer = [sys.executable, "-m", "uvicorn", "serving_peer:app", "--app-dir", here, "--log-level", "warning"]
        kinds = {
            "ronde serve": [*serve, "--port"],
            f"Starlette, {options.replicas + 1} workers": [*peer, "--workers", str(options.replicas + 1), "--port"],
            f"Starlette, {options.replicas} workers": [*peer, "--workers", str(options.replicas), "--port"],
        }
        env = {"MODEL": str(model), "RONDE_SERVE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for seed in range(options.rounds):
            for kind, command in kinds.items():
                port = next(ports)
                with server([*command, str(port)], port, env, folder / "log"):
                    found[kind].append(measure(folder, port, options.seconds, options.connections, seed))
                print(json.dumps({"kind": kind, **{k: round(v, 3) for k, v in found[kind][-1].items()}}), flush=True)
        for kind, rounds in found.items():
            medians = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
            medians["p99_over_p50"] = medians["load_p99_ms"] / medians["load_p50_ms"]
            print(json.dumps({"median of": kind, **{key: round(value, 3) for key, value in medians.items()}}))
        if options.kill_seconds:
            port = next(ports)
            with server([*kinds["ronde serve"], str(port)], port, env, folder / "log") as service:
                result = measure_kills(folder, port, service, options.kill_seconds, options.kill_every)
            print(json.dumps({"kills": result}))


if __name__ == "__main__":
    main()
