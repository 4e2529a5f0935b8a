"""Tiny models with PEFT folders whose logits PEFT has computed, so that tests need neither PEFT nor PyTorch.

`python tests/checkpoints/recorded_adapters.py` records them (needs torch, transformers and peft; the folders
tests, tests/networks and that of the package must be on PYTHONPATH). Weights and adapters are drawn by name.
"""

from __future__ import annotations

import json
import pathlib
import tempfile
import warnings
from typing import Any

import drawn_folders
import peft_prompts
from peft_folders import BASES, TARGETS_OF, load_base, their_logits
from safetensors.numpy import load_file, save_file
from transformers_families import draw

RECORDED = pathlib.Path(__file__).with_name("recorded_adapters.json")
_ALPHA = {"r": 4, "lora_alpha": 6}
# Name → the entries of adapter_config.json.
METHODS: dict[str, dict[str, Any]] = {
  "dora": _ALPHA | {"peft_type": "LORA", "use_dora": True},
  "lora": _ALPHA | {"peft_type": "LORA"},
  "rslora": _ALPHA | {"peft_type": "LORA", "use_rslora": True},
  "ia3": {"peft_type": "IA3"},
  "prompt": {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 5},
}


def write_base(name: str, path: pathlib.Path) -> None:
  """Writes the folder of a model."""
  if name not in peft_prompts.MODELS:
    bos = {"bos_token_id": 2}
    changes = bos if name == "llama" else {"decoder": drawn_folders.T5GEMMA_STACK | bos}
    drawn_folders.write_folder(path, name, **changes)
    return
  facts = json.loads(peft_prompts.RECORDED.read_text())["models"][name]
  path.mkdir()
  save_file({n: draw(n, x) for n, x in facts["shapes"].items()}, path / "model.safetensors")
  entries = facts["config"] | ({"decoder_start_token_id": 0} if name == "t5" else {})
  (path / "config.json").write_text(json.dumps(entries))


def _shapes(name: str, method: str, weights: dict[str, Any]) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of an adapter's tensors, by PEFT's names."""
  attention, mlp = TARGETS_OF[name]
  if method == "prompt":
    tables = (
      n for n in weights if n.endswith(("shared.weight", "embed_tokens.weight", "wte.weight"))
    )
    return {"prompt_embeddings": (5, weights[next(tables)].shape[1])}
  shapes: dict[str, tuple[int, ...]] = {}
  for module in (n.removesuffix(".weight") for n, x in weights.items() if x.ndim == 2):
    if not module.endswith(tuple(f".{target}" for target in (*attention, *mlp))):
      continue
    # Only GPT-2 has [inputs, outputs].
    outputs, inputs = weights[f"{module}.weight"].shape[:: -1 if name == "gpt2" else 1]
    prefix = f"base_model.model.{module}"
    if method == "ia3":
      shapes[f"{prefix}.ia3_l"] = (1, inputs) if module.endswith(tuple(mlp)) else (outputs, 1)
      continue
    shapes |= {f"{prefix}.lora_A.weight": (4, inputs), f"{prefix}.lora_B.weight": (outputs, 4)}
    if method == "dora":
      shapes[f"{prefix}.lora_magnitude_vector"] = (outputs,)
  return shapes


def write_adapter(name: str, method: str, base: pathlib.Path, path: pathlib.Path) -> None:
  """Writes the PEFT folder of a method, with drawn tensors, for the model at `base`."""
  shapes, (attention, mlp) = (
    _shapes(name, method, load_file(base / "model.safetensors")),
    TARGETS_OF[name],
  )
  config = METHODS[method] | {"base_model_name_or_path": str(base)}
  config["task_type"] = "CAUSAL_LM" if name in ("llama", "gpt2") else "SEQ_2_SEQ_LM"
  if method == "prompt":
    config |= {"token_dim": shapes["prompt_embeddings"][1], "num_transformer_submodules": 1}
    config |= {"num_layers": 2, "num_attention_heads": 4}
  else:
    config |= {"target_modules": [*attention, *mlp], "fan_in_fan_out": name == "gpt2"}
    config |= {"feedforward_modules": mlp} if method == "ia3" else {}
  path.mkdir()
  (path / "adapter_config.json").write_text(json.dumps(config))
  tensors = {key: draw(key, shape) for key, shape in shapes.items()}
  save_file(tensors, path / "adapter_model.safetensors")


def selected(logits: Any) -> list[list[float]]:
  """Returns the logits that are recorded of those of one text, [1, T, V]."""
  chosen: list[list[float]] = logits[0, ::5, ::10].astype(float).round(5).tolist()
  return chosen


def record() -> None:
  """Writes PEFT's logits."""
  import peft

  logits: dict[str, dict[str, Any]] = {name: {} for name in BASES}
  with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
    warnings.simplefilter("error", UserWarning)  # such as one of missing tensors
    for name in BASES:
      base = pathlib.Path(folder, name)
      write_base(name, base)
      for method in METHODS:
        path = pathlib.Path(folder, f"{name} {method}")
        write_adapter(name, method, base, path)
        model = peft.PeftModel.from_pretrained(load_base(name, base), path).eval()
        logits[name][method] = selected(their_logits(model, base))
  RECORDED.write_text(json.dumps({"peft": peft.__version__, "logits": logits}) + "\n")


if __name__ == "__main__":
  record()
