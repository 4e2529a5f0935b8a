"""What `rosetta-t5 finetune` chooses: each choice is a gin binding with its reason."""

import importlib.util
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

# The value that a metric reports by which checkpoints are compared, if its name is another one.
_VALUES = {
  "squad": "f1",
  "rouge": "rougeLsum",
  "f1_score_with_invalid": "f1",
  "lambada": "accuracy",
  "next_word": "accuracy",
  "word_perplexity": "perplexity",
}
_WIDTH = 100
_LOSS = "loss_per_nonpadding_target_token"
_MOST_LABELS, _LABEL_WORDS, _ANSWER_WORDS = 20, 4, 12
_LONGEST = 1024  # tokens, unless more are asked for
_LENGTH_UNIT = 8  # lengths that GPUs compute fast
_KEPT_WHOLE = 99  # percent of the rows, if a few are much longer
_EPOCHS, _FEWEST_STEPS, _EVALUATIONS = 3, 200, 10
_STEPS_PER_EPOCH = 20  # at least, if a batch of 8 allows it
_LARGEST_BATCH = {"CPU": 16, "GPU": 64}  # of a device
_PREDICTED = 1000  # rows at each evaluation


class Code(str):
  """A gin value that is code, such as @f() or %MACRO, and no string."""

  def __repr__(self) -> str:
    return str(self)


class Choice(NamedTuple):
  """A gin binding.

  Attributes:
    name: its left side.
    value: its value, whose `repr` is gin code.
    reason: why; "" if the user has given the value.
    is_noted: whether the reason is printed too.
  """

  name: str
  value: Any
  reason: str = ""
  is_noted: bool = False

  def __str__(self) -> str:
    """The lines of the gin file."""
    line = f"{self.name} = {self.value!r}"
    if not self.reason:
      return line
    if len(line) + len(self.reason) < _WIDTH:
      return f"{line}  # {self.reason}"
    return "\n".join([*textwrap.wrap(f"# {self.reason}:", _WIDTH, subsequent_indent="# "), line])


class Monitor(NamedTuple):
  """The value by which checkpoints are compared, and an early end is decided.

  Attributes:
    name: the value's name.
    mode: "max" or "min".
    folder: that of TensorBoard's files which have the value, and the prefix of its name in them.
    event: the name of the `ActionMode` in which actions see it.
  """

  name: str
  mode: str
  folder: str
  event: str


def choose_metrics(
  targets: Sequence[str], given: Sequence[str], task: str
) -> tuple[Choice, Monitor]:
  """Returns the metrics of the task, and the one by which checkpoints are compared.

  Args:
    targets: those of the first rows; none for a SeqIO task.
    given: the metrics that the user wants, or that the task has.
    task: its name.
  """
  metrics, reason = (list(given), "") if given else _metrics_of(targets)
  choice = Choice("data.file_task.metrics", metrics, reason)
  if not metrics:
    return choice, Monitor(_LOSS, "min", f"training_eval/{task}", "TRAIN_EVAL")
  value = _VALUES.get(metrics[0], metrics[0])
  mode = "min" if value == "perplexity" else "max"
  return choice, Monitor(value, mode, f"inference_eval/{task}/eval", "INFER_EVAL")


def _metrics_of(targets: Sequence[str]) -> tuple[list[str], str]:
  distinct, words = {*targets}, [len(target.split()) for target in targets]
  count = f"the first {len(targets)} targets"
  if not targets:
    return [], "those of the task"
  is_label = max(words) <= _LABEL_WORDS and len(distinct) <= _MOST_LABELS
  if is_label and 2 * len(distinct) <= len(targets):
    return ["accuracy", "macro_f1"], f"{count} are {len(distinct)} different labels"
  if np.percentile(words, 95) <= _ANSWER_WORDS:
    return ["squad"], f"{count} are short answers, 95% of them of at most {_ANSWER_WORDS} words"
  if importlib.util.find_spec("rouge_score") is None:
    return [], f"{count} are texts; for ROUGE, pip install rouge-score"
  return ["rouge"], f"{count} are texts"


