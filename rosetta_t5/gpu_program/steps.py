"""The steps of a run, lowered for GPUs."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rosetta_t5.config.language.binding import UncalledFunction
from rosetta_t5.gpu_program.compiler import compile_program
from rosetta_t5.gpu_program.hlo import parse_program
from rosetta_t5.gpu_program.roofline import time_program
from rosetta_t5.networks.computation_summary import describe_computation
from rosetta_t5.networks.kernel_choice import KernelChoice
from rosetta_t5.networks.kernel_measurement import attention_cases, case_program, usable_kernels
from rosetta_t5.networks.precision import choose_fp8, with_fp8
from rosetta_t5.networks.t5_config import replace_config
from rosetta_t5.plan.description import Plan
from rosetta_t5.telemetry.gpus import Gpu
from rosetta_t5.training.trainer import BaseTrainer, trainer_to_compile

STEPS = ("train", "eval", "predict", "score")


def lower_step(plan: Plan, step: str, gpu: Gpu) -> tuple[Any, str]:
  """Returns one step of a run, lowered, and its number formats and kernels as text.

  Args:
    plan: the run. The mesh of its partitioner is the one in use (`use_abstract_mesh`).
    step: one of `STEPS`: an optimizer step, the loss of an evaluation, decoding, or scoring.

  Raises:
    ValueError: the recipe is not for training, or its arguments do not fit together.
  """
  if step == "train" and not plan.is_training:
    raise ValueError(
      f"--step train needs a recipe of a training run, but this one is for {plan.resolved.run}: add "
      "--step predict, score or eval"
    )
  # As in `train`: such runs use XLA's own random numbers.
  if plan["random_seed"] is None or plan["use_hardware_rng"]:
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
  partitioner = plan["partitioner"]
  fp8 = choose_fp8(plan["te_config_cls"], partitioner.mesh.devices.flat[0])
  model = with_fp8(plan["model"], fp8)
  # Delayed scaling adds variables to the train state.
  arguments = {**plan.resolved.arguments, "model": model}
  plan = Plan(dataclasses.replace(plan.resolved, arguments=arguments), gpu)
  batch = batch_shapes(model, plan.dataset_cfg)
  kernel = None
  if step == "train" and getattr(model.network_config, "attention_kernel", None) == "auto":
    kernel = choose_kernel_by_roofline(model, batch, partitioner.mesh, gpu)
    model = replace_config(model, attention_kernel=kernel.name)
  computation = describe_computation(model, fp8, kernel) or ""
  if step in ("predict", "score"):
    return _lower_inference(plan, model, batch, step), computation
  trainer = trainer_to_compile(
    _trainer_class(plan), model, plan.state, plan.specs, partitioner, jax.random.PRNGKey(0)
  )
  return (trainer.lower_train if step == "train" else trainer.lower_eval)(batch), computation


def _trainer_class(plan: Plan) -> Any:
  """Returns what builds the run's trainer.

  Files from elsewhere may name a trainer but not call it, because it can write files. The one that is
  only compiled gets no folder (`trainer_to_compile`), so it is called here.
  """
  trainer_cls = plan["trainer_cls"]
  if not isinstance(trainer_cls, UncalledFunction):
    return trainer_cls
  is_trainer = inspect.isclass(trainer_cls.wrapped) and issubclass(trainer_cls.wrapped, BaseTrainer)
  return trainer_cls.configured if is_trainer else trainer_cls


def choose_kernel_by_roofline(
  model: Any, batch: Mapping[str, Any], mesh: Mesh, gpu: Gpu
) -> KernelChoice:
  """Returns the attention kernel with the minimum time for the model's shapes, as `auto` might choose."""
  one = Mesh(mesh.devices.ravel()[:1], ("data",), axis_types=(AxisType.Auto,))
  sharding = NamedSharding(one, PartitionSpec())
  seconds = dict.fromkeys(usable_kernels(model, batch, mesh.shape), 0.0)
  if len(seconds) == 1:
    return KernelChoice("xla", "auto: no other kernel supports this model")
  for case in attention_cases(model.network_config, batch, dict(mesh.shape)):
    for name in seconds:
      run, inputs = case_program(case, name)
      shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), inputs
      )
      with jax.set_mesh(one):
        lowered = jax.jit(run).lower(*shapes)
      program = parse_program(compile_program(lowered).hlo)
      seconds[name] += case.layers * time_program(program, gpu, {"data": 1}).seconds
  best = min(seconds, key=lambda name: seconds[name])
  times = ", ".join(f"{name} {1e3 * least:.3g} ms" for name, least in seconds.items())
  return KernelChoice(best, f"auto, by roofline: {times}; a run measures")


def batch_shapes(model: Any, cfg: Any) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shapes of a global batch, as the model's feature converter makes it; reads no data.

  Raises:
    ValueError: the lengths are those of the longest example, which is unknown without the data.
  """
  if not cfg.task_feature_lengths or None in cfg.task_feature_lengths.values():
    raise ValueError(
      "the lengths of a batch are unknown without its data: set TASK_FEATURE_LENGTHS"
    )
  converter = model.FEATURE_CONVERTER_CLS(pack=cfg.pack)
  # A converter that passes features through has no lengths of its own.
  lengths = (
    converter.get_model_feature_lengths(cfg.task_feature_lengths) or cfg.task_feature_lengths
  )
  return {
    name: jax.ShapeDtypeStruct((cfg.batch_size, length), jnp.int32)
    for name, length in lengths.items()
  }


def _lower_inference(plan: Plan, model: Any, batch: Any, step: str) -> Any:
  compute = model.predict_batch_with_aux if step == "predict" else model.score_batch
  takes_rng = "rng" in inspect.signature(compute).parameters

  def infer(params: Any, batch: Any, rng: jax.Array) -> Any:
    return compute(params, batch, rng=rng) if takes_rng else compute(params, batch)

  partitioner = plan["partitioner"]
  resources = (plan.specs.params, partitioner.data_partition_spec, PartitionSpec())
  partitioned = partitioner.partition(infer, resources, PartitionSpec())
  key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
  return partitioned.lower(plan.state.params, batch, key)
