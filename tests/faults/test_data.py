"""What happens to runs whose data changes, is damaged, or contains bad numbers."""

from __future__ import annotations

from collections.abc import Callable

from fault import Fault, fault_table

_MORE = "$TRAIN --gin.TRAIN_STEPS=6"
_POSITION = "run/checkpoint_4/dataset/train_ds-000-of-001"


def task(code: str) -> str:
  """Returns commands that train on a SeqIO task of pairs of token ids, `inputs, targets = {code}`."""
  return f"""cat > bad_task.py <<'END'
import seqio, tensorflow as tf
inputs, targets = {code}
def read(split, shuffle_files=False, seed=None):
  return tf.data.Dataset.from_tensors({{"inputs": inputs, "targets": targets}}).repeat(50)
feature = seqio.Feature(seqio.ByteVocabulary(), add_eos=False)
source = seqio.FunctionDataSource(read, splits=["train", "validation"])
seqio.TaskRegistry.add(
  "bad", source=source, preprocessors=[], output_features={{"inputs": feature, "targets": feature}})
END
PYTHONPATH=. $TRAIN --gin.MODEL_DIR="'new'" --gin.MIXTURE_OR_TASK_NAME="'bad'" \\
  --gin.MIXTURE_OR_TASK_MODULE="'bad_task'" """


def schedule(rate: str) -> str:
  """Returns commands that train with a learning-rate schedule of one's own, a function of `step`."""
  return f"""echo 'def schedule(): return lambda step: {rate}' > own.py
PYTHONPATH=. $TRAIN --gin.TRAIN_STEPS=20 --gin_bindings='from __gin__ import dynamic_registration' \\
  --gin_bindings='import own' --gin_bindings='trainer.Trainer.learning_rate_fn = @own.schedule()'"""


# A folder of TensorFlow Datasets, td/pairs/1.0.0, and a task that reads it.
TFDS = """cat > build.py <<'END'
import tensorflow_datasets as tfds
class Pairs(tfds.core.GeneratorBasedBuilder):
  VERSION = tfds.core.Version("1.0.0")
  def _info(self):
    texts = {"inputs": tfds.features.Text(), "targets": tfds.features.Text()}
    return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(texts))
  def _split_generators(self, manager):
    return {"train": self._generate_examples(), "validation": self._generate_examples()}
  def _generate_examples(self):
    yield from ((n, {"inputs": f"What is {n} and {n}?", "targets": str(2 * n)}) for n in range(99))
Pairs(data_dir="td").download_and_prepare()
END
python build.py 2> log.txt || cat log.txt
cat > pairs_task.py <<'END'
import seqio
feature, texts = seqio.Feature(seqio.ByteVocabulary(), add_eos=True), seqio.preprocessors
seqio.TaskRegistry.add(
  "pairs", source=seqio.TfdsDataSource("pairs:1.0.0"),
  preprocessors=[texts.tokenize, texts.append_eos],
  output_features={"inputs": feature, "targets": feature})
END
"""
TRAIN_TFDS = """; PYTHONPATH=. $TRAIN --gin.MODEL_DIR="'new'" --tfds_data_dir=td \\
  --gin.MIXTURE_OR_TASK_NAME="'pairs'" --gin.MIXTURE_OR_TASK_MODULE="'pairs_task'" """
MIXTURE = """cat > mixed.py <<'END'
import os, seqio
feature, texts = seqio.Feature(seqio.ByteVocabulary(), add_eos=True), seqio.preprocessors
def as_pair(dataset):
  return dataset.map(lambda line: {"inputs": line, "targets": line})
for name in ("first", "second"):
  seqio.TaskRegistry.add(
    name, source=seqio.TextLineDataSource({"train": "rows.jsonl", "validation": "rows.jsonl"}),
    preprocessors=[as_pair, texts.tokenize, texts.append_eos],
    output_features={"inputs": feature, "targets": feature})
seqio.MixtureRegistry.add("mixed", {"first": 1.0, "second": float(os.environ["RATE"])}.items())
END
TRAIN="$TRAIN --gin.MIXTURE_OR_TASK_NAME='mixed' --gin.MIXTURE_OR_TASK_MODULE='mixed'"
TRAIN="$TRAIN --gin.utils.DatasetConfig.allow_truncated_targets=True"
export PYTHONPATH=.; rm -r run; RATE=1 $TRAIN > log.txt 2>&1 || cat log.txt
"""
PREPARE = """rosetta-t5 prepare --input 'rows*.jsonl' --text-key question --vocab v.model \\
  --out tokens --workers 1"""