def choose_lengths(
  lengths: Mapping[str, Any], given: Mapping[str, int | None], limit: int | None
) -> Choice:
  """Returns the numbers of tokens of inputs and targets, with the share of the rows that is truncated.

  Args:
    lengths: the numbers of tokens of the first rows, by feature.
    given: the lengths that the user wants, by feature.
    limit: the number of positions of a network that has a limit.
  """
  chosen, reasons, is_cut = {}, [], False
  for name, tokens in lengths.items():
    longest, most = int(tokens.max()), float(np.percentile(tokens, _KEPT_WHOLE))
    length = longest if longest <= 1.5 * most else math.ceil(most)
    length = given[name] or min(math.ceil(length / _LENGTH_UNIT) * _LENGTH_UNIT, limit or _LONGEST)
    chosen[name], is_cut = length, is_cut or longest > length
    share = f"{np.mean(tokens > length):.1%} of the {name} truncated"
    reasons.append(f"{share} (the longest of the first {len(tokens)} has {longest} tokens)")
  return Choice("TASK_FEATURE_LENGTHS", chosen, "; ".join(reasons), is_cut)


def choose_steps(
  rows: int | None, options: Any, num_devices: int, device: str
) -> tuple[Choice, Choice, Choice]:
  """Returns the batch size, the number of steps, and the steps between evaluations.

  Args:
    rows: the number of rows that are trained on; None if it is unknown.
    options: the command's options; `batch_size`, `steps` and `epochs` may be set.
    device: "CPU" or "GPU".
    num_devices: the number of devices; the batch is a multiple of it.

  Raises:
    ValueError: an epoch has an unknown number of rows.
  """
  largest = _LARGEST_BATCH[device]
  wanted = 2 ** int(math.log2(max(8, (rows or largest * 1000) / _STEPS_PER_EPOCH)))
  per_device = math.ceil(min(wanted, largest * num_devices) / num_devices)
  size = options.batch_size or per_device * num_devices
  epoch = math.ceil(rows / size) if rows else None
  why = f"an epoch has {epoch or 'an unknown number of'} steps, a {device} at most {largest} rows"
  batch = Choice("BATCH_SIZE", size, "" if options.batch_size else why)
  if options.steps:
    steps = Choice("TRAIN_STEPS", options.steps)
  elif epoch is None:
    raise ValueError("the number of rows is not known, so neither is that of steps: give --steps")
  else:
    epochs = options.epochs or _EPOCHS
    number = math.ceil(epochs * epoch)
    steps = Choice("TRAIN_STEPS", number, f"{epochs:g} epochs of {epoch} steps ({rows:,} rows)")
    if not options.epochs and number < _FEWEST_STEPS:
      reason = f"{_FEWEST_STEPS / epoch:.3g} epochs; 3 epochs would be only {number} steps"
      steps = Choice("TRAIN_STEPS", _FEWEST_STEPS, reason, is_noted=True)
  period = min(steps.value, max(epoch or 1, math.ceil(steps.value / _EVALUATIONS)))
  text = f"at most {_EVALUATIONS} evaluations, and at most one in an epoch"
  return batch, steps, Choice("EVAL_PERIOD", period, text)


def evaluation_choices(monitor: Monitor, rows: int | None, batch: int, period: int) -> list[Choice]:
  """Returns how predictions and the loss are evaluated, and which checkpoints are kept."""
  best = "checkpoints.SaveBestCheckpointer"
  few = None if rows is None or rows <= _PREDICTED else _PREDICTED
  return [
    Choice("EVALUATOR_NUM_EXAMPLES", few, f"rows that are predicted (of {rows}); None is all"),
    Choice("EVAL_STEPS", math.ceil(min(rows or _PREDICTED, _PREDICTED) / batch), "for the loss"),
    Choice("train_script.train.concurrent_metrics", False, "known before the next checkpoint"),
    Choice("utils.SaveCheckpointConfig.period", period, "after each evaluation"),
    Choice("utils.SaveCheckpointConfig.save_dataset", True, "a restart continues exactly"),
    Choice("utils.SaveCheckpointConfig.keep", 1, f"the best by {monitor.name}, and the latest"),
    Choice("utils.SaveCheckpointConfig.checkpointer_cls", Code(f"@{best}")),
    Choice(f"{best}.metric_name_to_monitor", f"{monitor.folder}/{monitor.name}"),
    Choice(f"{best}.metric_mode", monitor.mode),
    Choice(f"{best}.keep_checkpoints_without_metrics", False, "such as the first"),
  ]


def patience_choices(monitor: Monitor, task: str, patience: int | None) -> list[Choice]:
  """Returns what ends a run early; nothing if `patience` is None."""
  if patience is None:
    return []
  action = "trainer.EarlyStoppingAction"
  ends = f"ends when {monitor.name} has not improved in {patience} evaluations in a row"
  return [
    Choice("train_script.train.actions", {monitor.event: [Code(f"@{action}()")]}, ends),
    Choice(f"{action}.metric", (task, monitor.name)),
    Choice(f"{action}.mode", monitor.mode),
    Choice(f"{action}.patience", patience + 1, "values, none better than the one before it"),
  ]
