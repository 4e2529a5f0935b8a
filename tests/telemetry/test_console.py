"""Plain lines in log files, a bar on terminals, and silence on other processes."""

from __future__ import annotations

import io
import os
import pty
import re
import time

import jax
import pytest

from rosetta_t5 import terminal
from rosetta_t5.telemetry import console

VALUES = {
  "loss": 5041.98,
  "loss_per_nonpadding_target_token": 3.2112,
  "timing/seqs_per_second": 12.34,
  "timing/steps_per_second": 11.25,
}


class Flushed(io.StringIO):
  """A stream that counts flushes and can claim to be a terminal."""

  def __init__(self, terminal=False):
    super().__init__()
    self.flushes = 0
    self.terminal = terminal

  def flush(self):
    self.flushes += 1
    super().flush()

  def isatty(self):
    return self.terminal


@pytest.fixture
def replace_stdout(monkeypatch):
  """Returns a function that replaces standard output. Pytest replaces it after fixtures were built."""
  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.setenv("COLUMNS", "120")

  def replace(stream):
    monkeypatch.setattr("sys.stdout", stream)
    return stream

  return replace


def test_plain_line_has_step_loss_speed_and_time_left_with_units_and_is_flushed(replace_stdout):
  stream = replace_stdout(Flushed())
  with console.Progress(0, 1000) as progress:
    progress.report(100, VALUES)
  # At 11.25 steps a second.
  line = "step 100/1000  loss 3.211 nats/token  88.89 ms/step  eta 1m20s  12.34 seq/s\n"
  assert stream.getvalue() == line
  assert stream.flushes == 1


def test_lines_show_the_same_metrics_in_the_same_order(replace_stdout):
  stream = replace_stdout(Flushed())
  measured = {
    "skipped_steps": 2.0,
    "weight_norm": 123.456,
    "weight_gradient_norm": 0.98765,
    "timing/model_flops_utilization": 0.4567,
    "data/consumed_samples": 12345678.0,
    "timing/target_tokens_per_second": 1234.5,
    "learning_rate/current": 0.0006,
  }
  with console.Progress(0, 10) as progress:
    progress.report(1, measured)
    progress.report(2, {**VALUES, **measured})
  assert stream.getvalue() == (
    "step 1/10  skipped 2 steps  grad norm 0.9877  lr 0.0006  MFU 45.7%\n"
    "step 2/10  loss 3.211 nats/token  88.89 ms/step  eta 1s  skipped 2 steps  grad norm 0.9877  "
    "lr 0.0006  12.34 seq/s  MFU 45.7%\n"
  )


def test_line_shows_epochs_and_unusable_records(replace_stdout):
  stream = replace_stdout(Flushed())
  progress = console.Progress(0, 10)
  progress.report(1, {"data/epochs/pile": 1.234})
  progress.report(2, {"data/epochs/pile": 0.5, "data/epochs/mine": 12.0, "data/bad_examples": 3.0})
  assert stream.getvalue() == (
    "step 1/10  epoch 1.23\nstep 2/10  bad examples left out: 3  epoch 0.5 of pile  epoch 12 of mine\n"
  )


def test_line_omits_metrics_that_were_not_measured(replace_stdout):
  stream = replace_stdout(Flushed())
  progress = console.Progress(0, 10)
  progress.report(5, {"accuracy": 0.5})
  progress.report(6, {"loss": 2.0})
  assert stream.getvalue() == "step 5/10\nstep 6/10  loss 2.000\n"


def test_line_leaves_out_zeros(replace_stdout):
  stream = replace_stdout(Flushed())
  values = {"learning_rate/current": 8.0, "skipped_steps": 0.0}
  console.Progress(0, 10).report(1, values)
  assert stream.getvalue() == "step 1/10  lr 8\n"


