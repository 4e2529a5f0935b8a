"""Folders and gin files that somebody else wrote: no command that opens them runs their code."""

from __future__ import annotations

from fault import Fault, fault_table

# A gin file that would leave a file `ran`, and a module that would, if it were imported.
SENT = """
printf 'open("ran", "w")\\n' | tee evil.py matplotlib.py > triton.py
printf 'from __gin__ import dynamic_registration\\nimport __main__ as train_script\\n' > sent.gin
printf 'import os\\nimport evil\\ntrain_script.train.model = @os.system()\\n' >> sent.gin
printf 'os.system.command = "touch ran"\\n' >> sent.gin
never_ran() { local status=$?; test ! -e ran && echo "nothing ran"; return $status; }
"""
REFUSED = r"the module 'os' is not imported.*--trust\s+\S*\.gin, line 3:  import os.*nothing ran"


@fault_table(
  [
    Fault(
      "check of a hostile gin file",
      f"{SENT}rosetta-t5 check sent.gin; never_ran",
      "evil.*nothing ran",
      2,
    ),
    Fault(
      "infer in a folder whose config.gin is hostile and has no model.json",
      f"{SENT}rm run/model.json; cp sent.gin run/config.gin; $INFER --input rows.jsonl "
      "--template '{question}'; never_ran",
      REFUSED,
      2,
    ),
    Fault(
      "infer in a folder whose config.gin is hostile, with model.json",
      f"{SENT}cp sent.gin run/config.gin; $INFER --input rows.jsonl --template '{{question}}' "
      "| tail -1; never_ran",
      r"prediction.*nothing ran",
      0,
    ),
    Fault(
      "model.json names a function that is not listed",
      f"{SENT}rm run/checksums.json; sed -i 's/t5x.models.EncoderDecoderModel/os.system/' run/model.json; "
      "$EVAL; never_ran",
      r"model.json: model: 'os.system' is not a function or class that this file may name.*nothing ran",
      2,
    ),
    Fault(
      "a digit of model.json changes",
      'sed -i \'s/"head_dim": 8/"head_dim": 9/\' run/model.json; $EVAL',
      r"model.json is damaged: it has changed since it was written",
      1,
    ),
    Fault(
      "model.json is truncated",
      "truncate_to_half run/model.json; $EVAL",
      r"model.json is damaged: it has changed since it was written",
      1,
    ),
    Fault(
      "report on a folder with a matplotlib.py of its own",
      f"{SENT}cp sent.gin run/config.gin; rosetta-t5 report run; never_ran",
      r"nothing ran",
      0,
    ),
  ]
)
def test_untrusted(fault, check_fault):
  check_fault(fault)
