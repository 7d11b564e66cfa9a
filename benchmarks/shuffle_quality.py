"""How well the plan shuffles data that is sorted in one shard, against a full shuffle and a shuffle buffer.

    python -m benchmarks.shuffle_quality [--data DIR] [--seeds N] [--epochs N] [--no-training]

Fashion-MNIST sorted by label, and a day of a web server's log in its order, by time; DIR has `fashion-mnist/` and
`weblogs/` (default: data/ of this repository). No data are read through the plan: it computes the order of the records,
and that order is measured. Block and window as on disk (blocks of 2 MiB, 8 MiB of windows), and both a 32nd, the
proportions of a dataset 32 times as large.

order    |rank correlation| of position in the epoch and sort key: 1 if sorted, 0 if shuffled (noise: 1 / sqrt(T) for T
         samples)
again    the same for a sample's positions in two epochs: 0 if the second epoch's order is independent
runs     mean length of runs of one label over that of a full shuffle
batch    distance (total variation) of a batch's label shares from those of all samples, mean over batches
32       the same over 32 batches together
accuracy of a small network (one hidden layer of 64; web log: logistic regression on hashed words) on held-out samples,
         mean and standard deviation over seeds
"""

from __future__ import annotations

import argparse
import gzip
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.shared.shapes import machine
from lockstep.training.plan.epoch_plan import EpochPlan

I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
Order = Callable[[int, int], I64]  # seed, epoch -> the records of the epoch in the order of training

GLOBAL_BATCH, BLOCK_BYTES, WINDOW_BYTES, SCALE = 64, 2 << 20, 8 << 20, 32
TOGETHER = 32


@dataclass(frozen=True, slots=True)
class Data:
    """A set in the order of its shard: x (n, d) float32, label (n,) int64, sort key (n,); bytes of a record on disk."""

    name: str
    x: F32
    label: I64
    key: npt.NDArray[np.float64]
    record_bytes: int
    test_x: F32
    test_label: I64
    hidden: int
    rate: float


def fashion(folder: Path) -> Data:
    """Fashion-MNIST, its training images sorted by label."""

    def read(name: str, head: int) -> npt.NDArray[np.uint8]:
        return np.frombuffer(gzip.decompress((folder / "fashion-mnist" / name).read_bytes())[head:], np.uint8)

    def pixels(name: str) -> F32:
        return (read(name, 16).reshape(-1, 784) / np.float32(255) - np.float32(0.29)).astype(np.float32)

    x, label = pixels("train-images-idx3-ubyte.gz"), read("train-labels-idx1-ubyte.gz", 8).astype(np.int64)
    order = np.argsort(label, kind="stable")
    test = pixels("t10k-images-idx3-ubyte.gz"), read("t10k-labels-idx1-ubyte.gz", 8).astype(np.int64)
    return Data("Fashion-MNIST by label", x[order], label[order], label[order].astype(float), 830, *test, 64, 0.1)


def weblog(folder: Path) -> Data:
    """The web log by time; the label is the third of the day, which words predict partly and order completely.

    Every fifth request is held out.
    """
    path = folder / "weblogs" / "nasa_access_log_1995-07-09.log.gz"
    lines = gzip.decompress(path.read_bytes()).decode("latin-1").splitlines()
    x = np.zeros((len(lines), 512), np.float32)
    for row, line in enumerate(lines):
        host, _, rest = line.partition(" ")
        words = [host, host.rpartition(".")[2], *rest.partition('"')[2].split()[:2], *rest.split()[-2:-1]]
        for number, word in enumerate(words):
            x[row, zlib.crc32(f"{number}{word}".encode()) % 512] += 1
    place = np.arange(len(lines))
    label = place * 3 // len(lines)
    held = place % 5 == 0
    kept = ~held
    size = round(sum(map(len, lines)) / len(lines)) + 60  # a tf.Example of it has its names besides
    return Data("web log by time", x[kept], label[kept], place[kept].astype(float), size, x[held], label[held], 0, 0.5)


