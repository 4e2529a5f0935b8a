"""Trains, predicts, scores and evaluates on examples that a user types in a notebook."""

import contextlib
import copy
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rosetta_t5 import checkpoints, data
from rosetta_t5.adapters.adapter import AdapterOptimizer
from rosetta_t5.data.pipeline.inference_data import Example, Preprocessors, default_preprocessors
from rosetta_t5.inference.text_inference import Inferences, InferenceType, TextInference
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.telemetry.console import log_model_info
from rosetta_t5.trained_model import read_run
from rosetta_t5.training import Trainer
from rosetta_t5.training.optimizers.adafactor import Adafactor
from rosetta_t5.training.optimizers.factor_rules import standard_logical_factor_rules
from rosetta_t5.training.optimizers.optimizer_def import OptimizerDef
from rosetta_t5.training.schedules import create_learning_rate_scheduler

MetricFn = Callable[..., Mapping[str, Any]]


class InteractiveModel:
  """A model with its parameters, for examples that are texts or {"input": text, "target": text}.

  T5X's class. Example, given a model and a partitioner:

      model = InteractiveModel(
        batch_size=8, task_feature_lengths={"inputs": 64, "targets": 32}, output_dir="notebook",
        partitioner=partitioner, model=model, dtype="float32", restore_mode="latest",
        checkpoint_path="runs/my_text",
        input_shapes={"encoder_input_tokens": (8, 64), "decoder_input_tokens": (8, 32)},
      )
      predictions, aux = model.predict_with_aux(["A first question?"])

  Attributes:
    model: the model.
    partitioner: splits arrays over the devices.
    trainer: runs the training steps.
    train_state: the parameters and the optimizer's state.
    train_state_axes: the same with PartitionSpecs in place of arrays.
    features: the `seqio.Feature` of inputs and targets.
    batch_size: number of examples in a batch.
    task_feature_lengths: length of each feature.
    output_dir: folder for checkpoints, metrics and model-info.txt.
    restore_cfg: the checkpoint that was restored, or None.
    save_cfg: how checkpoints are saved.
  """

  def __init__(
    self,
    batch_size: int,
    task_feature_lengths: Mapping[str, int],
    output_dir: str,
    partitioner: BasePartitioner,
    model: Any,
    dtype: str | None,
    restore_mode: str,
    checkpoint_path: str,
    input_shapes: Mapping[str, tuple[int, ...]],
    input_types: Mapping[str, Any] | None = None,
    init_random_seed: int = 42,
    add_eos: bool = True,
    eval_names: Sequence[str] | None = None,
    restore_cfg: checkpoints.RestoreCheckpointConfig | None = None,
  ):
    """Restores or initializes the parameters.

    Args:
      batch_size: number of examples in a batch; any number can be inferred, batch by batch.
      task_feature_lengths: length of each feature, {"inputs": 64, "targets": 32}.
      output_dir: folder for checkpoints, metrics and model-info.txt.
      partitioner: splits arrays over the devices.
      model: the model.
      dtype: dtype of restored and saved parameters; None keeps the stored dtype.
      restore_mode: 'specific', or 'latest' for the last checkpoint in a folder.
      checkpoint_path: the checkpoint or the folder; if empty, the latest checkpoint in `output_dir`
        is restored, or the parameters are initialized if there is none.
      input_shapes: the shape of each of the model's inputs, including the batch.
      input_types: the dtypes of the inputs; None for the model's default.
      init_random_seed: seed of initial values and dropout.
      add_eos: whether inputs and targets end with the end token.
      eval_names: the tasks of `trainer.eval`.
      restore_cfg: how to restore, in place of dtype, restore_mode and checkpoint_path.

    Raises:
      ValueError: there is no checkpoint at `checkpoint_path`, or it belongs to another model.
    """
    self.model, self.partitioner = model, partitioner
    self.batch_size, self.task_feature_lengths = batch_size, task_feature_lengths
    self._task_feature_lengths = task_feature_lengths  # T5X's name, which its notebooks read
    self.output_dir = output_dir
    self._layout = partitioner.get_data_layout(batch_size)
    self._train_summary: Any = None
    if checkpoint_path and restore_cfg is None:
      restore_cfg = checkpoints.RestoreCheckpointConfig(checkpoint_path, restore_mode, dtype=dtype)
    self.restore_cfg = restore_cfg
    init_rng, trainer_rng = jax.random.split(jax.random.PRNGKey(init_random_seed), 2)
    initializer = checkpoints.TrainStateInitializer(
      optimizer_def=model.optimizer_def,
      init_fn=model.get_initial_variables,
      input_shapes=input_shapes,
      input_types=input_types,
      partitioner=partitioner,
    )
    self.train_state_axes = initializer.train_state_axes
    self._texts = TextInference(
      model, partitioner, self.train_state_axes, batch_size, task_feature_lengths, add_eos
    )
    self.features = self._texts.features
    self.save_cfg = checkpoints.SaveCheckpointConfig(dtype or "float32", keep=5, period=1000)
    self._manager = checkpoints.create_orbax_checkpoint_manager(
      save_cfg=self.save_cfg,
      train_state=initializer.global_train_state_shape,
      partitioner=partitioner,
      model_dir=self.output_dir,
    )
    if restore_cfg is not None:
      checkpoints.find_checkpoints([restore_cfg])
      checkpoints.check_model(model, data.vocabulary_digests(model), restore_cfg)
    start = restore_cfg or checkpoints.RestoreCheckpointConfig(output_dir, mode="latest")
    self.trainer = Trainer(
      model=model,
      train_state=initializer.from_checkpoint_or_scratch([start], init_rng=init_rng),
      partitioner=partitioner,
      eval_names=list(eval_names or ()),
      summary_dir=self.output_dir,
      train_state_axes=self.train_state_axes,
      rng=trainer_rng,
      learning_rate_fn=create_learning_rate_scheduler(),
      num_microbatches=None,
    )
    self._saved_step = self.step  # the last that is restored or saved
    log_model_info(os.path.join(output_dir, "model-info.txt"), self.train_state, partitioner)

  @property
  def train_state(self) -> Any:
    """The state after the last step."""
    return self.trainer.train_state

  @property
  def train_summary(self) -> Any:
    """The metrics of the last training step, by name; None before the first step."""
    return None if self._train_summary is None else self._train_summary.result()

  @property
  def step(self) -> int:
    """The number of optimizer steps."""
    return int(self.train_state.step)

  def train_step(self, examples: Sequence[Example]) -> None:
    """Runs one step on a batch of examples, and saves a checkpoint.

    Raises:
      ValueError: there are fewer examples than a batch.
    """
    self.train_step_with_preprocessors(examples, default_preprocessors())

  def train_step_with_preprocessors(
    self, examples: Sequence[Example], preprocessors: Preprocessors
  ) -> None:
    """Runs one step on a batch of examples with other preprocessors; see `train_step`."""
    if len(examples) < self.batch_size:
      raise ValueError(
        f"A training step needs a batch of {self.batch_size} examples, got {len(examples)}: give "
        "more, or build the InteractiveModel with a smaller batch_size"
      )
    _, model_ds = self._texts.datasets(examples, preprocessors)
    # Each host reads its share of the batch.
    shard = model_ds.shard(self._layout.num_shards, self._layout.shard_id)
    host_batch = self.batch_size // self._layout.num_shards
    self.train_step_from_batch_iterator(shard.batch(host_batch).as_numpy_iterator())
    self.save_checkpoint()

  def train_step_from_batch_iterator(self, iterator: Iterator[Any]) -> None:
    """Runs one step on the iterator's next batch, which has the model's features."""
    # The feed gets a single batch, because batches that it prefetches would be lost.
    limit = data.token_limit(self.model)
    feed = data.prepare_train_iter(
      [next(iterator)], self.partitioner, None, self._layout, num_token_ids=limit
    )
    with contextlib.closing(feed):
      self._train_summary = self.trainer.train(feed, 1, start_step=self.step)

  def save_checkpoint(self) -> None:
    """Saves `output_dir/checkpoint_STEP`; the last five checkpoints are kept.

    Raises:
      ValueError: another session has saved this step in `output_dir`.
    """
    if not self._manager.save(self.train_state) and self.step != self._saved_step:
      existing = f"{self.output_dir}/checkpoint_{self.step}"
      raise ValueError(f"{existing} exists, from another session: give another output_dir")
    self._manager.wait_until_finished()
    self._saved_step = self.step

  def infer_with_preprocessors(
    self,
    mode: InferenceType,
    examples: Sequence[Example],
    preprocessors: Preprocessors,
    **inference_kwargs: Any,
  ) -> Inferences:
    """Predicts or scores any number of examples; see `TextInference.infer`."""
    return self._texts.infer(mode, examples, preprocessors, self.train_state, **inference_kwargs)

  def predict_with_aux(self, examples: Sequence[Example], **inference_kwargs: Any) -> Inferences:
    """Returns predictions with their examples, and auxiliary values such as scores.

    Args:
      examples: the examples.
      **inference_kwargs: further arguments of the model's `predict_batch_with_aux`, such as
        num_decodes=4, return_all_decodes=True or decoder_params={"repetition_penalty": 1.2}.
    """
    return self.infer_with_preprocessors(
      InferenceType.PREDICT_WITH_AUX, examples, default_preprocessors(), **inference_kwargs
    )

  def score(self, examples: Sequence[Example]) -> list[tuple[Mapping[str, Any], float]]:
    """Returns the log likelihood of each example's target, with the example."""
    return self.infer_with_preprocessors(InferenceType.SCORE, examples, default_preprocessors())[0]

  def evaluate(self, examples: Sequence[Example], metric_fns: Sequence[MetricFn]) -> dict[str, Any]:
    """Returns metrics by name; see `evaluate_with_preprocessors`."""
    return self.evaluate_with_preprocessors(examples, default_preprocessors(), metric_fns)

  def evaluate_with_preprocessors(
    self,
    examples: Sequence[Example],
    preprocessors: Preprocessors,
    metric_fns: Sequence[MetricFn],
    postprocessor: Callable[..., Any] | None = None,
  ) -> dict[str, Any]:
    """Returns metrics by name.

    Args:
      examples: examples with targets.
      preprocessors: make features of texts.
      metric_fns: f(targets, scores), f(targets, predictions) or f(targets, predictions,
        aux_values); each returns values by name.
      postprocessor: f(text, example=features, is_target=bool), applied to the texts that the metrics
        receive.

    Raises:
      ValueError: a function has other arguments, or two functions return a metric of the same name.
    """
    arguments = [_metric_arguments(metric_fn) for metric_fn in metric_fns]
    needed = {name for names in arguments for name in names}
    dataset, _ = self._texts.datasets(examples, preprocessors)

    def postprocess(text: Any, example: Mapping[str, Any], is_target: bool) -> Any:
      text = text.decode("utf-8") if isinstance(text, bytes) else text
      return postprocessor(text, example=example, is_target=is_target) if postprocessor else text

    texts = ((row["targets_pretokenized"], row) for row in dataset.as_numpy_iterator())
    values: dict[str, Any] = {"targets": [postprocess(*pair, is_target=True) for pair in texts]}
    if needed & {"predictions", "aux_values"}:
      predictions, values["aux_values"] = self.infer_with_preprocessors(
        InferenceType.PREDICT_WITH_AUX, examples, preprocessors
      )
      values["predictions"] = [postprocess(text, row, is_target=False) for row, text in predictions]
    if "scores" in needed:
      scores, _ = self.infer_with_preprocessors(InferenceType.SCORE, examples, preprocessors)
      values["scores"] = np.array([score for _, score in scores])
    metrics: dict[str, Any] = {}
    for metric_fn, names in zip(metric_fns, arguments, strict=True):
      found = metric_fn(*(values[name] for name in names))
      if repeated := set(found) & set(metrics):
        raise ValueError(f"Two metric_fns return a metric named {min(repeated)!r}: rename one")
      metrics |= found
    return metrics

  def train_loop(
    self,
    num_steps: int,
    eval_period: int | None = 1,
    train_batches: Sequence[Any] | None = None,
    predict_batches: Sequence[Any] | None = None,
    score_batches: Sequence[Any] | None = None,
    eval_batches: Sequence[Any] | None = None,
    metrics_fns: Sequence[MetricFn] | None = None,
  ) -> tuple[Any, Any, Any]:
    """Trains; predicts, scores and evaluates every `eval_period` steps.

    Args:
      num_steps: number of training steps.
      eval_period: number of steps between evaluations. The first step is followed by one.
      train_batches: a batch (a list of examples), or a list of batches, which is repeated as needed;
        None trains nothing.
      predict_batches: batches to predict, in the same form.
      score_batches: batches to score, in the same form.
      eval_batches: batches to evaluate, in the same form.
      metrics_fns: see `evaluate_with_preprocessors`.

    Returns:
      (predictions, scores, metrics) of the last batch at the last evaluation, each None if it has
      no batches.
    """
    train = _as_batches(train_batches)
    predict, score, evaluate = map(_as_batches, (predict_batches, score_batches, eval_batches))
    predictions = scores = metrics = None
    for step in range(num_steps):
      if train:
        self.train_step(train[step % len(train)])
      if not eval_period or step % eval_period:
        continue
      for batch in predict:
        predictions, _ = self.predict_with_aux(batch)
      for batch in score:
        scores = self.score(batch)
      for batch in evaluate:
        metrics = self.evaluate(batch, metrics_fns or ())
    return predictions, scores, metrics


