"""The table of the verbs of `rosetta-t5`."""

from __future__ import annotations

from typing import NamedTuple


class Verb(NamedTuple):
  """A verb of the command line.

  Attributes:
    arguments: the MODULE:FUNCTION of rosetta_t5 that adds the verb's arguments to a parser, and as
      the default `run` the function that gets their values and returns the exit status.
    help: what it does, in one line.
    examples: the arguments of calls that --help shows.
    has_flags: whether it also takes T5X's flags, such as --gin.NAME=VALUE, as `options.flags`.
    imports_modules: whether it may import the user's modules.
  """

  arguments: str
  help: str
  examples: tuple[str, ...]
  has_flags: bool = False
  imports_modules: bool = False


VERBS = {
  "train": Verb(
    "cli.run_commands:train_arguments",
    "Train a model as gin files configure it, or continue its training (python -m t5x.train).",
    (
      "--gin_file=gin/examples/quickstart.gin",
      "--gin_file=gin/examples/quickstart.gin --gin.TRAIN_STEPS=100 --gin.MODEL_DIR=\"'runs/short'\"",
      "--gin_file=my_run.gin --dry_run",
    ),
    has_flags=True,
    imports_modules=True,
  ),
  "eval": Verb(
    "cli.run_commands:eval_arguments",
    "Evaluate the task or the loss of a trained model, or what gin files configure (t5x.eval).",
    (
      "--model_dir runs/squad",
      "--model_dir runs/squad/checkpoint_2000 --split test",
      "--model_dir runs/squad --file new_rows.csv",
      "--gin_file=gin/examples/base_wmt_eval.gin --gin.CHECKPOINT_PATH=\"'runs/wmt'\"",
    ),
    has_flags=True,
    imports_modules=True,
  ),
  "infer": Verb(
    "cli.run_commands:infer_arguments",
    "Write predictions or scores: for texts, for a run's own task, or as gin files configure it.",
    (
      "--model_dir runs/squad --input questions.jsonl --template 'question: {question}'",
      "--model_dir runs/squad --split test",
      "--gin_file=gin/examples/base_wmt_infer.gin --gin.CHECKPOINT_PATH=\"'runs/wmt'\"",
    ),
    has_flags=True,
    imports_modules=True,
  ),
  "export": Verb(
    "cli.run_commands:export_arguments",
    "Write a model as a TensorFlow SavedModel and as StableHLO (t5x.export).",
    (
      "--model_dir runs/squad --output_dir exported/1",
      "--model_dir google/flan-t5-small --output_dir exported/flan --num_decodes 4",
      "--gin_file=t5x/examples/t5/t5_1_1/small.gin --gin_file=t5x/configs/runs/export.gin",
    ),
    has_flags=True,
    imports_modules=True,
  ),
  "chat": Verb(
    "cli.text_commands:chat_arguments",
    "Fill the blanks in sentences that you type.",
    ("quickstart/run", "quickstart/run/checkpoint_600"),
  ),
  "check": Verb(
    "cli.run_commands:check_arguments",
    "Report all errors in gin files, and what they would run; nothing is run.",
    (
      "gin/examples/small_pile_pretrain.gin",
      "my_run.gin --gin.MODEL_DIR=\"'runs/mine'\" --devices=64",
    ),
    has_flags=True,
    imports_modules=True,
  ),
  "plan": Verb(
    "plan.plan_command:add_arguments",
    "Estimate the memory, time and traffic of a recipe on GPUs that need not be present.",
    (
      "gin/examples/xl_pile_pretrain.gin --devices=64",
      "gin/examples/xl_pile_pretrain.gin --devices=64 --gpu=h200 "
      "--gin.partitioning.PjitPartitioner.mesh='{\"fsdp\": 8}'",
    ),
    has_flags=True,
    imports_modules=True,
  ),
  "compile": Verb(
    "gpu_program.compile_command:add_arguments",
    "Compile a recipe's step for GPUs that need not be present, and show the program.",
    (
      "gin/examples/large_pile_pretrain.gin --gpu=h200 --devices=64",
      "gin/examples/xl_pile_pretrain.gin --devices=64 --mesh='{\"fsdp\": 64}' --json=xl.json",
    ),
    has_flags=True,
    imports_modules=True,
  ),
  "convert": Verb(
    "conversion.convert:add_arguments",
    "Write a checkpoint in another layout, and verify that the model is the same.",
    (
      "google/flan-t5-small runs/flan --to t5x",
      "runs/squad exported --to hf --tokenizer spiece.model",
    ),
  ),
  "ckpt": Verb(
    "checkpoints.inspect_command:add_arguments",
    "Inspect, compare and verify checkpoints of any layout.",
    ("ls runs/squad", "show runs/squad", "diff runs/squad exported", "verify runs/squad --write"),
  ),
  "vocab": Verb(
    "data.vocabularies.vocab_command:add_arguments",
    "Train a vocabulary on your text, or show how one splits a text.",
    (
      "train --input 'corpus/*.jsonl.zst' --size 32000 --out my.model",
      "show my.model 'some text'",
    ),
  ),
  "prepare": Verb(
    "data.prepared.prepare:add_arguments",
    "Tokenize text into indexed shards.",
    (
      "--input 'corpus/*.jsonl.zst' --vocab my.model --out corpus_tokens",
      "--input notes/ --vocab my.model --out notes_tokens --text-unit file --workers 4",
    ),
  ),
  "inspect": Verb(
    "cli.inspect_command:add_arguments",
    "Show a task's batches as text, their statistics and the problems found.",
    (
      "my_files.gin",
      "runs/squad",
      "rows.tsv --inputs 'question: {question}' --targets answer --vocab my.model",
      "corpus_tokens",
      "squad_v010_allanswers --tfds_data_dir /data --lengths inputs=512,targets=64 --pack",
      "my_task --module my.tasks",
    ),
    has_flags=True,
    imports_modules=True,
  ),
  "quickstart": Verb(
    "cli.quickstart:add_arguments",
    "Pretrain a small T5 on the text of Python's standard library, and finetune it on dates.",
    ("", "--gin.TRAIN_STEPS=200"),
    has_flags=True,
    imports_modules=True,
  ),
  "report": Verb(
    "run_report.report_command:add_arguments",
    "Write one HTML page that shows training runs, this package's or T5X's, and compares them.",
    (
      "runs/small",
      "runs/small runs/base --out compared.html",
      "runs/small --follow",
    ),
  ),
  "bench": Verb(
    "bench.train_step:add_arguments",
    "Time a training step on this machine's devices.",
    ("--size base --batch 128", "--size large --batch 64 --fp8 --kernel cudnn --json large.json"),
  ),
  "doctor": Verb(
    "cli.doctor:add_arguments", "Show what is installed, what is missing, and the devices.", ("",)
  ),
  "completion": Verb(
    "cli.command:completion_arguments",
    "Print a script that makes a shell complete verbs, options and recipes.",
    (
      "bash > ~/.local/share/bash-completion/completions/rosetta-t5",
      'zsh > "${fpath[1]}/_rosetta-t5"',
    ),
  ),
}
