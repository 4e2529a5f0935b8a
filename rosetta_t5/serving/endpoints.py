"""What a server answers to requests for its models."""

import asyncio
import contextlib
import json
import logging
import operator
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, NamedTuple

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from rosetta_t5.argument_types import near_hint
from rosetta_t5.serving import api
from rosetta_t5.serving.engine import RequestError
from rosetta_t5.serving.served_model import ServedModel
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


# By status and field.
_CODES = {
  (401, None): "invalid_api_key",
  (404, "model"): "model_not_found",
  (429, None): "rate_limit_exceeded",
}


def response_to(error: Exception) -> JSONResponse:
  """Returns the answer to a request that has failed; only after 429 and 503 it may be sent again."""
  if isinstance(error, TimeoutError):
    text = "the answer was not complete within the server's --timeout_s"
    error = RequestError(text, status=504)
  elif isinstance(error, HTTPException):
    error = RequestError(error.detail, status=error.status_code)
  elif not isinstance(error, RequestError):
    error = RequestError(f"the model has failed: {reason_of(error)}", status=500)
  status, field = error.status, error.field
  kind = "server_error" if status >= 500 else "invalid_request_error"
  content = {"message": str(error), "type": kind, "param": field}
  content["code"] = _CODES.get((status, field))
  # Without the second header, OpenAI's clients send requests again after all of 5xx.
  again = {"retry-after": str(error.retry_after_s)}
  headers = again if status in (429, 503) else {"x-should-retry": "false"}
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
      text = f"there is no model {name!r}{hint}: this server has {known}"
      raise RequestError(text, "model", status=404)
    return self._models[name]

  async def _read(
    self, request: Request, known: api.Fields, *needed: str
  ) -> tuple[ServedModel, dict[str, Any]]:
    """Returns the model of a request, and its other fields."""
    kind = request.headers.get("content-type", "")
    # Browsers let no page of another server send this type.
    if kind.partition(";")[0].strip().lower() != "application/json":
      text = f"the header must be Content-Type: application/json, got {kind!r}"
      raise RequestError(text, status=415)
    body = bytearray()
    async for part in request.stream():
      body += part
      if len(body) > self._limits.body_bytes:
        text = f"the body must have at most {self._limits.body_bytes} bytes"
        raise RequestError(text, status=413)
    try:
      value = json.loads(bytes(body))
      json.dumps(value, ensure_ascii=False).encode()  # Half of a surrogate pair is no text.
    except (ValueError, RecursionError) as error:
      raise RequestError(f"the body must be JSON in UTF-8: {error}") from error
    given = api.check(value, known, needed)
    return self._find(given.pop("model", next(iter(self._models)))), given

  async def generate(self, request: Request, is_chat: bool) -> Response:
    """Answers POST /v1/completions and /v1/chat/completions."""
    deadline = asyncio.get_running_loop().time() + self._limits.timeout_s
    schema = (api.CHAT, "messages") if is_chat else (api.COMPLETION, "prompt")
    model, given = await self._read(request, *schema)
    asked = await asyncio.to_thread(api.Generation, given, model, is_chat, self._limits.texts)
    if asked.use_beam_search:
      best = enumerate(await model.beams(asked.prompts, asked.n))
      choices = [{**asked.choice(n, piece), "score": api.finite(x)} for n, (piece, x) in best]
      return JSONResponse(asked.answer(choices, usage=asked.usage()))
    pieces = model.generate(asked.texts(), asked.max_tokens, asked.stop, asked.is_stream)
    if asked.is_stream:
      events = _events(asked, deadline, await anext(pieces), pieces)
      return StreamingResponse(events, media_type="text/event-stream")
    choices = [asked.choice(*each) async for each in pieces]
    choices.sort(key=operator.itemgetter("index"))
    return JSONResponse(asked.answer(choices, usage=asked.usage()))

  async def embed(self, request: Request) -> Response:
    """Answers POST /v1/embeddings."""
    model, given = await self._read(request, api.EMBEDDING, "input")
    _check_encoder(model, "makes no embeddings")
    prompts = await asyncio.to_thread(api.encode_all, given["input"], model, "input")
    vectors = await model.embed(prompts)
    kind = given.get("encoding_format", "float")
    shown = enumerate(api.encode_vector(vector, kind) for vector in vectors)
    data = [{"object": "embedding", "index": index, "embedding": x} for index, x in shown]
    return _listed(model, prompts, 0, data=data)

  async def score(self, request: Request) -> Response:
    """Answers POST /score."""
    model, given = await self._read(request, api.SCORE, "inputs", "targets")
    inputs, targets = given["inputs"], given["targets"]
    if len(inputs) != len(targets):
      text = f"targets must be {len(inputs)} texts, one for each input, got {len(targets)}"
      raise RequestError(text, "targets")
    prompts = await asyncio.to_thread(api.encode_all, inputs, model, "inputs")
    ends = await asyncio.to_thread(lambda: [*map(model.encode_target, targets)])
    rows = await model.score(prompts, ends)
    tokens = [[{"text": t.text, "logprob": api.finite(t.logprob)} for t in row] for row in rows]
    scores = [sum(api.finite(t.logprob) for t in row) for row in rows]
    return _listed(model, prompts, sum(map(len, rows)), scores=scores, tokens=tokens)

  async def attend(self, request: Request) -> Response:
    """Answers POST /v1/attention."""
    model, given = await self._read(request, api.ATTENTION, "target")
    _check_encoder(model, "has no cross-attention")
    if ("prompt" in given) == ("messages" in given):
      raise RequestError("exactly one of prompt and messages must be given", "prompt")
    (tokens,) = await asyncio.to_thread(api.encode_prompts, given, model)
    target = await asyncio.to_thread(model.encode_target, given["target"], "target", False)
    weights, rows, columns = await model.attention(tokens, target)
    layer, count = given.get("layer", -1), len(weights)
    if not count:
      raise RequestError(f"model {model.name} does not show what it attends to", "model")
    if not -count <= layer < count:
      raise RequestError(f"layer must be from {-count} to {count - 1}, got {layer}", "layer")
    shown = {"layer": layer % count, "layers": count, "tokens": rows, "input_tokens": columns}
    shown["weights"] = np.round(weights[layer].astype(float), 6).tolist()
    return JSONResponse({"object": "attention", "model": model.name, **shown})


def _check_encoder(model: ServedModel, consequence: str) -> None:
  if not model.has_encoder:
    raise RequestError(f"model {model.name} has no encoder, so it {consequence}", "model")


def _listed(model: ServedModel, prompts: Any, num_tokens: int, **content: Any) -> Response:
  head = {"object": "list", "model": model.name, "usage": api.usage(prompts, num_tokens)}
  return JSONResponse({**head, **content})


async def _events(
  asked: api.Generation, deadline: float, piece: Any, rest: AsyncGenerator[Any, None]
) -> AsyncGenerator[bytes, None]:
  """Yields the events of a stream. An error after its beginning is one of them, also if it takes too long."""
  usage = {"usage": None} if asked.has_usage else {}
  try:
    async with contextlib.aclosing(rest):
      while piece:
        yield _event(JSONResponse(asked.answer([asked.choice(*piece)], **usage)))
        async with asyncio.timeout_at(deadline):
          piece = await anext(rest, None)
    if asked.has_usage:
      yield _event(JSONResponse(asked.answer([], usage=asked.usage())))
  except Exception as error:
    _log.warning("a stream has failed", exc_info=error)
    yield _event(response_to(error))
  yield b"data: [DONE]\n\n"


def _event(response: JSONResponse) -> bytes:
  return b"data: " + bytes(response.body) + b"\n\n"
