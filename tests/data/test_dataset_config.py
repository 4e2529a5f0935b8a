"""DatasetConfig: plain construction, the module that registers a task, the seed."""

from __future__ import annotations

import dataclasses
import pathlib
import time

import pytest

from rosetta_t5.data import DatasetConfig, import_module, resolve_seed

CONFIG = DatasetConfig("a_task", {"inputs": 8, "targets": 8}, "train", 4, True, None)


def test_defaults_are_t5xs() -> None:
  assert dataclasses.asdict(CONFIG) == {
    "mixture_or_task_name": "a_task",
    "task_feature_lengths": {"inputs": 8, "targets": 8},
    "split": "train",
    "batch_size": 4,
    "shuffle": True,
    "seed": None,
    "use_cached": False,
    "pack": False,
    "use_custom_packing_ops": False,
    "module": None,
    "use_memory_cache": True,
    "trim_output_features": True,
    "runtime_preprocessors": None,
    "num_prefetch_threads": None,
    "num_workers": 0,
    "allow_truncated_targets": False,
  }


def test_a_configured_seed_takes_precedence_over_a_stored_one() -> None:
  assert resolve_seed(dataclasses.replace(CONFIG, seed=7), stored=3) == 7


def test_a_seed_of_zero_is_a_configured_seed() -> None:
  assert resolve_seed(dataclasses.replace(CONFIG, seed=0), stored=3) == 0


def test_a_stored_seed_is_used_again() -> None:
  assert resolve_seed(CONFIG, stored=3) == 3


def test_without_a_seed_one_is_drawn_from_the_clock() -> None:
  assert abs(resolve_seed(CONFIG) - time.time()) < 5


def test_a_seed_drawn_after_2038_fits_into_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(time, "time", lambda: 2.0**31 + 5)
  assert resolve_seed(CONFIG) == 5


def test_a_missing_module_is_refused_with_its_binding() -> None:
  with pytest.raises(ValueError, match=r"no Python module 'no_such_tasks'.*MIXTURE_OR_TASK_MODULE"):
    import_module("no_such_tasks.squad")


def test_an_import_error_inside_the_module_is_raised_unchanged(
  tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  (tmp_path / "tasks_of_mine.py").write_text("import no_such_dependency\n")
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
    import_module("tasks_of_mine")
