"""List the ready models and the settings that `--set NAME=VALUE` of lockstep train changes in each."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.jobs._cli import JobParser, run_job
from lockstep.training.models.ready import READY


def parser() -> JobParser:
    """The command line."""
    return JobParser("models", __doc__ or "", "models")


def main(argv: Sequence[str]) -> int:
    """Print the list; returns the exit code."""
    parser().parse(argv)
    for name, model in READY.items():
        print(f"{name}: {model.help}")
        for setting, one in model.settings.items():
            shown = f"{setting}={one.default}" if one.default != "" else f"{setting}=COLUMN"
            print(f"  --set {shown:<15} {one.help}; {one.allowed}")
    print("module:function: your own; it finds the settings in options.extra (docs/tutorial.md)")
    return 0


if __name__ == "__main__":
    run_job(main)
