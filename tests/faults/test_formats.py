"""What happens with weights, tokenizers and prepared data that are damaged or hostile."""

from __future__ import annotations

from collections.abc import Callable

from fault import Fault, fault_table

# A folder for Transformers, with its checksums and, as from another program, without.
_WITH_CHECKSUMS = "rosetta-t5 convert run hf --to hf > log.txt || cat log.txt; "
_HF = _WITH_CHECKSUMS + "rm hf/checksums.json; "
# An entry of its config.json is changed.
_CONFIG = _HF + "sed -i 's/\\(\"{}\": \\).*,$/\\1{},/' hf/config.json; "
_CONVERT = "rosetta-t5 convert hf new --to t5x; code=$?; test ! -e new && exit $code"
_VERIFY = "rosetta-t5 ckpt verify hf"
_FROM_HF = "$TRAIN --gin.MODEL_DIR=\"'new'\" "
_FROM_HF += "--gin.utils.RestoreCheckpointConfig.path=\"'hf'\""
# The 8 bytes before the header of a safetensors file are its length.
_WRITE_AT_0 = "printf '{}' | dd of=hf/model.safetensors conv=notrunc status=none; "
_IN_HEADER = _HF + "LC_ALL=C sed -i '1s/{}/{}/' hf/model.safetensors; "
_FLIP_A_WEIGHT = "flip hf/model.safetensors $(($(stat -c %s hf/model.safetensors) - 1000)); "
_PREPARE = """
rosetta-t5 vocab train --input rows.jsonl --text-key '{question}' --size 60 --out v.model > log.txt &&
rosetta-t5 prepare --input rows.jsonl --text-key '{question}' --vocab v.model --out tokens > log.txt
"""

FAULTS = [
  Fault(
    "config.json is nested deeply",
    _HF + "head -c 100000 /dev/zero | tr '\\0' '[' > hf/config.json; " + _VERIFY,
    expected=r"hf/config.json is not valid JSON: maximum recursion depth exceeded",
  ),
  Fault(
    "the header of a safetensors file claims 2^62 bytes",
    _HF + _WRITE_AT_0.format(r"\\0\\0\\0\\0\\0\\0\\0\\100") + _CONVERT,
    expected=r"hf/model.safetensors is damaged, .*header too large",
  ),
  Fault(
    "an array begins before the data",
    _IN_HEADER.format(r"\[0,", "[-8,") + _CONVERT,
    expected=r"hf/model.safetensors is damaged, or",
  ),
  Fault(
    "an array of a few bytes claims 10^18 values",
    _IN_HEADER.format(r"\"shape\":\[16\]", r"\"shape\":[1000000000,1000000000]") + _VERIFY,
    expected=r"hf/model.safetensors is damaged, or",
  ),
  Fault(
    "a byte of a converted folder's weights is flipped, and the folder is converted back",
    _WITH_CHECKSUMS + _FLIP_A_WEIGHT + _CONVERT,
    expected=r"model.safetensors is damaged: it has changed since it was written. If you changed it, remove",
  ),
  Fault(
    "a byte of a converted folder's weights is flipped, and a run starts from it",
    _WITH_CHECKSUMS + _FLIP_A_WEIGHT + _FROM_HF,
    expected=r"model.safetensors is damaged: it has changed since it was written",
  ),
  Fault(
    "pytorch_model.bin contains text",
    _HF + "rm hf/model.safetensors; echo junk > hf/pytorch_model.bin; " + _CONVERT,
    expected=r"hf/pytorch_model.bin (needs PyTorch|is not a file of weights)",
  ),
  Fault(
    "a SentencePiece model is truncated to half",
    _PREPARE
    + "truncate_to_half v.model; rosetta-t5 prepare --input rows.jsonl --vocab v.model --out new",
    expected=r"v.model is not a SentencePiece model, or is damaged",
  ),
  Fault(
    "a zarr array claims terabytes",
    "rosetta-t5 convert run old --to t5x-legacy > log.txt || cat log.txt; rm old/*/checksums.json; "
    'sed -i \'s/"shape":\\[384/"shape":[100000000000/\' old/*/target.token_embedder.*/.zarray; '
    "rosetta-t5 convert old new --to hf",
    expected=r"there is not enough memory: Unable to allocate",
  ),
]


@fault_table(FAULTS)
def test_faults_of_formats(fault: Fault, check_fault: Callable[[Fault], None]) -> None:
  check_fault(fault)
