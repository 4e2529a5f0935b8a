"""Reads PEFT's folders: adapter_config.json, and adapter_model.safetensors with an adapter's tensors."""

import collections
import math
import re
import statistics
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from rosetta_t5 import adapters
from rosetta_t5.argument_types import check_one_of
from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray, as_stored_array
from rosetta_t5.checkpoints.formats.hugging_face import folder, name_tables
from rosetta_t5.checkpoints.formats.hugging_face.families import find_family
from rosetta_t5.checkpoints.formats.hugging_face.name_tables import Arrays, Config
from rosetta_t5.files import read_json_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TYPES = {"LORA": adapters.LoRA, "IA3": adapters.IA3, "PROMPT_TUNING": adapters.PromptTuning}
# Entries that change what is computed, and that are not supported. "none", and empty lists and dicts, have no effect.
_UNSUPPORTED = (
  *("lora_bias", "use_qalora", "use_bdlora", "modules_to_save", "trainable_token_indices"),
  *("target_parameters", "layer_replication", "alora_invocation_tokens", "bias"),
  *("monteclora_config", "kasa_config", "arrow_config"),
)
# Their first step changes the weights of the base, so that the tensors do not fit the base itself.
_CHANGE_BASE = re.compile(r"(pissa|olora|corda|lora_ga|loftq).*")
PREFIX = "base_model.model."
_TENSOR = re.compile(
  rf"{re.escape(PREFIX)}(.+)\.(lora_A\.weight|lora_B\.weight|lora_magnitude_vector|ia3_l)(?:\.weight)?"
)
PROMPT = "prompt_embeddings"
LORA_A, LORA_B = "lora_A.weight", "lora_B.weight"
MAGNITUDE, IA3_VECTOR = "lora_magnitude_vector", "ia3_l"

# {Transformers' name of a module: {kind of tensor: tensor}}.
Groups = dict[str, dict[str, np.ndarray]]
# An adapter, and {our name: array} of what it adds.
Read = tuple[adapters.Adapter, dict[str, StoredArray]]


class Module(NamedTuple):
  """A module of Transformers with a matrix that adapters can change.

  Attributes:
    kernels: our names of the kernels that the matrix joins, without target/ and /kernel.
    is_transposed: whether the matrix is [outputs, inputs], as in PyTorch's Linear.
    inputs: the number of its inputs.
    outputs: the number of each kernel's outputs.
  """

  kernels: tuple[str, ...]
  is_transposed: bool
  inputs: int
  outputs: int


def is_peft(path: epath.PathLike) -> bool:
  """Returns whether there is a PEFT folder at `path`."""
  return (epath.Path(path) / CONFIG).exists()


def find_base(path: epath.PathLike) -> str:
  """Returns the Hugging Face folder of the model that a PEFT folder changes.

  Raises:
    ValueError: it is not on this machine and cannot be downloaded.
  """
  name = str(read_json_object(epath.Path(path) / CONFIG).get("base_model_name_or_path") or "")
  found = folder.local_folder(name) if name else name
  if not name or not folder.is_hugging_face(found):
    raise ValueError(
      f"{path} is an adapter of the model {name!r} (base_model_name_or_path in {CONFIG}), which is no folder "
      "with config.json on this machine: put the model's folder at this path, or write its path there"
    )
  return found


def read_with_base(path: epath.PathLike) -> Read:
  """Returns the adapter of a PEFT folder, and the arrays of its base and the adapter by our names."""
  base = epath.Path(find_base(path))
  arrays = folder.read_arrays(base)
  adapter, added = read(path, arrays, folder.read_config(base / folder.CONFIG))
  return adapter, {**arrays, **added}


def read(path: epath.PathLike, arrays: Arrays, config: Config) -> Read:
  """Returns the adapter of a PEFT folder, and {our name: array} of what it adds.

  Args:
    path: the folder.
    arrays: the base's arrays in the plain tree, by our names.
    config: the base's config.json; {} if it did not come from Transformers.

  Raises:
    ValueError: files are missing or damaged, the adapter is of a kind that is not supported, or it was made
      for another base.
  """
  root = epath.Path(path)
  settings = _read_settings(root)
  tensors = {n: x.get().astype(np.float32) for n, x in _open_tensors(root).items()}
  try:
    if settings["peft_type"] == "PROMPT_TUNING":
      return _read_prompt(settings, tensors, arrays)
    modules = modules_of(arrays, config)
    groups = _group_tensors(tensors, modules)
    if settings["peft_type"] == "IA3":
      return _read_ia3(groups, modules)
    return _read_lora(settings, groups, modules)
  except ValueError as error:
    raise ValueError(f"{root}: {error}") from None


