"""The command line of jobs.train: every field of TrainConfig has a flag."""

from __future__ import annotations

from argparse import SUPPRESS, Action, Namespace
from collections.abc import Callable, Collection
from typing import Any, get_args

from jobs._cli import JobParser, check_master, joined, refuse_idle
from lockstep.features.images.augment import forms
from training.comm.options import Algorithm, Backend
from training.config import (
    AUTO,
    READ_AHEAD_BYTES,
    BadImages,
    BatchNorm,
    NonFinite,
    Precision,
    ScalingRule,
    TrainConfig,
    Verify,
)


def parser(description: str, job_name: str = "train", without: Collection[str] = ()) -> JobParser:
    """The command line of a job that trains, whose TOML table is its name; `without`: flags it has no use for."""
    job = JobParser(job_name, description, job_name)

    def under(title: str) -> Callable[..., None]:
        """Adds flags below a title of --help."""
        group = job.add_argument_group(title)

        def add(flag: str, **options: Any) -> None:
            if flag not in without:
                group.add_argument(flag, **options)

        return add

    add = under("what is trained on what")
    add(
        "--dataset",
        nargs="+",
        dest="datasets",
        required=True,
        metavar="URL",
        help="datasets to train on, in this order; several must fit together, as a dataset and its appends do",
    )
    add("--run", required=True, metavar="URL", help="directory of the run, local or hdfs://; an existing run goes on")
    add("--model", required=True, metavar="NAME", help="logistic | resnet8, resnet14, resnet20, ... | module:function")
    add("--num-ranks", type=int, required=True, metavar="N", help="how many training processes")
    add("--global-batch", type=int, required=True, metavar="G", help="samples of one step over all ranks")
    add("--epochs", type=int, required=True, metavar="E", help="passes over the split, in all")
    add(
        "--split",
        type=joined,
        default="train",
        metavar="NAME",
        help="the split to train on (default train); folds: fold-1,fold-2",
    )
    add(
        "--mix",
        type=int,
        nargs="+",
        metavar="R",
        help="each dataset's share of every batch, such as 3 1; epochs are those of the first (default: end to end)",
    )
    add(
        "--init-from",
        metavar="URL",
        help="first weights of a new run: of a run, a checkpoint, an exported model, a .keras or .weights.h5 file",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the samples' order and the first weights (default 0)")
    add = under("order of samples (docs/batches.md)")
    add("--lanes", type=int, metavar="L", help="streams of samples; divides G (default: its largest divisor up to 64)")
    add(
        "--window-bytes",
        type=int,
        default=8 << 20,
        metavar="N",
        help="memory in which samples are shuffled (default 8 MiB)",
    )
    add(
        "--interleave",
        type=int,
        default=1,
        metavar="B",
        help="in how many places a lane reads at once, for sorted data: 64 / L (default 1)",
    )
    add(
        "--cache-groups",
        type=int,
        metavar="C",
        help="with --cache, the number of nodes: each reads the same blocks in every epoch (default: no groups)",
    )
    add("--cache-rotation", type=int, metavar="K", help="deal blocks to groups anew every K epochs (default: never)")
    add = under("reading (docs/performance.md, docs/batches.md)")
    add(
        "--read-ahead-bytes",
        type=int,
        default=READ_AHEAD_BYTES,
        metavar="N",
        help="how many bytes a rank fetches ahead of their use, at most (default 64 MiB)",
    )
    add(
        "--cache",
        metavar="DIR",
        help="a folder on each rank's host that keeps blocks for later epochs and runs (default: none)",
    )
    add("--cache-bytes", type=int, default=SUPPRESS, metavar="N", help="the most that DIR holds (default 16 GiB)")
    add(
        "--verify",
        choices=get_args(Verify),
        default="start",
        help="before the first step: start, lengths and indexes (default), or full, every byte by its digest",
    )
    add(
        "--bad-images",
        choices=get_args(BadImages),
        default="refuse",
        help="an image that cannot be decoded: ends the run (default) or counts with weight 0",
    )
    add("--augment", nargs="+", action=Joined, default="", metavar="OP", help=f"change training images: {forms()}")
    add = under("a step (docs/models.md)")
    add(
        "--batchnorm",
        choices=get_args(BatchNorm),
        default="ghost",
        help="statistics over an eighth of the batch (ghost, default), all of it (sync) or a rank's part (local)",
    )
    add("--learning-rate", type=float, metavar="X", help="default: the model's own")
    add(
        "--learning-rate-scaling",
        choices=get_args(ScalingRule),
        default="none",
        help="how the learning rate grows with G / --base-batch (default none)",
    )
    add("--base-batch", type=int, metavar="B", help="the global batch that the learning rate was found for")
    add(
        "--warm-up-epochs",
        type=float,
        default=0.0,
        metavar="E",
        help="epochs in which the learning rate rises to its value (default 0)",
    )
    add(
        "--micro-batches",
        type=int,
        default=1,
        metavar="K",
        help="parts in which a rank computes its batch, for less memory (default 1)",
    )
    add("--precision", choices=get_args(Precision), default="float32", help="default float32")
    add = under("checkpoints (docs/guarantees.md)")
    add(
        "--checkpoint-every",
        default=200,
        metavar="N|Ns|auto",
        help="so many steps (default 200), seconds (60s), or auto: as often as pays",
    )
    add(
        "--mean-time-between-failures",
        dest="mean_time_between_failures_s",
        type=float,
        default=SUPPRESS,
        metavar="S",
        help="seconds, of all ranks together: what auto reckons with (default 14400)",
    )
    add("--keep-checkpoints", type=int, default=3, metavar="K", help="the newest K stay (default 3)")
    add("--keep-every", type=int, metavar="M", help="the first at or after each multiple of M steps stays too")
    add(
        "--keep-best",
        metavar="METRIC:max",
        help="of those at epochs' ends the best stays too; METRIC:max or METRIC:min",
    )
    add = under("exactly once (docs/guarantees.md)")
    add(
        "--non-finite",
        choices=get_args(NonFinite),
        default="stop",
        help="a loss or gradient that is not finite: stop the run (default) or skip the step, on all ranks",
    )
    add("--canonical", action="store_true", help="the same weights, bit for bit, at 1, 2, 4, ... ranks; slower")
    add(
        "--compare-every",
        type=int,
        default=100,
        metavar="N",
        help="compare the ranks' weights every N steps (default 100)",
    )
    add("--audit", action="store_true", help="list each sample that counts, in RUN/audit")
    add = under("ranks and how they talk (docs/performance.md, docs/security.md)")
    add("--launcher", choices=["barrier", "local"], default="barrier", help="Spark barrier stage (default) | this host")
    add("--tls", choices=["on", "off"], default="off", help="encrypt what leaves a host (default off)")
    add(
        "--backend",
        choices=get_args(Backend),
        default="auto",
        help="what carries gradients (default auto); nccl: docs/gpu.md",
    )
    add("--algorithm", choices=get_args(Algorithm), default="auto", help="how gradients are added (default: measured)")
    add(
        "--trust-network",
        metavar="IFACE",
        help="the interface that may carry what cannot be authenticated (tensorflow, nccl)",
    )
    add("--master", metavar="URL", help="Spark master, such as local[2] (default: spark-submit's)")
    add = under("limits and restarts (docs/operations.md)")
    add(
        "--start-limit",
        dest="start_limit_s",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds for all ranks to start (300)",
    )
    add(
        "--stall-limit",
        dest="stall_limit_s",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds without a step after which ranks are ended and started again (600)",
    )
    add(
        "--heartbeat-limit",
        dest="heartbeat_limit_s",
        type=float,
        metavar="S",
        help="seconds of silence after which a rank is lost (10); more where hosts pause or swap",
    )
    add("--take-over", action="store_true", help="replace a driver that is at work on this run")
    add(
        "--max-restarts",
        type=int,
        default=3,
        metavar="N",
        help="failures in a row without a new checkpoint (default 3)",
    )
    add(
        "--max-restarts-per-hour",
        type=int,
        default=20,
        metavar="N",
        help="failures within an hour, new checkpoints or not (default 20)",
    )
    add(
        "--spare",
        action="store_true",
        help="restart faster: beside each rank a process that has imported TensorFlow waits (300 MB)",
    )
    return job


class Joined(Action):
    """Several words of a flag as one text."""

    def __call__(self, _parser: Any, namespace: Namespace, values: Any, _flag: str | None = None) -> None:
        setattr(namespace, self.dest, " ".join(values))


def config_of(args: Namespace) -> TrainConfig:
    """The configuration that the flags say; `take_over` is of this call alone, no property of the run.

    Raises ConfigError for what cannot be right, and for a flag that does nothing without another one.
    """
    # Asked of flags and not of TrainConfig: a stored run, which always names all fields, must stay readable.
    refuse_idle("--cache-bytes", hasattr(args, "cache_bytes") and args.cache is None, "--cache DIR")
    told = hasattr(args, "mean_time_between_failures_s") and args.checkpoint_every != AUTO
    refuse_idle("--mean-time-between-failures", told, "--checkpoint-every auto")
    refuse_idle("--spare", getattr(args, "spare", False) and args.max_restarts == 0, "--max-restarts 1 or more")
    check_master(args)
    return TrainConfig(**{k: v for k, v in vars(args).items() if k not in ("config", "debug", "master", "take_over")})
