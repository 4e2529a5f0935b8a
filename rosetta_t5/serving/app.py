"""The web server: addresses, access, limits of time and number, metrics, and how it ends."""

import asyncio
import contextlib
import functools
import hmac
import pathlib
import socket
import sys
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any

import prometheus_client
import uvicorn
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from rosetta_t5.serving.endpoints import Endpoints, Limits, response_to
from rosetta_t5.serving.engine import STOPPING, RequestError
from rosetta_t5.serving.served_model import ServedModel
from rosetta_t5.user_errors import reason_of

_HEADERS = {
  "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
  "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
  "x-content-type-options": "nosniff",
  "cache-control": "no-store",
}
_FILES = (pathlib.Path(__file__).parent / "page").iterdir()
_PAGES = {f"/{file.name}": FileResponse(file, headers=_HEADERS) for file in _FILES}
_PAGES["/"] = _PAGES["/index.html"]


class Application:
  """An ASGI application that answers requests, refuses them, and ends those that take too long.

  Attributes:
    models: by name.
    is_stopping: whether new requests are refused.
    running: the number of requests whose answer is not complete.
  """

  def __init__(
    self,
    models: Mapping[str, ServedModel],
    limits: Limits,
    tokens: Sequence[str] = (),
    hosts: Sequence[str] = ("*",),
  ):
    """Makes the application; it starts and stops the models.

    Args:
      models: by name; a request without a name is for the first one.
      limits: what requests may use.
      tokens: a request must have one of them in its header; if there are none, it needs none.
      hosts: the names of the server that requests may use, so that no page of another one reaches it
        under a name of its own.
    """
    self.models, self._limits = models, limits
    self._authorizations = [f"Bearer {token}".encode() for token in tokens]
    self.is_stopping, self.running = False, 0
    self._metrics = _Metrics(models.values())
    endpoints = Endpoints(models, limits)
    answers: dict[str, Any] = {
      "/v1/completions": functools.partial(endpoints.generate, is_chat=False),
      "/v1/chat/completions": functools.partial(endpoints.generate, is_chat=True),
      "/v1/embeddings": endpoints.embed,
      "/v1/attention": endpoints.attend,
      "/score": endpoints.score,
    }
    routes = [
      *(Route(path, response, methods=["GET"]) for path, response in _PAGES.items()),
      *(Route(path, answer, methods=["POST"]) for path, answer in answers.items()),
      Route("/v1/models", endpoints.list_models),
      Route("/v1/models/{name}", endpoints.show_model),
      Route("/health", self._show_health),
      Route("/metrics", self._show_metrics),
    ]
    self._paths = {route.path for route in routes}
    kinds = (RequestError, TimeoutError, HTTPException, Exception)
    handlers: dict[Any, Any] = dict.fromkeys(kinds, lambda request, error: response_to(error))
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._run_models)
    self._app = TrustedHostMiddleware(app, allowed_hosts=list(hosts))

  @contextlib.asynccontextmanager
  async def _run_models(self, _: Starlette) -> AsyncIterator[None]:
    for model in self.models.values():
      model.start()
    yield
    for model in self.models.values():
      await model.engine.stop()

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
      await self._app(scope, receive, send)
      return
    begun, status = time.monotonic(), 0
    path = scope["path"] if scope["path"] in self._paths else "other"

    async def observed_send(message: Message) -> None:
      nonlocal status
      if message["type"] == "http.response.start":
        status = message["status"]
        self._metrics.first_byte_seconds.labels(path).observe(time.monotonic() - begun)
      await send(message)

    messages: asyncio.Queue[Message] = asyncio.Queue(1)

    async def forward_until_gone() -> None:
      while (message := await receive())["type"] != "http.disconnect":
        await messages.put(message)

    self.running += 1
    app: Any = self._refusal(scope) or self._app
    work = asyncio.create_task(app(scope, messages.get, observed_send))
    tasks = [work, asyncio.create_task(forward_until_gone())]
    try:
      # Streams end by themselves before, with an event that says so.
      timeout_s = self._limits.timeout_s + 1
      done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
      if work in done:
        work.result()
      elif not (done or status):
        await response_to(TimeoutError())(scope, receive, observed_send)
    finally:
      for task in tasks:
        task.cancel()
      await asyncio.gather(*tasks, return_exceptions=True)
      self.running -= 1
      self._metrics.requests.labels(path, status).inc()
      self._metrics.seconds.labels(path).observe(time.monotonic() - begun)

  def _refusal(self, scope: Scope) -> Response | None:
    """Returns the answer to a request that gets no other."""
    if scope["path"] in (*_PAGES, "/health"):
      return None
    given = dict(scope["headers"]).get(b"authorization", b"")
    found = [hmac.compare_digest(given, known) for known in self._authorizations]
    if found and not any(found):
      text = "this server needs the header Authorization: Bearer TOKEN, a client's api_key"
      return response_to(RequestError(text, status=401))
    if scope["method"] == "POST" and self.is_stopping:
      return response_to(RequestError(STOPPING, status=503))
    if scope["method"] == "POST" and self.running > self._limits.requests:
      text = f"{self._limits.requests} requests are running"
      return response_to(RequestError(text, status=429))
    return None

  async def _show_health(self, request: Request) -> Response:
    errors = ((name, model.engine.error) for name, model in self.models.items())
    failed = [f"{name} has failed: {reason_of(error)}" for name, error in errors if error]
    if failed or self.is_stopping:
      return response_to(RequestError("; ".join(failed) or STOPPING, status=503))
    return JSONResponse({"status": "ok"})

  async def _show_metrics(self, request: Request) -> Response:
    text = prometheus_client.generate_latest(self._metrics.registry)
    return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)


