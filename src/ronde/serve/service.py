"""A service: the front in this process, its replicas as ranks that agents start, here or on other hosts. Used by
`ronde serve`.

The main thread runs the front in asyncio (HTTP, batches, connections with replicas); the thread `ronde-driver` runs the
driver of the job, which starts each replica that has died again; the thread `ronde-listener` authenticates the
connections of replicas. The service ends when it is told to (SIGTERM, Ctrl-C): it says that it is not ready, takes no
more connections, answers what was asked, and ends the replicas. SIGHUP makes it load its model again.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ronde.errors import JobFailed, ModelError, StartFailed
from ronde.launch.config import HostOptions, host_flags, make_launch_config
from ronde.launch.driver.driver import Driver
from ronde.launch.driver.failure_report import JobResult
from ronde.launch.driver.monitor import open_jobs_dir
from ronde.launch.function import FUNCTION_RANK_COMMAND, pickle_call
from ronde.launch.job import Job
from ronde.launch.named_functions import search_modules_beside
from ronde.launch.output.printer import Printer
from ronde.net.connect import Connection
from ronde.net.handshake import ConnectionRequest
from ronde.net.http_server import HttpOptions, HttpServer, new_token, read_token, write_token
from ronde.net.keys import JobKey, new_job_key
from ronde.net.listener import Listener
from ronde.serve.batcher import BatchLimits
from ronde.serve.dispatcher import Dispatcher
from ronde.serve.front import PUBLIC_PATHS, Front
from ronde.serve.handler import load_handler
from ronde.serve.model_store import ModelCopy, copy_model, remove_abandoned_copies
from ronde.serve.replica import ReplicaOptions, run_replica
from ronde.serve.replica_messages import REPLICA_PURPOSE
from ronde.serve.serving_metrics import ServingMetrics
from ronde.settings import take_secret
from ronde.text import format_count

TOKEN_VARIABLE = "RONDE_SERVE_TOKEN"
DRIVER_STOP_S = 30.0
"""How long the end of the job may take."""
RESTART_COOLDOWN_S = (0.1, 5.0)
"""How long a replica's slot is left alone when its process has died: the first time, and at most, when the next ones
die soon as well."""
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")

logger = logging.getLogger("ronde.serve")


class ServeOptions(HostOptions, frozen=True, kw_only=True):
    """The section `serve` of a job file; each key is a flag of `ronde serve`, with dashes. Those for hosts are of the
    hosts of the replicas."""

    model: str = ""
    """Folder that `ronde export` has made, or a file of ONNX."""
    name: str = ""
    """Name of the model in URLs. Default: the one in its metadata, or that of the file."""
    handler: str = ""
    """`module:Class` with preprocess, predict and postprocess. Default: the model alone."""
    replicas: int | None = None
    """Processes that predict. Default: all slots of the hosts, or 1."""
    threads: int = 0
    """Threads of one replica. 0: the cores of a host, shared by its replicas."""
    host: str = "127.0.0.1"
    """Address at which the service listens; 0.0.0.0 for all of this machine."""
    port: int = 8000
    """0: any free one."""
    token_file: str = ""
    """File with the token that clients have to send. Default: $RONDE_SERVE_TOKEN, or a new one in a file of its own."""
    no_token: bool = False
    """Answer everybody who can connect."""
    certificate: str = ""
    """File with the certificate chain for TLS, in PEM."""
    private_key: str = ""
    """File with the private key of the certificate."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in the header Host that are answered. Default: on a loopback address those of loopback, otherwise all."""
    max_batch: int = 32
    """The most samples that are predicted together."""
    max_delay_ms: float = 2.0
    """How long requests may wait for company while all replicas are busy."""
    max_waiting: int = 1000
    """Requests that wait; further ones get 503."""
    max_body_bytes: int = 64 * 1024 * 1024
    """The largest request, also when it was decompressed."""
    max_buffered_bytes: int = 1024 * 1024 * 1024
    """The largest sum of the bodies of requests that are being answered."""
    max_connections: int = 4096
    body_timeout_s: float = 30.0
    """How long a client may take to send its request, besides a second for each megabyte."""
    timeout_s: float = 60.0
    """How long a request may take."""
    predict_timeout_s: float = 60.0
    """A replica that takes longer for a batch is ended, and another one started."""
    load_timeout_s: float = 300.0
    """How long replicas may take to load a model that replaces another."""
    drain_s: float = 30.0
    """At the end, how long what was asked may take to be answered."""
    drain_delay_s: float = 0.0
    """At the end, how long the service says that it is not ready, and takes connections all the same."""
    allow_nan: bool = False
    """Whether inputs may hold NaN."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("there is no model to serve; give the folder that `ronde export` has made")
        if self.replicas is not None and self.replicas < 1:
            raise ValueError(f"replicas must be at least 1, got {self.replicas}")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be from 0 to 65535, got {self.port}")
        if self.threads < 0:
            raise ValueError(f"threads must be 0 or more, got {self.threads}")
        for name in ("max_body_bytes", "max_buffered_bytes", "max_connections"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("body_timeout_s", "timeout_s", "predict_timeout_s", "load_timeout_s"):
            if not 0 < getattr(self, name) < 1e9:
                raise ValueError(f"{name} must be a number of seconds above 0, got {getattr(self, name)}")
        for name in ("drain_s", "drain_delay_s", "max_delay_ms"):
            if not 0 <= getattr(self, name) < 1e9:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.name and not MODEL_NAME.match(self.name):
            raise ValueError(f"name must be of letters, digits, dots, dashes and underscores, got {self.name!r}")
        if self.no_token and self.token_file:
            raise ValueError("no_token and token_file exclude each other")


def make_service_job(options: ServeOptions, job_file: str = "") -> Job:
    """The job of the replicas, without their function. ValueError if the hosts do not have so many slots."""
    flags = host_flags(options, job_file)
    if options.replicas is not None:
        flags["num_ranks"] = options.replicas
    config = make_launch_config({**flags, "min_np": 1, "cooldown": RESTART_COOLDOWN_S}, FUNCTION_RANK_COMMAND)
    # The call is made when it is known where replicas reach the front; until then this one says that there will be one.
    return replace(config.job, is_service=True, pickled_call=pickle_call(run_replica, (), {}))


def make_http_options(options: ServeOptions) -> HttpOptions:
    """Whom the service answers, where. ValueError if the token, or a file for TLS, cannot be read."""
    token = take_secret(TOKEN_VARIABLE)
    if options.token_file:
        token = read_token(Path(options.token_file))
    return HttpOptions(
        host=options.host,
        port=options.port,
        token="" if options.no_token else token,
        public_paths=PUBLIC_PATHS,
        allowed_hosts=tuple(options.allowed_hosts),
        certificate=options.certificate,
        private_key=options.private_key,
        max_connections=options.max_connections,
        max_body_bytes=options.max_body_bytes,
        max_buffered_bytes=options.max_buffered_bytes,
        body_timeout_s=options.body_timeout_s,
    )


def run_service(
    options: ServeOptions,
    output_sink: Callable[[int], Printer],
    on_event: Callable[[str], None],
    *,
    job_file: str = "",
) -> None:
    """Serve until a signal ends it. `output_sink` makes what shows the output of so many replicas; `on_event` is called
    with lines for the user; `job_file` is where the options are from, if they are from one. Raises ModelError if the
    model cannot be loaded, StartFailed if the service cannot start, JobFailed if its replicas cannot run, ValueError
    for options that cannot be used."""
    if options.handler:
        search_modules_beside(job_file)
    load_handler(options.handler)  # so that a mistake is seen before anything starts
    job = make_service_job(options, job_file)
    service = _Service(options, make_http_options(options), job, on_event)
    with ExitStack() as opened:
        remove_abandoned_copies()
        copy = copy_model(options.model, 1)
        opened.callback(copy.remove)
        name = options.name or copy.name
        if not MODEL_NAME.match(name):
            raise ValueError(f"the model is called {name!r}, which no URL can hold; give another name with --name")
        printer = output_sink(job.num_ranks)
        opened.callback(printer.close)
        _run_in_loop(service.run(name, copy, printer))


def _run_in_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run it in uvloop, which is faster, if it is there."""
    try:
        import uvloop
    except ModuleNotFoundError:
        asyncio.run(main)
        return
    loop = uvloop.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(main)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        asyncio.set_event_loop(None)
        loop.close()


