"""What the files beside a tokenizer.json specify about its use, as Transformers 5 reads them.

tokenizer_config.json (earlier special_tokens_map.json and added_tokens.json too) names special tokens and
adds tokens, config.json says where texts end and whether the model has an encoder, and the chat template is in
chat_template.jinja or in tokenizer_config.json. Whether a text begins with a begin token and ends with an end
token is decided by the post-processor in tokenizer.json alone: Transformers ignores add_bos_token and
add_eos_token beside it.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

from rosetta_t5.files import read_json_object, write_atomically

TOKENIZER = "tokenizer.json"
_TEMPLATE = "chat_template.jinja"
# The files beside tokenizer.json that change how it or its model is used. Copies of a vocabulary have them too.
COMPANIONS = (
  *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json"),
  *(_TEMPLATE, "generation_config.json"),
)
# The order in which Transformers adds named tokens that tokenizer.json lacks; others follow.
_NAMES = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]


@dataclasses.dataclass(frozen=True)
class TokenizerFolder:
  """A folder with a tokenizer.json.

  Attributes:
    path: the folder.
    named: the special tokens by their names in Transformers, {"eos_token": "</s>", …}.
    added: the tokens that are added to those of tokenizer.json, as arguments of `AddedToken`.
    end_ids: the ids of the tokens with which the model's texts may end, by config.json.
    is_encoder_decoder: whether config.json is that of an encoder-decoder, or of its encoder alone; None
      without config.json.
    has_padding_0: whether token 0 is padding by config.json.
    chat_template: the chat template, of several the one that is called "default"; None without one.
  """

  path: pathlib.Path
  named: Mapping[str, str]
  added: tuple[Mapping[str, Any], ...]
  end_ids: tuple[int, ...]
  is_encoder_decoder: bool | None
  has_padding_0: bool
  chat_template: str | None

  def add_tokens(self, tokenizer: Any) -> None:
    """Adds the folder's tokens that a `tokenizers.Tokenizer` lacks, in Transformers' order."""
    from tokenizers import AddedToken

    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    new = [AddedToken(**token) for token in self.added if token["content"] not in known]
    tokenizer.add_tokens(new)

  def shift(self, tokenizer: Any) -> int:
    """Returns 1 if ids must be one higher, because token 0 is text or is not a decoder's padding; else 0."""
    if self.is_encoder_decoder is False:
      return int(not self.has_padding_0)
    return int(len(tokenizer.id_to_token(0) or "") == 1)

  def end_token(self, tokenizer: Any) -> str:
    """Returns the token with which texts end: the one of config.json, or of several the tokenizer's own."""
    named = self.named.get("eos_token", "</s>")
    if not self.end_ids or tokenizer.token_to_id(named) in self.end_ids:
      return named
    return tokenizer.id_to_token(self.end_ids[0]) or named


@functools.cache
def read_tokenizer_folder(path: str) -> TokenizerFolder:
  """Returns what the files in a folder specify; files that are missing specify nothing.

  Raises:
    ValueError: a file is not JSON.
  """
  root = pathlib.Path(path)
  settings, legacy, numbered, model = (
    read_json_object(root / name) if (root / name).is_file() else {} for name in COMPANIONS[:4]
  )
  if "added_tokens_decoder" not in settings:
    settings = {**settings, **legacy}
  extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
  if isinstance(extra, dict):
    settings, extra = {**settings, **extra}, []
  names = [*_NAMES, *(name for name in settings if name.endswith("_token"))]
  named = {name: token for name in names if (token := _content(settings.get(name)))}
  special = dict.fromkeys([*named.values(), *map(_content, extra)])
  by_id: dict[int, Any] = {int(n): x for n, x in settings.get("added_tokens_decoder", {}).items()}
  if not by_id:
    by_id = {n: _added(token, token in special) for token, n in numbered.items()}
  added = [token for _, token in sorted(by_id.items())]
  added += [_added(token, True) for token in special]
  model = {**model.get("text_config", {}), **model}  # of a multimodal model
  ends = model.get("eos_token_id")
  is_encoder = any(str(x).endswith("EncoderModel") for x in model.get("architectures") or ())
  return TokenizerFolder(
    path=root,
    named=named,
    added=tuple(added),
    end_ids=tuple(ends if isinstance(ends, list) else [] if ends is None else [ends]),
    is_encoder_decoder=is_encoder or bool(model.get("is_encoder_decoder")) if model else None,
    has_padding_0=model.get("pad_token_id") == 0,
    chat_template=_read_template(root / _TEMPLATE, settings.get("chat_template")),
  )


def _content(token: Any) -> str:
  """Returns the text of a token, which may be an object with flags; "" for what is no token."""
  text = token.get("content") if isinstance(token, dict) else token
  return text if isinstance(text, str) else ""


def _added(token: str, is_special: bool) -> dict[str, Any]:
  return {"content": token, "special": is_special, "normalized": not is_special}


def _read_template(file: pathlib.Path, given: Any) -> str | None:
  """Returns the template in a file, or else the one that tokenizer_config.json gives, alone or in a list."""
  if file.is_file():
    return file.read_text(encoding="utf-8")
  if isinstance(given, list):
    given = {each["name"]: each["template"] for each in given}.get("default")
  return given if isinstance(given, str) else None


def copy_vocabulary(source: pathlib.Path, copy: pathlib.Path) -> None:
  """Copies a vocabulary's file, and the files beside a tokenizer.json that belong to it."""
  write_atomically(copy, source.read_bytes())
  for file in map(source.with_name, COMPANIONS if source.name == TOKENIZER else ()):
    if file.is_file():
      write_atomically(copy.with_name(file.name), file.read_bytes())
