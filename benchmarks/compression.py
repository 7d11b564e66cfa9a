"""Gradients in fewer bytes: the exchange of six dense layers of 2,048 between hosts by each method, and what it costs
in accuracy.

    python -m benchmarks.compression links [--mbit 100 1000 10000] [--hosts 2] [--steps 3] [--methods ...]    (as root)
        [--torch PYTHON]
    python -m benchmarks.compression accuracy DATASET FOLDER [--model mlp] [--epochs 3] [--methods ...] [--seeds 0 1 2]

links: hosts are network namespaces of this machine (tests/network/hosts.py) with one rank each and no compute: seconds
from the first posted gradient to the sums, of the slowest rank, median of the steps; bytes that a rank sends in a step,
headers included. With --torch, PyTorch's communication hooks on the same hosts after them; their steps have a forward
and a backward pass of one row, whose seconds are printed too. accuracy: runs of two local ranks on DATASET, scored on
its test split: mean over seeds and range. For `dgc`, which takes SGD without Nesterov: --model resnet8
--flags "--set nesterov=false", or --model benchmarks.compression:sgd_mlp.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.exchange_namespaces import SPECS
from benchmarks.shared.step_worker import KEY, Control, hear, say
from benchmarks.train_step import ROOT
from lockstep.training.comm import connect
from lockstep.training.compression.method import Compression
from lockstep.training.exchange.agreement import CONTROL_WORDS
from lockstep.training.exchange.buckets import lay_out
from lockstep.training.exchange.exchange import Exchange
from lockstep.training.run.metrics import read_history
from lockstep.training.world import World
from tests.network.hosts import Hosts, why_not

METHODS = ("none", "bf16", "fp16", "int8", "1bit", "qsgd:4", "terngrad", "topk:1%", "dgc:0.1%", "powersgd:2")
HOOKS, PEER_PORT = ("", "none", "fp16", "bf16", "powersgd:2"), 29500


def work(rank: int, num_ranks: int) -> None:
    """One rank: answers {"steps": n, "method": m} by [seconds, bytes sent] of each step."""
    control = Control(os.environ["BENCHMARK_HOSTS"].split(",")[rank])
    comm = connect(World(rank, num_ranks, 0, 1, 1), control, KEY, 60.0, 300.0)
    rng = np.random.default_rng(rank)
    gradients = [rng.standard_normal(shape, dtype=np.float32) for shape, _ in SPECS]
    say("ready")
    while True:
        asked = hear()
        exchange = Exchange(comm, compression=Compression.parse(asked["method"]))
        layout = lay_out(SPECS, [], CONTROL_WORDS, apart=True)
        exchange.use(layout, [str(number) for number in range(len(SPECS))])
        found: list[list[float]] = []
        for _ in range(asked["steps"] + 1):
            comm.barrier()
            began, sent = time.monotonic(), comm.sent_bytes
            for bucket in range(layout.first_tail):
                exchange.post(bucket, *(gradients[number] for number in layout.posted(bucket)))
            exchange.finish(np.zeros((), np.float32))
            found.append([time.monotonic() - began, comm.sent_bytes - sent])
        exchange.close()
        say(found[1:])  # the first one compiles and allocates


def links(args: argparse.Namespace) -> None:
    """Measure each method over each link, and print."""
    if (reason := why_not()) is not None:
        raise SystemExit(f"not measured: {reason}")
    print(f"{args.hosts} hosts, {args.steps} steps, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}, ", end="")
    print(f"Python {platform.python_version()}, NumPy {np.__version__}")
    print(f"{'Mbit/s':>8}  {'method':<12}{'s':>8}  {'times':>6}  {'MB a rank':>10}  {'fewer':>7}")
    for mbit in args.mbit:
        with Hosts(args.hosts, rate_bits_s=mbit * 10**6) as hosts:
            command = [sys.executable, "-m", "benchmarks.compression", "rank", f"--hosts={args.hosts}"]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
            env = os.environ | {"BENCHMARK_HOSTS": ",".join(hosts.addresses)}
            ranks = [hosts.popen(rank, [*command, f"--rank={rank}"], env=env, **pipes) for rank in range(args.hosts)]
            _send(ranks, [_answer(rank) for rank in ranks])
            assert [_answer(rank) for rank in ranks] == ["ready"] * args.hosts
            _measure(args, mbit, "", args.methods, ranks)
            if args.torch:
                peer = [args.torch, "benchmarks/peers/hooks_torch.py"]
                where = [str(args.hosts), hosts.addresses[0], str(PEER_PORT)]
                ranks = [hosts.popen(rank, [*peer, str(rank), *where], **pipes) for rank in range(args.hosts)]
                version = {_answer(rank) for rank in ranks}.pop()
                _measure(args, mbit, f"torch {version} ", HOOKS, ranks)


def _measure(
    args: argparse.Namespace, mbit: int, whose: str, methods: Sequence[str], ranks: list[subprocess.Popen[str]]
) -> None:
    """Print seconds and bytes of a step by each method, also as parts of the first one's."""
    whole: tuple[float, float] | None = None
    for method in methods:
        _send(ranks, {"method": method, "steps": args.steps})
        steps = list(zip(*[_answer(rank) for rank in ranks], strict=True))
        seconds = statistics.median(max(taken for taken, _ in step) for step in steps)
        sent = statistics.median(max(count for _, count in step) for step in steps)
        if not method:
            print(f"{mbit:>8}  {whose}passes alone: {seconds:.3f} s", flush=True)
            continue
        whole = whole or (seconds, sent)
        row = f"{mbit:>8}  {whose + method:<12}{seconds:>8.3f}  {whole[0] / seconds:>6.2f}  {sent / 1e6:>10.3f}"
        print(f"{row}  {whole[1] / sent:>7.1f}", flush=True)


