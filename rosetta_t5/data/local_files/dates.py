"""Dates as people write them, beside ISO 8601: the rows on which the quickstart finetunes."""

from __future__ import annotations

import datetime
import json
import pathlib
import random

from rosetta_t5.files import write_atomically

_FIRST, _LAST = datetime.date(1900, 1, 1), datetime.date(2099, 12, 31)
_FORMATS = (
  "{d:%B} {day}, {year}",
  "{d:%b} {day}, {year}",
  "{d:%A}, {day} {d:%B} {year}",
  "{d:%B} {day}{ordinal}, {year}",
  "the {day}{ordinal} of {d:%B} {year}",
  "{day} {d:%b} {year}",
  "{day}.{d.month}.{year}",
)


def write_dates(path: pathlib.Path, count: int = 10_000, seed: int = 0) -> None:
  """Writes `count` different rows such as {"date": "the 4th of July 1776", "iso": "1776-07-04"}.

  Nothing is written if the file exists. The dates are between 1900 and 2099, in English.
  """
  if path.exists():
    return
  rng = random.Random(seed)
  rows: dict[str, str] = {}
  while len(rows) < count:
    date = _FIRST + datetime.timedelta(days=rng.randint(0, (_LAST - _FIRST).days))
    rows[as_text(date, rng.choice(_FORMATS))] = date.isoformat()
  lines = (json.dumps({"date": text, "iso": iso}) + "\n" for text, iso in rows.items())
  path.parent.mkdir(parents=True, exist_ok=True)
  write_atomically(path, "".join(lines))


def as_text(date: datetime.date, template: str) -> str:
  """Returns a date in a format, in which {ordinal} is the st, nd, rd or th of the day."""
  day = date.day
  ordinal = "th" if day in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
  return template.format(d=date, day=day, year=date.year, ordinal=ordinal)
