"""Files of every format and compression are read, and damage of every kind is reported."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import pathlib
import re
import struct
from typing import Literal

import pyarrow
import pytest
from pyarrow import parquet

from rosetta_t5.data.reading import (
  DEFAULT_OPTIONS,
  BadExamples,
  BlockReader,
  ReadOptions,
  find_files,
  is_in_validation,
  make_converter,
  read_records,
)
from rosetta_t5.data.reading.examples import RECORDS_PER_BLOCK

TEXTS = [f"text {n}" for n in range(600)]
JSONL = "".join(json.dumps({"text": text, "meta": {"n": 1}}) + "\n" for text in TEXTS).encode()


def zst(data: bytes) -> bytes:
  return pyarrow.compress(data, codec="zstd", asbytes=True)


def quick_xz(data: bytes) -> bytes:
  return lzma.compress(data, preset=0)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
  table = pyarrow.table({"text": TEXTS})
  (tmp_path / "a.jsonl").write_bytes(JSONL)
  (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(JSONL))
  (tmp_path / "a.jsonl.xz").write_bytes(quick_xz(JSONL))
  # Two frames, as programs write that append to a file.
  (tmp_path / "a.jsonl.zst").write_bytes(zst(JSONL[:5000]) + zst(JSONL[5000:]))
  (tmp_path / "a.txt").write_text("\n\n".join(TEXTS))
  (tmp_path / "a.csv").write_text("id,text\n" + "".join(f'1,"{t}"\n' for t in TEXTS))
  (tmp_path / "a.tsv").write_text("text\n" + "".join(f"{t}\n" for t in TEXTS))
  parquet.write_table(table, tmp_path / "a.parquet", row_group_size=100)
  (tmp_path / "hf").mkdir()
  (tmp_path / "hf/state.json").write_text("{}")
  with pyarrow.ipc.new_stream(tmp_path / "hf/data-00000-of-00001.arrow", table.schema) as file:
    file.write_table(table)
  return tmp_path


def texts(path: str, options: ReadOptions = DEFAULT_OPTIONS) -> list[str]:
  return [record["text"] for _, record in read_records(path, options)]


def bad(path: pathlib.Path) -> list[str]:
  return [record for _, record in read_records(str(path)) if isinstance(record, str)]


def test_every_format_and_compression_gives_the_same_texts(folder: pathlib.Path) -> None:
  files = find_files([str(folder / "a.*"), str(folder / "hf")])
  assert len(files) == 9
  for path in files:
    assert texts(path) == TEXTS, path


def test_a_name_with_brackets_is_found_as_a_pattern_or_else_as_a_file(
  tmp_path: pathlib.Path,
) -> None:
  file, of_pattern = tmp_path / "part[1].txt", tmp_path / "part1.txt"
  file.write_text("a text\n")
  assert find_files(str(file)) == [str(file)]
  of_pattern.write_text("a text\n")
  assert find_files(str(file)) == [str(of_pattern)]


def test_a_folder_includes_linked_folders(tmp_path: pathlib.Path) -> None:
  folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
  for parent in (folder, elsewhere):
    parent.mkdir()
    (parent / "part.txt").write_text("a text\n")
  (folder / "linked").symlink_to(elsewhere)
  assert find_files(str(folder)) == [str(folder / "linked/part.txt"), str(folder / "part.txt")]


@pytest.mark.parametrize("suffix", ["jsonl", "txt", "csv"])
def test_a_byte_order_mark_is_not_part_of_the_first_record(
  tmp_path: pathlib.Path, suffix: str
) -> None:
  content = {"jsonl": '{"text": "é"}\n', "txt": "é\n", "csv": "text\né\n"}[suffix]
  (tmp_path / f"a.{suffix}").write_text(content, encoding="utf-8-sig")
  assert texts(f"{tmp_path}/a.{suffix}") == ["é"]


def test_a_record_of_a_text_file_is_a_line_a_paragraph_or_the_file(tmp_path: pathlib.Path) -> None:
  path = tmp_path / "a.md"
  path.write_text("one\ntwo\n\n\nthree\n")
  assert texts(str(path)) == ["one", "two", "three"]
  assert texts(str(path), ReadOptions(text_unit="paragraph")) == ["one\ntwo", "three"]
  assert [line for line, _ in read_records(str(path), ReadOptions(text_unit="paragraph"))] == [1, 5]
  assert texts(str(path), ReadOptions(text_unit="file")) == ["one\ntwo\n\n\nthree"]


def test_columns_of_a_file_without_a_header_are_named_by_the_options(
  tmp_path: pathlib.Path,
) -> None:
  path = tmp_path / "a.csv"
  path.write_text('1,"a, b"\n')
  ((_, record),) = read_records(str(path), ReadOptions(columns=("id", "text")))
  assert record == {"id": "1", "text": "a, b"}


@pytest.mark.parametrize(
  ("line", "reason"),
  [
    (b'{"text": "cut', "invalid JSON: .*no line break"),
    (b'["text"]\n', "a JSON list, not an object"),
    (b'{"text": "a\0b"}\n', "invalid JSON: Invalid control character"),
  ],
)
def test_a_broken_line_is_reported_with_its_number_and_the_rest_is_read(
  tmp_path: pathlib.Path, line: bytes, reason: str
) -> None:
  path = tmp_path / "a.jsonl"
  path.write_bytes(b'{"text": "good"}\n' + line)
  records = list(read_records(str(path)))
  assert records[0][1] == {"text": "good"}
  assert records[1][0] == 2
  assert re.match(reason, str(records[1][1]))


# Every kind of text that a quoting program treats specially: tabs, quotes and line breaks.
CELLS = ["plain", "a\tb", 'he said "yes"', '"Why?"', "one\ntwo\r\nthree", '""', "", "ends with \\"]


def written(quoting: Literal[0, 1, 2, 3], delimiter: str, rows: list[list[str]]) -> bytes:
  text = io.StringIO()
  csv.writer(text, delimiter=delimiter, quoting=quoting).writerows([["id", "text"], *rows])
  return text.getvalue().encode()


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
@pytest.mark.parametrize("ending", ["csv", "tsv"])
@pytest.mark.parametrize(
  "cells",
  [
    *([cell] for cell in CELLS),
    CELLS,
    ["x" * 500] * 3000 + CELLS,
    ['a "quoted" line\n' * 3000] * 30,  # The characters that decide end inside a field.
  ],
)
def test_a_table_that_a_program_quoted_has_the_same_rows_again(
  tmp_path: pathlib.Path, quoting: Literal[0, 1, 2], ending: str, cells: list[str]
) -> None:
  path = tmp_path / f"a.{ending}"
  rows = [[f"a{n}", cell] for n, cell in enumerate(cells)]
  path.write_bytes(written(quoting, "\t" if ending == "tsv" else ",", rows))
  assert [list(record.values()) for _, record in read_records(str(path))] == rows  # type: ignore[union-attr]


@pytest.mark.parametrize(
  "texts",
  [
    ['"Why?"'],
    ['"Why?" he said.', 'She said "yes".', "plain"],
    ['"It was', 'ends here"', 'a 5" disk'],
    ['say ""', '"x"" y'],
  ],
)
def test_quotes_of_a_tsv_file_without_quoting_are_part_of_the_text(
  tmp_path: pathlib.Path, texts: list[str]
) -> None:
  path = tmp_path / "a.tsv"
  path.write_text("id\ttext\n" + "".join(f"1\t{text}\n" for text in texts))
  assert [record["text"] for _, record in read_records(str(path))] == texts  # type: ignore[index]


def test_quotes_in_a_tsv_file_that_fit_neither_way_are_refused_until_their_meaning_is_set(
  tmp_path: pathlib.Path,
) -> None:
  path = tmp_path / "a.tsv"
  path.write_text('id\ttext\n1\tplain\n2\t"a \\"b\\" c\nd"\n3\t5" disk\n')
  with pytest.raises(
    ValueError, match=r"a\.tsv, line 3: every row must have.*file_task\.quoted = True"
  ):
    list(read_records(str(path)))
  records = [record for _, record in read_records(str(path), ReadOptions(quoted=False))]
  assert [isinstance(record, str) for record in records] == [False, False, True, False]


def test_a_quote_in_the_wrong_place_of_a_csv_file_makes_its_row_bad(tmp_path: pathlib.Path) -> None:
  path = tmp_path / "a.csv"
  path.write_text('id,text\n1,"a\nb"\n2,"a "b" c"\n3,x\n')
  records = list(read_records(str(path)))
  assert [line for line, _ in records] == [2, 4, 5]
  assert records[2][1] == {"id": "3", "text": "x"}
  assert "quote in a quoted field must be doubled" in str(records[1][1])


@pytest.mark.parametrize(
  ("text", "error"),
  [
    ('id,text\n1,"a\nb"\n2,"c\n3,d\n', r"a\.csv, line 4: this row opens a quote .* never closed"),
    ('id,text\n1,"' + "x" * (65 << 20), r"a\.csv, line 2: this row opens a quote .* never closed"),
    ('id,"text" of\n1,a\n', r"a\.csv, line 1: quotes in the wrong place \(',' expected"),
  ],
)
def test_a_csv_file_with_an_unclosed_quote_or_a_damaged_header_is_refused(
  tmp_path: pathlib.Path, text: str, error: str
) -> None:
  path = tmp_path / "a.csv"
  path.write_text(text)
  with pytest.raises(ValueError, match=error):
    list(read_records(str(path)))


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_csv_file_separates_columns_as_its_first_line_does(
  tmp_path: pathlib.Path, separator: str
) -> None:
  path, rows = tmp_path / "a.csv", [["Größe", "Text"], ["1,5; 2", 'a "b"\nc'], ["", "\t"]]
  with open(path, "w", newline="", encoding="utf-8-sig") as file:
    csv.writer(file, delimiter=separator).writerows(rows)
  found = [record for _, record in read_records(str(path))]
  assert found == [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def test_two_columns_of_one_name_are_refused(tmp_path: pathlib.Path) -> None:
  path = tmp_path / "a.csv"
  path.write_text("text,,text,\na,,b,\n")
  with pytest.raises(ValueError, match=r"a\.csv has two columns 'text': rename one"):
    list(read_records(str(path)))


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_file_of_one_array_has_the_same_records_as_its_lines(
  tmp_path: pathlib.Path, indent: int | None
) -> None:
  rows = [{"text": f"[text], {n}", "list": [[n]]} for n in range(50)]
  path = tmp_path / "a.json"
  path.write_text(json.dumps(rows, indent=indent) + "\n")
  found = list(read_records(str(path)))
  assert [record for _, record in found] == rows
  assert [number for number, _ in found][:3] == [1, 2, 3]


@pytest.mark.parametrize(
  ("text", "reason"),
  [
    ('[{"a": 1}, {"a"', "damaged here: Expecting ':'"),
    ('[{"a": 1}][{"a": 2}]', "expected an object in each line, or one array"),
    ("[1]\n[2]\n", "expected an object in each line, or one array"),
    ('[{"a": 1}, [2]]', "a JSON list, not an object"),
    ('{\n "a": 1\n}', "an object over several lines; expected one in each line"),
  ],
)
def test_damage_of_a_json_file_of_one_array_is_reported(
  tmp_path: pathlib.Path, text: str, reason: str
) -> None:
  path = tmp_path / "a.json"
  path.write_text(text)
  assert reason in bad(path)[0]


def test_a_row_with_too_few_columns_is_bad(tmp_path: pathlib.Path) -> None:
  path = tmp_path / "a.csv"
  path.write_bytes(b"a,text\n1,x\n1\n3,y\n")
  assert bad(path) == ["1 columns instead of 2"]


@pytest.mark.parametrize(
  ("suffix", "content"),
  [("csv", b"text\n%s\n"), ("txt", b"%s\n"), ("jsonl", b'{"text": "%s"}\n')],
)
def test_texts_of_another_encoding_are_bad_examples(
  tmp_path: pathlib.Path, suffix: str, content: bytes
) -> None:
  path = tmp_path / f"a.{suffix}"
  path.write_bytes(content % "café".encode("latin-1"))
  with pytest.raises(ValueError, match=r"line \d: text contains a NUL .* or is not text in UTF-8"):
    list(reader().examples(str(path)))


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("pack", [zst, gzip.compress, quick_xz])
def test_a_truncated_file_yields_its_complete_records_and_reports_where_it_ends(
  tmp_path: pathlib.Path, pack: object
) -> None:
  ending = {zst: "zst", gzip.compress: "gz", quick_xz: "xz"}[pack]  # type: ignore[index]
  path = tmp_path / f"a.jsonl.{ending}"
  data = b"".join(b'{"text": "%d %d"}\n' % (n, hash(str(n))) for n in range(60_000))
  packed = pack(data)  # type: ignore[operator]
  path.write_bytes(packed[: len(packed) * 2 // 3])
  records = list(read_records(str(path)))
  assert len(records) > 1000
  last = records[-1][1]
  assert isinstance(last, str)
  assert "damaged" in last or "invalid JSON" in last


def test_a_damaged_parquet_file_is_one_bad_example(tmp_path: pathlib.Path) -> None:
  path = tmp_path / "a.parquet"
  parquet.write_table(pyarrow.table({"text": TEXTS}), path)
  path.write_bytes(path.read_bytes()[:-50])
  (found,) = bad(path)
  assert "damaged" in found


def test_a_damaged_offset_of_an_arrow_file_is_one_bad_example(tmp_path: pathlib.Path) -> None:
  path, table = tmp_path / "a.arrow", pyarrow.table({"text": ["ab", "cde"]})
  with pyarrow.ipc.new_stream(path, table.schema) as file:
    file.write_table(table)
  offsets, damaged = struct.pack("3i", 0, 2, 5), struct.pack("3i", 0, 1 << 30, -5)
  assert path.read_bytes().count(offsets) == 1
  path.write_bytes(path.read_bytes().replace(offsets, damaged))
  (found,) = bad(path)
  assert "damaged here: In column 0: Invalid: Offset" in found


def reader(policy: str = "skip", column: str = "text", **options: object) -> BlockReader:
  return BlockReader(
    make_converter({"text": column}),
    bad_examples=BadExamples(policy),
    **options,  # type: ignore[arg-type]
  )


def test_blocks_are_the_same_in_any_order(folder: pathlib.Path) -> None:
  path = str(folder / "a.jsonl.gz")
  in_order = reader()
  blocks = [in_order.read(path, block) for block in range(3)]
  assert [more for _, more in blocks] == [True, True, False]
  assert [len(examples) for examples, _ in blocks] == [RECORDS_PER_BLOCK, RECORDS_PER_BLOCK, 88]
  again = reader()
  for block in (2, 0, 1, 0):
    assert again.read(path, block) == blocks[block]


def test_the_hash_split_has_no_overlap_and_depends_on_the_content(folder: pathlib.Path) -> None:
  def split(file: str, is_validation: bool) -> list[str]:
    of_split = reader(is_kept=lambda fields: is_in_validation(fields, 10) == is_validation)
    return [example["text"] for example in of_split.examples(str(folder / file))]

  train, held_out = split("a.jsonl", False), split("a.jsonl", True)
  assert sorted(train + held_out) == sorted(TEXTS)
  assert 30 < len(held_out) < 90
  assert split("a.csv", True) == held_out


def test_bad_examples_are_counted_by_reason(tmp_path: pathlib.Path) -> None:
  path = tmp_path / "a.jsonl"
  path.write_text(
    '{"text": ""}\n{"text": "a"}\n{"body": "b"}\n{"text": "\\ud800"}\n{"text": " "}\n'
  )
  of_file = reader()
  assert [e["text"] for e in of_file.examples(str(path))] == ["a"]
  assert of_file.bad_examples.counts["text is empty"] == 2
  assert of_file.bad_examples.counts.total() == 4


def test_a_bad_example_is_counted_once_when_its_file_is_read_repeatedly(
  tmp_path: pathlib.Path,
) -> None:
  before = BadExamples.total_in_process
  path = tmp_path / "a.jsonl"
  path.write_text('{"text": "a"}\n{"text": ""}\n{"body": 1}\n')
  of_file = reader()
  for _ in range(3):
    list(of_file.examples(str(path)))
  assert of_file.bad_examples.counts.total() == 2
  assert BadExamples.total_in_process == before + 2


def test_a_file_without_any_good_example_is_refused_by_an_error_that_alone_names_the_first(
  folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
  text = (
    r"None of the first 256 records of .*a\.jsonl .*line 1: no column 'body' among 'text', 'meta'"
  )
  with pytest.raises(ValueError, match=text):
    list(reader(column="body").examples(str(folder / "a.jsonl")))
  assert "is left out" not in caplog.text


def test_templates_convert_records_to_texts_or_return_why_they_cannot() -> None:
  convert = make_converter({"text": "{title}: {body} {{}}"})
  assert convert({"title": "A", "body": ["b", 1]}) == {"text": "A: b 1 {}"}
  assert convert({"title": "A"}) == "no column 'body' among 'title'"
  assert convert({"title": " ", "body": None}) == "title and body is empty"
  assert convert({"title": "", "body": "b"}) == {"text": ": b {}"}
  assert make_converter({"targets": "story"})({"story": "a\0"}) == (
    "story contains a NUL character or is not text in UTF-8"
  )
  convert = make_converter({"inputs": "to fr: {pair.en}", "targets": "pair.fr"})
  pair = {"en": "Yes.", "fr": "Oui."}
  assert convert({"pair": pair}) == {"inputs": "to fr: Yes.", "targets": "Oui."}
  assert convert({"pair": {}, "pair.en": "x", "pair.fr": "y"}) == {
    "inputs": "to fr: x",
    "targets": "y",
  }
  assert convert({"pair": {"fr": "Oui."}}) == (
    "no column 'pair.en' (did you mean 'pair'?) among 'pair'"
  )
  assert "pair is an object, not text" in make_converter({"text": "pair"})({"pair": pair})
  with pytest.raises(ValueError, match="braces contain only the name of a column"):
    make_converter({"text": "{{}}"})
  with pytest.raises(ValueError, match="is not a valid template"):
    make_converter({"text": "{title"})


def test_a_missing_file_is_refused_and_the_folders_files_are_listed(tmp_path: pathlib.Path) -> None:
  (tmp_path / "b.jsonl").write_text("")
  with pytest.raises(ValueError, match=r"There is no file .*a\.jsonl"):
    find_files(str(tmp_path / "a.jsonl"))
  (tmp_path / "b.xml").write_text("")
  with pytest.raises(
    ValueError,
    match=r"cannot be inferred from its name\. Known suffixes: .*\.parquet.*data\.file_task\.format",
  ):
    list(read_records(str(tmp_path / "b.xml")))
  (tmp_path / "c.csv").write_text("text,label\nA,B\n", encoding="utf-16")
  with pytest.raises(ValueError, match=r"c\.csv is encoded in UTF-16: save it as UTF-8"):
    list(read_records(str(tmp_path / "c.csv")))
