"""What a server answers to requests for its models."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from rosetta_t5.argument_types import near_hint
from rosetta_t5.serving import api, fields
from rosetta_t5.serving.engine import Overloaded, Stopping
from rosetta_t5.serving.served_model import Piece, RequestError, ServedModel
from rosetta_t5.user_errors import reason_of

_log = logging.getLogger(__name__)


class Limits(NamedTuple):
  """What requests may use.

  Attributes:
    body_bytes: the size of a body.
    timeout_s: the seconds until an answer is complete.
    requests: the number of requests at the same time.
    texts: the number of texts of an answer.
  """

  body_bytes: int
  timeout_s: float
  requests: int
  texts: int


class UnknownModel(RequestError):
  """A request names a model that this server does not have."""


# The status of each error, and its text if it has none.
_FAILURES: dict[type[Exception], tuple[int, str]] = {
  UnknownModel: (404, ""),
  RequestError: (400, ""),
  Overloaded: (429, "too many requests are waiting"),
  Stopping: (503, "the server is stopping"),
  TimeoutError: (503, "the answer was not complete within the server's --timeout_s"),
}
ERRORS = (*_FAILURES, HTTPException, Exception)
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


def response_to(error: Exception) -> JSONResponse:
  """Returns the answer to a request that has failed; after 429 and 503 it may be sent again."""
  found = [value for kind, value in _FAILURES.items() if isinstance(error, kind)]
  status, text = found[0] if found else (500, f"the model has failed: {reason_of(error)}")
  text = str(error) or text if found else text
  if isinstance(error, HTTPException):
    status, text = error.status_code, error.detail
  field = error.field if isinstance(error, RequestError) else None
  code = "model_not_found" if isinstance(error, UnknownModel) else _CODES.get(status)
  kind = "server_error" if status >= 500 else "invalid_request_error"
  content = {"message": text, "type": kind, "param": field, "code": code}
  retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else 1
  headers = {"retry-after": str(retry_after_s)} if status in (429, 503) else {}
  return JSONResponse({"error": content}, status, headers)


class Endpoints:
  """The functions that answer requests for models."""

  def __init__(self, models: Mapping[str, ServedModel], limits: Limits):
    self._models, self._limits, self._created = models, limits, int(time.time())

  async def list_models(self, request: Request) -> Response:
    """Answers GET /v1/models."""
    return JSONResponse({"object": "list", "data": [*map(self._describe, self._models.values())]})

  async def show_model(self, request: Request) -> Response:
    """Answers GET /v1/models/NAME."""
    return JSONResponse(self._describe(self._find(request.path_params["name"])))

  def _describe(self, model: ServedModel) -> dict[str, Any]:
    names = ("input_length", "output_length", "has_chat", "has_encoder")
    head = {"id": model.name, "object": "model", "created": self._created, "owned_by": "rosetta-t5"}
    return {**head, **{name: getattr(model, name) for name in names}}

  def _find(self, name: str) -> ServedModel:
    if name not in self._models:
      known, hint = ", ".join(self._models), near_hint(name, self._models)
      raise UnknownModel(f"there is no model {name!r}{hint}: this server has {known}", "model")
    return self._models[name]

  async def _read(
    self, request: Request, known: fields.Fields, *needed: str
  ) -> tuple[ServedModel, dict[str, Any]]:
    """Returns the model of a request, and its other fields."""
    kind = request.headers.get("content-type", "")
    # Browsers let no page of another server send this type.
    if kind.partition(";")[0].strip().lower() != "application/json":
      raise HTTPException(415, f"the header must be Content-Type: application/json, got {kind!r}")
    body = bytearray()
    async for part in request.stream():
      body += part
      if len(body) > self._limits.body_bytes:
        raise HTTPException(413, f"the body must have at most {self._limits.body_bytes} bytes")
    given = fields.check(api.parse_json(bytes(body)), known, needed)
    return self._find(given.pop("model", next(iter(self._models)))), given

  async def generate(self, request: Request, is_chat: bool) -> Response:
    """Answers POST /v1/completions and /v1/chat/completions."""
    deadline = asyncio.get_running_loop().time() + self._limits.timeout_s
    schema = (fields.CHAT, "messages") if is_chat else (fields.COMPLETION, "prompt")
    model, given = await self._read(request, *schema)
    read, most = api.Generation, self._limits.texts
    asked = await asyncio.to_thread(read, given, model, is_chat, most)
    if asked.use_beam_search:
      found = [x for prompt in asked.prompts for x in await model.beams(prompt, asked.n)]
      count = sum(length for *_, length in found)
      longest = model.output_length
      best = [Piece(text, (), "stop" if n < longest else "length") for text, _, n in found]
      whole = asked.whole(best, count)
      for choice, (_, score, _) in zip(whole["choices"], found, strict=True):
        choice["score"] = api.finite(score)
      return JSONResponse(whole)
    pieces = _generate(request, model, asked, deadline)
    if not asked.is_stream:
      return JSONResponse(asked.whole(await _join(pieces)))
    first = await anext(pieces)
    return StreamingResponse(_events(first, pieces, asked), media_type="text/event-stream")

  async def embed(self, request: Request) -> Response:
    """Answers POST /v1/embeddings."""
    model, given = await self._read(request, fields.EMBEDDING, "input")
    prompts = await asyncio.to_thread(api.encode_all, given["input"], model, "input")
    # A few at a time, because they share the model's queue.
    rows = [prompts[n : n + 8] for n in range(0, len(prompts), 8)]
    vectors = [vector for row in rows for vector in await model.embed(row)]
    if (size := given.get("dimensions", len(vectors[0]))) != len(vectors[0]):
      raise RequestError(f"dimensions must be {len(vectors[0])}, got {size}", "dimensions")
    kind, item = given.get("encoding_format", "float"), {"object": "embedding"}
    shown = [api.encode_vector(vector, kind) for vector in vectors]
    data = [{**item, "index": index, "embedding": vector} for index, vector in enumerate(shown)]
    return _listed(model, data=data, usage=api.usage(prompts, 0))

  async def score(self, request: Request) -> Response:
    """Answers POST /score."""
    model, given = await self._read(request, fields.SCORE, "inputs", "targets")
    inputs, targets = given["inputs"], given["targets"]
    if len(inputs) != len(targets):
      text = f"targets must be {len(inputs)} texts, one for each input, got {len(targets)}"
      raise RequestError(text, "targets")
    prompts = await asyncio.to_thread(api.encode_all, inputs, model, "inputs")
    pairs = [*zip(prompts, targets, strict=True)]
    rows = [row for n in range(0, len(pairs), 8) for row in await model.score(pairs[n : n + 8])]
    tokens = [[{"text": t.text, "logprob": api.finite(t.logprob)} for t in row] for row in rows]
    scores = [sum(api.finite(t.logprob) for t in row) for row in rows]
    usage = api.usage(prompts, sum(map(len, rows)))
    return _listed(model, scores=scores, tokens=tokens, usage=usage)


def _listed(model: ServedModel, **content: Any) -> Response:
  return JSONResponse({"object": "list", "model": model.name, **content})


async def _generate(
  request: Request, model: ServedModel, asked: api.Generation, deadline: float
) -> AsyncIterator[tuple[int, Piece]]:
  """Yields the pieces of all texts as they come, with the index of the text.

  Raises:
    TimeoutError: the texts were not complete at the deadline, a time of the event loop.
  """
  queue: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()

  async def forward(index: int, pieces: AsyncIterator[Piece]) -> None:
    try:
      async for piece in pieces:
        queue.put_nowait((index, piece))
    except Exception as error:
      queue.put_nowait((index, error))

  running = len(texts := asked.texts())
  for index, (prompt, sampling) in enumerate(texts):
    pieces = model.generate(prompt, asked.max_tokens, sampling, asked.stop)
    request.scope["tasks"].append(asyncio.create_task(forward(index, pieces)))
  while running:
    async with asyncio.timeout_at(deadline):
      index, piece = await queue.get()
    if isinstance(piece, Exception):
      raise piece
    running -= int(piece.finish_reason is not None)
    yield index, piece


async def _join(pieces: AsyncIterator[tuple[int, Piece]]) -> list[Piece]:
  """Returns the whole texts in the order of their indices."""
  found: dict[int, list[Piece]] = {}
  async for index, piece in pieces:
    found.setdefault(index, []).append(piece)
  return [
    Piece(
      "".join(p.text for p in row), tuple(t for p in row for t in p.tokens), row[-1].finish_reason
    )
    for _, row in sorted(found.items())
  ]


async def _events(
  first: tuple[int, Piece], rest: AsyncIterator[tuple[int, Piece]], asked: api.Generation
) -> AsyncIterator[bytes]:
  """Yields the events of a stream. An error after its beginning is one of them."""
  try:
    yield _event(JSONResponse(asked.part(*first)))
    async for each in rest:
      yield _event(JSONResponse(asked.part(*each)))
    if asked.has_usage:
      yield _event(JSONResponse(asked.end()))
  except Exception as error:
    _log.warning("a stream has failed", exc_info=error)
    yield _event(response_to(error))
  yield b"data: [DONE]\n\n"


def _event(response: JSONResponse) -> bytes:
  return b"data: " + bytes(response.body) + b"\n\n"