def accuracy(args: argparse.Namespace) -> None:
    """Train with each method and seed, score, and print."""
    print(f"{args.dataset.rstrip('/').split('/')[-1]}, {args.model}, {args.epochs} epochs, batches of {args.batch}")
    for method in args.methods:
        scores: list[dict[str, float]] = []
        for seed in args.seeds:
            run = f"{args.folder}/{args.model.rpartition(':')[2]}-{method.replace(':', '-').replace('%', '')}-{seed}"
            words = ["--dataset", args.dataset, "--run", run, "--model", args.model, "--epochs", str(args.epochs)]
            words += ["--num-ranks", "2", "--launcher", "local", "--global-batch", str(args.batch)]
            words += ["--seed", str(seed), "--compression", method, "--validate", "test"]
            words += ["--validate-every", str(args.epochs), *args.flags]
            subprocess.run(
                [sys.executable, "-m", "lockstep.jobs.train", *words], cwd=ROOT, check=True, capture_output=True
            )
            scores.append(read_history(run).epochs[-1]["metrics"])
        columns = []
        for name in args.metrics:
            values = [score[name] for score in scores]
            columns.append(f"{name} {statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})")
        print(f"{method:<12}{'  '.join(columns)}", flush=True)


def sgd_mlp(signature: Any, options: Any) -> Any:
    """`mlp` with SGD and momentum in place of Adam."""
    import keras

    from lockstep.training.models.mlp import mlp

    model = mlp(signature, options)
    model.optimizer = keras.optimizers.SGD(options.learning_rate or 0.1, momentum=0.9)
    return model


def _send(ranks: list[subprocess.Popen[str]], document: object) -> None:
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(json.dumps(document) + "\n")
        rank.stdin.flush()


def _answer(rank: subprocess.Popen[str]) -> Any:
    assert rank.stdout is not None
    return json.loads(rank.stdout.readline())


def main() -> None:
    """Parse, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    of_links, of_rank, of_runs = kinds.add_parser("links"), kinds.add_parser("rank"), kinds.add_parser("accuracy")
    for one in (of_links, of_rank):
        one.add_argument("--hosts", type=int, default=2)
    of_rank.add_argument("--rank", type=int, required=True)
    of_links.add_argument("--mbit", type=int, nargs="+", default=[100, 1000, 10000])
    of_links.add_argument("--steps", type=int, default=3)
    of_links.add_argument("--torch", help="a Python with PyTorch: measure its communication hooks, too")
    of_runs.add_argument("dataset")
    of_runs.add_argument("folder")
    of_runs.add_argument("--model", default="mlp")
    of_runs.add_argument("--epochs", type=int, default=3)
    of_runs.add_argument("--batch", type=int, default=128)
    of_runs.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    of_runs.add_argument("--metrics", nargs="+", default=["val_loss", "val_accuracy"])
    of_runs.add_argument("--flags", type=shlex.split, default=[], help="more flags of lockstep train, as one text")
    for one in (of_links, of_runs):
        one.add_argument("--methods", nargs="+", default=list(METHODS))
    args = parser.parse_args()
    if args.kind == "rank":
        work(args.rank, args.hosts)
    elif args.kind == "links":
        links(args)
    else:
        accuracy(args)


if __name__ == "__main__":
    main()