class _Service:
    def __init__(
        self, options: ServeOptions, http_options: HttpOptions, job: Job, on_event: Callable[[str], None]
    ) -> None:
        self._options = options
        self._has_own_token = not (http_options.token or options.no_token)
        """Whether the token is made for this run: then it is in a file of its own."""
        self._http_options = replace(http_options, token=new_token()) if self._has_own_token else http_options
        self._job = job
        self._on_event = on_event
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._driver: Driver | None = None
        self._result: JobResult | None = None
        self._listeners: list[Listener] = []
        """For replicas: at most one."""

    async def run(self, name: str, copy: ModelCopy, printer: Printer) -> None:
        """Serve a model under this name until a signal comes."""
        options, loop = self._options, asyncio.get_running_loop()
        with ExitStack() as opened:
            metrics = ServingMetrics()
            dispatcher = Dispatcher(
                BatchLimits(
                    max_rows=options.max_batch,
                    max_delay_s=options.max_delay_ms / 1000,
                    max_waiting=options.max_waiting,
                    num_replicas=self._job.num_ranks,
                ),
                copy,
                metrics=metrics,
                kill_replica=self._kill_replica,
                timeout_s=options.timeout_s,
                predict_timeout_s=options.predict_timeout_s,
                load_timeout_s=options.load_timeout_s,
            )
            opened.callback(dispatcher.close)
            front = Front(name, options.model, dispatcher, metrics, self._http_options, allow_nan=options.allow_nan)
            server = HttpServer(front.make_app(), self._http_options)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.add_signal_handler(number, self._signals.put_nowait, number)
                opened.callback(loop.remove_signal_handler, number)
            await server.start()
            self._report_address(server, opened)
            driver_done = self._start_driver(dispatcher, printer)
            try:
                await self._serve(name, server, dispatcher, driver_done)
            finally:
                await self._drain(front, server)
                await self._stop_driver(driver_done)
                for listener in self._listeners:
                    listener.close()

    # --- the start ---------------------------------------------------------------------------------------------------

    def _report_address(self, server: HttpServer, opened: ExitStack) -> None:
        http_options = self._http_options
        self._on_event(f"listening at {server.url}")
        if not http_options.token:
            self._on_event("everybody who can connect is answered (no token)")
        elif not self._has_own_token:
            self._on_event(f"clients send the token in {self._options.token_file or '$' + TOKEN_VARIABLE}")
        else:
            path = open_jobs_dir() / f"serve-{server.port}.token"
            write_token(path, http_options.token)
            opened.callback(path.unlink, missing_ok=True)
            self._on_event(f"clients send the token in {path}")
        if not http_options.is_loopback and not http_options.certificate:
            self._on_event("without TLS, the token and all requests can be read by whoever sees the network")

    def _start_driver(self, dispatcher: Dispatcher, printer: Printer) -> asyncio.Event:
        """Listen for replicas and have them started. The event is set when the job is over."""
        options, loop = self._options, asyncio.get_running_loop()
        key, done = new_job_key(), asyncio.Event()
        adding: set[asyncio.Task[None]] = set()

        def add(number: int, connection: Connection) -> None:
            task = loop.create_task(dispatcher.add_replica(number, connection))
            adding.add(task)
            task.add_done_callback(adding.discard)

        def on_connection(request: ConnectionRequest, connection: Connection) -> bool:  # in the listener's thread
            if request.purpose != REPLICA_PURPOSE:
                return False
            loop.call_soon_threadsafe(add, request.rank, connection)
            return True

        def prepare(job: Job, address: str) -> Job:  # in the driver's thread
            """Listen where replicas of all hosts reach this machine, and tell them."""
            tcp_host = None if ipaddress.ip_address(address).is_loopback else address
            listener = Listener(JobKey(key), unix=True, tcp_host=tcp_host, on_connection=on_connection)
            self._listeners.append(listener)
            replica_options = ReplicaOptions(
                key=key,
                unix_name=listener.unix_name,
                tcp_port=listener.tcp_port,
                handler=options.handler,
                threads=options.threads,
                warm_up_rows=tuple(sorted({1, options.max_batch})),
            )
            return replace(job, pickled_call=pickle_call(run_replica, (replica_options,), {}))

        driver = self._driver = Driver(self._job, printer, prepare=prepare)

        def run_driver() -> None:
            try:
                self._result = driver.run()
            except Exception as error:  # the thread's edge
                logger.exception("the driver has failed")
                self._result = JobResult(1, f"the driver has failed: {error!r}")
            loop.call_soon_threadsafe(done.set)

        # Owned by this service: ends when the driver is told to stop. Touches the driver and the printer.
        threading.Thread(target=run_driver, name="ronde-driver", daemon=True).start()
        return done

    def _kill_replica(self, number: int) -> None:
        if self._driver is not None:
            self._driver.kill_worker(number)

    # --- until the end -----------------------------------------------------------------------------------------------

    async def _serve(self, name: str, server: HttpServer, dispatcher: Dispatcher, driver_done: asyncio.Event) -> None:
        """Wait for the end, and change the model on SIGHUP."""
        loop = asyncio.get_running_loop()
        ready = loop.create_task(dispatcher.wait_until_ready())
        over = loop.create_task(driver_done.wait())
        changing: set[asyncio.Task[None]] = set()
        waiting: set[asyncio.Task[Any]] = {ready, over}
        try:
            while True:
                signalled = loop.create_task(self._signals.get())
                await asyncio.wait({*waiting, signalled}, return_when=asyncio.FIRST_COMPLETED)
                if over.done():
                    signalled.cancel()
                    assert self._result is not None
                    raise JobFailed(self._result.summary or "all replicas have ended", code=self._result.exit_code or 1)
                if ready in waiting and ready.done():
                    waiting.discard(ready)
                    loaded = ready.result()  # or its error
                    # What there is by now stays: the collector need not look through it, which takes 20 ms and more,
                    # while requests wait.
                    gc.freeze()
                    replicas = format_count(self._job.num_ranks, "replica")
                    self._on_event(
                        f"ready: {server.url}/v2/models/{name} (loaded in {loaded.load_s:.1f} s, {replicas})"
                    )
                if not signalled.done():
                    signalled.cancel()
                    continue
                number = signalled.result()
                if number is not signal.SIGHUP or os.isatty(0):  # a terminal that was closed sends SIGHUP as well
                    self._on_event(f"{number.name}: no more connections are taken, what was asked is answered")
                    return
                task = loop.create_task(self._change_model(dispatcher))
                changing.add(task)
                task.add_done_callback(changing.discard)
        finally:
            for running in (ready, over, *changing):
                running.cancel()
            await asyncio.gather(ready, over, *changing, return_exceptions=True)

    async def _change_model(self, dispatcher: Dispatcher) -> None:
        try:
            changed = await dispatcher.change_model(self._options.model)
        except ModelError as error:
            self._on_event(f"the model was not changed: {error}")
            return
        model = dispatcher.model
        assert model is not None
        self._on_event(f"version {model.version} of the model is served" if changed else "the model is the same")

    # --- the end -----------------------------------------------------------------------------------------------------

    async def _drain(self, front: Front, server: HttpServer) -> None:
        """Answer what was asked. A second signal cuts it short."""
        front.is_draining = True
        options = self._options
        impatient = asyncio.get_running_loop().create_task(self._signals.get())
        draining = asyncio.get_running_loop().create_task(self._drain_server(server))
        await asyncio.wait({impatient, draining}, return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            await server.stop(0.1)
        impatient.cancel()
        if not await draining:
            self._on_event(f"requests were cut off: they took more than {options.drain_s:g} s, or you did not wait")

    async def _drain_server(self, server: HttpServer) -> bool:
        if self._options.drain_delay_s:
            await asyncio.sleep(self._options.drain_delay_s)
        return await server.stop(self._options.drain_s)

    async def _stop_driver(self, done: asyncio.Event) -> None:
        assert self._driver is not None
        self._driver.stop("the service was ended")
        try:
            await asyncio.wait_for(done.wait(), DRIVER_STOP_S)
        except asyncio.TimeoutError:
            raise StartFailed("the replicas could not be ended") from None
