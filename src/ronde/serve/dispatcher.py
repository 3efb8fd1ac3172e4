"""Hands requests to replicas, and their results back: what Batcher decides is carried out here, in asyncio. Used by the
front.

A replica connects, is told to load the model that is served, and gets batches from then on. When its connection ends,
it has died: the launcher starts another one, and what it had is predicted by others (Batcher.replica_lost). A replica
that takes too long for a batch is ended. Models are changed here as well: see change_model().
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from ronde.errors import ModelError, ProtocolError
from ronde.net.connect import Connection
from ronde.net.http_server import ClientConnection, RequestError
from ronde.serve.batcher import ALONE, Batch, Batcher, BatchLimits, WaitingRequest
from ronde.serve.inference_protocol import ModelSignature, PredictionRequest, Tensor, describe_tensors
from ronde.serve.model_store import ModelCopy, copy_model
from ronde.serve.replica_messages import (
    BatchDone,
    FetchModel,
    FrontMessage,
    LoadModel,
    ModelFailed,
    ModelFile,
    ModelLoaded,
    PredictBatch,
    ReplicaMessage,
    UnloadModel,
    encode_frame,
    make_front_assembler,
)
from ronde.serve.serving_metrics import ServingMetrics
from ronde.text import format_count

TIMER_S = 0.001
"""Timers of uvloop count so long, and round."""
SWEEP_S = 0.05
"""How often it is looked for requests and replicas whose time is over."""
RATE_WINDOW = 256
"""Results from which the time until a queue is empty is estimated."""
MAX_SET_ASIDE = 1000
MAX_DEATHS_BEFORE_READY = 3
"""If so many replicas die before one has loaded the first model, the service cannot start."""

logger = logging.getLogger("ronde.serve")


class Prediction(NamedTuple):
    """The result of a request."""

    version: int
    """Of the model."""
    tensors: list[Tensor]
    """In the order of the signature."""


class PendingPrediction(NamedTuple):
    """A request, and who waits for its result."""

    request: PredictionRequest
    result: asyncio.Future[Prediction]


class ReplicaLost(Exception):
    """The replica has died."""


class ReplicaConnection(asyncio.Protocol):
    """The front's end of the connection with one replica."""

    def __init__(self, number: int, dispatcher: Dispatcher) -> None:
        self.number = number
        """Of its process among all that the job ever starts."""
        self._dispatcher = dispatcher
        self._assembler = make_front_assembler()
        self._transport: asyncio.Transport | None = None
        self.models: dict[int, ModelLoaded] = {}
        """By version."""
        self.loading: dict[int, asyncio.Future[ModelLoaded]] = {}
        self.is_lost = False
        self.busy_since_s = math.inf
        """From when on it has been predicting the oldest of its batches."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._dispatcher.replica_connected(self)

    def data_received(self, data: bytes) -> None:
        try:
            for message, view in self._assembler.feed(data):
                self._dispatcher.handle_message(self, message, view)
        except ProtocolError as error:
            logger.warning("replica %d is ended: %s", self.number, error)
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        for future in self.loading.values():
            if not future.done():
                future.set_exception(ReplicaLost())
                future.exception()  # it may be that nobody waits for it
        self._dispatcher.replica_lost(self)

    def send(self, message: FrontMessage, data: Sequence[bytes | memoryview] = ()) -> None:
        if self._transport is not None and not self.is_lost:
            self._transport.writelines(encode_frame(message, data))

    def load(self, copy: ModelCopy) -> asyncio.Future[ModelLoaded]:
        """Have a model loaded. The future has ReplicaLost or ModelError if it cannot be."""
        future: asyncio.Future[ModelLoaded] = asyncio.get_running_loop().create_future()
        if self.is_lost:
            future.set_exception(ReplicaLost())
            return future
        self.loading[copy.version] = future
        self.send(LoadModel(copy.version, str(copy.path), copy.files, copy.entry))
        return future

    async def send_files(self, copy: ModelCopy) -> None:
        """Send the files of a model, piece by piece, while everything else goes on."""
        pieces = copy.read_pieces()
        piece = await asyncio.to_thread(next, pieces, None)
        while piece is not None and not self.is_lost and self._transport is not None:
            name, data = piece
            piece = await asyncio.to_thread(next, pieces, None)
            self.send(ModelFile(copy.version, name, piece is None), [data])
            while self._transport.get_write_buffer_size() > len(data) and not self.is_lost:
                await asyncio.sleep(0.001)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Dispatcher:
    """The requests, the replicas and the models of a service. All methods are called in the asyncio loop."""

    def __init__(
        self,
        limits: BatchLimits,
        copy: ModelCopy,
        *,
        metrics: ServingMetrics,
        kill_replica: Callable[[int], None],
        timeout_s: float,
        predict_timeout_s: float,
        load_timeout_s: float,
    ) -> None:
        """`copy` is the model to begin with. `kill_replica` ends a replica by its number."""
        self._limits = limits
        self._metrics = metrics
        self._kill_replica = kill_replica
        self._timeout_s = timeout_s
        self._predict_timeout_s = predict_timeout_s
        self._load_timeout_s = load_timeout_s
        self._batcher: Batcher[PendingPrediction] = Batcher(limits)
        self._replicas: dict[int, ReplicaConnection] = {}
        self._copies: dict[int, ModelCopy] = {copy.version: copy}
        self._active = self._last_version = copy.version
        self._model: ModelLoaded | None = None
        """The model that is served; None until a replica has loaded it."""
        self._first_model: asyncio.Future[ModelLoaded] = asyncio.get_running_loop().create_future()
        self._changing = asyncio.Lock()
        self._num_deaths_before_ready = 0
        self._pump_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._finished_s: deque[float] = deque(maxlen=RATE_WINDOW)
        self._set_aside: OrderedDict[tuple[tuple[int, ...], bytes], None] = OrderedDict()
        """Requests with which two replicas have died, by size and digest."""
        self._set_aside_sizes: set[tuple[int, ...]] = set()
        self._sending: set[asyncio.Task[None]] = set()
        """Tasks that send files of models."""
        self._closed = False
        gauges = {
            "replicas_ready": ("Replicas that take requests.", lambda: self._batcher.num_ready),
            "requests_waiting": ("Requests that wait for a replica.", lambda: self._batcher.num_waiting),
            "requests_sent": ("Requests that replicas have.", lambda: self._batcher.num_sent),
            "model_version": ("The version of the model that is served.", lambda: self._active),
        }
        metrics.gauges.update(gauges)
        self._sweep()

    # --- what is served ----------------------------------------------------------------------------------------------

    @property
    def model(self) -> ModelLoaded | None:
        """The model that is served; None until a replica has loaded it."""
        return self._model

    @property
    def is_ready(self) -> bool:
        return self._model is not None and self._batcher.num_ready > 0

    async def wait_until_ready(self) -> ModelLoaded:
        """Wait until a replica has loaded the first model. ModelError if none can."""
        return await asyncio.shield(self._first_model)

    def refuse_if_full(self) -> None:
        """RequestError if too many requests wait."""
        if self._batcher.num_waiting >= self._limits.max_waiting:
            message = f"{self._batcher.num_waiting} requests wait already; try again"
            raise RequestError(503, message, retry_after_s=self._estimate_wait_s())

    async def predict(self, request: PredictionRequest, client: ClientConnection) -> Prediction:
        """Return the outputs for a request. RequestError if there are none, ConnectionError if the client leaves."""
        assert self._model is not None, "requests are checked against a model first"
        self._refuse_set_aside(request)
        now_s = time.monotonic()
        result: asyncio.Future[Prediction] = asyncio.get_running_loop().create_future()
        timeout_s = min(self._timeout_s, request.timeout_s or math.inf)
        waiting = WaitingRequest(
            PendingPrediction(request, result), self._group(request), request.num_rows, now_s, now_s + timeout_s
        )
        self.refuse_if_full()
        self._batcher.add(waiting)
        self._schedule_pump()

        def leave() -> None:
            if not result.done():
                result.set_exception(ConnectionError("the client has left"))

        client.on_leave = leave
        try:
            return await result
        finally:
            client.on_leave = None
            self._batcher.withdraw(waiting)

    def _group(self, request: PredictionRequest) -> object:
        assert self._model is not None
        if not self._model.signature.is_batched:
            return ALONE
        return tuple(tensor.shape[1:] for tensor in request.tensors)

    def _estimate_wait_s(self) -> float:
        """How long it takes until those that wait now were answered, at the present rate."""
        if len(self._finished_s) < 2:
            return 1.0
        passed_s = max(1e-3, time.monotonic() - self._finished_s[0])
        return min(30.0, self._batcher.num_waiting * passed_s / len(self._finished_s))

    # --- replicas ----------------------------------------------------------------------------------------------------

    async def add_replica(self, number: int, connection: Connection) -> None:
        """Take over the connection of a replica."""
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: ReplicaConnection(number, self), connection)

    def replica_connected(self, replica: ReplicaConnection) -> None:
        self._replicas[replica.number] = replica
        self._load_active(replica)

    def _load_active(self, replica: ReplicaConnection) -> None:
        """Have a replica load the model that is served; it gets requests from then on."""

        def done(future: asyncio.Future[ModelLoaded]) -> None:
            error = future.exception()
            if isinstance(error, ModelError):
                logger.warning("replica %d cannot load the model: %s", replica.number, error)
                if not self._first_model.done():
                    self._first_model.set_exception(error)
                self._kill_replica(replica.number)
            elif error is None and not replica.is_lost:
                self._first_loaded(future.result())
                self._batcher.set_ready(replica.number, self._active in replica.models)
                self._schedule_pump()

        replica.load(self._copies[self._active]).add_done_callback(done)

    def _first_loaded(self, loaded: ModelLoaded) -> None:
        if self._model is None:
            self._model = loaded
        if not self._first_model.done():
            self._first_model.set_result(loaded)

    def replica_lost(self, replica: ReplicaConnection) -> None:
        if self._replicas.get(replica.number) is replica:
            del self._replicas[replica.number]
        if self._closed:
            return
        self._metrics.num_replicas_lost += 1
        lost = self._batcher.replica_lost(replica.number, by_request=True)
        self._metrics.num_retried += len(lost.retried)
        if lost.retried:
            requests = format_count(len(lost.retried), "request")
            logger.warning("replica %d was lost; others get what it had: %s", replica.number, requests)
        for waiting in lost.set_aside:
            self._metrics.num_set_aside += 1
            self._remember(waiting.payload.request)
            described = describe_tensors([tensor.info for tensor in waiting.payload.request.tensors])
            logger.warning("a request is set aside: two replicas have died with it (%s)", described)
            self._fail(waiting, 500, "two replicas have died with this request; it is not tried again")
        for waiting in lost.given_up:
            self._fail(waiting, 503, "too many replicas have died; try again")
        if not self._first_model.done():
            self._num_deaths_before_ready += 1
            if self._num_deaths_before_ready >= MAX_DEATHS_BEFORE_READY:
                reason = f"{MAX_DEATHS_BEFORE_READY} replicas have died while they loaded the model"
                self._first_model.set_exception(ModelError(f"{reason}; their output says why"))
        self._schedule_pump()

    def handle_message(self, replica: ReplicaConnection, message: ReplicaMessage, data: memoryview) -> None:
        match message:
            case BatchDone():
                self._handle_results(replica, message, data)
            case ModelLoaded(version):
                replica.models[version] = message
                future = replica.loading.pop(version, None)
                if future is not None and not future.done():
                    future.set_result(message)
            case ModelFailed(version, reason):
                future = replica.loading.pop(version, None)
                if future is not None and not future.done():
                    future.set_exception(ModelError(reason))
            case FetchModel(version):
                if version in self._copies:
                    task = asyncio.get_running_loop().create_task(replica.send_files(self._copies[version]))
                    self._sending.add(task)
                    task.add_done_callback(self._sending.discard)

    # --- requests ----------------------------------------------------------------------------------------------------

    def _schedule_pump(self) -> None:
        """Send what can be sent, at the end of this turn of the loop, so that what comes together goes together."""
        if not self._pump_scheduled:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_scheduled = False
        now_s = time.monotonic()
        # What is due within half of TIMER_S is due: a timer for it would be called again and again until then.
        for batch in self._batcher.take_batches(now_s + TIMER_S / 2):
            self._send_batch(batch, now_s)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self._batcher.due_s() if self._batcher.num_waiting else math.inf
        if due_s < math.inf:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due_s - now_s), self._pump)

    def _send_batch(self, batch: Batch[PendingPrediction], now_s: float) -> None:
        assert self._model is not None
        replica = self._replicas[batch.replica]
        requests = [waiting.payload.request for waiting in batch.requests]
        first = requests[0].tensors
        is_batched = self._model.signature.is_batched
        shapes = tuple(tensor.shape[1:] if is_batched else tensor.shape for tensor in first)
        by_input = [[request.tensors[index].data for request in requests] for index in range(len(first))]
        message = PredictBatch(
            batch.number,
            self._active,
            tuple(request.num_rows for request in requests),
            shapes,
            tuple(tuple(map(len, of_input)) for of_input in by_input),
        )
        replica.send(message, [data for of_input in by_input for data in of_input])
        if replica.busy_since_s == math.inf:
            replica.busy_since_s = now_s
        self._metrics.batch_rows.add(batch.num_rows)
        for waiting in batch.requests:
            self._metrics.queue_s.add(now_s - waiting.arrived_s)

    def _handle_results(self, replica: ReplicaConnection, message: BatchDone, data: memoryview) -> None:
        batch = self._batcher.batch_done(replica.number, message.number)
        if batch is None:
            return
        now_s = time.monotonic()
        replica.busy_since_s = now_s if self._batcher.outstanding(replica.number) else math.inf
        self._metrics.predict_s.add(message.predict_s)
        assert self._model is not None
        infos = self._model.signature.outputs
        offset = 0
        for waiting, result in zip(batch.requests, message.results, strict=True):
            tensors = []
            for info, shape, size in zip(infos, result.shapes, result.sizes, strict=False):
                tensors.append(Tensor(info, shape, data[offset : offset + size]))
                offset += size
            if result.status != 200:
                self._fail(waiting, result.status, result.message)
            elif not waiting.payload.result.done():
                waiting.payload.result.set_result(Prediction(message.version, tensors))
            self._finished_s.append(now_s)
        self._schedule_pump()

    def _fail(self, waiting: WaitingRequest[PendingPrediction], status: int, message: str) -> None:
        if not waiting.payload.result.done():
            retry_after_s = 1.0 if status == 503 else None
            waiting.payload.result.set_exception(RequestError(status, message, retry_after_s=retry_after_s))

    def _sweep(self) -> None:
        """End what has lasted too long. Called every SWEEP_S."""
        now_s = time.monotonic()
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
        if self._batcher.num_waiting:
            for waiting in self._batcher.take_expired(now_s):
                self._fail(waiting, 503, "no replica had time for the request; try again")
        for replica in [*self._replicas.values()]:
            outstanding = self._batcher.outstanding(replica.number)
            for batch in outstanding:
                for waiting in batch.requests:
                    if waiting.deadline_s <= now_s:
                        self._fail(waiting, 504, "the prediction took too long")
            if now_s - replica.busy_since_s > self._predict_timeout_s and outstanding:
                seconds = self._predict_timeout_s
                logger.warning("replica %d is ended: it took more than %g s for a batch", replica.number, seconds)
                self._kill_replica(replica.number)
                replica.close()

    # --- requests that end replicas ----------------------------------------------------------------------------------

    def _remember(self, request: PredictionRequest) -> None:
        sizes = tuple(len(tensor.data) for tensor in request.tensors)
        self._set_aside[sizes, _digest(request)] = None
        while len(self._set_aside) > MAX_SET_ASIDE:
            self._set_aside.popitem(last=False)
        self._set_aside_sizes = {each for each, _ in self._set_aside}

    def _refuse_set_aside(self, request: PredictionRequest) -> None:
        """RequestError for a request with which two replicas have died before. Most are told apart by their size."""
        if not self._set_aside:
            return
        sizes = tuple(len(tensor.data) for tensor in request.tensors)
        if sizes in self._set_aside_sizes and (sizes, _digest(request)) in self._set_aside:
            raise RequestError(500, "two replicas have died with an equal request; it is not tried again")

    # --- another model -----------------------------------------------------------------------------------------------

    async def change_model(self, path: str) -> bool:
        """Serve the model that is at this path now. It is loaded, warmed up and checked beside the one that is served:
        first by one replica, then by all; then it replaces the other. ModelError if it is broken, and then nothing
        has changed. Return whether it is another one."""
        async with self._changing:
            before = self._copies[self._active]
            self._last_version = version = self._last_version + 1
            copy = await asyncio.to_thread(copy_model, path, version)
            if copy.fingerprint == before.fingerprint:
                copy.remove()
                return False
            self._copies[version] = copy
            try:
                loaded = await asyncio.wait_for(self._load_everywhere(copy), self._load_timeout_s)
            except BaseException as error:
                self._metrics.num_model_failures += 1
                self._unload(version)
                if isinstance(error, asyncio.TimeoutError):
                    seconds = self._load_timeout_s
                    raise ModelError(f"the model was not loaded within {seconds:g} s; the other one stays") from None
                raise
            self._activate(loaded)
            self._unload(before.version)
            self._metrics.num_model_changes += 1
            return True

    async def _load_everywhere(self, copy: ModelCopy) -> ModelLoaded:
        loaded = await self._load_first(copy)
        assert self._model is not None
        _check_compatible(self._model.signature, loaded.signature)
        others = [replica.load(copy) for replica in self._replicas.values() if copy.version not in replica.models]
        for found in await asyncio.gather(*others, return_exceptions=True):
            if isinstance(found, BaseException) and not isinstance(found, ReplicaLost):
                raise found
        return loaded

    async def _load_first(self, copy: ModelCopy) -> ModelLoaded:
        """Have one replica load the model. A second one, if the first has died, as that may have another reason."""
        for attempt in range(2):
            while not self._batcher.num_ready:
                await asyncio.sleep(SWEEP_S)
            replica = next(each for each in self._replicas.values() if self._active in each.models)
            try:
                return await replica.load(copy)
            except ReplicaLost:
                logger.warning("a replica died while it loaded the new model (attempt %d of 2)", attempt + 1)
        raise ModelError("replicas die while they load the model; the other one stays")

    def _activate(self, loaded: ModelLoaded) -> None:
        self._active, self._model = loaded.version, loaded
        for replica in self._replicas.values():
            is_loaded = loaded.version in replica.models
            if not is_loaded:  # it came while the others loaded
                self._batcher.set_ready(replica.number, False)
                self._load_active(replica)
        self._schedule_pump()

    def _unload(self, version: int) -> None:
        """Replicas answer in order, so batches that they have are predicted by this model before it is unloaded."""
        self._copies.pop(version).remove()
        for replica in self._replicas.values():
            if replica.models.pop(version, None) is not None or replica.loading.pop(version, None) is not None:
                replica.send(UnloadModel(version))

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the connections with replicas, and so these themselves. What still waits is refused."""
        self._closed = True
        for timer in (self._timer, self._sweeper):
            if timer is not None:
                timer.cancel()
        for waiting in self._batcher.take_expired(math.inf):
            self._fail(waiting, 503, "the service is being ended")
        for replica in [*self._replicas.values()]:
            replica.close()
        for task in self._sending:
            task.cancel()
        for copy in self._copies.values():
            copy.remove()


def _digest(request: PredictionRequest) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    for tensor in request.tensors:
        digest.update(repr(tensor.shape).encode())
        digest.update(tensor.data)
    return digest.digest()


def _check_compatible(served: ModelSignature, new: ModelSignature) -> None:
    """ModelError if requests for one model are none for the other, or if replies would be of other types."""
    if served.inputs != new.inputs:
        raise ModelError(
            f"the new model takes {describe_tensors(new.inputs)}, the one that is served "
            f"{describe_tensors(served.inputs)}; start a service of its own for it"
        )
    if served.is_batched != new.is_batched:
        raise ModelError("one of the two models predicts several samples at a time, and the other does not")
    if [(each.name, each.dtype) for each in served.outputs] != [(each.name, each.dtype) for each in new.outputs]:
        raise ModelError(
            f"the new model returns {describe_tensors(new.outputs)}, the one that is served "
            f"{describe_tensors(served.outputs)}; start a service of its own for it"
        )
