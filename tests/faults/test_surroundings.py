"""What happens to commands whose output, terminal, disk or folder fails."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest
from fault import Fault, fault_table

# A disk of its own for the metrics, which is full until a checkpoint appears.
FULL_DISK_OF_METRICS = """
rm -r run && mkdir -p run/train && mount -t tmpfs -o size=64k tmpfs run/train || exit 9
trap 'umount --lazy run/train' EXIT
cat /dev/zero > run/train/fill 2> full
"""


def as_another_user(prepare: str, arguments: str) -> str:
  """Returns commands that run rosetta-t5 as nobody in a copy of the folder that belongs to root."""
  return f"""folder=$(mktemp -d); chmod 755 $folder; cp -r run *.* $folder; cd $folder; {prepare}
python -c "
import os
import rosetta_t5.cli
os.setgid(65534)
os.setuid(65534)
raise SystemExit(rosetta_t5.cli.main({arguments}))
" """


FAULTS = [
  Fault(
    "the reader of a run's output ends after a line",
    "set -o pipefail; $TRAIN --gin.TRAIN_STEPS=6 2> errors | head -1; status=$?;"
    "cat errors run/run-log.jsonl; test -e run/checkpoint_6 && exit $status",
    expected='"event": "end".*"finished"',
    status=0,
  ),
  Fault(
    "both outputs of a run are closed",
    "$TRAIN --gin.TRAIN_STEPS=6 >&- 2>&-; status=$?;"
    "cat run/run-log.jsonl; test -e run/checkpoint_6 && exit $status",
    expected='"event": "end".*"finished"',
    status=0,
  ),
  Fault(
    "both outputs of a run go to a full disk",
    "$TRAIN --gin.TRAIN_STEPS=6 > /dev/full 2>&1 < /dev/null; status=$?;"
    "cat run/run-log.jsonl; test -e run/checkpoint_6 && exit $status",
    expected='"event": "end".*"finished"',
    status=0,
  ),
  Fault(
    "a run's input is closed",
    "$TRAIN --gin.TRAIN_STEPS=6 <&- && test -e run/checkpoint_6",
    expected="done +step 6",
    status=0,
  ),
  Fault(
    "the terminal of a run hangs up",
    "$TRAIN --gin.TRAIN_STEPS=40 & until test -e run/checkpoint_6; do sleep 0.1; done;"
    "kill -HUP %1; wait %1 && test -e run/checkpoint_40",
    expected="done +step 40",
    status=0,
  ),
  Fault(
    "the reader of an evaluation's output has ended",
    "$EVAL > >(true) && ls run/eval",
    expected="validation",
    status=0,
  ),
  Fault(
    "the reader of a conversion's output has ended",
    "rosetta-t5 convert run converted --to hf > >(true) && ls converted",
    expected="model.safetensors",
    status=0,
  ),
  Fault(
    "the reader of a short command's output ends after a line",
    "rosetta-t5 ckpt show run/checkpoint_4 2>&1 | head -1",
    expected="^target[^\n]*\n$",
    status=0,
  ),
  Fault(
    "the output of a short command goes to a full disk",
    "rosetta-t5 ckpt show run > /dev/full",
    expected="error: No space left on device",
  ),
  Fault(
    "the disk of the metrics is full, and has space again later",
    FULL_DISK_OF_METRICS
    + "(until test -e run/checkpoint_10; do sleep 0.1; done; rm run/train/fill) &"
    "$TRAIN --gin.TRAIN_STEPS=40; status=$?;"
    "cat run/run-log.jsonl; ls run/train/events* && exit $status",
    expected=r'metrics cannot be written: .*No space left on device.*"finished"',
    status=0,
    keeps=False,
  ),
  Fault(
    "the disk of a run has no inodes for the folders of a checkpoint",
    "rm -r run && mkdir run && mount -t tmpfs -o nr_inodes=12 tmpfs run || exit 9;"
    "trap 'umount --lazy run' EXIT; $TRAIN",
    expected="checkpoint_0 could not be saved: .*No space left on device",
    keeps=False,
  ),
  Fault(
    "the folder of the metrics is removed during a run",
    "(until test -e run/checkpoint_8; do sleep 0.1; done; rm -r run/train) &"
    "$TRAIN --gin.TRAIN_STEPS=40; status=$?; ls run; exit $status",
    expected="done +step 40",
    status=0,
  ),
  Fault(
    "the files of a run cannot be replaced by its metrics, samples and descriptions",
    "rm run/*.*; mkdir run/model-info.txt run/run-log.jsonl run/config.gin;"
    "rm -r run/train; touch run/train; $TRAIN --gin.TRAIN_STEPS=6",
    expected="run-log.jsonl cannot be written: .*Is a directory.*done +step 6",
    status=0,
  ),
  Fault(
    "a run gets SIGTERM twice",
    "$TRAIN --gin.TRAIN_STEPS=4000 & until test -e run/checkpoint_6; do sleep 0.1; done;"
    "kill -TERM %1; kill -TERM %1; wait %1",
    expected=r"interrupted  after step \d+: run the same command to continue",
    status=143,
  ),
  Fault(
    "a run gets SIGTERM while it saves its last step",
    "$TRAIN --gin.TRAIN_STEPS=6 & until ls -d run/checkpoint_6* 2> none; do :; done; kill -TERM %1;"
    "wait %1; test -e run/checkpoint_6 && ! ls -d run/*tmp*",
    expected="step 6/6",
    status=0,
  ),
  Fault(
    "two runs start at the same time",
    "rm -r run; $TRAIN > 1.txt 2>&1 & $TRAIN > 2.txt 2>&1; status=$?; wait; cat ?.txt; "
    "test -e run/checkpoint_4 && exit 1",
    expected="MODEL_DIR run is in use by another training run",
    keeps=False,
  ),
  Fault(
    "the compilation cache contains junk",
    """export JAX_COMPILATION_CACHE_DIR=$PWD/cache JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
    $TRAIN --gin.TRAIN_STEPS=5 > log.txt 2>&1
    for file in cache/*; do head -c 100 /dev/urandom > $file; done; $TRAIN --gin.TRAIN_STEPS=6""",
    expected="steps     5 to 6.*done +step 6",
    status=0,
  ),
  Fault(
    "the readers of the output of several short commands end after a line",
    """set -o pipefail
    for command in "ckpt ls run" "ckpt show run" "check tiny.gin" doctor \\
      "completion bash" "train --gin_file=tiny.gin --dry_run" --help; do
      rosetta-t5 $command 2> errors | head -1; status=$?; cat errors
      test $status = 141 -o $status = 0 || exit $status
    done; echo all ended""",
    expected="all ended",
    unexpected="Traceback|BrokenPipe|Exception",
    status=0,
  ),
  Fault(
    "the clock was set back, and all files are from the future",
    "find run -exec touch -d 2040-01-01 {} +; $TRAIN --gin.TRAIN_STEPS=6",
    expected="steps     4 to 6, from run/checkpoint_4.*done +step 6",
    status=0,
  ),
  Fault(
    "another process writes the same output of inference",
    "echo 'What is 2 and 2?' > in.txt; flock out.jsonl $INFER --input in.txt --output out.jsonl",
    expected="another process is writing to out.jsonl",
  ),
  Fault(
    "the folder of a run is mounted read-only",
    "mount --bind run run && mount -o remount,ro,bind run || exit 9; trap 'umount run' EXIT;"
    "$TRAIN --gin.TRAIN_STEPS=6; $EVAL && exit 9; $EVAL --output_dir out || exit 9; exit 1",
    expected="MODEL_DIR run cannot be written to.*output_dir = .* cannot be written.*results  out",
  ),
  Fault(
    "the folder of a run belongs to another user",
    as_another_user("", "['train', '--gin_file=tiny.gin', '--gin.TRAIN_STEPS=6']"),
    expected="MODEL_DIR run cannot be written to .*Permission denied",
  ),
  Fault(
    "another user may not read the data",
    as_another_user(
      "chmod 600 rows.jsonl; chmod 777 run",
      "['train', '--gin_file=tiny.gin', '--gin.MODEL_DIR=' + repr('/tmp/' + str(os.getpid()))]",
    ),
    expected="None of the 1 records of rows.jsonl .*the file cannot be read: Permission denied",
  ),
  Fault(
    "another user may not read the vocabulary",
    as_another_user(
      "touch pieces.model; chmod 600 pieces.model",
      "['train', '--gin_file=tiny.gin', r'--gin.VOCABULARY=@seqio.SentencePieceVocabulary()', '--gin.MODEL_DIR='"
      " + repr('/tmp'), '--gin.seqio.SentencePieceVocabulary.sentencepiece_model_file=' + repr('pieces.model')]",
    ),
    expected="error: pieces.model: Permission denied",
  ),
  Fault(
    "the disk of a gin file fails",
    "python -m t5x.train --gin_file=/proc/self/mem",  # its first page cannot be read
    expected="error: /proc/self/mem cannot be read as a gin file: .*Input/output error",
    status=2,
  ),
  Fault(
    "the disk of the text to infer fails",
    "$INFER --input /proc/self/mem",
    expected="error: Input/output error",
  ),
  Fault(
    "the gin file and the text to infer are pipes",
    "mkfifo tiny.pipe text.pipe; rm -r run; cat tiny.gin > tiny.pipe &"
    "python -m t5x.train --gin_file=tiny.pipe; echo What is 1? > text.pipe & $INFER --input text.pipe",
    expected="done +step 4.*What is 1",
    status=0,
    keeps=False,
  ),
  Fault(
    "another user may not read one file of the newest checkpoint",
    as_another_user(
      "chmod 600 run/checkpoint_4/state/_METADATA",
      "['ckpt', 'verify', 'run/checkpoint_4']",
    ),
    expected="checkpoint_4 cannot be opened on this machine: .*Permission denied.*not mean that it is",
  ),
  Fault(
    "the files of a checkpoint are deleted while an evaluation starts",
    "$EVAL > out & until grep -q 'data ' out || ! kill -0 $!; do rm -rf run/checkpoint_4/state/d; done;"
    "wait $!; status=$?; cat out; exit $status",
    expected="checkpoint_4 cannot be read",
  ),
]


@fault_table(FAULTS)
def test_faults_of_surroundings(fault: Fault, check_fault: Callable[[Fault], None]) -> None:
  if re.search("mount|setuid", fault.commands) and os.geteuid() != 0:
    pytest.skip("only root can mount a disk or become another user")
  check_fault(fault)