def _as_batches(batches: Sequence[Any] | None) -> list[Sequence[Example]]:
  """Returns a list of batches, given None, one batch (a list of examples) or several batches."""
  if not batches:
    return []
  return [batches] if isinstance(batches[0], str | bytes | Mapping) else list(batches)


def _metric_arguments(metric_fn: MetricFn) -> tuple[str, ...]:
  parameters = inspect.signature(metric_fn).parameters.values()
  names = tuple(p.name for p in parameters if p.default is p.empty)
  if names[:1] != ("targets",) or {*names} - {"targets", "predictions", "aux_values", "scores"}:
    raise ValueError(
      "A metric_fn must have the arguments (targets, scores), (targets, predictions) or "
      f"(targets, predictions, aux_values), got ({', '.join(names)})"
    )
  return names


def open_model(
  source: str | os.PathLike[str],
  output_dir: str,
  batch_size: int = 8,
  task_feature_lengths: Mapping[str, int] | None = None,
  flags: Sequence[str] = (),
  optimizer_def: OptimizerDef | None = None,
  add_eos: bool = True,
) -> InteractiveModel:
  """Opens what `rosetta-t5 infer --model_dir` opens.

  Where the run's optimizer averages the parameters, `infer` predicts with the average. The parameters themselves
  are opened here, unless `optimizer_def` is the run's optimizer, whose average is then restored and used too.

  Args:
    source: a run's MODEL_DIR, one of its checkpoints, a Hugging Face folder, or OWNER/NAME on its hub.
    output_dir: folder for checkpoints, metrics and model-info.txt.
    batch_size: number of examples in a batch.
    task_feature_lengths: length of each feature; None for those of the run or the folder.
    flags: change the run, such as ["--gin.decoding.temperature_sample.temperature=0.7"].
    optimizer_def: the optimizer of training steps; None for T5's Adafactor. Of a run with an adapter, it trains
      what the adapter does.
    add_eos: whether inputs and targets end with the end token. A language model continues texts without it.

  Raises:
    ValueError: there is no such model.
  """
  run, restore_cfg = read_run(source, flags)
  model, lengths = copy.copy(run["model"]), task_feature_lengths or run["task_feature_lengths"]
  rules = standard_logical_factor_rules()
  optimizer = optimizer_def or Adafactor(decay_rate=0.8, logical_factor_rules=rules)
  model.optimizer_def = AdapterOptimizer(optimizer, model.adapter) if model.adapter else optimizer
  shapes = model.FEATURE_CONVERTER_CLS(pack=False).get_model_feature_lengths(lengths)
  return InteractiveModel(
    batch_size=batch_size,
    task_feature_lengths=lengths,
    output_dir=output_dir,
    partitioner=run["partitioner"],
    model=model,
    dtype="float32",
    restore_mode=restore_cfg.mode,
    checkpoint_path=str(restore_cfg.path),
    input_shapes={name: (batch_size, length) for name, length in shapes.items()},
    add_eos=add_eos,
    restore_cfg=restore_cfg,
  )
