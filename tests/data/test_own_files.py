"""`file_task`: objectives, splits, restarts and user errors."""

from __future__ import annotations

import collections
import itertools
import json
import pathlib
from typing import Any

import numpy as np
import pytest

from rosetta_t5.config.language.statements import read_program
from rosetta_t5.config.t5x_surface import RECIPES
from rosetta_t5.data import (
  DatasetConfig,
  file_task,
  get_dataset,
  mixture,
  prepare_train_iter,
  prepared_task,
  task_on_rows,
)
from rosetta_t5.data.tensorflow_import import import_seqio, import_tensorflow
from rosetta_t5.data.vocabularies.sentencepiece_models import train_sentencepiece
from rosetta_t5.parallel.partitioner import PjitPartitioner

WORDS = ("red", "old", "cat", "hat", "sea", "sun")
LENGTHS = {"inputs": 32, "targets": 32}


pytestmark = pytest.mark.usefixtures("isolated_registries")


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Any:
  path = tmp_path_factory.mktemp("vocabulary") / "pieces.model"
  path.write_bytes(train_sentencepiece([" ".join(WORDS)] * 20, vocab_size=18))
  return import_seqio().SentencePieceVocabulary(str(path), extra_ids=30)


@pytest.fixture
def pattern(tmp_path: pathlib.Path) -> str:
  """Three files of 40 documents, each with a title."""
  random = np.random.default_rng(0)
  for number in range(3):
    texts = [" ".join(random.choice(WORDS, 30)) for _ in range(40)]
    rows = [json.dumps({"title": WORDS[n % 6], "text": t}) + "\n" for n, t in enumerate(texts)]
    (tmp_path / f"{number}.jsonl").write_text("".join(rows))
  return str(tmp_path / "*.jsonl")


def dataset(name: str, split: str = "train", **options: Any) -> Any:
  options = {"shuffle": False, "num_epochs": 1, **options}
  lengths = options.pop("lengths", LENGTHS)
  task = import_seqio().get_mixture_or_task(name)
  return task.get_dataset(lengths, split=split, **options)


def examples(name: str, split: str = "train", **options: Any) -> list[dict[str, Any]]:
  return list(dataset(name, split, **options).as_numpy_iterator())


@pytest.mark.slow
def test_span_corruption_makes_inputs_and_targets_with_end_tokens(
  pattern: str, vocabulary: Any
) -> None:
  found = examples(file_task(pattern, vocabulary=vocabulary))
  assert len(found) > 20
  for example in found:
    assert set(example) == {"inputs", "targets"}
    for name, length in LENGTHS.items():
      assert example[name][-1] == 1
      assert 1 < len(example[name]) <= length


def test_a_prefix_lms_inputs_and_targets_make_up_the_text(pattern: str, vocabulary: Any) -> None:
  name = file_task(pattern, vocabulary=vocabulary, objective="prefix_lm", validation_percent=0)
  lengths = {"inputs": 400, "targets": 400}
  found = examples(name, lengths=lengths)
  texts = [
    json.loads(line)["text"]
    for n in range(3)
    for line in pathlib.Path(pattern.replace("*", str(n))).read_text().splitlines()
  ]
  joined = [
    vocabulary.decode([*e["inputs"][:-1].tolist(), *e["targets"][:-1].tolist()]) for e in found
  ]
  assert sorted(joined) == sorted(texts)


def test_causal_targets_are_documents_with_an_end_token_each(pattern: str, vocabulary: Any) -> None:
  name = file_task(pattern, vocabulary=vocabulary, objective="causal_lm", validation_percent=0)
  found = examples(name, lengths={"targets": 32})
  ends = sum(int((e["targets"][:-1] == 1).sum()) for e in found)
  assert ends + len(found) >= 120  # one per document; some are the last token of an example
  assert all(len(e["targets"]) == 32 for e in found[:-2])


@pytest.mark.slow
def test_ul2_puts_its_modes_before_the_inputs_and_mixes_all_denoisers(
  pattern: str, vocabulary: Any
) -> None:
  name = file_task(pattern, vocabulary=vocabulary, objective="ul2")
  seqio = import_seqio()
  assert len(seqio.get_subtasks(seqio.get_mixture_or_task(name))) == 7
  for key, mode in (("x64", "[NLG]"), ("s", "[S2S]")):
    found = examples(f"{name}_{key}")
    tokens = vocabulary.encode(mode)
    assert found
    assert all(e["inputs"][: len(tokens)].tolist() == tokens for e in found)
    assert all(len(e["inputs"]) <= 32 and len(e["targets"]) <= 32 for e in found)


