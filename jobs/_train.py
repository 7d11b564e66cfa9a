"""The command line of jobs.train: every field of TrainConfig has a flag."""

from __future__ import annotations

from argparse import Action, Namespace
from collections.abc import Collection
from typing import Any, get_args

from features.augment.parse import forms
from jobs._cli import JobParser
from training.block_fetch import READ_AHEAD_BYTES
from training.checkpoint_schedule import MEAN_TIME_BETWEEN_FAILURES_S
from training.comm.options import Algorithm, Backend
from training.config import CACHE_BYTES, BadImages, BatchNorm, NonFinite, Precision, ScalingRule, TrainConfig, Verify


def parser(description: str, job_name: str = "train", without: Collection[str] = ()) -> JobParser:
    """The command line of a job that trains, whose TOML table is its name; `without`: flags it has no use for."""
    job = JobParser(job_name, description, job_name)

    def add(flag: str, **options: Any) -> None:
        if flag not in without:
            job.add_argument(flag, **options)

    add(
        "--dataset",
        nargs="+",
        dest="datasets",
        required=True,
        metavar="URL",
        help="datasets to train on, in this order; several must fit together, as a dataset and its appends do",
    )
    add("--run", required=True, metavar="URL", help="directory of the run, local or hdfs://; an existing run goes on")
    add("--model", required=True, metavar="NAME", help="logistic | resnet20 | ... | module:function")
    add("--num-ranks", type=int, required=True, metavar="N", help="training processes")
    add("--global-batch", type=int, required=True, metavar="G", help="samples of one step over all ranks")
    add("--epochs", type=int, required=True, metavar="E", help="passes over the split, in all")
    add("--split", default="train", metavar="NAME", help="the split to train on (default train); folds: fold-1,fold-2")
    add(
        "--mix",
        type=int,
        nargs="+",
        metavar="R",
        help="a weight for each dataset, their shares of each batch; epochs are the first one's (default: end to end)",
    )
    add("--lanes", type=int, metavar="L", help="streams of samples; divides G (default: its largest divisor up to 64)")
    add("--window-bytes", type=int, default=8 << 20, metavar="N", help="shuffle window of all lanes (default 8 MiB)")
    add(
        "--interleave",
        type=int,
        default=1,
        metavar="B",
        help="places a lane reads at once, for sorted data (default 1)",
    )
    add("--cache-groups", type=int, metavar="C", help="of blocks that the same L / C lanes read each epoch, for caches")
    add("--cache-rotation", type=int, metavar="K", help="epochs after which cache groups are made anew (default never)")
    add(
        "--read-ahead-bytes",
        type=int,
        default=READ_AHEAD_BYTES,
        metavar="N",
        help="of shards that a rank fetches ahead (default 64 MiB)",
    )
    add("--cache", metavar="DIR", help="on each rank's host, for blocks that later epochs read again (default none)")
    add("--cache-bytes", type=int, default=CACHE_BYTES, metavar="N", help="the most that DIR holds (default 16 GiB)")
    add(
        "--verify",
        choices=get_args(Verify),
        default="start",
        help="full: every byte of the split by its digest, before the first step (default start: lengths and indexes)",
    )
    add("--bad-images", choices=get_args(BadImages), default="refuse", help="skip: weight 0 (default refuse)")
    add("--augment", nargs="+", action=Joined, default="", metavar="OP", help=f"of training images: {forms()}")
    add(
        "--batchnorm",
        choices=get_args(BatchNorm),
        default="ghost",
        help="ghost (up to 8 ranks) and sync (one message a layer): the same at any N (default ghost)",
    )
    add("--learning-rate", type=float, metavar="X", help="default: the model's own")
    add(
        "--learning-rate-scaling",
        choices=get_args(ScalingRule),
        default="none",
        help="of the rate with G / base batch (default none: docs/learning-rate.md)",
    )
    add("--base-batch", type=int, metavar="B", help="the global batch that the learning rate was found for")
    add("--warm-up-epochs", type=float, default=0.0, metavar="E", help="of the learning rate (default 0)")
    add("--micro-batches", type=int, default=1, metavar="K", help="parts of a rank's batch, added up (default 1)")
    add("--precision", choices=get_args(Precision), default="float32", help="default float32")
    add(
        "--init-from",
        metavar="URL",
        help="first weights: a run, a checkpoint, an exported model, a .keras, .weights.h5",
    )
    add("--seed", type=int, default=0, metavar="N", help="of samples' order and first weights (default 0)")
    add("--checkpoint-every", default=200, metavar="N|Ns|auto", help="steps (200), seconds (60s) or auto (default 200)")
    add(
        "--mean-time-between-failures",
        dest="mean_time_between_failures_s",
        type=float,
        default=MEAN_TIME_BETWEEN_FAILURES_S,
        metavar="S",
        help="of all ranks together, for --checkpoint-every auto (default 14400)",
    )
    add("--keep-checkpoints", type=int, default=3, metavar="K", help="newest checkpoints that stay (default 3)")
    add("--keep-every", type=int, metavar="M", help="one checkpoint for so many steps stays too")
    add("--keep-best", metavar="METRIC:max", help="the best of the epochs' ends stays too (:min or :max)")
    add(
        "--non-finite",
        choices=get_args(NonFinite),
        default="stop",
        help="what a loss or gradient that is no finite number does: stop (default) or skip the step on all ranks",
    )
    add("--canonical", action="store_true", help="the same weights, bit for bit, at 1, 2, 4, ... ranks; slower")
    add("--compare-every", type=int, default=100, metavar="N", help="steps between looks whether ranks agree (100)")
    add("--audit", action="store_true", help="list each sample that counts, in RUN/audit")
    add("--launcher", choices=["barrier", "local"], default="barrier", help="Spark barrier stage (default) | this host")
    add("--tls", choices=["on", "off"], default="off", help="encrypt between hosts (default off; docs/security.md)")
    add("--backend", choices=get_args(Backend), default="auto", help="of gradients (default auto); nccl: docs/gpu.md")
    add(
        "--algorithm", choices=get_args(Algorithm), default="auto", help="of all_reduce (default auto: docs/scaling.md)"
    )
    add("--trust-network", metavar="IFACE", help="may carry what cannot be authenticated: gRPC, NCCL")
    add("--master", metavar="URL", help="Spark master, such as local[2] (default: spark-submit's)")
    add(
        "--start-limit",
        dest="start_limit_s",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds for all ranks to start (300)",
    )
    add("--stall-limit", dest="stall_limit_s", type=float, default=600.0, metavar="S", help="without a step (600 s)")
    add("--take-over", action="store_true", help="replace a driver that is at work on this run (docs/control.md)")
    add("--max-restarts", type=int, default=3, metavar="N", help="in a row without a checkpoint (default 3)")
    add("--spare", action="store_true", help="a process a rank, TensorFlow imported, waits for a restart: 300 MB")
    return job


class Joined(Action):
    """Several words of a flag as one text."""

    def __call__(self, _parser: Any, namespace: Namespace, values: Any, _flag: str | None = None) -> None:
        setattr(namespace, self.dest, " ".join(values))


def config_of(args: Namespace) -> TrainConfig:
    """The configuration that the flags say; `take_over` is of this call alone, no property of the run."""
    return TrainConfig(**{k: v for k, v in vars(args).items() if k not in ("config", "debug", "master", "take_over")})
