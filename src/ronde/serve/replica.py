"""A replica: a process that loads models and predicts batches for the front. Started by an agent, as a rank that calls
run_replica (ronde.launch.function).

The main thread receives batches, predicts them and answers, one at a time, so that nothing stands between a batch and
its model. Models are loaded in a thread of their own (`ronde-load-model`), while others go on being used. When the
connection to the front ends, the process does.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ronde.comm.buffers import Array
from ronde.data.files import safe_name
from ronde.errors import ModelError, RondeError, StartFailed
from ronde.launch.environment import assigned_threads
from ronde.net.addresses import format_address, parse_address
from ronde.net.connect import Connection, connect_authenticated
from ronde.net.handshake import ConnectionRequest
from ronde.net.keys import JobKey
from ronde.serve.handler import Handler, check_outputs, load_handler
from ronde.serve.inference_protocol import Buffer, ModelSignature, decode_array, encode_array
from ronde.serve.model import load_model
from ronde.serve.replica_messages import (
    REPLICA_PURPOSE,
    BatchDone,
    FetchModel,
    LoadModel,
    ModelFailed,
    ModelFile,
    ModelLoaded,
    PredictBatch,
    ReplicaMessage,
    RequestResult,
    UnloadModel,
    encode_frame,
    make_replica_assembler,
)
from ronde.settings import Settings
from ronde.text import shorten
from ronde.types import Deadline

RECEIVE_BYTES = 256 * 1024
MAX_BUFFERS_PER_SEND = 512
CONNECT_S = 60.0
MAX_ERROR_CHARS = 2000

logger = logging.getLogger("ronde.serve")


class ReplicaOptions(NamedTuple):
    """What every replica gets from the front, through the pipe of its function."""

    key: str
    unix_name: str
    """Of the front's Unix socket."""
    tcp_port: int
    """Of the front, for replicas of other hosts, at the address of the coordinator; 0 if there are none."""
    handler: str
    threads: int
    """0: as many as its launcher assigns."""
    warm_up_rows: tuple[int, ...]

    def __repr__(self) -> str:
        return f"ReplicaOptions(handler={self.handler!r}, threads={self.threads})"  # without the key


# --- one model -------------------------------------------------------------------------------------------------------


