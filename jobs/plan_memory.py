"""Print what a model holds on each rank, sends and takes for a step, by how ranks divide it, and where it fits.

The model is given by its numbers (--parameters, and of a transformer its shape), or built and measured (--model,
--dataset).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lockstep.jobs._cli import JobParser, print_result, refuse_idle, run_job, size
from lockstep.jobs._train import Settings, setting
from lockstep.storage.errors import require

if TYPE_CHECKING:
    from lockstep.training.comm.cost import LinkCosts
    from lockstep.training.driver.memory_plan import Size

DEFAULT_BYTES, DEFAULT_ROWS, DEFAULT_LATENCY_S = 16 << 30, 32, 5e-5
SHAPE = ("layers", "hidden", "heads", "sequence", "rows")


def parser() -> JobParser:
    """The command line."""
    job = JobParser("plan_memory", __doc__ or "", "plan_memory")
    job.add_code_flag()
    add = job.add_argument
    add("--parameters", type=float, metavar="N", help="trained parameters, in float32: 7e9, 1.7e12")
    text = "sgd, momentum, adagrad, rmsprop, lion, adam, adamw or nadam: 0, 1 or 2 numbers a parameter (default adam)"
    add("--optimizer", metavar="NAME", help=text)
    add("--model", metavar="NAME", help="build this model instead, measure it, and time its step on this host")
    add("--dataset", metavar="URL", help="the dataset whose columns --model takes")
    text = "settings of --model, such as width=1024 layers=8"
    add("--set", dest="extra", nargs="+", type=setting, action=Settings, default={}, metavar="NAME=VALUE", help=text)
    add("--lora-rank", type=int, default=0, metavar="R", help="as in lockstep train, with --model")
    text = "numbers of ranks to compare (default 1 2 4 8)"
    add("--num-ranks", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help=text)
    add("--memory", type=size, default=DEFAULT_BYTES, metavar="SIZE", help="of a rank, as 80G (default 16G)")
    text = "of a transformer, for what its layers keep for the backward pass; give all of these or none"
    add("--layers", type=int, metavar="L", help=text)
    add("--hidden", type=int, metavar="H", help="numbers a token")
    add("--heads", type=int, metavar="A", help="attention heads of a layer")
    add("--sequence", type=int, metavar="S", help="tokens of a row")
    text = f"rows of a rank's step, or of a micro-batch (default with --model {DEFAULT_ROWS})"
    add("--rows", type=int, metavar="ROWS", help=text)
    add("--step-seconds", type=float, metavar="S", help="what one rank computes for a step of its rows, if known")
    add("--bandwidth", type=size, metavar="SIZE", help="bytes a second between ranks, as 1G: for the seconds of a step")
    text = f"seconds a message, with --bandwidth (default {DEFAULT_LATENCY_S:g})"
    add("--latency", type=float, default=DEFAULT_LATENCY_S, metavar="S", help=text)
    job.add_json_flag()
    return job


def main(argv: Sequence[str]) -> int:
    """Print the table; returns the exit code."""
    args = parser().parse(argv)
    from lockstep.training.driver.memory_plan import advice, memory_plan, table

    one = (args.parameters is None) != (args.model is None)
    require(one, "the size of a model", f"{args.parameters=}, {args.model=}", "one of --parameters and --model")
    measured = measured_size(args) if args.model is not None else size_by_numbers(args)
    rows = memory_plan(measured, args.num_ranks, args.memory, links_of(args))
    missing = "" if all(row["runs"] for row in rows) else "* not in Lockstep\n"
    print_result(f"{table(rows)}\n{missing}{advice(rows, args.memory)}", rows, args.json)
    return 0


def size_by_numbers(args: Namespace) -> Size:
    """The size of a model of --parameters."""
    from dataclasses import replace

    from lockstep.training.driver.memory_plan import Size, Transformer

    for name in ("dataset", "extra", "lora_rank"):
        refuse_idle(f"--{name.replace('_', '-').replace('extra', 'set')}", bool(getattr(args, name)), "--model")
    given = {name: getattr(args, name) for name in SHAPE if getattr(args, name) is not None}
    flags = " ".join(f"--{name}" for name in SHAPE)
    require(len(given) in (0, len(SHAPE)), "the shape of a transformer", f"only --{' --'.join(given)}", flags)
    found = Size.of(args.parameters, args.optimizer or "adam", Transformer(**given) if given else None)
    return replace(found, step_s=args.step_seconds)


def measured_size(args: Namespace) -> Size:
    """The size of --model, built for --dataset as a rank of a run would, and the seconds of its step."""
    from dataclasses import replace

    from lockstep.training.config import TrainConfig
    from lockstep.training.driver.dry_run import model_size, size_of
    from lockstep.training.driver.memory_plan import Transformer
    from lockstep.training.driver.preflight import open_and_plan
    from lockstep.training.models import check_name
    from lockstep.training.models.ready import settings_of

    require(args.dataset is not None, "--model", f"{args.model} without --dataset", "both")
    for name in (*SHAPE[:-1], "optimizer"):
        refuse_idle(f"--{name}", getattr(args, name) is not None, "--parameters")
    check_name(args.model, args.extra)
    rows = args.rows or DEFAULT_ROWS
    options: dict[str, Any] = {"extra": args.extra, "lora_rank": args.lora_rank, "batchnorm": "local"}
    config = TrainConfig(
        datasets=args.dataset, run="unused", model=args.model, num_ranks=1, global_batch=rows, epochs=rows, **options
    )
    _, encoder, plan = open_and_plan(config, None)
    found = model_size(config, plan, rows, timed=args.step_seconds is None)
    shape = None
    if args.model == "transformer":
        chosen = settings_of(args.model, args.extra)
        ids = [one.shape for one in encoder.signature.features.values() if one.dtype == "int64" and one.shape != (1,)]
        shape = Transformer(
            layers=chosen["layers"], hidden=chosen["width"], heads=chosen["heads"], sequence=ids[0][0], rows=rows
        )
    measured = size_of(found, shape)
    return measured if args.step_seconds is None else replace(measured, step_s=args.step_seconds)


def links_of(args: Namespace) -> LinkCosts | None:
    """The costs of --bandwidth and --latency; None without them."""
    from lockstep.training.comm.cost import LinkCosts

    if args.bandwidth is None:
        return None
    require(args.bandwidth > 0, "--bandwidth", f"{args.bandwidth}", "bytes a second above 0")
    return LinkCosts(alpha_s=args.latency, beta_s_per_byte=1 / args.bandwidth, gamma_s_per_byte=0.0)


if __name__ == "__main__":
    run_job(main)
