"""What happens to runs whose checkpoints are damaged, swapped, copied or missing."""

from __future__ import annotations

from collections.abc import Callable

from fault import Fault, fault_table

FAULTS = [
  Fault(
    "a run continues after its last step",
    "$TRAIN --gin.TRAIN_STEPS=6 && test -e run/checkpoint_6",
    expected="steps     4 to 6, from run/checkpoint_4",
    status=0,
  ),
  Fault(
    "the largest array file of the newest checkpoint is truncated to half",
    'truncate_to_half "$(largest run/checkpoint_4/state)"; $TRAIN --gin.TRAIN_STEPS=6',
    expected="checkpoint_4 cannot be read.*steps     2 to 6, from run/checkpoint_2",
    status=0,
  ),
  Fault(
    "a byte of an array is flipped, and the run continues",
    'flip "$(largest run/checkpoint_4/state)"; $TRAIN --gin.TRAIN_STEPS=6',
    expected="checkpoint_4 cannot be read: .* is damaged.*steps     2 to 6, from run/checkpoint_2",
    status=0,
  ),
  Fault(
    "an array consists of zeros, and the run continues",
    'zeros "$(largest run/checkpoint_4/state)"; $TRAIN --gin.TRAIN_STEPS=6',
    expected="checkpoint_4 cannot be read: .* is damaged.*steps     2 to 6, from run/checkpoint_2",
    status=0,
  ),
  *[
    Fault(
      f"arrays consist of zeros, and {name} reads them",
      # The largest file may contain nothing but optimizer state, which these commands do not read.
      f'for file in $(find run/checkpoint_4/state/ocdbt* -type f -size +9k); do zeros "$file"; done; {command}',
      expected=r"error: .*checkpoint_4/state/ocdbt\S+ is damaged",
    )
    for name, command in {
      "an evaluation": "$EVAL",
      "an inference": "$INFER --input rows.jsonl --template '{question}'",
      "a conversion": "rosetta-t5 convert run converted --to t5x || (! ls converted/* && exit 1)",
      "a comparison": "rosetta-t5 ckpt diff run/checkpoint_4 run/checkpoint_2",
    }.items()
  ],
  Fault(
    "the file of run facts is damaged",
    "flip run/checkpoint_4/run_facts.json 20; $TRAIN --gin.TRAIN_STEPS=6",
    expected="run_facts.json is damaged.*steps     2 to 6, from run/checkpoint_2",
    status=0,
  ),
  Fault(
    "the file of run facts is missing",
    "rm run/checkpoint_4/run_facts.json; $TRAIN --gin.TRAIN_STEPS=6",
    expected="run_facts.json is missing.*steps     2 to 6",
    status=0,
  ),
  Fault(
    "checksums.json is damaged",
    "flip run/checkpoint_4/checksums.json; $TRAIN --gin.TRAIN_STEPS=6",
    expected="checkpoint_4 cannot be read: .*checksums.json.*steps     2 to 6",
    status=0,
  ),
  Fault(
    "the feed's position is truncated to half",
    "truncate_to_half run/checkpoint_4/dataset/*.feed; $TRAIN --gin.TRAIN_STEPS=6",
    expected=r"checkpoint_4 cannot be read: .*\.feed is damaged.*steps     2 to 6",
    status=0,
  ),
  Fault(
    "the newest checkpoint has the position of another",
    "cp -r run/checkpoint_2/dataset/. run/checkpoint_4/dataset; $TRAIN --gin.TRAIN_STEPS=6",
    expected=r"checkpoint_4 cannot be read: .*dataset/.* is damaged.*steps     2 to 6",
    status=0,
  ),
  Fault(
    "the newest checkpoint is an empty folder",
    "mkdir run/checkpoint_5; $TRAIN --gin.TRAIN_STEPS=6",
    expected="checkpoint_5 cannot be read: .*the folder is empty.*steps     4 to 6, from run/checkpoint_4",
    status=0,
  ),
  Fault(
    "a pattern of an assignment map is not a regular expression",
    "$TRAIN --gin.MODEL_DIR=\"'new'\" --gin.utils.RestoreCheckpointConfig.path=\"'run'\""
    " --gin.utils.RestoreCheckpointConfig.assignment_map=\"[('(', 'x')]\""
    " --gin.TRAIN_STEPS=6",
    expected=r"assignment_map: the rule .* is wrong: missing \)",
  ),
  Fault(
    "a file is in the place of a checkpoint's arrays",
    "rm -r run/checkpoint_4/state; touch run/checkpoint_4/state; $TRAIN --gin.TRAIN_STEPS=6",
    expected="checkpoint_4 cannot be read: .*steps     2 to 6, from run/checkpoint_2",
    status=0,
  ),
  Fault(
    "run.lock is empty",
    "touch run/run.lock; timeout 60 $TRAIN --gin.TRAIN_STEPS=6",
    expected="steps     4 to 6",
    status=0,
  ),
  Fault(
    "a conversion is killed",
    """rosetta-t5 convert run converted --to t5x & pid=$!
    until test -e converted/checkpoint_4.unfinished -o -e converted/checkpoint_4; do sleep 0.01; done
    kill -9 $pid; wait $pid; test -e converted/checkpoint_4 || rosetta-t5 convert run converted --to t5x
    ls converted; rosetta-t5 ckpt verify converted""",
    expected="files compared with checksums.json, 0 problems",
    status=0,
  ),
  Fault(
    "a checkpoint is copied to a later step",
    "cp -r run/checkpoint_2 run/checkpoint_5; $TRAIN --gin.TRAIN_STEPS=6",
    expected="error: .*checkpoint_5 contains the checkpoint of step 2",
  ),
  Fault(
    "two checkpoints are swapped",
    "cd run; mv checkpoint_2 x; mv checkpoint_4 checkpoint_2; mv x checkpoint_4; cd ..; $EVAL",
    expected="error: .*checkpoint_4 contains the checkpoint of step 2",
  ),
  Fault(
    "MODEL_DIR has a name of special characters",
    r"""mv run 'we ird%20#|$a'; $TRAIN --gin.MODEL_DIR="'we ird%20#|\$a'" \
      --gin.TRAIN_STEPS=6 && rosetta-t5 eval --model_dir 'we ird%20#|$a'""",
    expected="steps     4 to 6.*evaluation at step 6",
    status=0,
    keeps=False,
  ),
]


@fault_table(FAULTS)
def test_faults_of_checkpoints(fault: Fault, check_fault: Callable[[Fault], None]) -> None:
  check_fault(fault)
