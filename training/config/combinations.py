"""What cannot be combined: options of one part of a configuration with those of another.

What a way to exchange cannot be combined with stands with the way, in `training/ways`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.training.comm.options import UNAUTHENTICATED
from lockstep.training.compression.method import Compression
from lockstep.training.rules import of_validation
from lockstep.training.ways import EveryStep, Zero

if TYPE_CHECKING:
    from lockstep.training.config.train_config import TrainConfig

# What --balance needs, since it fixes each rank's rows, has none, or computes other weights for other shares.
WITH_BALANCE = {
    "strategy": "sync",
    "canonical": False,
    "cache_groups": None,
    "micro_batches": 1,
    "delay": 0,
    "sync_every": 1,
    "compression": "none",
}


def check_combinations(config: TrainConfig) -> None:
    """Raise ConfigError for options that cannot be combined."""
    _check_validation(config)
    _check_step(config)
    for option, allowed in config.way.faults(config):
        config.check(option, False, allowed)
    _check_compression(config)
    if config.model.lora_rank:
        adds_up = isinstance(config.way, EveryStep | Zero)
        config.check("lora_rank", adds_up, f"0 with {config.way.flag}, which averages or serves whole weights")
        config.check("lora_rank", config.step.shard_embeddings is None, "0 with --shard-embeddings")
    if config.model.ewc is not None:
        config.check("ewc", not config.model.lora_rank, "unset with --lora-rank, which keeps the weights themselves")
        config.check("ewc", config.step.shard_embeddings is None, "unset with --shard-embeddings")
    if config.ranks.balance:
        _check_balance(config)
    if config.exactness.canonical:  # which numbers of ranks divide its lane groups or lanes: training.plan.lane_count
        _check_canonical(config)


def _check_validation(config: TrainConfig) -> None:
    split, held_out = config.data.split, config.validation.validate
    apart = held_out is None or ("," not in held_out and held_out not in ("", *split.split(",")))
    config.check("validate", apart, f"one split that is not trained on (--split {split})")
    right = held_out is not None or not of_validation(config.checkpoints.keep_best)
    config.check("keep_best", right, "a training metric, unless --validate SPLIT is given")
    known = config.data.where is None or config.exactness.on_bad_record == "stop"
    unknown = "stop with --where: whether a record that cannot be decoded meets it is not known"
    config.check("on_bad_record", known, unknown)
    durable = not config.run.startswith(("webhdfs:", "swebhdfs:"))
    config.check("run", bool(config.run.strip("/")), "the URL of a directory for this run")
    safe = "a local path, hdfs:// or an object store, where what is written is durable"
    config.check("run", durable, safe)


def _check_step(config: TrainConfig) -> None:
    warms_up = config.step.warm_up_epochs < config.data.epochs
    config.check("warm_up_epochs", warms_up, "from 0 to fewer than epochs")
    stops = config.exactness.non_finite == "stop" or config.step.micro_batches == 1
    config.check("non_finite", stops, "stop with --micro-batches: a sum of gradients cannot be skipped in part")


def _check_compression(config: TrainConfig) -> None:
    method = Compression.parse(config.step.compression)
    if not method:
        return

    def check(right: bool, allowed: str) -> None:
        config.check("compression", right, allowed)

    precision, backend = config.step.precision, config.ranks.backend
    unkept = "none, bf16, fp16, int8, qsgd or terngrad"
    check(not config.exactness.canonical, "none with --canonical, whose sums are exact")
    check(precision != "float64", "none with --precision float64")
    check(backend not in UNAUTHENTICATED, f"none with --backend {backend}, whose sums stay on the device")
    check(not (method.keeps and precision == "mixed_float16"), f"{unkept} with --precision mixed_float16")
    check(not method.keeps or config.ranks.num_ranks > 1, f"{unkept} with one rank")
    check(not (method.keeps and config.exactness.non_finite == "skip"), f"{unkept} with --non-finite skip")


def _check_balance(config: TrainConfig) -> None:
    given = config.options()
    for name, value in WITH_BALANCE.items():
        config.check(name, given[name] == value, f"{value} with --balance")
    varies = "ghost or sync with --balance: a rank's part varies"
    config.check("batchnorm", config.step.batchnorm != "local", varies)


def _check_canonical(config: TrainConfig) -> None:
    power_of_two = config.ranks.num_ranks.bit_count() == 1
    config.check("num_ranks", power_of_two, "with --canonical 1, 2, 4, ...: ranks add up whole subtrees")
    config.check("batchnorm", config.step.batchnorm != "sync", "with --canonical: ghost or local")
    one_by_one = "1 with --canonical, which computes lanes one by one"
    config.check("micro_batches", config.step.micro_batches == 1, one_by_one)
    config.check("backend", config.ranks.backend not in UNAUTHENTICATED, "with --canonical: auto, tcp or shm")