PREPARED = f"""for n in 1 2 3; do cp rows.jsonl rows$n.jsonl; done
rosetta-t5 vocab train --input rows.jsonl --text-key question --size 40 --out v.model
{PREPARE}
"""
TRAIN_PREPARED = """$TRAIN --gin.MODEL_DIR="'new'" --gin.train_script.train.train_eval_dataset_cfg=None \\
  --gin.MIXTURE_OR_TASK_NAME=@data.prepared_task\\(\\) --gin.data.prepared_task.folders="'tokens'" \\
  --gin.VOCABULARY=@seqio.SentencePieceVocabulary\\(\\) --gin.seqio.SentencePieceVocabulary.extra_ids=100 \\
  --gin.seqio.SentencePieceVocabulary.sentencepiece_model_file="'tokens/vocabulary.model'" """
OTHER_VOCABULARY = """train_vocabulary() {
  rosetta-t5 vocab train --input "$1" --text-key '{question} {answer}' --size 40 --out "$2" > log.txt
}
train_vocabulary rows.jsonl v.model
sed 's/is/su/; s/What/Whom/; s/and/plus/' rows.jsonl > other.jsonl; train_vocabulary other.jsonl other.model
sed -i 's/^VOCABULARY = .*/VOCABULARY = @seqio.SentencePieceVocabulary()/' tiny.gin
echo "seqio.SentencePieceVocabulary.sentencepiece_model_file = 'v.model'" >> tiny.gin
rm -r run; $TRAIN > log.txt 2>&1 || cat log.txt
mv other.model v.model
"""

