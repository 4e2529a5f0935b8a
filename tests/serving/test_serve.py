"""`rosetta-t5 serve` as a process, with OpenAI's client: the texts that Transformers generates, and the end."""

from __future__ import annotations

import functools
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers_texts import NEW_TOKENS, PROMPTS, RECORDINGS, write_folder

from rosetta_t5 import cli

CASE = "5.24.0/t5"
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}{{ eos_token }}"
ROOT = pathlib.Path(__file__).parents[2]


def start(folder: pathlib.Path, log: pathlib.Path) -> subprocess.Popen[str]:
  (log / "tokens").write_text("secret\n")
  options = ["--slots", 2, "--input_length", 8, "--output_length", 500, "--port", 0]
  command = ["serve", "--model_dir", folder, "--token_file", log / "tokens", *options]
  program = [sys.executable, "-m", "rosetta_t5.cli", *map(str, command)]
  with (log / "errors").open("w") as errors:
    options = {"stdout": subprocess.PIPE, "stderr": errors, "text": True, "cwd": ROOT}
    return subprocess.Popen(program, **options)


class Server:
  """A process that serves a folder.

  Attributes:
    process: the process.
    client: a client with the server's token.
    name: the model's name.
  """

  def __init__(self, folder: pathlib.Path, log: pathlib.Path):
    import openai

    self.process = start(folder, log)
    with self.process.stdout as output:
      line = output.readline()
    found = re.fullmatch(r"serving (\S+) at (http://127.0.0.1:\d+)\n", line)
    assert found, line + (log / "errors").read_text()
    self.name, self.url = found.groups()
    self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="secret", max_retries=0)

  def metric(self, name: str) -> float:
    text = httpx2.get(f"{self.url}/metrics", headers={"authorization": "Bearer secret"}).text
    return sum(
      float(x) for x in re.findall(rf"^rosetta_t5_{name}\{{.*\}} (.*)$", text, re.MULTILINE)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp("serve") / "words"
  write_folder(CASE, folder)
  (folder / "chat_template.jinja").write_text(TEMPLATE)
  return folder


@pytest.fixture(scope="module")
def server(folder: pathlib.Path) -> Iterator[Server]:
  server = Server(folder, folder.parent)
  yield server
  server.process.kill()
  server.process.wait()


def expected() -> list[str]:
  return json.loads(RECORDINGS.read_text())[CASE]["greedy"]


@pytest.mark.slow
def test_texts_are_those_of_transformers_however_they_are_asked_for(server):
  ask = functools.partial(server.client.completions.create, max_tokens=NEW_TOKENS)
  together = ask(model=server.name, prompt=PROMPTS)
  assert [choice.text.strip() for choice in together.choices] == expected()
  messages = [{"role": "user", "content": PROMPTS[0]}]
  chat = server.client.chat.completions.create
  answer = chat(model=server.name, messages=messages, max_tokens=NEW_TOKENS)
  assert answer.choices[0].message.content.strip() == expected()[0]
  assert answer.usage.prompt_tokens == 6


@pytest.mark.slow
def test_many_clients_get_their_own_answers_beside_malformed_and_cancelled_requests(server):
  import openai

  ask = functools.partial(server.client.completions.create, model=server.name)

  def answer(number: int) -> str | int:
    prompt = PROMPTS[number % 2]
    if number % 5 == 3:
      with pytest.raises(openai.BadRequestError) as refused:
        ask(prompt=prompt, extra_body={"beams": 3})
      return refused.value.status_code
    if number % 5 == 4:
      with ask(prompt=prompt, stream=True, extra_body={"min_tokens": 500}) as stream:
        next(iter(stream))
      return 0
    parts = ask(prompt=prompt, stream=True, max_tokens=NEW_TOKENS)
    return "".join(part.choices[0].text for part in parts).strip()

  with ThreadPoolExecutor(10) as pool:
    answers = list(pool.map(answer, range(30)))
  others = {3: 400, 4: 0}
  assert answers == [others.get(n % 5, expected()[n % 2]) for n in range(30)]
  for _ in range(100):
    if server.metric("requests_running") == 0:
      break
    time.sleep(0.1)
  assert server.metric("requests_running") == 0
  assert server.metric("requests_cancelled_total") > 0


@pytest.mark.slow
def test_vectors_have_the_clients_format_and_scores_are_log_probabilities(server):
  embed = functools.partial(server.client.embeddings.create, model=server.name, input=PROMPTS)
  packed, listed = (
    [item.embedding for item in answer.data] for answer in (embed(), embed(encoding_format="float"))
  )
  np.testing.assert_allclose(packed, listed, rtol=1e-6)
  given = {"inputs": PROMPTS, "targets": expected()}
  headers = {"authorization": "Bearer secret"}
  scores = httpx2.post(f"{server.url}/score", json=given, headers=headers).json()["tokens"]
  choices = server.client.completions.create(
    model=server.name, prompt=PROMPTS, max_tokens=NEW_TOKENS, logprobs=0
  ).choices
  for score, choice in zip(scores, choices, strict=True):
    generated = choice.logprobs.token_logprobs
    assert [x["logprob"] for x in score][: len(generated)] == pytest.approx(generated, abs=1e-3)


@pytest.mark.slow
def test_sigterm_lets_begun_requests_end_and_refuses_others(server):
  import openai

  body = json.dumps({"prompt": PROMPTS[0], "max_tokens": NEW_TOKENS}).encode()
  head = f"Host: x\r\nAuthorization: Bearer secret\r\nContent-Length: {len(body)}\r\n"
  head = f"POST /v1/completions HTTP/1.1\r\n{head}Content-Type: application/json\r\n\r\n"
  with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as begun:
    begun.sendall(head.encode() + body[:10])
    time.sleep(0.5)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    with pytest.raises(openai.InternalServerError, match="the server is stopping"):
      server.client.completions.create(model=server.name, prompt="w9")
    begun.sendall(body[10:])
    assert expected()[0] in begun.makefile().read()
  assert server.process.wait(30) == 0


@pytest.mark.slow
def test_sigterm_ends_a_server_that_compiles(folder, tmp_path):
  process = start(folder, tmp_path)
  while "compiling" not in (tmp_path / "errors").read_text() and process.poll() is None:
    time.sleep(0.05)
  process.terminate()
  assert process.communicate(timeout=30)[0] == ""
  assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.slow
def test_each_adapter_of_the_first_model_is_a_model_of_its_name(
  folder, tmp_path, monkeypatch, capsys
):
  weight = "decoder.block.0.layer.1.EncDecAttention.v.weight"
  with safe_open(folder / "model.safetensors", "np") as file:
    outputs, inputs = file.get_tensor(weight).shape
  key = f"base_model.model.{weight.removesuffix('.weight')}"
  changes = {f"{key}.lora_A.weight": (1, inputs), f"{key}.lora_B.weight": (outputs, 1)}
  adapter = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["EncDecAttention.v"]}
  entries = adapter | {"base_model_name_or_path": str(folder), "layers_to_transform": [0]}
  (tmp_path / "adapter").mkdir()
  (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(entries))
  arrays = {name: np.full(shape, 3, np.float32) for name, shape in changes.items()}
  save_file(arrays, tmp_path / "adapter/adapter_model.safetensors")
  served = []
  monkeypatch.setattr("rosetta_t5.serving.app.serve", lambda app, _: served.append(app.models))
  command = ["serve", "--model_dir", str(folder), "--port", "0", "--adapter"]
  assert cli.main([*command, f"changed={tmp_path / 'adapter'}"]) == 0
  assert [*served[0]] == [folder.name, "changed"]
  assert served[0]["changed"].name == "changed"
  for wrong in (str(tmp_path / "adapter"), f"{folder.name}={tmp_path / 'adapter'}"):
    with pytest.raises(SystemExit, match="2"):
      cli.main([*command, wrong])
    assert "must be NAME=PATH, with a name that no other model has" in capsys.readouterr().err