def _read_settings(root: epath.Path) -> dict[str, Any]:
  settings = read_json_object(root / CONFIG)
  check_one_of(f"{root / CONFIG}: peft_type", settings.get("peft_type"), TYPES)
  wrong = [key for key in _UNSUPPORTED if settings.get(key) and settings[key] != "none"]
  if _CHANGE_BASE.fullmatch(str(settings.get("init_lora_weights"))):
    wrong.append("init_lora_weights")
  if wrong:
    shown = ", ".join(f"{key} = {settings[key]!r}" for key in wrong)
    raise ValueError(
      f"{root / CONFIG} sets {shown}, which changes what the adapter computes and is not supported. Merge it "
      "with PEFT (merge_and_unload), and use the merged folder"
    )
  return settings


def _open_tensors(root: epath.Path) -> dict[str, StoredArray]:
  if (root / WEIGHTS).exists():
    return folder.read_safetensors(root / WEIGHTS)
  pickled = root / "adapter_model.bin"
  found = "only adapter_model.bin, a pickle, which may run code" if pickled.exists() else "none"
  raise ValueError(f"{root} must contain {WEIGHTS}, got {found}: save it again with PEFT")


def modules_of(arrays: Arrays, config: Config) -> dict[str, Module]:
  """Returns {Transformers' name: module} of a model's projections, except its output layer.

  Args:
    arrays: the model's arrays in the plain tree, by our names.
    config: its config.json; {} for the family's first model_type.
  """
  family = find_family(arrays)
  if not config:
    encoder_decoder = any(name.startswith("target/decoder/") for name in arrays)
    config = {"model_type": next(iter(family.MODEL_TYPES)), "is_encoder_decoder": encoder_decoder}
  rows = {name: row for row in family.weight_table(config) for name in row.ours}
  kernels = {n: x for n, x in arrays.items() if n.endswith("/kernel") and x.ndim == 2}
  unknown = "projections that Transformers' models do not have"
  modules = {}
  for name, (row, numbers) in name_tables.find_rows(kernels, rows, unknown).items():
    names = [ours.format(**numbers) for ours in row.ours]
    if name == names[0] and not name.endswith("logits_dense/kernel"):
      ours = tuple(each.removeprefix("target/").removesuffix("/kernel") for each in names)
      theirs = row.theirs.format(**numbers).removesuffix(".weight")
      modules[theirs] = Module(ours, row.is_transposed, *kernels[name].shape)
  return modules


def _read_prompt(settings: Config, tensors: Mapping[str, np.ndarray], arrays: Arrays) -> Read:
  is_decoder = find_family(arrays).IS_DECODER
  side = "decoder" if is_decoder else "encoder"
  tables = (f"target/{side}/token_embedder/embedding", "target/token_embedder/embedding")
  width = next(arrays[name].shape[1] for name in tables if name in arrays)
  length, found = settings["num_virtual_tokens"], tensors.get(PROMPT, np.zeros(0))
  # PEFT computes with the first part only, also of the two that it makes for an encoder-decoder.
  parts = settings.get("num_transformer_submodules") or (1 if is_decoder else 2)
  if found.shape != (expected := (parts * length, width)):
    raise ValueError(
      f"{PROMPT} must have the shape {expected} for this base, got {found.shape or 'none'}: it belongs to another base"
    )
  vectors = as_stored_array(found[:length] * prompt_scale(arrays, width))
  return adapters.PromptTuning(length=length), {f"target/{side}/prompt/prompt/prompt": vectors}


def prompt_scale(arrays: Arrays, width: int) -> float:
  """Returns by what Transformers multiplies a prompt: T5Gemma scales embedded inputs after they are joined."""
  is_t5gemma = "target/encoder/token_embedder/embedding" in arrays
  return math.sqrt(width) if is_t5gemma else 1.0


