"""Print what a model holds on each rank, sends and takes for a step, by how ranks divide it, and where it fits.

The model is given by its numbers (--parameters, and of a transformer its shape), or built and measured (--model,
--dataset).
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.jobs._cli import JobParser, print_result, refuse_idle, run_job, size
from lockstep.jobs._train import Settings, setting
from lockstep.storage.errors import require

DEFAULT_BYTES, DEFAULT_ROWS, DEFAULT_LATENCY_S = 16 << 30, 32, 5e-5
SHAPE = ("layers", "hidden", "heads", "sequence", "rows")
IDLE_WITH_MODEL, IDLE_WITHOUT = (*SHAPE[:-1], "optimizer"), ("dataset", "extra", "lora_rank")
NAMED = {"extra": "set", "lora_rank": "lora-rank"}


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
    from lockstep.training.comm.cost import LinkCosts
    from lockstep.training.driver.dry_run import measured_size
    from lockstep.training.driver.memory_plan import Size, Transformer, advice, memory_plan, table

    built, numbers = args.model is not None, args.parameters is not None
    got = "both of them" if built else "none of them"
    require(built != numbers, "the size of a model", got, "one of --parameters and --model")
    for name in IDLE_WITH_MODEL if built else IDLE_WITHOUT:
        refuse_idle(f"--{NAMED.get(name, name)}", bool(getattr(args, name)), "--parameters" if built else "--model")
    if built:
        require(args.dataset is not None, "--model", f"{args.model} without --dataset", "both")
        rows, step_s = args.rows or DEFAULT_ROWS, args.step_seconds
        model = measured_size(args.dataset, args.model, args.extra, rows, lora_rank=args.lora_rank, step_s=step_s)
    else:
        given = {name: getattr(args, name) for name in SHAPE if getattr(args, name) is not None}
        flags = " ".join(f"--{name}" for name in SHAPE)
        require(len(given) in (0, len(SHAPE)), "the shape of a transformer", f"only --{' --'.join(given)}", flags)
        shape = Transformer(**given) if given else None
        model = Size.of(args.parameters, args.optimizer or "adam", shape, step_s=args.step_seconds)
    links = None
    if args.bandwidth is not None:
        require(args.bandwidth > 0, "--bandwidth", f"{args.bandwidth}", "bytes a second above 0")
        links = LinkCosts(alpha_s=args.latency, beta_s_per_byte=1 / args.bandwidth, gamma_s_per_byte=0.0)
    rows = memory_plan(model, args.num_ranks, args.memory, links)
    missing = "" if all(row["runs"] for row in rows) else "* not in Lockstep\n"
    print_result(f"{table(rows)}\n{missing}{advice(rows, args.memory)}", rows, args.json)
    return 0


if __name__ == "__main__":
    run_job(main)
