"""The dates on which the quickstart finetunes."""

from __future__ import annotations

import datetime
import json
import pathlib

import pytest

from rosetta_t5.data.quickstart_data import date_text, write_dates


@pytest.mark.parametrize(
  ("day", "text"), [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (22, "22nd")]
)
def test_ordinals_are_english(day: int, text: str) -> None:
  date = datetime.date(1976, 7, day)
  assert date_text(date, "the {day}{ordinal} of {d:%B} {year}") == f"the {text} of July 1976"


def test_rows_are_different_repeatable_and_written_once(tmp_path: pathlib.Path) -> None:
  first, second = tmp_path / "new" / "first.jsonl", tmp_path / "second.jsonl"
  for path in (first, second):
    write_dates(path, count=300)
  rows = [json.loads(line) for line in first.read_text().splitlines()]
  assert len({row["date"] for row in rows}) == len(rows) == 300
  assert all(datetime.date.fromisoformat(row["iso"]).year >= 1900 for row in rows)
  assert second.read_text() == first.read_text()
  first.write_text("mine")
  write_dates(first)
  assert first.read_text() == "mine"