@pytest.mark.slow
@pytest.mark.parametrize(
  "variant", sorted((RECIPES / "runs/ul2").glob("*.gin")), ids=lambda f: f.stem
)
def test_the_variants_of_ul2_mix_their_denoisers_at_their_rates(
  variant: Any, pattern: str, vocabulary: Any
) -> None:
  (rows,) = (
    b.value
    for b in read_program([str(variant)]).effective_bindings().values()
    if b.name == "UL2_DENOISERS"
  )
  name = file_task(pattern, vocabulary=vocabulary, objective="ul2", denoisers=rows)
  seqio = import_seqio()
  mixed = seqio.get_mixture_or_task(name)
  found = [mixed.get_rate(task) for task in seqio.get_subtasks(mixed)]
  assert sorted(found) == sorted(rate for *_, rate in rows)
  first = vocabulary.encode(rows[0][0])
  made = examples(f"{name}_denoiser0")
  assert made
  assert all(e["inputs"][: len(first)].tolist() == first for e in made)


def test_seq2seq_accepts_templates(pattern: str, vocabulary: Any) -> None:
  name = file_task(
    pattern,
    vocabulary=vocabulary,
    objective="seq2seq",
    inputs="title: {text}",
    targets="title",
    metrics=["accuracy"],
  )
  example = examples(name)[0]
  assert example["inputs_pretokenized"].startswith(b"title: ")
  assert example["targets_pretokenized"].decode() in WORDS
  task = import_seqio().TaskRegistry.get(name)
  assert [fn.__name__ for fn in task.metric_fns] == ["accuracy"]


def test_train_and_validation_do_not_overlap(pattern: str, vocabulary: Any) -> None:
  options = {"vocabulary": vocabulary, "objective": "seq2seq", "inputs": "text", "targets": "title"}
  name = file_task(pattern, validation_percent=20, **options)
  parts = [
    {e["inputs_pretokenized"] for e in examples(name, split)} for split in ("train", "validation")
  ]
  assert not parts[0] & parts[1]
  assert sum(map(len, parts)) == 120
  assert 10 < len(parts[1]) < 45


@pytest.mark.slow
def test_shards_are_disjoint_and_complete(pattern: str, vocabulary: Any) -> None:
  seqio = import_seqio()
  options = {"vocabulary": vocabulary, "objective": "seq2seq", "inputs": "text", "targets": "title"}
  name = file_task(pattern, **options)
  parts = [  # more shards than files
    [e["inputs_pretokenized"] for e in examples(name, shard_info=seqio.ShardInfo(n, 4))]
    for n in range(4)
  ]
  assert all(parts)
  whole = [e["inputs_pretokenized"] for e in examples(name)]
  assert sorted(text for part in parts for text in part) == sorted(whole)


@pytest.mark.slow
def test_a_position_in_compressed_files_is_saved_and_restored(
  pattern: str, vocabulary: Any, tmp_path: pathlib.Path
) -> None:
  tf = import_tensorflow()
  name = file_task(pattern, vocabulary=vocabulary, validation_percent=0)
  data = dataset(name, shuffle=True, seed=3, num_epochs=None)
  iterator = iter(data)
  for _ in range(30):
    next(iterator)
  path = tf.train.Checkpoint(iterator=iterator).save(str(tmp_path / "position"))
  expected = [next(iterator)["targets"].numpy().tolist() for _ in range(10)]
  other = iter(data)
  tf.train.Checkpoint(iterator=other).restore(path)
  assert [next(other)["targets"].numpy().tolist() for _ in range(10)] == expected


@pytest.mark.slow
def test_a_mixture_of_own_files_has_the_rates_that_were_asked_for(
  pattern: str, vocabulary: Any
) -> None:
  def task(file: str, **more: Any) -> str:
    path = pattern.replace("*", file)
    return file_task(
      path, vocabulary=vocabulary, objective="causal_lm", validation_percent=0.0, **more
    )

  names = [task("0"), task("[12]")]
  seqio = import_seqio()

  def rates(**arguments: Any) -> list[float]:
    provider = seqio.get_mixture_or_task(mixture(names, **arguments))
    return [provider.get_rate(seqio.TaskRegistry.get(name)) for name in names]

  assert rates() == [40.0, 80.0]
  assert rates(maximum=50) == [40.0, 50.0]
  assert rates(maximum=50, temperature=2.0) == [40**0.5, 50**0.5]
  assert rates(rates="equal") == [1.0, 1.0]
  assert rates(rates=[0.25, 3]) == [0.25, 3.0]
  assert examples(mixture(names), lengths={"targets": 32})
  denoisers = file_task(pattern, vocabulary=vocabulary, objective="ul2", validation_percent=0.0)
  both = seqio.MixtureRegistry.get(mixture([denoisers, file_task(pattern, vocabulary=vocabulary)]))
  parts = seqio.get_subtasks(seqio.get_mixture_or_task(denoisers))
  assert len(parts) == 7
  assert sum(map(both.get_rate, parts)) == pytest.approx(120)
  own = seqio.MixtureRegistry.add("own", names, default_rate=seqio.mixing_rate_num_examples)
  assert [own.get_rate(seqio.TaskRegistry.get(name)) for name in names] == [40.0, 80.0]


