"""Fill this host's cache of a dataset before ranks train on it: `lockstep fill_cache --dataset URL --cache DIR`."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.jobs._cli import JobParser, run_job
from lockstep.storage.errors import require
from lockstep.storage.progress import Progress


def parser() -> JobParser:
    """The command line."""
    job = JobParser("fill_cache", __doc__ or "", "fill_cache")
    add = job.add_argument
    add("--dataset", required=True, nargs="+", metavar="URL", help="the datasets of a run")
    add("--split", default="train", metavar="NAME", help="the split (default train)")
    add("--where", metavar="CONDITION", help="the condition of the run: blocks without such a sample are left out")
    text = "the folder that the run's --cache names, on a disk of this host"
    add("--cache", required=True, metavar="DIR", help=text)
    text = "the most bytes that the folder keeps, over all runs that use it"
    add("--cache-bytes", required=True, type=int, metavar="N", help=text)
    job.epilog = "Run it on each host; again after an interruption: what is there is not fetched. exit 0, also if full"
    return job


def main(argv: Sequence[str]) -> int:
    """Fill the cache and print what it has of each dataset; returns the exit code."""
    args = parser().parse(argv)
    require(args.cache.startswith("/"), "--cache", args.cache, "an absolute path, as a run's --cache")
    from lockstep.features.condition import one_form
    from lockstep.training.plan.selection import Selection
    from lockstep.training.reading.open import OpenSplit, fill_cache
    from lockstep.training.reading.reader import ReadOptions
    from lockstep.training.reading.selecting import select

    options = ReadOptions(cache=args.cache, cache_bytes=args.cache_bytes)
    selection = None
    if args.where is not None:
        selection = select(Selection(one_form(args.where), {}), args.dataset, args.split.split(","))
    for url in args.dataset:
        split = OpenSplit.at(url, args.split, training=True, options=options, selection=selection)
        with Progress("fill", split.reader.table.num_blocks, "blocks") as progress:
            found = fill_cache(split, progress.update)
        why = "no room for more, a failing disk, or row groups that are not the blocks"
        state = "whole" if found.whole else f"not whole ({why}): the rest is read from the dataset"
        size = f"{found.added} blocks added ({found.added_bytes / 1e6:.1f} MB), {found.there} were there"
        print(f"{args.cache}: {args.split} of {url}: {size}; {state}", flush=True)
    return 0


if __name__ == "__main__":
    run_job(main)