class _Metrics:
  """What is counted of all requests, and the statistics of the models."""

  def __init__(self, models: Collection[ServedModel]):
    self._models, self.registry = models, prometheus_client.CollectorRegistry()
    self.registry.register(self)
    own: dict[str, Any] = {"namespace": "rosetta_t5", "registry": self.registry}
    self.requests = prometheus_client.Counter("requests", "Requests", ("path", "status"), **own)
    own["buckets"], make = [0.01 * 2**n for n in range(15)], prometheus_client.Histogram
    self.seconds = make("request_seconds", "Time of an answer", ("path",), **own)
    text = "Time to the beginning of an answer, which is the first token of a stream"
    self.first_byte_seconds = make("first_byte_seconds", text, ("path",), **own)

  def collect(self) -> Collection[CounterMetricFamily | GaugeMetricFamily]:
    """Returns the statistics of the models, as a registry asks for them."""
    found: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for model in self._models:
      for name, value in model.engine.statistics().items():
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        made = kind(f"rosetta_t5_{name}", name.replace("_", " "), labels=("model",))
        found.setdefault(name, made).add_metric((model.name,), value)
    return found.values()


def serve(app: Application, bound: socket.socket) -> None:
  """Compiles the models, then listens at a socket until SIGTERM or Ctrl-C, and until all answers are complete.

  A second signal ends it at once.
  """
  for name, model in app.models.items():
    print(f"compiling the programs of {name} …", file=sys.stderr, flush=True)
    model.compile()
  host, port, *_ = bound.getsockname()
  place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
  bound.listen()
  print(f"serving {', '.join(app.models)} at http://{place}", flush=True)
  options: Any = {"log_level": "warning", "timeout_graceful_shutdown": 1, "server_header": False}
  _Server(uvicorn.Config(app, **options)).run([bound])


class _Server(uvicorn.Server):
  async def on_tick(self, counter: int) -> bool:
    app: Any = self.config.app
    return await super().on_tick(counter) or (app.is_stopping and not app.running)

  def handle_exit(self, sig: int, frame: Any) -> None:
    app: Any = self.config.app
    if app.is_stopping:
      super().handle_exit(sig, frame)
    app.is_stopping = True
