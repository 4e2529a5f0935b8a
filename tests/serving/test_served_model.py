"""Continuous batching: what requests get does not depend on what else the server computes."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
from tiny_models import (
  DECODER_ONLY,
  GPT,
  T5_1_1,
  adafactor,
  decoder_only_variables,
  variables,
)
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from rosetta_t5 import data, decoding
from rosetta_t5.data.tensorflow_import import seqio
from rosetta_t5.decoding.slots import SlotControls
from rosetta_t5.models import DecoderOnlyModel, EncoderDecoderModel
from rosetta_t5.networks.transformer import DecoderWrapper, Transformer
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.serving import RequestError, ServedModel
from rosetta_t5.serving.programs import CALLS
from rosetta_t5.serving.served_model import StreamedText
from rosetta_t5.trained_model import OpenedModel
from rosetta_t5.training import InferenceState

VOCABULARY = seqio.ByteVocabulary()
SIZE = 320
LENGTHS = {"inputs": 8, "targets": 12}
DECODER_LENGTHS = {"inputs": 7, "targets": 12}
LONG = {"inputs": 32, "targets": 12}  # Inputs are computed at 8, 16 and 32 tokens.
NUM_SLOTS = 3

CONFIGS = {
  "T5": dataclasses.replace(T5_1_1, vocab_size=SIZE),
  "long T5": dataclasses.replace(T5_1_1, vocab_size=SIZE),
  "scanned T5": dataclasses.replace(T5_1_1, vocab_size=SIZE, scan_layers=True),
  "decoder": dataclasses.replace(DECODER_ONLY, vocab_size=SIZE),
  "windows": dataclasses.replace(
    DECODER_ONLY, vocab_size=SIZE, window=4, layer_pattern=("local", "global")
  ),
  "GPT": dataclasses.replace(GPT, vocab_size=SIZE, max_length=64),
}


def lengths_of(name: str) -> dict[str, int]:
  if name == "long T5":
    return LONG
  return DECODER_LENGTHS if hasattr(CONFIGS[name], "num_layers") else LENGTHS


@functools.cache
def open_model(name: str) -> OpenedModel:
  """Returns a model with random parameters, whose most probable tokens are far from the others."""
  config = CONFIGS[name]
  options = {"optimizer_def": adafactor(), "decode_fn": decoding.temperature_sample}
  if hasattr(config, "num_layers"):
    model: Any = DecoderOnlyModel(DecoderWrapper(config), VOCABULARY, **options)
    drawn = decoder_only_variables(config)
  else:
    module = Transformer(config)
    model = EncoderDecoderModel(module, VOCABULARY, VOCABULARY, **options)
    drawn = variables(module)
  state, partitioner = InferenceState.create(drawn), PjitPartitioner(num_partitions=1)
  return OpenedModel(model, partitioner, state, partitioner.get_mesh_axes(state), lengths_of(name))


@pytest.fixture(scope="module")
def serve() -> Any:
  """Returns a function that runs a coroutine of a served model, which is compiled once for each network."""
  loop, served = asyncio.new_event_loop(), {}

  def run(make: Callable[[ServedModel], Any], name: str = "T5") -> Any:
    async def start() -> ServedModel:
      if name not in served:
        lengths, calls = lengths_of(name), CALLS if name == "T5" else ()
        options = (NUM_SLOTS, 40, decoding.Controls(), calls)
        model = ServedModel(name, open_model(name), lengths, *options)
        model.compile()
        model.start()
        served[name] = model
      return served[name]

    async def limited() -> Any:
      return await asyncio.wait_for(make(await start()), timeout=120)

    return loop.run_until_complete(limited())

  yield run
  for model in served.values():
    loop.run_until_complete(model.engine.stop())
  loop.close()


async def generate(
  model: ServedModel, tokens: Sequence[int], count: int, **controls: Any
) -> list[int]:
  """Returns the tokens that a request generates."""
  pieces = model.generate([(tokens, SlotControls(**controls))], count)
  return [token.id async for _, piece in pieces for token in piece.tokens]


def prompts(count: int, seed: int = 0, longest: int = 8) -> list[list[int]]:
  rng = np.random.default_rng(seed)
  return [rng.integers(3, 250, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


@functools.cache
def jitted_predict_batch(model: Any) -> Callable[..., Any]:
  return jax.jit(model.predict_batch_with_aux)


def expected(opened: OpenedModel, tokens: Sequence[int], count: int) -> list[int]:
  """Returns what `predict_batch` generates for a prompt alone."""
  model: Any = opened.model
  if isinstance(model, DecoderOnlyModel):
    row = [0, *tokens]
    total = DECODER_LENGTHS["inputs"] + 1 + DECODER_LENGTHS["targets"]
    inputs = np.pad(row, (0, total - len(row)))[None].astype(np.int32)
    mask = (np.arange(total)[None] < len(row)).astype(np.int32)
    batch = {"decoder_input_tokens": inputs, "decoder_causal_attention": mask}
  else:
    inputs = np.pad(tokens, (0, opened.lengths["inputs"] - len(tokens)))[None].astype(np.int32)
    targets = np.zeros((1, LENGTHS["targets"]), np.int32)
    batch = {"encoder_input_tokens": inputs, "decoder_input_tokens": targets}
  decode, _ = jitted_predict_batch(model)(opened.state.params, batch)
  ids = [int(token) for token in decode[0]][:count]
  return ids[: ids.index(1) + 1] if 1 in ids else ids


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("name", [*CONFIGS])
def test_answers_do_not_depend_on_the_requests_that_join_and_leave(serve: Any, name: str) -> None:
  given, opened = prompts(10, longest=lengths_of(name)["inputs"]), open_model(name)
  limits = [4 + n % 9 for n in range(10)]

  async def all_at_once(model: ServedModel) -> list[list[int]]:
    before = model.engine.statistics()["compilations_total"]
    answers = await asyncio.gather(
      *(generate(model, tokens, n) for tokens, n in zip(given, limits, strict=True))
    )
    assert model.engine.statistics()["compilations_total"] == before > 0
    return answers

  answers = serve(all_at_once, name)
  for tokens, limit, answer in zip(given, limits, answers, strict=True):
    assert answer == expected(opened, tokens, limit)


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("name", ["T5", "decoder"])
def test_equal_prompts_are_computed_once(serve: Any, name: str) -> None:
  (tokens,) = prompts(1, seed=1, longest=7)

  async def several_times(model: ServedModel) -> tuple[list[list[int]], float]:
    before = model.engine.statistics()["prefix_hits_total"]
    answers = [await generate(model, tokens, 5), await generate(model, tokens, 5)]
    answers += await asyncio.gather(*(generate(model, tokens, 5) for _ in range(4)))
    return answers, model.engine.statistics()["prefix_hits_total"] - before

  answers, hits = serve(several_times, name)
  assert hits >= 5
  assert answers == [expected(open_model(name), tokens, 5)] * 6


@pytest.mark.slow
def test_samples_depend_on_the_seed_and_not_on_other_requests(serve: Any) -> None:
  given = prompts(6, seed=3)

  async def sample(model: ServedModel) -> list[list[int]]:
    alone = await generate(model, given[0], 12, temperature=1.0, seed=7)
    options = {"temperature": 1.0, "top_k": 40, "top_p": 0.9}
    others = [generate(model, tokens, 12, **options, seed=n) for n, tokens in enumerate(given)]
    again, other_seed, *_ = await asyncio.gather(
      generate(model, given[0], 12, temperature=1.0, seed=7),
      generate(model, given[0], 12, temperature=1.0, seed=8),
      *others,
    )
    greedy = await generate(model, given[0], 12, temperature=1.0, top_k=1, seed=9)
    return [alone, again, other_seed, greedy]

  alone, again, other_seed, greedy = serve(sample)
  assert alone == again != other_seed
  assert greedy == expected(open_model("T5"), given[0], 12)


def test_controls_of_a_request_change_its_answer(serve: Any) -> None:
  (tokens,) = prompts(1, seed=4)

  async def ask(model: ServedModel) -> tuple[list[int], ...]:
    never = {"presence_penalty": 1e4}
    return (
      await generate(model, tokens, 12, **never),
      await generate(model, tokens, 12, frequency_penalty=1e4),
      await generate(model, tokens, 12, temperature=50.0, min_tokens=12, seed=1),
    )

  without_repetition, also, long = serve(ask)
  assert len({*without_repetition}) == len(without_repetition) == len({*also})
  assert len(long) == 12
  assert 1 not in long


async def cancelled(model: ServedModel) -> float:
  return model.engine.statistics()["requests_cancelled_total"]


def test_a_stop_text_ends_an_answer_before_itself(serve: Any) -> None:
  before = serve(cancelled)
  (tokens,) = prompts(1, seed=5)

  async def ask(
    model: ServedModel, stop: Sequence[str], is_stream: bool = True
  ) -> tuple[str, str | None]:
    text, reason = "", None
    controls = SlotControls(temperature=1.0, seed=3)
    async for _, piece in model.generate([(tokens, controls)], 12, stop, is_stream):
      text, reason = text + piece.text, piece.finish_reason
    return text, reason

  text, _ = serve(lambda model: ask(model, ()))
  assert serve(lambda model: ask(model, (), is_stream=False))[0] == text
  readable = next(char for char in text[1:] if char != "�")
  for is_stream in (True, False):
    shorter, reason = serve(lambda model, x=is_stream: ask(model, (readable,), x))
    assert shorter == text[: text.index(readable)]
    assert reason == "stop"
  assert serve(cancelled) == before


@pytest.mark.parametrize(
  ("text", "expected"), [("abcde", ""), ("abcdx", "abcdx"), ("abcabcde", "abc"), ("äö", "äö")]
)
def test_text_is_held_back_while_it_may_begin_a_stop_text(text: str, expected: str) -> None:
  streamed, sent = StreamedText(VOCABULARY, ["abcde"]), ""
  tokens = VOCABULARY.encode(text)
  for count, token in enumerate(tokens, 1):
    streamed.tokens.append(token)
    new, has_stopped = streamed.advance(is_complete=count == len(tokens))
    sent += new
    assert has_stopped == (count == len(tokens) and expected != text)
    assert expected.startswith(sent)
  assert sent == expected


@pytest.mark.slow
def test_a_request_that_is_closed_frees_its_slot(serve: Any) -> None:
  given = prompts(NUM_SLOTS + 1, seed=6)

  async def close_all(model: ServedModel) -> list[int]:
    pieces = [model.generate([(tokens, SlotControls())], 12) for tokens in given[:NUM_SLOTS]]
    for iterator in pieces:
      await anext(iterator)
      await iterator.aclose()
    answer = await generate(model, given[-1], 12)
    assert model.engine.statistics()["requests_running"] == 0
    return answer

  before = serve(cancelled)
  answer = serve(close_all)
  assert serve(cancelled) - before == NUM_SLOTS
  assert answer == expected(open_model("T5"), given[-1], 12)


@pytest.mark.slow
def test_too_many_waiting_requests_are_refused(serve: Any) -> None:
  given = prompts(60, seed=7)

  async def overload(model: ServedModel) -> list[Any]:
    requests = (generate(model, tokens, 3) for tokens in given)
    return await asyncio.gather(*requests, return_exceptions=True)

  results = serve(overload)
  refused = [result for result in results if isinstance(result, RequestError)]
  assert {error.status for error in refused} == {429}
  assert refused[0].retry_after_s >= 1
  assert all(isinstance(result, list | RequestError) for result in results)


@pytest.mark.slow
def test_beams_scores_and_vectors_are_the_models(serve: Any) -> None:
  given, opened = prompts(6, seed=8), open_model("T5")

  async def ask(model: ServedModel) -> tuple[Any, ...]:
    target = model.encode_target("a word")
    return await asyncio.gather(
      model.beams(given, 2), model.score(given, [target] * len(given)), model.embed(given)
    )

  beams, scores, vectors = serve(ask)
  inputs = np.stack([np.pad(x, (0, 8 - len(x))) for x in given]).astype(np.int32)
  target = [*VOCABULARY.encode("a word"), 1]
  targets = np.tile(np.pad(target, (0, 12 - len(target))), (6, 1)).astype(np.int32)
  batch = {
    "encoder_input_tokens": inputs,
    "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
    "decoder_target_tokens": targets,
  }
  params = opened.state.params
  want = opened.model.score_batch(params, batch)
  np.testing.assert_allclose([sum(t.logprob for t in row) for row in scores], want, rtol=1e-4)
  encode = opened.model.module.encode
  encoded = opened.model.module.apply(
    {"params": params}, inputs, enable_dropout=False, method=encode
  )
  for row, vector, tokens in zip(encoded, vectors, given, strict=True):
    np.testing.assert_allclose(vector, row[: len(tokens)].mean(0), rtol=1e-3, atol=1e-5)
  searching = EncoderDecoderModel(opened.model.module, VOCABULARY, VOCABULARY, None)
  options = {"num_decodes": 4, "return_all_decodes": True}
  _, aux = searching.predict_batch_with_aux(params, batch, **options)
  want = np.asarray(aux["scores"])[:, ::-1][:, :2].ravel()
  np.testing.assert_allclose([score for _, score in beams], want, rtol=1e-4)


def test_prompts_that_do_not_fit_are_refused(serve: Any) -> None:
  async def encode(model: ServedModel) -> None:
    assert model.encode("ab") == [*VOCABULARY.encode("ab"), 1]
    with pytest.raises(RequestError, match="1 to 8 tokens, got 41"):
      model.encode("a" * 40)
    with pytest.raises(
      RequestError, match="input has token 5000, but tokens are from 0 to"
    ) as refused:
      model.encode([3, 5000], "input")
    assert refused.value.field == "input"
    assert model.encode_target("a", "target", must_end=False) == VOCABULARY.encode("a")
    with pytest.raises(RequestError, match="target must have at most 12 tokens, got 13"):
      model.encode_target("a" * 13, "target", must_end=False)

  serve(encode)


def test_padding_is_refused_in_the_prompts_of_a_decoder() -> None:
  options = (NUM_SLOTS, 40, decoding.Controls(), ())
  model = ServedModel("decoder", open_model("decoder"), DECODER_LENGTHS, *options)
  with pytest.raises(RequestError, match="prompt has the token of padding, 0: leave it out"):
    model.encode([3, 0, 4])


def test_a_call_that_fails_does_not_end_the_model(
  serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
  def fail(name: str, requests: Sequence[Any]) -> list[Any]:
    raise RuntimeError(f"{len(requests)} {name}")

  async def ask(model: ServedModel) -> None:
    monkeypatch.setattr(model._programs, "call", fail)
    before = model.engine.statistics()["requests_cancelled_total"]
    results = await asyncio.gather(
      *(model.embed([[5]] * count) for count in (3, 2)), return_exceptions=True
    )
    assert [*map(str, results)] == ["4 embed"] * 2
    assert model.engine.statistics()["requests_cancelled_total"] == before + 1
    assert await generate(model, [5], 3)

  serve(ask)


@pytest.mark.slow
def test_calls_end_when_the_server_stops(serve: Any) -> None:
  async def stop(model: ServedModel) -> list[Any]:
    calls = [asyncio.create_task(model.embed([[5, n + 3]])) for n in range(6)]
    for _ in range(3):  # Then a batch of 4 runs, and the others wait.
      await asyncio.sleep(0)
    await model.engine.stop()
    ended = await asyncio.gather(*calls, return_exceptions=True)
    model.start()
    return ended

  for error in serve(stop):
    assert isinstance(error, RequestError)
    assert error.status == 503


# The last test, because the model cannot be used after it.
def test_a_failure_ends_the_requests_and_is_named(
  serve: Any, capfd: pytest.CaptureFixture[str]
) -> None:
  async def fail(model: ServedModel) -> None:
    jax.tree.map(lambda x: x.delete(), open_model("T5").state.params)
    with pytest.raises(RuntimeError, match="delete"):
      await generate(model, [5], 3)
    assert "delete" in str(model.engine.error)
    with pytest.raises(RequestError, match="failed"):
      await generate(model, [5], 3)

  serve(fail)
  assert "Traceback" in capfd.readouterr().err


def test_token_ids_of_a_request_are_those_of_the_tokenizer(tmp_path):
  tokenizer = tokenizers.Tokenizer(WordLevel({"a": 0, "b": 1, "<s>": 2, "</s>": 3}))
  tokenizer.pre_tokenizer = WhitespaceSplit()
  tokenizer.save(str(tmp_path / "tokenizer.json"))
  (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
  words = data.tokenizer_vocabulary(str(tmp_path / "tokenizer.json"), "</s>", shift=1)
  opened = open_model("decoder")
  opened = dataclasses.replace(opened, model=DecoderOnlyModel(opened.model.module, words, None))
  served = ServedModel("words", opened, DECODER_LENGTHS, NUM_SLOTS, 40, decoding.Controls(), ())
  assert served.encode("a b") == [1, 2, 4]
  assert served.encode([0, 1, 3]) == served.encode([2, 0, 1, 3]) == [1, 2, 4]
  with pytest.raises(RequestError, match="token 4, but tokens are from 0 to 3"):
    served.encode([4])