def _read_lora(settings: Config, groups: Groups, modules: Mapping[str, Module]) -> Read:
  added: dict[str, StoredArray] = {}
  ranks: dict[str, int] = {}
  alphas: dict[str, float] = {}
  use_dora = bool(settings.get("use_dora"))
  alpha_pattern = settings.get("alpha_pattern") or {}
  for name, group in groups.items():
    module = modules[name]
    rank, size = group.get(LORA_A, np.zeros((0, 0))).shape[0], module.outputs * len(module.kernels)
    shapes: dict[str, Any] = {LORA_A: (rank, module.inputs), LORA_B: (size, rank)}
    shapes |= {MAGNITUDE: (size,)} if use_dora else {}
    _check_shapes(name, group, shapes)
    # As in PEFT, the first pattern counts that matches the end of the name.
    matched = (x for key, x in alpha_pattern.items() if re.match(rf"(.*\.)?({key})$", name))
    alpha = float(next(matched, settings.get("lora_alpha", 8)))
    for part, ours in enumerate(module.kernels):
      rows = slice(part * module.outputs, (part + 1) * module.outputs)
      ranks[ours], alphas[ours] = rank, alpha
      added[f"target/{ours}/lora_a"] = as_stored_array(group[LORA_A].T)
      added[f"target/{ours}/lora_b"] = as_stored_array(group[LORA_B][rows].T)
      if use_dora:
        added[f"target/{ours}/dora_magnitude"] = as_stored_array(group[MAGNITUDE][rows])
  rank, alpha = statistics.mode(ranks.values()), statistics.mode(alphas.values())
  adapter = adapters.LoRA(
    targets=_our_targets(ranks, modules),
    rank=rank,
    alpha=alpha,
    rslora=bool(settings.get("use_rslora")),
    dora=use_dora,
    dropout=settings.get("lora_dropout") or 0.0,
    rank_pattern={name: x for name, x in ranks.items() if x != rank},
    alpha_pattern={name: x for name, x in alphas.items() if x != alpha},
  )
  return adapter, added


def _read_ia3(groups: Groups, modules: Mapping[str, Module]) -> Read:
  added: dict[str, StoredArray] = {}
  targets: list[str] = []
  input_targets: list[str] = []
  for name, group in groups.items():
    module, vector = modules[name], group[IA3_VECTOR]
    of_inputs, count = vector.shape[0] == 1, len(module.kernels)
    expected = (1, module.inputs) if of_inputs else (module.outputs * count, 1)
    _check_shapes(name, group, {IA3_VECTOR: expected})
    parts = [vector.ravel()] * count if of_inputs else np.split(vector.ravel(), count)
    for ours, part in zip(module.kernels, parts, strict=True):
      added[f"target/{ours}/ia3_scaling"] = as_stored_array(part)
    targets += module.kernels
    input_targets += module.kernels if of_inputs else ()
  scaled, by_inputs = (_our_targets(names, modules) for names in (targets, input_targets))
  return adapters.IA3(targets=scaled, input_targets=by_inputs), added


def _group_tensors(tensors: Mapping[str, np.ndarray], modules: Mapping[str, Module]) -> Groups:
  """Returns {module: {kind of tensor: tensor}}.

  Raises:
    ValueError: a tensor is of another kind, or of a module that is not among `modules`.
  """
  groups: Groups = collections.defaultdict(dict)
  unknown = []
  for name, tensor in tensors.items():
    match = _TENSOR.fullmatch(name)
    module = folder.TEXT_WEIGHTS.sub("model.", match[1]) if match else ""
    if match and module in modules:
      groups[module][match[2]] = tensor
    else:
      unknown.append(name)
  if unknown or not groups:
    shown = name_tables.list_names(unknown) or "none"
    raise ValueError(
      f"the tensors must be those of projections of the base, such as {PREFIX}{next(iter(modules))}.{LORA_A}, got "
      f"{shown}. Embeddings, output layers and experts are not supported"
    )
  return groups


def _check_shapes(
  name: str, group: Mapping[str, np.ndarray], expected: Mapping[str, tuple[int, ...]]
) -> None:
  found = {kind: tensor.shape for kind, tensor in group.items()}
  if found != expected:
    raise ValueError(
      f"the tensors of {name} must have the shapes {dict(expected)} for this base, got {found}: the adapter "
      "belongs to another base, or the file is incomplete"
    )


def _our_targets(names: Collection[str], modules: Mapping[str, Module]) -> tuple[str, ...]:
  every = [kernel for module in modules.values() for kernel in module.kernels]
  return target_names(names, every, "/")


def target_names(names: Collection[str], every: Collection[str], separator: str) -> tuple[str, ...]:
  """Returns the last parts of names if they are those of no other of `every`, else the names."""
  last = {name.rpartition(separator)[2] for name in names}
  others = {name.rpartition(separator)[2] for name in {*every} - {*names}}
  # The last parts are also those of T5Gemma 2's vision tower.
  is_unclear = last & others or any(".text_model." in name for name in every)
  return tuple(sorted(names if is_unclear else last))