def test_a_mixture_within_a_mixture_counts_the_examples_of_all_its_tasks(
  pattern: str, vocabulary: Any
) -> None:
  def task(n: str) -> str:
    return file_task(pattern.replace("*", n), vocabulary=vocabulary, validation_percent=0.0)

  seqio, inner, alone = import_seqio(), mixture([task("0"), task("1")]), task("2")
  outer = seqio.MixtureRegistry.get(mixture([inner, alone]))
  assert outer.rate_per_task_name[inner] == 80.0
  assert outer.get_rate(seqio.TaskRegistry.get(alone)) == 40.0
  features = {"targets": seqio.Feature(vocabulary)}
  source = seqio.TextLineDataSource({"train": pattern})
  seqio.TaskRegistry.add("uncounted", source, output_features=features)
  unknown = mixture(["uncounted"], rates="equal")
  with pytest.raises(ValueError, match=r"'mixture_\w+' does not know .*: set data.mixture.rates"):
    mixture([unknown], maximum=5)


@pytest.mark.parametrize(
  ("tasks", "arguments", "error"),
  [
    (["missing"], {}, "names 'missing', but there is no such task"),
    (["lambada"], {"rates": [1, 2]}, "a positive number for each of the 1 tasks.*got \\[1, 2\\]"),
    (["lambada"], {"rates": [0]}, "a positive number for each"),
    (["lambada"], {"rates": "even"}, "must be one of"),
  ],
)
def test_wrong_rates_of_a_mixture_are_refused(tasks: Any, arguments: Any, error: str) -> None:
  with pytest.raises(ValueError, match=error):
    mixture(tasks, **arguments)


def test_a_mixtures_name_belongs_to_its_arguments(pattern: str, vocabulary: Any) -> None:
  tasks = [file_task(pattern.replace("*", n), vocabulary=vocabulary) for n in "01"]
  assert mixture(tasks, name="mine", rates="equal") == mixture(tasks, name="mine", rates="equal")
  for name, arguments in (("mine", {"rates": [1, 2]}), (tasks[0], {})):
    with pytest.raises(
      ValueError, match=rf"'{name}' already exists .* another data\.mixture\.name"
    ):
      mixture(tasks, name=name, **arguments)


def test_the_number_of_examples_of_large_files_is_estimated_from_the_first(
  pattern: str, vocabulary: Any
) -> None:
  name = file_task(pattern, vocabulary=vocabulary, validation_percent=0.0)
  source = import_seqio().TaskRegistry.get(name).source
  assert source.count_examples("train") == (120, True)
  number, is_exact = source.count_examples("train", max_bytes=1)
  assert not is_exact
  assert abs(number - 120) <= 2


def test_the_same_arguments_give_the_same_task_and_other_arguments_under_its_name_are_refused(
  pattern: str, vocabulary: Any
) -> None:
  name = file_task(pattern, vocabulary=vocabulary)
  assert file_task(pattern, vocabulary=vocabulary) == name
  assert file_task(pattern, vocabulary=vocabulary, objective="prefix_lm") != name
  file_task(pattern, vocabulary=vocabulary, name="mine")
  with pytest.raises(ValueError, match="task 'mine' already exists with other arguments"):
    file_task(pattern, vocabulary=vocabulary, name="mine", text="title")


@pytest.mark.parametrize("held_out", ["1.jsonl", "*1.jsonl", "linked.jsonl"])
def test_a_file_to_train_on_is_not_one_of_those_for_validation(
  pattern: str, vocabulary: Any, tmp_path: pathlib.Path, held_out: str
) -> None:
  (tmp_path / "linked.jsonl").symlink_to("1.jsonl")
  files = [pattern.replace("*", n) for n in "01"]
  error = r"/1\.jsonl is in the files to train on \(files; .* \(validation_files; "
  with pytest.raises(ValueError, match=error):
    file_task(files, vocabulary=vocabulary, validation_files=str(tmp_path / held_out))
  file_task(files, vocabulary=vocabulary, validation_files=files)


def test_rows_of_files_in_other_folders_have_other_names(
  vocabulary: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.chdir(tmp_path)
  for folder in ("here/data", "data"):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "x.csv").write_text("inputs,targets\na,b\n")
  monkeypatch.chdir("here")
  names = [task_on_rows([f"{x}data/x.csv"], None, vocabulary, {}) for x in ("", "../")]
  assert names[0] == "data_x.csv" != names[1]


