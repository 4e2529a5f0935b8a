"""A trainer, a partitioner, an initializer and an action of the user's own."""

import functools
import json
import os

import jax
from flax import traverse_util
from flax.linen import partitioning as flax_partitioning

from t5x import partitioning, trainer, utils


class BagTrainer(trainer.BaseTrainer):
  """T5X's step with metrics of each weight."""

  def __init__(
    self,
    model,
    train_state,
    partitioner,
    eval_names,
    summary_dir,
    train_state_axes,
    rng,
    learning_rate_fn,
    num_microbatches=None,
  ):
    self._learning_rate_fn = learning_rate_fn
    self._num_microbatches = num_microbatches
    super().__init__(
      model=model,
      train_state=train_state,
      partitioner=partitioner,
      eval_names=eval_names,
      summary_dir=summary_dir,
      train_state_axes=train_state_axes,
      rng=rng,
    )

  @functools.cached_property
  def _partitioned_train_step(self):
    def train_step(train_state, batch):
      return trainer.train_with_lr(
        train_state,
        batch,
        learning_rate=self._learning_rate_fn(train_state.step),
        dropout_rng=self._get_step_rng(train_state.step),
        model=self._model,
        num_microbatches=self._num_microbatches,
        weight_metrics_computer=trainer.WeightMetricsComputer(),
        data_partition_spec=self._partitioner.data_partition_spec,
      )

    return self._partitioner.partition(
      train_step,
      in_axis_resources=(self._train_state_axes, self._partitioner.data_partition_spec),
      out_axis_resources=(self._train_state_axes, None),
      donate_argnums=(0,),
    )

  @functools.cached_property
  def _partitioned_eval_step(self):
    return self._partitioner.partition(
      lambda *args, **kwargs: trainer.eval_step(self._model, *args, **kwargs),
      in_axis_resources=(self._train_state_axes, self._partitioner.data_partition_spec),
      out_axis_resources=None,
    )


class BagPartitioner(partitioning.BasePartitioner):
  """Splits batches over the devices and parameters by a table of its own."""

  RULES = (("batch", "data"), ("vocab", None), ("embed", None))

  def __init__(self, num_partitions):
    super().__init__(num_partitions=num_partitions)

  @functools.cached_property
  def mesh(self):
    return partitioning.default_mesh(self._num_partitions)

  @functools.cached_property
  def _local_chunker(self):
    return partitioning.LocalChunker(self.mesh)

  def get_logical_axes(self, train_state):
    return train_state.as_logical_axes()

  def get_mesh_axes(self, train_state):
    logical_axes = self.get_logical_axes(train_state)
    flat = traverse_util.flatten_dict(logical_axes.state_dict(), keep_empty_nodes=True, sep="/")

    def to_mesh(axes):
      if axes is None or axes is traverse_util.empty_node:
        return axes
      return flax_partitioning.logical_to_mesh_axes(axes, self.RULES)

    mapped = {name: to_mesh(axes) for name, axes in flat.items()}
    return logical_axes.restore_state(traverse_util.unflatten_dict(mapped, sep="/"))

  def partition(
    self, fn, in_axis_resources, out_axis_resources, static_argnums=(), donate_argnums=()
  ):
    pjitted = jax.jit(
      fn,
      in_shardings=in_axis_resources,
      out_shardings=out_axis_resources,
      static_argnums=static_argnums,
      donate_argnums=donate_argnums,
    )
    return partitioning.PjittedFnWithContext(pjitted, self.mesh, self.RULES)

  def compile(self, partitioned_fn, *args):
    return partitioned_fn.lower(*args).compile()


class CalmInitializer(utils.TrainStateInitializer):
  """Begins with a tenth of every parameter."""

  def from_scratch(self, init_rng):
    state = super().from_scratch(init_rng)
    return state.replace_params(jax.tree.map(lambda x: 0.1 * x, state.params))


class WriteDown(trainer.BaseAction):
  """Appends what it is shown to a file, and ends the run once it has seen enough."""

  def __init__(self, path, enough):
    self._path, self._enough = path, enough

  def run(self, train_state, metrics_by_task):
    os.makedirs(os.path.dirname(self._path), exist_ok=True)
    with open(self._path, "a") as file:
      row = {"step": int(train_state.step), "metrics": sorted(metrics_by_task["train"])}
      file.write(json.dumps(row) + "\n")
    return int(train_state.step) >= self._enough
