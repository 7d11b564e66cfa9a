"""Say what a model of so many parameters holds on each rank, by how ranks divide it, and on how many ranks it fits.

Of a model of yours, `lockstep train --dry-run` says it.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.jobs._cli import JobParser, print_result, run_job, size
from lockstep.storage.errors import require

DEFAULT_BYTES = 16 << 30
SHAPE = ("layers", "hidden", "heads", "sequence", "rows")


def parser() -> JobParser:
    """The command line."""
    job = JobParser("plan_memory", __doc__ or "", "plan_memory")
    add = job.add_argument
    add("--parameters", type=float, required=True, metavar="N", help="trained parameters, in float32: 7e9, 1.7e12")
    text = "sgd, momentum, adagrad, rmsprop, lion, adam, adamw or nadam: 0, 1 or 2 numbers a parameter (default adam)"
    add("--optimizer", default="adam", metavar="NAME", help=text)
    text = "numbers of ranks to compare (default 1 2 4 8)"
    add("--num-ranks", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help=text)
    add("--memory", type=size, default=DEFAULT_BYTES, metavar="SIZE", help="of a rank, as 80G (default 16G)")
    text = "of a transformer, for what its layers keep for the backward pass; give all of these or none"
    add("--layers", type=int, metavar="L", help=text)
    add("--hidden", type=int, metavar="H", help="numbers a token")
    add("--heads", type=int, metavar="A", help="attention heads of a layer")
    add("--sequence", type=int, metavar="S", help="tokens of a row")
    add("--rows", type=int, metavar="ROWS", help="rows of a rank's step, or of a pipeline's micro-batch")
    job.add_json_flag()
    return job


def main(argv: Sequence[str]) -> int:
    """Print the table; returns the exit code."""
    args = parser().parse(argv)
    from lockstep.training.driver.memory_plan import Size, Transformer, advice, memory_plan, table

    given = {name: getattr(args, name) for name in SHAPE if getattr(args, name) is not None}
    flags = " ".join(f"--{name}" for name in SHAPE)
    require(len(given) in (0, len(SHAPE)), "the shape of a transformer", f"only --{' --'.join(given)}", flags)
    model = Size.of(args.parameters, args.optimizer, Transformer(**given) if given else None)
    rows = memory_plan(model, args.num_ranks, args.memory)
    text = f"{table(rows)}\n* not in Lockstep\n{advice(rows, args.memory)}"
    print_result(text, rows, args.json)
    return 0


if __name__ == "__main__":
    run_job(main)
