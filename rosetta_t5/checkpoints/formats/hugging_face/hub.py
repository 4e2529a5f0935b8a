"""Models of Hugging Face's hub: a name such as google/flan-t5-small becomes a folder on this machine."""

from __future__ import annotations

import os
import re

from etils import epath

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]


def local_folder(source: epath.PathLike) -> str:
  """Returns the folder of a model on the hub, which is downloaded unless it is in the hub's cache.

  Args:
    source: OWNER/NAME. A path that exists, one that begins with an existing folder, and any other path
      are returned unchanged.

  Raises:
    ValueError: there is no such model, or it cannot be downloaded.
  """
  name = os.fspath(source)
  if not _NAME.fullmatch(name) or os.path.lexists(name) or os.path.isdir(name.split("/")[0]):
    return name
  import huggingface_hub  # importing it takes time

  def download(*patterns: str) -> str:
    allowed = [*_FILES, *patterns]
    return str(
      huggingface_hub.snapshot_download(name, allow_patterns=allowed, ignore_patterns=["*/*"])
    )

  try:
    folder = download("*.safetensors")
    if not any(file.endswith(".safetensors") for file in os.listdir(folder)):
      folder = download("pytorch_model*.bin")
  except (OSError, ValueError) as error:
    raise ValueError(
      f"There is no folder {name}, and the model of this name on Hugging Face's hub cannot be "
      f"downloaded: {str(error).partition(chr(10))[0][:200]}. On a machine with a network, run: hf "
      f"download {name} --local-dir {name.split('/')[1]}. Copy this folder here and give its path"
    ) from None
  return folder