class ServedModel:
    """A loaded model with its handler."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.signature: ModelSignature = handler.signature

    def warm_up(self, sizes: Sequence[int]) -> None:
        """Predict batches of these sizes. ModelError if the model does not return what it says."""
        for num_rows in sizes if self.signature.is_batched else (1,):
            self._handler.warm_up(num_rows)
        model, metadata = self._handler.model, self._handler.model.metadata
        num_rows = 3 if metadata.is_batched else 1
        for info, array in zip(metadata.outputs, model.predict(model.make_example(num_rows)).values(), strict=True):
            fits = len(array.shape) == len(info.shape) and all(
                wanted in (None, length) for length, wanted in zip(array.shape, info.shape, strict=True)
            )
            if not fits or (info.is_batched and metadata.is_batched and array.shape[0] != num_rows):
                raise ModelError(f"for {num_rows} samples the model returned shape {array.shape} as {info.describe()}")

    def predict(self, batch: PredictBatch, data: memoryview) -> tuple[list[RequestResult], list[Buffer]]:
        """Return what became of each request, and the bytes of all outputs."""
        if self._handler.is_plain:
            arrays = self._whole_arrays(batch, data)
            try:
                outputs = self._handler.predict(arrays)
                if len(batch.num_rows) == 1:
                    parts = [outputs]
                else:
                    parts = _split(outputs, batch.num_rows)
                return self._encode(parts)
            except Exception:
                if len(batch.num_rows) == 1:
                    return [_failure()], []
                logger.debug("a batch has failed, its requests are tried one by one", exc_info=True)
        return self._predict_one_by_one(self._request_arrays(batch, data))

    def _predict_one_by_one(self, requests: Sequence[dict[str, Array]]) -> tuple[list[RequestResult], list[Buffer]]:
        """Prepare each request alone, predict them together if that works, and otherwise one after the other."""
        results: list[RequestResult | None] = [None] * len(requests)
        prepared: dict[int, dict[str, Array]] = {}
        for index, inputs in enumerate(requests):
            try:
                prepared[index] = self._handler.preprocess(inputs)
            except ValueError as error:
                results[index] = RequestResult(400, shorten(str(error), MAX_ERROR_CHARS))
            except Exception:
                results[index] = _failure()
        outputs = self._predict_together([*prepared.values()]) if self.signature.is_batched else None
        buffers: dict[int, list[Buffer]] = {}
        for position, (index, inputs) in enumerate(prepared.items()):
            try:
                own = self._handler.predict(inputs) if outputs is None else outputs[position]
                (results[index],), buffers[index] = self._encode([self._handler.postprocess(own)])
            except Exception:
                results[index] = _failure()
        assert all(result is not None for result in results)
        done = [result for result in results if result is not None]
        return done, [buffer for index in sorted(buffers) for buffer in buffers[index]]

    def _predict_together(self, prepared: Sequence[dict[str, Array]]) -> list[dict[str, Array]] | None:
        """The outputs of each request; None if they cannot be predicted together."""
        if len(prepared) < 2:
            return None
        try:
            num_rows = [len(next(iter(inputs.values()))) for inputs in prepared]
            together = {name: np.concatenate([inputs[name] for inputs in prepared]) for name in prepared[0]}
            return _split(self._handler.predict(together), num_rows)
        except Exception:
            logger.debug("requests cannot be predicted together, so it is done one by one", exc_info=True)
            return None

    def _encode(self, parts: Sequence[dict[str, Array]]) -> tuple[list[RequestResult], list[Buffer]]:
        results, buffers = [], []
        for outputs in parts:
            arrays = check_outputs(outputs, self.signature)
            own = [encode_array(array) for array in arrays]
            results.append(RequestResult(200, "", tuple(a.shape for a in arrays), tuple(len(b) for b in own)))
            buffers += own
        return results, buffers

    def _whole_arrays(self, batch: PredictBatch, data: memoryview) -> dict[str, Array]:
        arrays = {}
        offset = 0
        for info, shape, sizes in zip(self.signature.inputs, batch.shapes, batch.sizes, strict=True):
            whole = (sum(batch.num_rows), *shape) if self.signature.is_batched else shape
            arrays[info.name] = _aligned(decode_array(info, whole, data[offset : offset + sum(sizes)]))
            offset += sum(sizes)
        return arrays

    def _request_arrays(self, batch: PredictBatch, data: memoryview) -> list[dict[str, Array]]:
        requests: list[dict[str, Array]] = [{} for _ in batch.num_rows]
        offset = 0
        for info, shape, sizes in zip(self.signature.inputs, batch.shapes, batch.sizes, strict=True):
            for request, num_rows, size in zip(requests, batch.num_rows, sizes, strict=True):
                own = (num_rows, *shape) if self.signature.is_batched else shape
                request[info.name] = _aligned(decode_array(info, own, data[offset : offset + size]))
                offset += size
        return requests


def _aligned(array: Array) -> Array:
    return array if array.flags.aligned else array.copy()


def _split(outputs: dict[str, Array], num_rows: Sequence[int]) -> list[dict[str, Array]]:
    """The outputs of each request. ValueError if they do not have as many rows as the inputs."""
    for name, array in outputs.items():
        if not array.shape or len(array) != sum(num_rows):
            raise ValueError(f"the output {name!r} has shape {array.shape} for {sum(num_rows)} samples")
    parts, start = [], 0
    for count in num_rows:
        parts.append({name: array[start : start + count] for name, array in outputs.items()})
        start += count
    return parts


def _failure() -> RequestResult:
    """The result of a request whose prediction has raised the current exception."""
    logger.error("a prediction has failed\n%s", traceback.format_exc())
    last = traceback.format_exc(limit=0).strip().rpartition("\n")[2]
    return RequestResult(500, f"the prediction failed: {shorten(last, MAX_ERROR_CHARS)}")


# --- the process -----------------------------------------------------------------------------------------------------


def run_replica(options: ReplicaOptions) -> None:
    """Serve the front until it ends the connection. The function of each rank of the service."""
    settings = Settings.load()
    logging.basicConfig(format="%(message)s")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    connection, is_local = _connect(options, settings)
    with contextlib.closing(connection), contextlib.ExitStack() as opened:
        _ReplicaProcess(connection, options, opened, is_local=is_local).run()


def _connect(options: ReplicaOptions, settings: Settings) -> tuple[Connection, bool]:
    """Connect to the front: by its Unix socket if it is on this host, otherwise at the address of the coordinator,
    which is in the same process. Return also whether it is on this host."""
    key, deadline = JobKey(options.key), Deadline(CONNECT_S)
    request = ConnectionRequest(REPLICA_PURPOSE, max(0, settings.worker))

    def refuse_retry() -> None:
        raise StartFailed("the front is not on this host")

    try:
        connection, _ = connect_authenticated(
            f"unix:{options.unix_name}",
            key,
            request,
            deadline,
            before_retry=refuse_retry if options.tcp_port else lambda: None,
        )
    except StartFailed:
        if not options.tcp_port:
            raise
        host, _ = parse_address(settings.coordinator)
        address = format_address(host, options.tcp_port)
        connection, _ = connect_authenticated(address, key, request, deadline, heartbeat_s=settings.heartbeat_s)
        return connection, False
    return connection, True


class _ReplicaProcess:
    """The connection to the front, and the models that are loaded."""

    def __init__(
        self, connection: Connection, options: ReplicaOptions, opened: contextlib.ExitStack, *, is_local: bool
    ) -> None:
        """`is_local`: the front is on this host, and so are its files."""
        self._connection = connection
        self._is_local = is_local
        self._options = options
        self._opened = opened
        self._threads = options.threads or assigned_threads()
        self._lock = threading.Lock()
        """Guards sending, and the models: a thread that loads one adds it and says so."""
        self._models: dict[int, ServedModel] = {}
        self._unwanted: set[int] = set()
        """Models that were unloaded before they were loaded."""
        self._fetched: dict[int, tuple[LoadModel, Path]] = {}
        """Models whose files are being received."""

    def run(self) -> None:
        assembler = make_replica_assembler()
        while True:
            missing = assembler.missing
            if missing is not None:
                num_bytes = self._connection.recv_into(missing)
                received = assembler.filled(num_bytes) if num_bytes else None
            else:
                data = self._connection.recv(RECEIVE_BYTES)
                received = assembler.feed(data) if data else None
            if received is None:  # the front has ended
                return
            for message, data_view in received:
                match message:
                    case PredictBatch():
                        self._predict(message, data_view)
                    case LoadModel():
                        self._start_loading(message)
                    case ModelFile():
                        self._write_file(message, data_view)
                    case UnloadModel(version):
                        with self._lock:
                            if self._models.pop(version, None) is None:
                                self._unwanted.add(version)

    def _predict(self, batch: PredictBatch, data: memoryview) -> None:
        began_s = time.perf_counter()
        results, buffers = self._models[batch.version].predict(batch, data)
        self._send(BatchDone(batch.number, batch.version, tuple(results), time.perf_counter() - began_s), buffers)

    def _start_loading(self, message: LoadModel) -> None:
        if self._is_local:
            self._load_in_thread(message, Path(message.path))
            return
        folder = Path(tempfile.mkdtemp(prefix="ronde-model-"))
        self._opened.callback(shutil.rmtree, folder, ignore_errors=True)
        self._fetched[message.version] = (message, folder)
        self._send(FetchModel(message.version))

    def _write_file(self, message: ModelFile, data: memoryview) -> None:
        order, folder = self._fetched[message.version]
        target = folder / safe_name(message.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("ab") as file:
            file.write(data)
        if message.is_last:
            del self._fetched[message.version]
            self._load_in_thread(order, folder)

    def _load_in_thread(self, message: LoadModel, folder: Path) -> None:
        # Touches the models under the lock, and the connection to send. It ends with the process.
        thread = threading.Thread(target=self._load, args=(message, folder), name="ronde-load-model", daemon=True)
        thread.start()

    def _load(self, message: LoadModel, folder: Path) -> None:
        began_s = time.perf_counter()
        try:
            loaded = load_model(folder / message.entry, threads=self._threads)
            handler = load_handler(self._options.handler)(loaded)
            model = ServedModel(handler)
            model.warm_up(self._options.warm_up_rows)
        except Exception as error:
            if not isinstance(error, ValueError | RondeError):
                logger.error("the model could not be loaded\n%s", traceback.format_exc())
            reason = str(error) if isinstance(error, RondeError) else f"{type(error).__name__}: {error}"
            self._send(ModelFailed(message.version, shorten(reason, MAX_ERROR_CHARS)))
            return
        finally:
            if str(folder) != message.path:  # what was fetched is in memory now
                shutil.rmtree(folder, ignore_errors=True)
        gc.freeze()  # what there is by now stays: a later collection need not look through it while a batch waits
        with self._lock:
            if message.version in self._unwanted:
                return
            self._models[message.version] = model
        name = handler.model.metadata.name
        self._send(ModelLoaded(message.version, model.signature, name, time.perf_counter() - began_s))

    def _send(self, message: ReplicaMessage, data: Sequence[Buffer] = ()) -> None:
        buffers = [memoryview(each) for each in encode_frame(message, data) if len(each)]
        with self._lock:
            while buffers:
                num_sent = self._connection.sendmsg(buffers[:MAX_BUFFERS_PER_SEND])
                while buffers and num_sent >= len(buffers[0]):
                    num_sent -= len(buffers.pop(0))
                if num_sent:
                    buffers[0] = buffers[0][num_sent:]
