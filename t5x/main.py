"""T5X's `main`: `python -m t5x.main --run_mode=train --gin_file=…` starts any run."""

if __name__ == "__main__":
  from rosetta_t5.cli import begin

  begin("t5x.main")

import enum
from collections.abc import Sequence

from rosetta_t5 import config
from rosetta_t5.config.t5x_surface import RUN_MODES
from rosetta_t5.plan.description import describe_run

# The values of --run_mode.
RunMode = enum.Enum("RunMode", {mode.upper(): mode for mode in RUN_MODES})  # type: ignore[misc]


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the function that --run_mode names, or else the one that the gin files configure."""
  config.run_from_command_line(None, argv, describe_run)


if __name__ == "__main__":
  main()
