"""What a service answers over HTTP: the Open Inference Protocol, and metrics. An application of Starlette; used by
service.

    GET   /v2/health/live  /v2/health/ready                 for load balancers; they need no token
    GET   /v2  /v2/models/NAME  /v2/models/NAME/ready       what is served
    POST  /v2/models/NAME/infer                             predictions
    POST  /v2/repository/index                              which model is loaded
    POST  /v2/repository/models/NAME/load                   serve the model that is now in its folder
    GET   /metrics                                          for Prometheus

Every path of a model may name its version, as in /v2/models/NAME/versions/3/infer.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from ronde.errors import ModelError
from ronde.net.http_server import (
    AsgiApp,
    BodyBudget,
    HttpOptions,
    Receive,
    RequestBody,
    RequestError,
    Scope,
    Send,
    client_of,
    header,
    send_reply,
)
from ronde.serve.dispatcher import Dispatcher
from ronde.serve.inference_protocol import HEADER_LENGTH, Tensor, encode_reply, model_metadata, parse_request
from ronde.serve.replica_messages import ModelLoaded
from ronde.serve.serving_metrics import CONTENT_TYPE, ServingMetrics
from ronde.text import shorten
from ronde.version import __version__

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

LIVE_PATH, READY_PATH = "/v2/health/live", "/v2/health/ready"
PUBLIC_PATHS = frozenset((LIVE_PATH, READY_PATH))
EXTENSIONS = ("binary_tensor_data", "model_repository")


class Front:
    """The endpoints of a service."""

    def __init__(
        self,
        name: str,
        path: str,
        dispatcher: Dispatcher,
        metrics: ServingMetrics,
        options: HttpOptions,
        *,
        allow_nan: bool,
    ) -> None:
        """`name` is that of the model, `path` where it is loaded from."""
        self._name = name
        self._path = path
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._options = options
        self._allow_nan = allow_nan
        self._budget = BodyBudget(options.max_buffered_bytes)
        self._infer_path = f"/v2/models/{name}/infer"
        self.is_draining = False
        """Whether the service is about to end: it says that it is not ready, and goes on."""

    def make_app(self) -> AsgiApp:
        try:
            from starlette.applications import Starlette
            from starlette.responses import JSONResponse
            from starlette.routing import Route
        except ModuleNotFoundError:
            raise ModuleNotFoundError("serving needs Starlette: pip install ronde[serve]") from None

        def answer(
            make_reply: Callable[[Request], Any],
        ) -> Callable[[Request], Awaitable[Response]]:
            async def endpoint(request: Request) -> Response:
                found = make_reply(request)
                return JSONResponse(await found if isinstance(found, Awaitable) else found)

            return endpoint

        model = "/v2/models/{name}"
        routes = [
            Route(LIVE_PATH, answer(lambda request: {"live": True})),
            Route(READY_PATH, answer(self._ready)),
            Route("/v2", answer(self._describe_server)),
            *(
                Route(prefix + end, answer(reply))
                for prefix in (model, model + "/versions/{version}")
                for end, reply in (("", self._describe_model), ("/ready", self._model_ready))
            ),
            Route("/v2/repository/index", answer(self._list_models), methods=["POST"]),
            Route("/v2/repository/models/{name}/load", answer(self._load_model), methods=["POST"]),
        ]

        async def not_found(request: Request, error: Exception) -> Response:
            status = getattr(error, "status_code", 404)
            what = "there is no such path" if status == 404 else f"{request.method} is not for this path"
            return JSONResponse({"error": f"{what}: {shorten(request.url.path)}"}, status)

        async def refused(request: Request, error: Exception) -> Response:
            assert isinstance(error, RequestError)
            headers = {name.decode(): value.decode() for name, value in error.headers}
            return JSONResponse({"error": str(error)}, error.status, headers)

        handlers: dict[Any, Any] = {404: not_found, 405: not_found, RequestError: refused}
        other = Starlette(routes=routes, exception_handlers=handlers)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            path: str = scope["path"]
            if path == self._infer_path or (path.startswith("/v2/models/") and path.endswith("/infer")):
                await self._infer(scope, receive, send)
            elif path == "/metrics":
                await send_reply(send, 200, self._metrics.render().encode(), CONTENT_TYPE)
            else:
                await other(scope, receive, send)

        return app

    # --- predictions -------------------------------------------------------------------------------------------------

    async def _infer(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_s = time.monotonic()
        status = 500
        try:
            if scope["method"] != "POST":
                raise RequestError(405, "predictions are asked for with POST")
            if scope["path"] != self._infer_path:
                _, _, _, name, *rest = scope["path"].split("/")
                self._check_model(name, rest[1] if len(rest) == 3 and rest[0] == "versions" else "")
                if len(rest) not in (1, 3):
                    raise RequestError(404, f"there is no such path: {shorten(scope['path'])}")
            model = self._served()
            with RequestBody(scope, receive, self._options, self._budget) as request_body:
                body = await request_body.read()
                self._dispatcher.refuse_if_full()  # before anything else is done about it
                length = header(scope, HEADER_LENGTH)
                try:
                    request = parse_request(body, length, model.signature, allow_nan=self._allow_nan)
                except ValueError as error:
                    raise RequestError(400, str(error)) from None
                prediction = await self._dispatcher.predict(request, client_of(scope))
                by_name: dict[str, Tensor] = {tensor.info.name: tensor for tensor in prediction.tensors}
                outputs = [(by_name[wanted.name], wanted.is_binary) for wanted in request.outputs]
                reply = encode_reply(self._name, str(prediction.version), request.id, outputs)
            status = 200
            if reply.num_json_bytes is None:
                await send_reply(send, 200, reply.body, b"application/json")
            else:
                headers = [(HEADER_LENGTH, str(reply.num_json_bytes).encode())]
                await send_reply(send, 200, reply.body, b"application/octet-stream", headers)
        except RequestError as error:
            status = error.status
            raise
        except ConnectionError:
            status = 499  # as others call it: the client has left
            raise
        finally:
            self._metrics.count_reply(status, time.monotonic() - began_s)

    def _served(self) -> ModelLoaded:
        model = self._dispatcher.model
        if model is None:
            raise RequestError(503, "the model is being loaded; try again", retry_after_s=1)
        return model

    def _check_model(self, name: str, version: str = "") -> None:
        if name != self._name:
            raise RequestError(404, f"there is no model {shorten(name)!r}; this service has {self._name!r}")
        model = self._served()
        if version and version != str(model.version):
            raise RequestError(404, f"version {shorten(version)!r} is not served; version {model.version} is")

    # --- everything else ---------------------------------------------------------------------------------------------

    def _ready(self, request: Request) -> dict[str, Any]:
        if self.is_draining:
            raise RequestError(503, "the service is being ended", retry_after_s=1)
        if not self._dispatcher.is_ready:
            raise RequestError(503, "no replica is ready", retry_after_s=1)
        return {"ready": True}

    def _describe_server(self, request: Request) -> dict[str, Any]:
        return {"name": "ronde", "version": __version__, "extensions": list(EXTENSIONS)}

    def _describe_model(self, request: Request) -> dict[str, Any]:
        self._check_model(request.path_params["name"], request.path_params.get("version", ""))
        model = self._served()
        return model_metadata(self._name, [str(model.version)], model.signature)

    def _model_ready(self, request: Request) -> dict[str, Any]:
        self._check_model(request.path_params["name"], request.path_params.get("version", ""))
        return {"name": self._name, **self._ready(request)}

    def _list_models(self, request: Request) -> list[dict[str, Any]]:
        model = self._dispatcher.model
        is_ready = self._dispatcher.is_ready and not self.is_draining
        state = {"state": "READY", "reason": ""} if is_ready else {"state": "UNAVAILABLE", "reason": "not ready"}
        return [{"name": self._name, "version": str(model.version) if model else "", **state}]

    async def _load_model(self, request: Request) -> dict[str, Any]:
        self._check_model(request.path_params["name"])
        if (await self._read_small(request)).strip() not in (b"", b"{}"):
            raise RequestError(400, "a service loads the model of its own folder: the request must be empty, or {}")
        try:
            changed = await self._dispatcher.change_model(self._path)
        except ModelError as error:
            raise RequestError(400, f"the model was not changed: {error}") from None
        model = self._served()
        return {"name": self._name, "version": str(model.version), "changed": changed}

    async def _read_small(self, request: Request) -> bytes:
        with RequestBody(request.scope, request.receive, self._options, self._budget) as body:
            return await body.read()