def test_small_loss_is_shown_with_three_digits(replace_stdout):
  stream = replace_stdout(Flushed())
  progress = console.Progress(0, 10)
  for loss in (0.1, 0.001234, 0.0):
    progress.report(1, {"loss": loss})
  assert stream.getvalue() == "step 1/10  loss 0.100\nstep 1/10  loss 0.00123\nstep 1/10  loss 0\n"


def test_evaluations_and_messages_have_their_own_lines(replace_stdout):
  stream = replace_stdout(Flushed())
  progress = console.Progress(0, 10)
  progress.report_evaluation(5, {"pile": {"loss": 2.0, "accuracy": 0.25, "z_loss": 1.0}})
  terminal.print_line("[bold] is printed as it is")
  assert stream.getvalue() == (
    "evaluation at step 5  pile  loss 2.000  token accuracy 25.00%\n[bold] is printed as it is\n"
  )


def test_terminal_gets_a_bar_and_lines_that_stay(monkeypatch, replace_stdout):
  stream = replace_stdout(Flushed(terminal=True))
  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.setenv("COLUMNS", "120")
  with console.Progress(0, 1000) as progress:
    progress.report(100, VALUES)
    progress.report_evaluation(100, {"pile": {"loss": 2.5}})
  text = stream.getvalue()
  assert "step 100/1000  loss 3.211 nats/token  88.89 ms/step  eta 1m20s" in text
  assert "evaluation at step 100  pile  loss 2.500" in text
  assert re.search(r"step 100/1000 .*━.* loss 3.211 nats/token", text)
  assert "\x1b[" in text


@pytest.mark.parametrize(
  "environment", [{"TERM": "dumb"}, {"TERM": "xterm", "OMPI_COMM_WORLD_RANK": "0"}]
)
def test_dumb_terminals_and_those_of_open_mpi_get_lines(environment, monkeypatch, replace_stdout):
  stream = replace_stdout(Flushed(terminal=True))
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  with console.Progress(0, 10) as progress:
    progress.report(1, {"loss": 1.0})
  assert stream.getvalue() == "step 1/10  loss 1.000\n"


def test_other_processes_print_nothing(monkeypatch, replace_stdout):
  stream = replace_stdout(Flushed(terminal=True))
  monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  with console.Progress(0, 10) as progress:
    progress.report(1, {"loss": 1.0})
  terminal.print_line("y")
  assert stream.getvalue() == ""


@pytest.mark.parametrize(
  ("seconds", "text"),
  [
    *((0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (80, "1m20s"), (7500, "2h05m")),
    *((273600, "3d04h"), (-5, "0s")),
  ],
)
def test_durations_are_formatted_in_their_two_largest_units(seconds, text):
  assert terminal.format_duration(seconds) == text


def test_normalized_loss_is_not_divided_by_tokens(replace_stdout):
  stream = replace_stdout(Flushed())
  values = {"loss": 2.5, "loss_per_nonpadding_target_token": 0.001}
  assert console.loss_to_show(values) == 0.001
  console.Progress(0, 10, loss_per_token="").report(5, values)
  assert "loss 2.500\n" in stream.getvalue()
  console.Progress(0, 10, loss_per_token="loss").report(5, values)
  assert "loss 2.500 nats/token" in stream.getvalue()


@pytest.fixture
def screen(monkeypatch):
  """Yields (a stream to a real terminal, a function that returns what has been written to it)."""
  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.setenv("COLUMNS", "120")
  master, keyboard = pty.openpty()
  os.set_blocking(master, False)
  with open(keyboard, "w") as stream:
    yield stream, lambda: os.read(master, 100_000).decode()
  os.close(master)


def test_bar_moves_without_a_report_when_a_step_has_been_started(screen, replace_stdout):
  stream, written = screen
  replace_stdout(stream)
  with console.Progress(0, 1000) as progress:
    progress.follow(7)
    time.sleep(1.0)
    text = written()
  assert re.search(r"step 7/1000 .*━", text)
