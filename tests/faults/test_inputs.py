"""What commands do with texts, data, metrics and outputs that they cannot use."""

from __future__ import annotations

from collections.abc import Callable

from fault import Fault, fault_table

FILE = "--file {} --inputs '{{question}}' --targets '{{answer}}'"
FILES = "--gin.data.file_task.files"
NEW = "rm -rf run; "

FAULTS = [
  # infer --input
  Fault("the input does not exist", "$INFER --input no.txt", "There is no file 'no.txt'"),
  Fault(
    "the input is a folder", "mkdir d; $INFER --input d", "d contains no file of a known format"
  ),
  Fault(
    "the input is empty", ": > e; $INFER --input e --output o; test ! -e o", "no text", status=0
  ),
  Fault(
    "the input is not UTF-8",
    "printf 'a\\n\\xff\\n' > b; $INFER --input b",
    "Line 2 of b cannot be used: text contains a NUL character or is not text in UTF-8",
  ),
  Fault(
    "a text has more tokens than the model reads",
    "head -c 3000000 /dev/zero | tr '\\0' a > b; $INFER --input b --output o",
    "1 inputs had more than 32 tokens and were truncated: set a larger --input_length",
    status=0,
  ),
  Fault(
    "the output is the input",
    "echo a > b; $INFER --input b --output b; test $? = 1 -a $(cat b) = a",
    "b exists and is not an output of this command",
    status=0,
  ),
  Fault(
    "the output's folder does not exist",
    "echo a > b; $INFER --input b --output no/such/o",
    "no/such/o must be a file in a folder that exists",
    status=2,
  ),
  Fault(
    "a row of the input has another field than the template",
    """echo '{"q": 1}' > b; $INFER --input b --template '{question}'""",
    "Line 1 of b cannot be used: no column 'question' among 'q'",
  ),
  Fault(
    "a field of the input is null",
    """echo '{"question": null}' > b; $INFER --input b --template '{question}'""",
    "Line 1 of b cannot be used: question is empty",
  ),
  Fault(
    "a field of the input is an object",
    """echo '{"question": {"a": 1}}' > b; $INFER --input b --template '{question}'""",
    "Line 1 of b cannot be used: question is an object, not text",
  ),
  Fault(
    "a row of the input is truncated",
    """echo '{"question": ' > b; $INFER --input b --template '{question}'""",
    "Line 1 of b cannot be used: invalid JSON",
  ),
  Fault(
    "more output tokens than an array can have",
    "echo a > b; $INFER --input b --output_length 1000000",
    "error: there is not enough memory: Unable to allocate",
  ),
  Fault(
    "more predictions of each row than memory can hold",
    "sed -n 1p rows.jsonl > b; $INFER --input b --template '{question}' --num_decodes 1000000",
    "error: there is not enough memory: Out of memory allocating",
  ),
  # eval
  Fault("a split that does not exist", "$INFER --split nope", "it has 'train', 'validation'"),
  Fault("a task that does not exist", "$INFER --task nope", "no SeqIO task or mixture 'nope'"),
  Fault(
    "eval's output folder cannot exist", "$EVAL --output_dir /dev/null/x", "Set another folder"
  ),
  Fault(
    "a checkpoint that does not exist",
    "rosetta-t5 eval --model_dir run/checkpoint_99",
    "There is no folder run/checkpoint_99",
  ),
  Fault("the data is missing", f"$EVAL {FILE.format('no.jsonl')}", "no file 'no.jsonl'"),
  Fault(
    "the data is empty", f": > e.jsonl; $EVAL {FILE.format('e.jsonl')}", "no example for inference"
  ),
  Fault(
    "no checkpoint is left",
    "rm -r run/checkpoint_0 run/checkpoint_2 run/checkpoint_4; $EVAL",
    "there is no checkpoint to restore in",
  ),
  Fault(
    "a row of the input is nested brackets",
    "head -c 100000 /dev/zero | tr '\\0' '[' > b; $INFER --input b --template '{question}'",
    "Line 1 of b cannot be used: invalid JSON: maximum recursion depth",
  ),
  Fault(
    "a template has a format",
    "$INFER --input rows.jsonl --template '{question:.10}'",
    """'?input'? = "{question:.10}" is not a valid template: braces contain only the name""",
  ),
  # train
  *[
    Fault(f"{what} needs itself", f"{command} --gin.TRAIN_STEPS=%TRAIN_STEPS{more}", expected, 2)
    for what, command, more, expected in (
      ("a macro", "$TRAIN", "", "TRAIN_STEPS needs itself: TRAIN_STEPS → TRAIN_STEPS\n"),
      (
        "a macro of other macros",
        "rosetta-t5 check tiny.gin",
        " --gin.TRAIN_STEPS=%A --gin.A=%B --gin.B='[%A]'",
        "A needs itself: A → B → A\n.*A = %B\n.*B = .%A.\n",
      ),
    )
  ],
  Fault(
    "a model of 10^12 parameters",
    f"{NEW}$TRAIN --gin.network.T5Config.emb_dim=1000000000",
    "out of memory: the train state needs .* TB on each device",
    keeps=False,
  ),
  Fault(
    "more steps than 32 bits can count",
    "$TRAIN --gin.TRAIN_STEPS=3000000000",
    r"TRAIN_STEPS must be an integer of at least 0 and less than 2\^31, got 3000000000",
    2,
  ),
  Fault("MODEL_DIR is a file", "$TRAIN --gin.MODEL_DIR=\"'rows.jsonl'\"", "MODEL_DIR rows.jsonl"),
  Fault(
    "MODEL_DIR is a link to a folder that does not exist",
    "ln -s /no/such/disk link; $TRAIN --gin.MODEL_DIR=\"'link'\"",
    "MODEL_DIR link cannot be written to .*File exists",
  ),
  Fault("MODEL_DIR is empty", "$TRAIN --gin.MODEL_DIR=\"''\"", "a string that is not empty", 2),
  Fault("fewer steps than the run has done", "$TRAIN --gin.TRAIN_STEPS=2", "must be more than"),
  Fault(
    "another model than the checkpoint's",
    "$TRAIN --gin.TRAIN_STEPS=6 --gin.network.T5Config.num_heads=4",
    "wrong shape.*set an empty folder",
  ),
  Fault(
    "the data is nested brackets",
    NEW + "head -c 100000 /dev/zero | tr '\\0' '[' > rows.jsonl; $TRAIN",
    "None of the 1 records of rows.jsonl can be used.*recursion",
    keeps=False,
  ),
  Fault(
    "the data is a truncated archive",
    NEW + f"gzip rows.jsonl; truncate_to_half rows.jsonl.gz; $TRAIN {FILES}=\"'rows.jsonl.gz'\"",
    "rows.jsonl.gz, line 1: the file is damaged here",
    keeps=False,
  ),
  Fault(
    "the data is not a Parquet file",
    NEW + f"head -c 1000 /dev/urandom > r.parquet; $TRAIN {FILES}=\"'r.parquet'\"",
    "None of the 1 records of r.parquet can be used",
    keeps=False,
  ),
  Fault(
    "every target is null",
    NEW + """sed -i 's/"answer": "[0-9]*"/"answer": null/' rows.jsonl; $TRAIN""",
    "None of the 200 records of rows.jsonl can be used.*answer is empty",
    keeps=False,
  ),
  Fault(
    "every target is an object",
    NEW + """sed -i 's/"answer": "\\([0-9]*\\)"/"answer": {"is": \\1}/' rows.jsonl; $TRAIN""",
    "None of the 200 records of rows.jsonl can be used.*answer is an object, not text",
    keeps=False,
  ),
  Fault(
    "some targets are null",
    NEW + """sed -i '50,70s/"answer": "[0-9]*"/"answer": null/' rows.jsonl; $TRAIN""",
    "Bad example 1 is left out: rows.jsonl, line 5[0-9]: answer is empty",
    status=0,
    keeps=False,
  ),
  Fault(
    "some texts are NaN, as pandas writes missing values",
    NEW
    + """printf '{"question": NaN, "answer": "1"}\\n{"question": "a", "answer": NaN}\\n' >> rows.jsonl
    $TRAIN""",
    "line 201: question is empty.*line 202: answer is empty.*bad examples left out: 2",
    status=0,
    keeps=False,
  ),
  Fault(
    "the texts of a Parquet file are bytes",
    NEW
    + """python -c "
import pyarrow, pyarrow.parquet
rows = {'question': [b'1 and %d' % i for i in range(50)] + [bytes([255])] * 9, 'answer': ['1'] * 59}
pyarrow.parquet.write_table(pyarrow.table(rows), 'r.parquet')"; rosetta-t5 vocab train \\
      --input r.parquet --text-key question --size 20 --out v.model; rosetta-t5 vocab show v.model '1 and 2'""",
    "line 51: question contains a NUL character or is not text in UTF-8.*1 and 2",
    status=0,
    unexpected="Traceback|\u2047",
    keeps=False,
  ),
  Fault(
    "too few rows to evaluate",
    NEW + "sed -i 4q rows.jsonl; $TRAIN",
    "There are no examples in the split 'validation' of the task",
    keeps=False,
  ),
  # report, inspect, vocab, prepare
  Fault("a report on nothing", "mkdir x; rosetta-t5 report x", "no metrics of a run"),
  Fault(
    "an event file has a flipped byte",
    "flip $(find run/train -name 'events*') 100; rosetta-t5 report run --out r",
    "open it in a browser",
    status=0,
  ),
  Fault(
    "the run's log has random bytes",
    "head -c 300 /dev/urandom >> run/run-log.jsonl; rosetta-t5 report run --out r",
    "open it in a browser",
    status=0,
  ),
  *[
    Fault(
      f"the output of {command} is a file of data",
      f"cp rows.jsonl copy; rosetta-t5 {command} --out rows.jsonl; cmp copy rows.jsonl",
      "error: --out rows.jsonl exists",
      status=0,
    )
    for command in ("report run", "vocab train --input rows.jsonl --text-key question --size 60")
  ],
  Fault(
    "the report's name is a folder", "rosetta-t5 report run --out run", "run: Is a directory", 1
  ),
  Fault(
    "a port that does not exist", "rosetta-t5 report run --follow --port 80000", "--port 80000", 2
  ),
  Fault(
    "inspect of a file",
    """rosetta-t5 vocab train --input rows.jsonl --text-key question --size 60 --out v.model
    rosetta-t5 inspect rows.jsonl --vocab v.model""",
    "no column 'text' among 'question'",
  ),
  Fault(
    "a vocabulary of no text",
    ": > e.txt; rosetta-t5 vocab train --input e.txt --size 100 --out v; test ! -e v",
    "on this text: there is none",
    status=0,
  ),
  Fault(
    "a vocabulary that is not a SentencePiece model",
    "echo junk > j.model; rosetta-t5 prepare --input rows.jsonl --vocab j.model --out t; test ! -e t",
    "j.model",
    status=0,
  ),
  # convert
  Fault(
    "convert's result exists", "rosetta-t5 convert run run --to t5x", "exists and is not empty"
  ),
  Fault(
    "convert's result is a link to a folder that does not exist",
    "ln -s disk/hf hf; mkdir disk; rosetta-t5 convert run hf --to hf && test -e disk/hf/config.json",
    "wrote .*/disk/hf",
    0,
  ),
  Fault("convert of nothing", "rosetta-t5 convert no out --to t5x", "no such file or folder"),
  Fault("convert to nowhere", "rosetta-t5 convert run /dev/null/x --to t5x", "Not a directory"),
  Fault("convert of a file", "rosetta-t5 convert tiny.gin o --to hf", "not a checkpoint"),
]


@fault_table(FAULTS)
def test_faults_of_inputs(fault: Fault, check_fault: Callable[[Fault], None]) -> None:
  check_fault(fault)
