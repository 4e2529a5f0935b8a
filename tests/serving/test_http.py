"""The web server's interface: fields, errors, limits and access, with OpenAI's client and a model of letters."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import sys
import time

import httpx2
import numpy as np
import pytest
from starlette.testclient import TestClient

from rosetta_t5 import cli
from rosetta_t5.decoding.slots import SlotControls
from rosetta_t5.serving.app import Application
from rosetta_t5.serving.endpoints import Limits
from rosetta_t5.serving.engine import RequestError
from rosetta_t5.serving.served_model import Piece, Token

LIMITS = Limits(body_bytes=10_000, timeout_s=5, requests=20, texts=20)


class LetterModel:
  """Repeats the prompt in capitals, a letter at a time; what a word in the prompt says happens instead."""

  input_length, output_length, has_chat, has_encoder = 40, 30, True, True

  def __init__(self, name="letters"):
    self.name, self.error, self.asked, self.open = name, None, [], 0
    self.engine = self

  def encode(self, prompt, field):
    ids = [ord(x) for x in prompt] if isinstance(prompt, str) else list(prompt)
    if len(ids) > self.input_length:
      raise RequestError(f"{field} must have 1 to 40 tokens, got {len(ids)}", field)
    return ids

  def encode_chat(self, messages):
    return self.encode("".join(f"[{m['role']}]{m['content']}" for m in messages), "messages")

  def encode_target(self, text, field="targets", must_end=True):
    return self.encode(text, field)

  async def generate(self, texts, max_tokens, stop=(), is_stream=True):
    texts = [("".join(map(chr, tokens)).upper(), controls) for tokens, controls in texts]
    self.asked += [(text, max_tokens, controls, tuple(stop)) for text, controls in texts]
    if any("FULL" in text for text, _ in texts):
      raise RequestError("8 requests are waiting", status=429, retry_after_s=3)
    self.open += 1
    await asyncio.sleep(0)
    try:
      for index, (text, _) in enumerate(texts):
        reason = "stop" if len(text) < max_tokens else "length"
        if not is_stream and not {"WAIT", "FAIL"} & {*text.split()}:
          letters = text[:max_tokens]
          yield index, Piece(letters, (*map(_token, letters),), reason)
          continue
        for place, letter in enumerate(text[:max_tokens]):
          if "WAIT" in text and place:
            await asyncio.sleep(60)
          if "FAIL" in text and place == 2 * ("LATE" in text):
            self.error = RuntimeError("the device is lost")
            raise self.error
          yield index, Piece(letter, (_token(letter),), None)
        yield index, Piece("", (), reason)
    finally:
      self.open -= 1

  async def beams(self, prompts, count):
    texts = ["".join(map(chr, tokens)) + "!" * n for tokens in prompts for n in range(count)]
    return [(Piece(x, (*map(_token, x),), "stop"), -float(n)) for n, x in enumerate(texts)]

  async def score(self, prompts, targets):
    return [[_token(chr(token)) for token in target] for target in targets]

  async def attention(self, tokens, target):
    weights = np.full((2, len(target), len(tokens)), 1 / len(tokens))
    weights[1] = np.eye(len(tokens))[0]
    return weights, [*map(chr, target)], [*map(chr, tokens)]

  async def embed(self, prompts):
    self.open += 1
    try:
      await asyncio.sleep(60 * ([ord("W")] in prompts))
      return [[len(tokens), 0.5] for tokens in prompts]
    finally:
      self.open -= 1

  def statistics(self):
    return {"requests_running": self.open, "tokens_generated_total": 7}

  def start(self):
    pass

  async def stop(self):
    pass


def _token(letter):
  return Token(ord(letter), letter, -0.25, ((letter, -0.25), ("?", -math.inf)))


@pytest.fixture
def model():
  return LetterModel()


@pytest.fixture
def client(model):
  app = Application({"letters": model, "other": LetterModel("other")}, LIMITS)
  with TestClient(app, raise_server_exceptions=False) as client:
    yield client


@pytest.fixture
def ai(client):
  import openai  # in functions, because its import takes a second in each process that collects tests

  return openai.OpenAI(
    base_url="http://testserver/v1", api_key="-", http_client=client, max_retries=0
  )


def error_of(response, status):
  assert response.status_code == status, response.text
  error = response.json()["error"]
  assert set(error) == {"message", "type", "param", "code"}
  return error


def test_a_completion_has_openais_fields(ai, model):
  answer = ai.completions.create(model="letters", prompt="hello", max_tokens=10)
  choice = answer.choices[0]
  assert (choice.text, choice.finish_reason, choice.logprobs) == ("HELLO", "stop", None)
  assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", "letters", "cmpl-")
  assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 5)
  assert answer.usage.total_tokens == 10
  assert (
    ai.completions.create(model="letters", prompt="hello", max_tokens=2).choices[0].text == "HE"
  )


def test_prompts_are_texts_ids_or_lists_of_them_and_each_has_n_texts(ai):
  prompts = ["ab", ["ab", "cd"], [97, 98], [[97, 98], [99]]]
  texts = [
    [x.text for x in ai.completions.create(model="letters", prompt=prompt, n=2).choices]
    for prompt in prompts
  ]
  assert texts == [["AB"] * 2, ["AB", "AB", "CD", "CD"], ["AB"] * 2, ["AB", "AB", "C", "C"]]


def test_the_controls_of_a_request_reach_the_model(ai, model):
  controls = {
    "temperature": 0.5,
    "top_p": 0.9,
    "presence_penalty": 1,
    "frequency_penalty": -1,
    "seed": 3,
  }
  more = {"top_k": 5, "min_tokens": 2, "repetition_penalty": 1.5}
  ai.completions.create(model="letters", prompt="a", n=2, stop="x", extra_body=more, **controls)
  expected = SlotControls(**controls, **more, reports_probabilities=False)
  (_, length, first, stop), (_, _, second, _) = model.asked
  assert (length, first, stop) == (30, expected, ("x",))
  assert second == expected.replace(seed=4)
  del model.asked[:]
  for _ in range(2):
    ai.completions.create(model="letters", prompt="a", stop=["x", "yz"])
  assert model.asked[0][3] == ("x", "yz")
  seeds = {controls.seed for *_, controls, _ in model.asked}
  assert len(seeds) == 2  # drawn at random


def test_a_stream_has_the_pieces_of_all_texts_and_the_usage(ai):
  stream = ai.completions.create(
    model="letters", prompt=["ab", "c"], stream=True, stream_options={"include_usage": True}
  )
  *parts, last = stream
  texts = {0: "", 1: ""}
  for part in parts:
    texts[part.choices[0].index] += part.choices[0].text
  assert texts == {0: "AB", 1: "C"}
  assert [p.choices[0].finish_reason for p in parts].count("stop") == 2
  assert (last.choices, last.usage.completion_tokens, last.usage.prompt_tokens) == ([], 3, 3)


def test_log_probabilities_of_a_completion(ai):
  choice = ai.completions.create(model="letters", prompt="ab", logprobs=2).choices[0]
  assert choice.logprobs.tokens == ["A", "B"]
  assert choice.logprobs.token_logprobs == [-0.25, -0.25]
  assert choice.logprobs.top_logprobs == [{"A": -0.25, "?": -9999.0}, {"B": -0.25, "?": -9999.0}]
  assert choice.logprobs.text_offset == [0, 1]
  stream = ai.completions.create(model="letters", prompt="ab", logprobs=0, stream=True)
  offsets = [part.choices[0].logprobs.text_offset for part in stream]
  assert offsets == [[0], [1], []]


def test_a_chat_is_answered_with_a_message(ai):
  messages = [
    {"role": "developer", "content": "x"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
  ]
  answer = ai.chat.completions.create(
    model="letters", messages=messages, logprobs=True, top_logprobs=1, max_completion_tokens=20
  )
  choice = answer.choices[0]
  assert choice.message.content == "[SYSTEM]X[USER]AB"
  assert choice.message.role == "assistant"
  first = choice.logprobs.content[0]
  assert (first.token, first.logprob, first.bytes) == ("[", -0.25, [91])
  assert [top.token for top in first.top_logprobs] == ["["]
  assert answer.object == "chat.completion"


def test_a_streamed_chat_has_one_role_and_the_text_in_pieces(ai):
  messages = [{"role": "user", "content": "hi"}]
  parts = list(ai.chat.completions.create(model="letters", messages=messages, stream=True))
  assert [part.choices[0].delta.role for part in parts][:2] == ["assistant", None]
  assert "".join(part.choices[0].delta.content for part in parts) == "[USER]HI"
  assert {part.object for part in parts} == {"chat.completion.chunk"}
  with ai.chat.completions.stream(model="letters", messages=messages) as stream:
    assert stream.get_final_completion().choices[0].message.content == "[USER]HI"


def test_beam_search_gives_the_n_best(ai):
  answer = ai.completions.create(
    model="letters", prompt="a", n=3, extra_body={"use_beam_search": True}
  )
  found = [(choice.text, choice.score) for choice in answer.choices]
  assert found == [("a", 0), ("a!", -1), ("a!!", -2)]
  assert answer.usage.completion_tokens == 6


def test_embeddings_as_numbers_and_in_the_clients_default_format(ai):
  for options in (
    {},
    {"encoding_format": "float"},
    {"encoding_format": "base64"},
  ):
    answer = ai.embeddings.create(model="letters", input=["abc", "d"], **options)
    vectors = [item.embedding for item in answer.data]
    if options.get("encoding_format") != "base64":
      assert vectors == [[3, 0.5], [1, 0.5]]
  assert answer.usage.total_tokens == 4


def test_scores_are_sums_of_the_targets_log_probabilities(client):
  answer = client.post("/score", json={"inputs": ["a", "b"], "targets": ["xy", "z"]}).json()
  assert answer["scores"] == [-0.5, -0.25]
  assert answer["tokens"][1] == [{"text": "z", "logprob": -0.25}]


def test_attention_is_that_of_the_last_layer_or_of_another_one(client):
  ask = lambda **given: client.post("/v1/attention", json={"target": "xyz", **given})  # noqa: E731
  answer = ask(prompt="ab").json()
  assert (answer["tokens"], answer["input_tokens"]) == ([*"xyz"], [*"ab"])
  assert (answer["layer"], answer["layers"], answer["weights"]) == (1, 2, [[1, 0]] * 3)
  assert ask(prompt="ab", layer=0).json()["weights"] == [[0.5, 0.5]] * 3
  chat = ask(messages=[{"role": "user", "content": "a"}]).json()
  assert "".join(chat["input_tokens"]) == "[user]a"
  assert "from -2 to 1, got 2" in error_of(ask(prompt="ab", layer=2), 400)["message"]
  assert "exactly one of prompt and messages" in error_of(ask(), 400)["message"]


def test_a_model_without_an_encoder_has_no_attention_and_no_embeddings(client, model):
  model.has_encoder = False
  for path, given in (
    ("attention", {"prompt": "a", "target": "b"}),
    ("embeddings", {"input": "a"}),
  ):
    error = error_of(client.post(f"/v1/{path}", json=given), 400)
    assert "letters has no encoder" in error["message"]


def test_models_are_listed_and_found_by_name(ai):
  import openai

  assert [model.id for model in ai.models.list()] == ["letters", "other"]
  assert ai.models.retrieve("other").id == "other"
  assert ai.completions.create(model="other", prompt="a").model == "other"
  with pytest.raises(
    openai.NotFoundError, match=r"'lettrs' \(did you mean 'letters'\?\)"
  ) as raised:
    ai.completions.create(model="lettrs", prompt="a")
  assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


def test_fields_with_neutral_values_are_accepted(client):
  neutral = {
    "user": "me", "logit_bias": {}, "best_of": 1, "n": 1, "echo": False, "suffix": None, "stop": None,
    "stream": False, "stream_options": None, "presence_penalty": 0, "frequency_penalty": 0, "top_k": -1,
  }  # fmt: skip
  assert client.post("/v1/completions", json={"prompt": "a", **neutral}).status_code == 200
  neutral = {
    "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"],
    "store": False, "metadata": {}, "parallel_tool_calls": True, "logprobs": False,
    "functions": None, "max_tokens": 9, "max_completion_tokens": 9,
  }  # fmt: skip
  messages = [{"role": "user", "content": "a", "refusal": None, "tool_calls": []}]
  assert (
    client.post("/v1/chat/completions", json={"messages": messages, **neutral}).status_code == 200
  )


@pytest.mark.parametrize(
  ("path", "field", "value", "text"),
  [
    ("completions", "temprature", 1, "(did you mean 'temperature'?): got 1, expected only"),
    ("completions", "temperature", 3, "a number from 0 to 2, got 3"),
    ("completions", "temperature", "hot", 'a number from 0 to 2, got "hot"'),
    ("completions", "top_p", 0, "got 0"),
    ("completions", "n", 9, "an integer from 1 to 8, got 9"),
    ("completions", "n", True, "an integer from 1 to 8, got true"),
    ("completions", "max_tokens", 31, "at most 30, the server's --output_length, got 31"),
    ("completions", "max_tokens", 1.5, "an integer"),
    ("completions", "min_tokens", 31, "at most 30"),
    ("completions", "prompt", None, "got null"),
    ("completions", "prompt", [], "got []"),
    ("completions", "prompt", ["a", 1], "a text, a list of token ids"),
    ("completions", "prompt", "x" * 41, "prompt must have 1 to 40 tokens, got 41"),
    (
      "completions",
      "logit_bias",
      {"5": 100},
      'left out or {}, because this server does not have it, got {"5": 100}',
    ),
    ("completions", "echo", True, "left out or false"),
    ("completions", "best_of", 2, "left out or 1"),
    ("completions", "service_tier", "auto", "must be left out"),
    ("completions", "logprobs", 6, "from 0 to 5"),
    ("completions", "stop", ["a", "b", "c", "d", "e"], "at most 4 texts"),
    ("completions", "stream_options", {"include_usage": True}, "left out without stream"),
    ("completions", "messages", [], "unknown field messages"),
    ("completions", "seed", 2**63, "an integer"),
    ("chat/completions", "tools", [{"type": "function"}], "left out or []"),
    (
      "chat/completions",
      "response_format",
      {"type": "json_object"},
      'left out or {"type": "text"}',
    ),
    ("chat/completions", "top_logprobs", 2, "left out without logprobs"),
    ("chat/completions", "max_completion_tokens", 31, "at most 30"),
    ("chat/completions", "messages", [], "a list of 1 to"),
    ("embeddings", "dimensions", 2, "unknown field dimensions"),
    ("embeddings", "encoding_format", "hex", "one of 'float', 'base64'"),
  ],
)
def test_a_field_that_cannot_be_honoured_is_refused_by_name(client, path, field, value, text):
  given = {
    "completions": {"prompt": "a"},
    "embeddings": {"input": "a"},
    "chat/completions": {"messages": [{"role": "user", "content": "a"}]},
  }[path]
  error = error_of(client.post(f"/v1/{path}", json={**given, field: value}), 400)
  assert text in error["message"]
  assert field in error["message"]
  assert (error["param"], error["type"]) == (field, "invalid_request_error")


@pytest.mark.parametrize(
  ("message", "field"),
  [
    ({"role": "robot", "content": "a"}, "messages[0].role"),
    ({"role": "user"}, "messages[0].content"),
    (
      {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
      "messages[0].content[0].type",
    ),
    ({"role": "user", "content": "a", "tool_call_id": "1"}, "messages[0].tool_call_id"),
  ],
)
def test_a_malformed_message_is_refused_by_place(client, message, field):
  error = error_of(client.post("/v1/chat/completions", json={"messages": [message]}), 400)
  assert error["param"] == field
  assert field in error["message"]


def test_beam_search_refuses_what_it_does_not_have(client):
  for field, value in {
    "temperature": 1,
    "stop": "a",
    "stream": True,
    "logprobs": 0,
    "n": 5,
    "max_tokens": 4,
    "seed": 0,
  }.items():
    given = {"prompt": "a", "use_beam_search": True, field: value}
    assert error_of(client.post("/v1/completions", json=given), 400)["param"] == field


@pytest.mark.parametrize(
  "body",
  [b"", b"{", b"[1]", b"null", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"\xff", b"[" * 9000,
   b'{"temperature": 1e999, "prompt": "a"}', b'{"n": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_a_malformed_body_is_refused(client, body):
  headers = {"content-type": "application/json"}
  error_of(client.post("/v1/completions", content=body, headers=headers), 400)


def test_bodies_are_json_of_limited_size(client):
  assert error_of(client.post("/v1/completions", json={"prompt": "a" * 10_000}), 413)
  error = error_of(
    client.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"}), 415
  )
  assert "application/json" in error["message"]
  given = {"prompt": ["a"] * 11, "n": 2}
  assert "at most 20 texts" in error_of(client.post("/v1/completions", json=given), 400)["message"]


def test_unknown_addresses_and_methods_have_errors_of_the_same_form(client):
  error_of(client.post("/v1/responses", json={}), 404)
  error_of(client.get("/v1/completions"), 405)
  error_of(client.get("/../setup.cfg"), 404)
  error_of(client.get("/%2e%2e/app.py"), 404)


def test_a_full_queue_says_when_to_try_again(client):
  response = client.post("/v1/completions", json={"prompt": "full"})
  assert error_of(response, 429)["code"] == "rate_limit_exceeded"
  assert response.headers["retry-after"] == "3"
  response = client.post("/v1/completions", json={"prompt": ["a", "full"], "stream": True})
  assert error_of(response, 429)


def test_a_model_that_fails_is_reported_by_the_answer_and_by_health(client, model):
  assert client.get("/health").json() == {"status": "ok"}
  error = error_of(client.post("/v1/completions", json={"prompt": "fail"}), 500)
  assert error["message"] == "the model has failed: RuntimeError: the device is lost"
  assert error["type"] == "server_error"
  assert (
    "letters has failed: RuntimeError: the device is lost"
    in error_of(client.get("/health"), 503)["message"]
  )


def test_an_error_in_a_stream_is_its_last_event(ai):
  import openai

  stream = ai.completions.create(model="letters", prompt="late fail", stream=True)
  texts = []
  with pytest.raises(openai.APIError, match="the device is lost"):
    texts += (part.choices[0].text for part in stream)
  assert texts == ["L", "A"]


def test_an_answer_that_takes_too_long_is_given_up():
  model = LetterModel()
  app = Application({"letters": model}, LIMITS._replace(timeout_s=0.1))
  with TestClient(app) as client:
    response = client.post("/v1/completions", json={"prompt": "wait"})
    assert response.headers["x-should-retry"] == "false"  # which OpenAI's client obeys
    assert "--timeout_s" in error_of(response, 504)["message"]
    stream = client.post("/v1/completions", json={"prompt": "wait", "stream": True}).text
    events = [line.removeprefix("data: ") for line in stream.split("\n\n")]
    assert json.loads(events[0])["choices"][0]["text"] == "W"
    assert "--timeout_s" in json.loads(events[1])["error"]["message"]
    assert events[2] == "[DONE]"
    response = client.post("/v1/embeddings", json={"input": "W"})
    assert "--timeout_s" in error_of(response, 504)["message"]
    deadline = time.monotonic() + 5
    while model.open and time.monotonic() < deadline:
      time.sleep(0.01)
    assert model.open == 0


def test_a_token_is_needed_except_for_health_and_the_page():
  app = Application({"letters": LetterModel()}, LIMITS, ["secret", "other"])
  with TestClient(app) as client:
    for headers in ({}, {"authorization": "secret"}, {"authorization": "Bearer secre"}):
      for method, path in (
        ("GET", "/metrics"),
        ("GET", "/v1/models"),
        ("POST", "/score"),
        ("GET", "/x"),
      ):
        error = error_of(client.request(method, path, headers=headers), 401)
        assert error["code"] == "invalid_api_key"
    assert client.get("/v1/models", headers={"authorization": "Bearer other"}).status_code == 200
    assert client.get("/health").status_code == 200
    assert client.get("/").status_code == 200


def test_the_page_may_load_only_files_of_this_server(client):
  response = client.get("/")
  assert response.headers["content-type"].startswith("text/html")
  policy = response.headers["content-security-policy"]
  assert "default-src 'none'" in policy
  assert "unsafe" not in policy


def test_metrics_count_requests_and_show_the_engines_statistics(client):
  from prometheus_client.parser import text_string_to_metric_families

  client.post("/v1/completions", json={"prompt": "a"})
  client.post("/v1/completions", json={})
  client.get("/unknown/path")
  text = client.get("/metrics").text
  samples = {
    (s.name, *sorted(s.labels.values())): s.value
    for family in text_string_to_metric_families(text)
    for s in family.samples
  }
  assert samples["rosetta_t5_requests_total", "/v1/completions", "200"] == 1
  assert samples["rosetta_t5_requests_total", "/v1/completions", "400"] == 1
  assert samples["rosetta_t5_requests_total", "404", "other"] == 1
  assert samples["rosetta_t5_request_seconds_count", "/v1/completions"] == 2
  assert samples["rosetta_t5_tokens_generated_total", "letters"] == 7
  assert samples["rosetta_t5_requests_running", "other"] == 0


def test_more_requests_at_once_than_allowed_are_refused_and_clients_that_leave_free_their_place():
  model = LetterModel()
  app = Application({"letters": model}, LIMITS._replace(requests=2))

  async def use() -> None:
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
      ask = lambda text: client.post("/v1/completions", json={"prompt": text})  # noqa: E731
      waiting = [asyncio.create_task(ask("wait")) for _ in range(2)]
      while model.open < 2:
        await asyncio.sleep(0.01)
      error_of(await ask("a"), 429)
      for task in waiting:
        task.cancel()
      await asyncio.gather(*waiting, return_exceptions=True)
      assert (await ask("a")).status_code == 200
      assert model.open == 0

  asyncio.run(use())


def test_new_requests_are_refused_while_the_server_stops(model):
  app = Application({"letters": model}, LIMITS)
  with TestClient(app) as client:
    app.is_stopping = True
    response = client.post("/v1/completions", json={"prompt": "a"})
    assert "stopping" in error_of(response, 503)["message"]
    assert response.headers["retry-after"]
    assert "stopping" in error_of(client.get("/health"), 503)["message"]
    assert client.get("/metrics").status_code == 200


def test_the_command_refuses_a_file_without_tokens_and_an_address_in_use(
  tmp_path, capsys, monkeypatch
):
  (tmp_path / "tokens").write_text("\n")
  call = ["serve", "--model_dir", "nowhere"]
  with pytest.raises(SystemExit, match="2"):
    cli.main([*call, "--token_file", str(tmp_path / "tokens")])
  assert "has no token" in capsys.readouterr().err
  monkeypatch.setattr("sys.argv", ["rosetta-t5", *call, "--token_file", "nowhere.txt"])
  with pytest.raises(SystemExit, match="1"):
    cli.main(sys.argv[1:])
  assert "--token_file nowhere.txt: No such file or directory" in capsys.readouterr().err
  with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit, match="2"):
    cli.main([*call, "--port", str(taken.getsockname()[1])])
  assert "cannot be used (Address already in use): give another" in capsys.readouterr().err


def test_a_server_with_known_names_refuses_others(model):
  app = Application({"letters": model}, LIMITS, hosts=["127.0.0.1"])
  with TestClient(app) as client:
    assert client.get("/v1/models").status_code == 400
    assert client.get("/v1/models", headers={"host": "127.0.0.1:8000"}).status_code == 200


def test_without_tokens_the_command_answers_under_names_of_this_machine(model, monkeypatch):
  served = []
  monkeypatch.setattr("rosetta_t5.cli.serve._open_models", lambda _: {"letters": model})
  monkeypatch.setattr("rosetta_t5.serving.app.serve", lambda app, _: served.append(app))
  assert cli.main(["serve", "--model_dir", "x", "--port", "0"]) == 0
  with TestClient(served[0]) as client:
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000"):
      assert client.get("/health", headers={"host": host}).status_code == 200
    assert client.get("/health", headers={"host": "example.org"}).status_code == 400


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ([], "give --model_dir RUN_OR_FOLDER"),
    (["--modle_dir", "x"], "unknown option --modle_dir. Did you mean --model_dir?"),
    (["--model_dir", "x", "--adapter", "y"], "--adapter must be NAME=PATH"),
    (["--model_dir", "a/x", "--model_dir", "b/x"], "different last parts"),
    (["--model_dir", "x", "--port", "70000"], "cannot be used (bind(): port must be 0-65535.)"),
  ],
)
def test_mistakes_in_the_command_are_named(options, message, capsys):
  with pytest.raises(SystemExit, match="2"):
    cli.main(["serve", "--port", "0", *options])
  assert message in capsys.readouterr().err