FAULTS = [
  Fault(
    "one character of the data has changed",
    f"sed -i 's/8 and 8/8 und 8/' rows.jsonl; {_MORE}",
    expected=r"changed: rows\.jsonl \(other contents\).*ignore_dataset_until=4",
  ),
  Fault(
    "a restart reads other files",
    f"head -50 rows.jsonl > few.jsonl; {_MORE} --gin.data.file_task.files=\"'few.jsonl'\"",
    expected=r"removed: rows\.jsonl; added: few\.jsonl",
  ),
  Fault(
    "a restart has another seed of the data",
    f"{_MORE} --gin.train/utils.DatasetConfig.seed=7",
    expected=r"\n  seed: \d+ → 7\n",
  ),
  Fault(
    "changed data is started from its beginning",
    f"sed -i 's/8 and 8/8 und 8/' rows.jsonl; "
    f"{_MORE} --gin.utils.SaveCheckpointConfig.ignore_dataset_until=4",
    expected="steps     4 to 6, from run/checkpoint_4.*step 6/6",
    status=0,
  ),
  Fault(
    "the data has moved",
    f"mkdir moved; mv rows.jsonl moved; {_MORE} --gin.data.file_task.files=\"'moved/rows.jsonl'\"",
    expected="steps     4 to 6, from run/checkpoint_4.*step 6/6",
    status=0,
  ),
  Fault(
    "the batches of a position are truncated to half",
    f"truncate_to_half {_POSITION}.feed; {_MORE}",
    expected=r"train_ds\S+\.feed is damaged: .*steps     2 to 6",
    status=0,
  ),
  Fault(
    "a byte of the data's position is flipped",
    f"flip {_POSITION}.data-00000-of-00001; {_MORE}",
    expected=r"train_ds\S+\.data-00000-of-00001 is damaged: it has changed.*steps     2 to 6",
    status=0,
  ),
  Fault(
    "the vocabulary of prepared data is truncated",
    PREPARED + f"truncate_to_half tokens/vocabulary.model; {TRAIN_PREPARED}",
    expected=r"tokens/vocabulary\.model is",
  ),
  Fault(
    "prepare is killed and repeated",
    f"""{PREPARED} mv tokens whole
{PREPARE} &
until compgen -G 'tokens/.train*' || compgen -G 'tokens/train*'; do sleep 0.01; done; kill -9 $!
wait; test ! -e tokens/manifest.json && {PREPARE} && diff whole tokens -x shards && echo the same files
""",
    expected="the same files",
    status=0,
  ),
  *[
    Fault(f"TFDS: {what}", f"{TFDS}{damage}{TRAIN_TFDS}", expected)
    for what, damage, expected in (
      (
        "the metadata is junk",
        "head -c 300 /dev/urandom > td/pairs/1.0.0/dataset_info.json",
        r"error: The data of the task 'pairs' cannot be opened in td \(.*codec can't decode",
      ),
      (
        "the metadata names a function",
        """sed -i 's/"pythonClassName": ".*"/"pythonClassName": "os.system"/' td/pairs/*/features.json""",
        r"cannot be opened in td \(Unrecognized FeatureConnector type: os.system",
      ),
      (
        "the folder does not exist",
        "rm -r td",
        r"cannot be opened in td \(Dataset pairs not found.*Correct --tfds_data_dir",
      ),
      (
        "a shard is truncated",
        "truncate_to_half td/pairs/*/*train*",
        "error: the data of the task 'pairs' cannot be read: truncated record",
      ),
      (
        "a byte of a shard is flipped",
        "flip td/pairs/*/*train*",
        "error: the data of the task 'pairs' cannot be read: corrupted record",
      ),
      (
        "a shard is missing",
        "rm td/pairs/*/*train*",
        r"error: the data of the task 'pairs' cannot be read: td/\S+train\S+; No such file or directory\.",
      ),
    )
  ],
  Fault(
    "a restart has other rates of a mixture",
    MIXTURE + "RATE=9 $TRAIN --gin.TRAIN_STEPS=6",
    expected=r"the training data has changed .*task\.second\.rate: 1\.0 → 9\.0",
    keeps=False,
  ),
  Fault(
    "the data is removed during a run",
    "(until test -e run/checkpoint_8; do sleep 0.1; done; rm rows.jsonl) & $TRAIN --gin.TRAIN_STEPS=4000",
    expected="error: None of the 1 records of rows.jsonl can be used.*No such file",
  ),
  Fault(
    "the data is overwritten with junk during a run",
    "(until test -e run/checkpoint_8; do sleep 0.1; done; head -c 3000 /dev/urandom > rows.jsonl) &"
    "$TRAIN --gin.TRAIN_STEPS=4000",
    expected="error: None of the .* records of rows.jsonl can be used",
  ),
  *[
    Fault(
      f"prepared data: a byte of {pattern} is flipped",
      f"{PREPARED}flip tokens/{pattern}; {TRAIN_PREPARED}",
      expected,
      status,
    )
    for pattern, expected, status in (
      ("vocabulary.model", "tokens/vocabulary.model is damaged", 1),
      ("manifest.json", "tokens/manifest.json is damaged", 1),
      ("train-00000-of-00004.array_record", r"prepared shard \S+ is damaged", 1),
    )
  ],
  *[
    Fault(
      f"{what} with a vocabulary of the same size that replaced the run's",
      OTHER_VOCABULARY + command,
      expected=r"vocabulary \(input, output\) is not the one with which \S*run/checkpoint_4 was trained",
      keeps=False,
    )
    for what, command in (
      ("a restart", "$TRAIN --gin.TRAIN_STEPS=6"),
      (
        "finetuning",
        "$TRAIN --gin.MODEL_DIR=\"'new'\" --gin.CheckpointConfig.restore=@utils.RestoreCheckpointConfig\\(\\) "
        "--gin.RestoreCheckpointConfig.path=\"'run'\" --gin.TRAIN_STEPS=6",
      ),
    )
  ],
  Fault(
    "all targets are empty",
    task("[5, 6], tf.zeros([0], tf.int32)"),
    expected="a batch of the task 'bad' has no target to learn from",
  ),
  Fault(
    "all targets are padding",
    task("[5, 6], [0, 0]"),
    expected="a batch of the task 'bad' has no target to learn from",
  ),
  Fault(
    "an input id is beyond the vocabulary",
    task("[5, 5000], [7]"),
    expected=r"'bad' has the value 5000 in encoder_input_tokens \(row 0, position 1.*384 ids",
  ),
  Fault(
    "a target id is negative",
    task("[5], [7, -7]"),
    expected=r"'bad' has the value -7 in decoder_target_tokens \(row 0, position 1",
  ),
  Fault(
    "a task yields 64-bit ids",
    task("tf.constant([5], tf.int64), [7]"),
    expected="incorrect type for feature 'inputs'.*int64, expected int32",
  ),
  Fault(
    "a length of the data is 0",
    "$TRAIN --gin.TASK_FEATURE_LENGTHS=\"{'inputs': 32, 'targets': 0}\"",
    expected=r"TASK_FEATURE_LENGTHS\['targets'\] must be an integer of at least 1, got 0",
    status=2,
  ),
  Fault(
    "the learning rate is negative",
    "$TRAIN --gin.utils.create_learning_rate_scheduler.base_learning_rate=-0.1",
    expected="base_learning_rate must be a number of at least 0, got -0.1",
    status=2,
  ),
  Fault(
    "the parameters overflow although loss and gradients are finite",
    schedule("1e38"),
    expected=r"training is not finite \(NaN or infinity\) at step 5: first in metric weight_norm",
  ),
]


@fault_table(FAULTS)
def test_faults_of_data(fault: Fault, check_fault: Callable[[Fault], None]) -> None:
  check_fault(fault)