def test_rows_are_read_as_prepared_data_or_a_mixture_of_denoisers_was(
  vocabulary: Any, pattern: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  seqio, rows = import_seqio(), tmp_path / "rows"
  rows.mkdir()
  denoisers = [("[A]", 0.25, 4.0, 1.0), ("", None, None, 3.0)]
  arguments: Any = {"objective": "ul2", "denoisers": denoisers, "text": "title"}
  mixed = seqio.MixtureRegistry.get(file_task(pattern, vocabulary=vocabulary, **arguments))
  manifest = {"vocabulary": {"sha256": "x"}, "text": "title"}
  monkeypatch.setattr("rosetta_t5.data.prepared.task.read_manifest", lambda _: manifest)
  likes = {
    "mixed": (mixed, denoisers),
    "prepared": (prepared_task("x", "ul2", denoisers=denoisers), denoisers),
    "noisy": (prepared_task("x", noise_density=0.5), [("", 0.5, 3.0, 1.0)]),
    "standard": (prepared_task("x"), None),
    "decoder": (prepared_task("x", "causal_lm"), None),
  }
  made = {}
  for name, (like, expected) in likes.items():
    (rows / f"{name}.jsonl").write_text('{"title": "red cat"}\n')
    made[name] = seqio.get_mixture_or_task(
      task_on_rows([str(rows / f"{name}.jsonl")], like, vocabulary, {})
    )
    assert made[name].arguments["text"] == "title"
    assert made[name].arguments["denoisers"] == expected
  assert len(made["mixed"].tasks) == len(made["prepared"].tasks) == 2
  assert len(made["noisy"].tasks) == 1
  objectives = [made[name].source.arguments["objective"] for name in ("standard", "decoder")]
  assert objectives == ["span_corruption", "causal_lm"]


def test_rows_for_a_task_without_columns_need_the_columns(vocabulary: Any, pattern: str) -> None:
  name = mixture([file_task(pattern, vocabulary=vocabulary)], rates="equal")
  like = import_seqio().MixtureRegistry.get(name)
  with pytest.raises(ValueError, match=f"task {name} has no columns: give --inputs and --targets"):
    task_on_rows([pattern], like, vocabulary, {})
  rows = task_on_rows([pattern], like, vocabulary, {"inputs": "title", "targets": "text"})
  assert [f.__name__ for f in import_seqio().TaskRegistry.get(rows).metric_fns] == ["accuracy"]


@pytest.mark.parametrize(
  ("options", "text"),
  [
    (
      {"objective": "spans"},
      r"objective must be one of 'span_corruption', 'prefix_lm'.*, got 'spans'",
    ),
    ({"inputs": "title"}, r"or set objective = 'seq2seq'"),
    ({"objective": "seq2seq"}, r"needs file_task\.inputs and file_task\.targets"),
    ({"metrics": ["bluu"]}, r"metrics .*must be one of 'accuracy', 'bleu', .*, got 'bluu'"),
    ({"on_bad_example": "stop"}, r"on_bad_example must be one of 'skip', 'refuse', got 'stop'"),
    ({"format": "xml"}, r"format must be one of .*, got 'xml'"),
    ({"text_unit": "page"}, r"text_unit must be one of 'line', .*got 'page'"),
  ],
)
def test_wrong_arguments_are_refused_with_what_to_set(
  pattern: str, vocabulary: Any, options: dict[str, Any], text: str
) -> None:
  with pytest.raises(ValueError, match=text):
    file_task(pattern, vocabulary=vocabulary, **options)


@pytest.mark.slow
def test_a_bad_example_that_is_refused_stops_a_running_feed_with_file_and_line(
  pattern: str, vocabulary: Any
) -> None:
  last = pathlib.Path(pattern.replace("*", "2"))
  last.write_text(last.read_text() + "no json\n")
  name = file_task(
    pattern,
    vocabulary=vocabulary,
    objective="seq2seq",
    inputs="text",
    targets="title",
    on_bad_example="refuse",
  )
  cfg = DatasetConfig(name, LENGTHS, "train", 8, shuffle=False, seed=0)
  partitioner = PjitPartitioner(num_partitions=1)
  feed = prepare_train_iter(
    get_dataset(cfg, 0, 1, import_seqio().EncDecFeatureConverter),
    partitioner=partitioner,
    checkpoint_cfg=None,
    data_layout=partitioner.get_data_layout(8),
  )
  with pytest.raises(
    ValueError, match=r'^\S+2\.jsonl, line 41: invalid JSON.*on_bad_example = "skip"'
  ):
    collections.deque(itertools.islice(feed, 40))
  feed.close()
