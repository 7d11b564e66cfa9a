"""Write a checkpoint of a run as a Keras model or a SavedModel, with its schema: `lockstep export`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.jobs._cli import JobParser, run_job, which
from lockstep.jobs._launch import check_runs

if TYPE_CHECKING:
    from lockstep.training.results.export_run import Format

FORMATS: tuple[Format, ...] = ("keras", "savedmodel")
PIXELS = (
    "note: the model takes pixels as lockstep etl_images made them; other loaders of files make others, and predictions"
    " get worse. A dataset with --store encoded gives a SavedModel that takes files (docs/prediction.md, Picture files)"
)


def parser() -> JobParser:
    """The command line."""
    job = JobParser("export", __doc__ or "", "export")
    add = job.add_argument
    text = "the run, finished or not; of several one model, the mean of their probabilities"
    add("--run", required=True, nargs="+", metavar="URL", help=text)
    add("--output", required=True, metavar="URL", help="directory of the model; must not exist")
    text = "last, best (by the run's --keep-best) or a step (default: best of a run with --keep-best, else last)"
    add("--checkpoint", type=which, metavar="last|best|STEP", help=text)
    text = "keras (default), or savedmodel, which TensorFlow loads without Keras and Lockstep; has the Keras file too"
    add("--format", choices=FORMATS, default="keras", help=text)
    job.add_code_flag()
    return job


def main(argv: Sequence[str]) -> int:
    """Write the model; returns the exit code."""
    args = parser().parse(argv)
    from lockstep.training.launch.local import run_local
    from lockstep.training.results.export_run import export_run

    check_runs("local", *args.run)
    done = export_run(args.run, args.output, run_local, checkpoint=args.checkpoint, form=args.format)
    print(f"{done.output}: the model of checkpoint {', '.join(map(str, (done.checkpoint, *done.others)))}")
    for column, reason in done.not_raw.items():
        print(f"no signature `raw`: column `{column}`: {reason}")
    if done.takes_pixels:
        print(PIXELS)
    return 0


if __name__ == "__main__":
    run_job(main)
