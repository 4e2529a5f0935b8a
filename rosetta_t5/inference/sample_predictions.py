"""Samples: a few inputs and targets beside the model's predictions, for people to read."""

import itertools
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from rosetta_t5 import terminal
from rosetta_t5.inference.infer_fn import get_infer_fn
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.user_errors import reason_of

Row = Mapping[str, np.ndarray]

FILE = "samples.jsonl"
# The number of tokens of a decode, and of the prompt that is cut from a text without inputs. They fill
# a line of the console, and decoding them costs little, whatever the lengths of the data.
_LENGTH = 64
_CONSOLE_WIDTH = 120
_CONSOLE_SAMPLES = 3  # of each task
_MASK = "decoder_causal_attention"


class Sample(NamedTuple):
  """An example of a task, as text, and what the model predicts for it."""

  task: str
  input: str
  target: str
  prediction: str


class SampleLog:
  """Shows samples on the console, and adds them to MODEL_DIR/samples.jsonl.

  A run never ends because its model cannot make samples: the reason is printed once.
  """

  def __init__(self, number: int, model_dir: str):
    """Prepares the log.

    Args:
      number: the number of samples of each task; 0 shows none.
      model_dir: the folder of the file.
    """
    self._number = number
    self._file = epath.Path(model_dir) / FILE

  def write(self, step: int, make_samples: Callable[[int], Sequence[Sample]]) -> None:
    """Shows the samples of one evaluation. All processes call it, and the first one writes.

    Args:
      step: the number of completed steps.
      make_samples: returns the samples; called with the number of samples of each task.
    """
    if not self._number:
      return
    try:
      samples = make_samples(self._number)
      reason = "nothing is predicted, because no metric needs predictions"
    except Exception as error:
      # A run whose model cannot predict, or lacks the memory for it, trains on.
      samples, reason = (), reason_of(error)
    if not samples:
      self._number = 0  # On all processes, which predict together.
      terminal.print_line(f"note     this run shows no sample predictions: {reason}")
    elif jax.process_index() == 0:
      self._write(step, samples)

  def _write(self, step: int, samples: Sequence[Sample]) -> None:
    rows = [json.dumps({"step": step, **x._asdict()}, ensure_ascii=False) for x in samples]
    # A token of a byte vocabulary may be half a character, which JSON can only write as an escape.
    with terminal.optional_output(FILE), self._file.open("ab") as file:
      file.write("\n".join([*rows, ""]).encode("utf-8", errors="backslashreplace"))
    for task, group in itertools.groupby(samples, operator.attrgetter("task")):
      terminal.print_line(f"samples at step {step}  {task}")
      for sample in itertools.islice(group, _CONSOLE_SAMPLES):
        for name in ("input", "target", "prediction"):
          # Control characters of the text become spaces.
          words = "".join(x if x.isprintable() else " " for x in getattr(sample, name)).split()
          line = f"  {name:11}{' '.join(words)}"
          is_short = len(line) <= _CONSOLE_WIDTH
          terminal.print_line(line if is_short else line[: _CONSOLE_WIDTH - 1] + "…")


def held_out_sampler(
  rows: Mapping[str, Sequence[Row]], model: Any, partitioner: BasePartitioner, train_state_axes: Any
) -> Callable[[Any], list[Sample]]:
  """Returns a function that predicts the first rows of data of which otherwise only the loss is evaluated.

  The decoding is compiled at the first call, for a batch of a few rows. Every call predicts the same
  rows, so their samples show the progress of a run.

  Args:
    rows: the first rows of each task, with the features that the model's loss needs. They may be
      packed: the first example of each is predicted. All processes give as many rows; those of the
      first process are predicted.
    model: the model.
    partitioner: splits batches over the devices.
    train_state_axes: the train state with PartitionSpecs in place of arrays.

  Returns:
    A function of the train state. Its result, the samples of all tasks, is the same on every process.

  Raises:
    ValueError: the rows do not have the features of our models.
  """
  rows = multihost_utils.broadcast_one_to_all(dict(rows))
  examples = [(task, _first_example(row)) for task, given in rows.items() for row in given]
  # Empty rows fill up a batch of too few examples.
  examples = [(task, row) for task, row in examples if row["decoder_target_tokens"].any()]
  # At most _LENGTH tokens follow the longest inputs of a text.
  length = _LENGTH + max((int(np.sum(row.get(_MASK, 0))) for _, row in examples), default=0)
  cut = [
    {name: x[:length] if name.startswith("decoder_") else x for name, x in row.items()}
    for _, row in examples
  ]
  largest = max(map(len, rows.values()), default=1)
  batch_size = largest + -largest % partitioner.data_mesh_size
  infer_fn = get_infer_fn(model.predict_batch, batch_size, train_state_axes, partitioner)

  def sample(train_state: Any) -> list[Sample]:
    predicted = infer_fn(enumerate(cut), train_state, rng=jax.random.PRNGKey(0))
    inputs, outputs = model.input_vocabulary, model.output_vocabulary
    samples = []
    for (task, _), row, (_, tokens) in zip(examples, cut, predicted, strict=True):
      given, target = _split(row)
      texts = token_text(inputs, given), token_text(outputs, target), token_text(outputs, tokens)
      samples.append(Sample(task, *texts))
    return samples

  return sample


def token_text(vocabulary: Any, tokens: Any) -> str:
  """Returns tokens as text, without padding and end tokens; other outputs as Python prints them.

  Of several decodes of one example, [N, T], the last one is taken, which is the best.
  """
  if not isinstance(tokens, list):
    return str(tokens)
  if tokens and isinstance(tokens[0], list):
    tokens = tokens[-1]
  return str(vocabulary.decode([x for x in tokens if x not in (0, vocabulary.eos_id)]))


def _first_example(row: Row) -> dict[str, np.ndarray]:
  """Returns the first example of a row that may be packed, in the features of unpacked data."""
  if "decoder_target_tokens" not in row:
    raise ValueError(f"the batches have no decoder_target_tokens (they have {', '.join(row)})")

  def keep_first(name: str, feature: np.ndarray) -> np.ndarray:
    segments = row.get(f"{name.partition('_')[0]}_segment_ids")
    return feature if segments is None else feature * (segments == segments[0])

  unpacked = (name for name in row if not name.endswith(("_segment_ids", "_positions")))
  example = {name: keep_first(name, np.asarray(row[name])) for name in unpacked}
  if "encoder_input_tokens" not in example and _MASK not in example:
    # A text without inputs. Its first half is the prompt.
    targets = example["decoder_target_tokens"]
    prompt = min(int(np.count_nonzero(targets)) // 2, _LENGTH)
    example[_MASK] = (np.arange(len(targets)) <= prompt).astype(np.int32)
  return example


def _split(example: Row) -> tuple[list[int], list[int]]:
  """Returns the tokens of the inputs and of the targets."""
  targets = example["decoder_target_tokens"].tolist()
  if "encoder_input_tokens" in example:
    return example["encoder_input_tokens"].tolist(), targets
  end = int(np.sum(example[_MASK])) - 1  # The mask includes the first target.
  return targets[:end], targets[end:]