def planned(
    data: Data, lanes: int, scale: int, cache_groups: int | None = None, interleave: int | None = None
) -> tuple[str, Order]:
    """The plan's order over one shard, and what it is called."""
    total = len(data.label)
    block = max(1, BLOCK_BYTES // data.record_bytes // scale)
    window = max(1, WINDOW_BYTES // data.record_bytes // scale // lanes)

    def order(seed: int, epoch: int) -> I64:
        plan = EpochPlan(
            dataset_digest="ab" * 32,
            split="train",
            shard_records=(total,),
            block_records=block,
            seed=seed,
            global_batch=GLOBAL_BATCH,
            lanes=lanes,
            window_records=window,
            cache_groups=cache_groups,
            interleave=interleave,
        )
        records = np.concatenate(
            [np.arange(r.first_record, r.first_record + r.count) for r in plan.runs(epoch, 0, total)]
        )
        first, last = plan.first_step(epoch), plan.first_step(epoch + 1)
        each = GLOBAL_BATCH // lanes
        by_lane = []
        for lane in range(lanes):
            start = max(first * each, plan.received(lane, epoch))
            stop = min(last * each, plan.received(lane, epoch + 1))
            places = [positions for _, positions in plan.lane_positions(lane, start, stop)]
            by_lane.append(records[np.concatenate(places)])
        steps = min(len(lane) for lane in by_lane) // each
        grid = np.stack([lane[: steps * each].reshape(steps, each) for lane in by_lane], axis=1)
        return grid.reshape(-1)  # (steps, lanes, each) -> (steps * G,)

    more = f", C {cache_groups}" if cache_groups else f", B {interleave}" if interleave else ""
    return f"plan, L {lanes}, W {window}, blocks of {block}{more}", order


def kept(cache_groups: int | None, nodes: int) -> list[float]:
    """The share of what a node reads in each of epochs 1..5 that it has read in the epoch before, mean over nodes."""
    plan = EpochPlan(
        dataset_digest="ab" * 32,
        split="train",
        shard_records=(6007,) * 10,
        block_records=100,
        seed=0,
        global_batch=64,
        lanes=64,
        window_records=50,
        cache_groups=cache_groups,
    )

    def records(epoch: int, node: int) -> set[int]:
        lanes = plan.rank_lanes(node, nodes)
        runs = plan.runs(epoch, plan.lane_span(epoch, lanes[0])[0], plan.lane_span(epoch, lanes[-1])[1])
        return {
            run.shard << 32 | record for run in runs for record in range(run.first_record, run.first_record + run.count)
        }

    of_node = [[records(epoch, node) for node in range(nodes)] for epoch in range(6)]
    pairs = [zip(before, after, strict=True) for before, after in pairwise(of_node)]
    return [float(np.mean([len(old & new) / len(new) for old, new in pair])) for pair in pairs]


def buffered(data: Data, scale: int) -> tuple[str, Order]:
    """tf.data's shuffle: a buffer of as many records as all windows together, from which one is drawn each time."""
    total, size = len(data.label), WINDOW_BYTES // data.record_bytes // scale

    def order(seed: int, epoch: int) -> I64:
        rng = np.random.default_rng([seed, epoch])
        held, found = np.arange(min(size, total)), np.empty(total, np.int64)
        picks = rng.random(total)
        for n in range(total):
            left = min(size, total - n)
            pick = int(picks[n] * left)
            found[n] = held[pick]
            held[pick] = n + size if n + size < total else held[left - 1]
        return found

    return f"buffer of {size}", order


def mean_ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Ranks, those of equal values averaged."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def correlation(keys: npt.NDArray[np.float64]) -> float:
    """|Spearman's rank correlation| of keys and their places."""
    return float(abs(np.corrcoef(np.arange(len(keys)), mean_ranks(keys))[0, 1]))


def distance(labels: I64, shares: npt.NDArray[np.float64], rows: int) -> float:
    """Mean total variation of the shares in `rows` samples at a time from those of all."""
    whole = labels[: len(labels) // rows * rows].reshape(-1, rows)
    found = np.stack([(whole == label).mean(axis=1) for label in range(len(shares))], axis=1)
    return float(np.abs(found - shares).sum(axis=1).mean() / 2)


def quality(data: Data, order: Order) -> list[float]:
    """order, again, runs, batch, 32: means over three seeds of epoch 0."""
    shares = np.bincount(data.label) / len(data.label)
    rows = []
    for seed in range(3):
        first, second = order(seed, 0), order(seed, 1)
        labels = data.label[first]
        places = np.full(len(data.label), -1.0)
        places[second] = np.arange(len(second))
        both = places[first]
        expected = 1 + (len(labels) - 1) * (1 - (shares**2).sum())
        runs = expected / (1 + np.count_nonzero(np.diff(labels)))
        near, far = (distance(labels, shares, GLOBAL_BATCH * count) for count in (1, TOGETHER))
        rows.append([correlation(data.key[first]), correlation(both[both >= 0]), runs, near, far])
    return np.mean(rows, axis=0).tolist()


def accuracy(data: Data, order: Order, seed: int, epochs: int) -> float:
    """Share of held-out samples that are right after `epochs` of SGD with momentum, the rate falling to nothing."""
    rng = np.random.default_rng(seed)
    classes = int(data.label.max()) + 1
    sizes = [data.x.shape[1], *([data.hidden] if data.hidden else []), classes]
    weights = [(rng.standard_normal(s) * (2 / s[0]) ** 0.5).astype(np.float32) for s in pairwise(sizes)]
    params = [*weights, *(np.zeros(size, np.float32) for size in sizes[1:])]
    speed = [np.zeros_like(value) for value in params]
    depth, orders = len(weights), [order(seed, epoch) for epoch in range(epochs)]
    records = np.concatenate([one[: len(one) // GLOBAL_BATCH * GLOBAL_BATCH] for one in orders]).reshape(
        -1, GLOBAL_BATCH
    )
    for step, rows in enumerate(records):
        layers = [data.x[rows]]
        for i in range(depth):
            layers.append(layers[-1] @ params[i] + params[depth + i])
            if i < depth - 1:
                layers[-1] = np.maximum(layers[-1], 0)
        grad = np.exp(layers[-1] - layers[-1].max(axis=1, keepdims=True))
        grad /= grad.sum(axis=1, keepdims=True)
        grad[np.arange(GLOBAL_BATCH), data.label[rows]] -= 1
        grad /= GLOBAL_BATCH
        rate = data.rate * (1 - step / len(records)) / 2
        for i in range(depth - 1, -1, -1):
            own = [layers[i].T @ grad, grad.sum(axis=0)]
            if i:
                grad = (grad @ params[i].T) * (layers[i] > 0)
            for place, value in zip((i, depth + i), own, strict=True):
                speed[place] = 0.9 * speed[place] - rate * value
                params[place] += speed[place]
    scores = data.test_x
    for i in range(depth):
        scores = scores @ params[i] + params[depth + i]
        scores = np.maximum(scores, 0) if i < depth - 1 else scores
    return float((scores.argmax(axis=1) == data.test_label).mean())


def orders_of(data: Data) -> list[tuple[str, Order]]:
    """What is compared on a set."""
    total = len(data.label)
    found: list[tuple[str, Order]] = [
        ("full shuffle", lambda seed, epoch: np.random.default_rng([seed, epoch, 7]).permutation(total)),
        ("as stored", lambda seed, epoch: np.arange(total)),
    ]
    for scale in (1, SCALE):
        found.append(buffered(data, scale))
        found += [planned(data, lanes, scale) for lanes in (64, 16, 4, 1)]
        found += [planned(data, lanes, scale, interleave=64 // lanes) for lanes in (16, 4, 1)]
        found += [planned(data, 64, scale, interleave=4)]
        found += [planned(data, 64, scale, groups) for groups in (2, 8)]
    return found


def main(argv: list[str]) -> int:
    """Print a table for each set; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parent.parent / "data")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--no-training", action="store_true")
    args = parser.parse_args(argv)
    print(f"{machine('numpy')}; batches of {GLOBAL_BATCH}, {args.epochs} epochs, {args.seeds} seeds")
    for data in (fashion(args.data), weblog(args.data)):
        print(f"\n{data.name}: {len(data.label)} samples, {len(data.test_label)} held out")
        print(f"{'':<43}{'order':>8}{'again':>8}{'runs':>8}{'batch':>8}{TOGETHER:>8}  accuracy")
        for name, order in orders_of(data):
            cells = "".join(f"{value:>8.3f}" for value in quality(data, order))
            accuracy_text = ""
            if not args.no_training:
                found = [accuracy(data, order, seed, args.epochs) for seed in range(args.seeds)]
                accuracy_text = f"  {100 * np.mean(found):.2f} +- {100 * np.std(found, ddof=1):.2f} %"
            print(f"{name:<43}{cells}{accuracy_text}", flush=True)
    print(
        "\nof what a node reads, it has read so much in the epoch before: epochs 1, 2, ... of 60,070 records, 64 lanes"
    )
    for nodes in (8, 4):
        for groups in (None, 8):
            cells = "".join(f"{share:>8.3f}" for share in kept(groups, nodes))
            print(f"{f'{nodes} nodes, C {groups}':<43}{cells}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
