"""The configuration of one training run."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from lockstep.features.images.augment import canonical
from lockstep.storage.errors import ConfigError, require
from lockstep.storage.urls import several
from lockstep.training.comm.options import UNAUTHENTICATED, Backend, CommOptions
from lockstep.training.compression.method import ALLOWED as ALLOWED_COMPRESSION
from lockstep.training.compression.method import Compression
from lockstep.training.rules import (
    ALLOWED,
    BEST,
    BEST_ALLOWED,
    STOP_ALLOWED,
    CheckpointEvery,
    Keep,
    StopRule,
    of_validation,
)
from lockstep.training.ways import WAYS

READ_AHEAD_BYTES = 64 << 20
CACHE_BYTES = 16 << 30

Value = bool | int | float | str
"""A setting of a model."""
BatchNorm = Literal["ghost", "sync", "local"]
Precision = Literal["float32", "float64", "mixed_float16", "mixed_bfloat16"]
ScalingRule = Literal["none", "linear", "sqrt"]
Launcher = Literal["barrier", "local"]
BadImages = Literal["refuse", "skip"]
OnBadRecord = Literal["stop", "skip"]
Switch = Literal["on", "off"]
Strategy = Literal["sync", "async", "parameter-server", "federated", "mirrored", "multi-worker-mirrored"]
OF_TENSORFLOW = ("mirrored", "multi-worker-mirrored")
"""Strategies of tf.distribute, which adds the gradients itself."""
Verify = Literal["start", "full"]
NonFinite = Literal["stop", "skip"]


def flag_of(field: str) -> str:
    """The flag of lockstep train for a field of TrainConfig."""
    named = {"datasets": "--dataset", "extra": "--set"}
    return named.get(field) or "--" + field.removesuffix("_s").replace("_", "-")


OF_CLIENTS = ("clients", "client_fraction", "local_epochs", "update_clip", "noise_multiplier", "privacy_delta")
# What a global batch of all ranks has, and a client's batch has not; these must have their defaults.
NOT_FEDERATED = (
    "mix", "lanes", "interleave", "cache_groups", "bad_images", "on_bad_record", "augment", "learning_rate_scaling",
    "warm_up_epochs", "delay", "sync_every", "shard_embeddings", "compression", "min_ranks", "max_ranks",
)  # fmt: skip

# The groups of fields in --help, each by its first field.
GROUPS = {
    "datasets": "what is trained on what",
    "validate": "validation, and ends before the last epoch (docs/validation.md)",
    "lanes": "order of samples (docs/batches.md)",
    "read_ahead_bytes": "reading (docs/performance.md, docs/batches.md)",
    "batchnorm": "a step (docs/models.md)",
    "checkpoint_every": "checkpoints (docs/guarantees.md)",
    "non_finite": "exactly once (docs/guarantees.md)",
    "launcher": "ranks and how they talk (docs/performance.md, docs/security.md)",
    "start_limit_s": "limits and restarts (docs/operations.md)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """All that defines a run; stored in run.json and handed to every rank. Raises ConfigError for invalid values.

    The fields are the options of `lockstep.train` and the flags of `lockstep train`, whose --help is made of the
    sentence below each field, its type and its default. A text in `Annotated` is how --help names the value.

    >>> import lockstep
    >>> config = lockstep.TrainConfig(
    ...     datasets="data", run="run", model="logistic", num_ranks=2, global_batch=16, epochs=1
    ... )
    >>> config.seed, config.checkpoint_every
    (0, 200)
    """

    datasets: Annotated[tuple[str, ...], "URL"]
    """Datasets to train on, in this order; several must fit together, as a dataset and its appends do."""
    run: Annotated[str, "URL"]
    """Directory of the run, local or hdfs://; an existing run is resumed."""
    model: Annotated[str, "NAME"]
    """A ready model (linear, logistic, mlp, wide-deep, two-tower, gru, transformer, resnet20, ...; lockstep models
    lists them), or your own: module:function."""
    num_ranks: int
    """Number of training processes."""
    global_batch: Annotated[int, "G"]
    """Samples of one optimizer step, over all ranks."""
    epochs: Annotated[int, "E"]
    """Passes over the split in total; a resumed run counts those it has done."""
    split: Annotated[str, "NAME"] = "train"
    """The split to train on; several folds with commas between them: fold-1,fold-2."""
    mix: Annotated[tuple[int, ...] | None, "R"] = None
    """Each dataset's share of every global batch, such as 3 1; an epoch is then a pass over the first dataset (default:
    datasets end to end)."""
    init_from: Annotated[str | None, "URL"] = None
    """First weights of a new run: a run, a checkpoint, an exported model, a .keras or .weights.h5 file (default: drawn
    by the seed)."""
    extra: Annotated[Mapping[str, Value], "NAME=VALUE"] = field(default_factory=dict, hash=False)
    """Settings of the model, such as width=64 decay=1e-4; may be given several times. lockstep models lists those of
    ready models; your own finds them in options.extra."""
    seed: int = 0
    """Seed of the order of samples and of the first weights."""

    validate: Annotated[str | None, "SPLIT"] = None
    """A split of the same datasets to score the model on after an epoch, over all ranks; its metrics are val_METRIC, as
    lockstep evaluate computes them (default: none)."""
    validate_every: Annotated[int, "E"] = 1
    """Epochs from one validation to the next; there is one more at the end of the run."""
    early_stop: Annotated[str | None, "METRIC:max:K"] = None
    """End the run when METRIC has not improved in K validations (of a training metric, K epochs); METRIC:max:K or
    METRIC:min:K, such as val_auc:max:3."""
    max_steps: Annotated[int | None, "N"] = None
    """End the run after N steps, if its epochs have more; a later call with more steps, or without this flag, resumes
    it."""

    lanes: Annotated[int | None, "L"] = None
    """Streams of samples that a global batch is taken from; divides G (default: the largest divisor up to 64)."""
    window_bytes: int = 8 << 20
    """Memory of a rank in which samples are shuffled, over all lanes."""
    interleave: Annotated[int, "B"] = 1
    """Number of places that a lane reads from at once; for sorted data, 64 / L."""
    cache_groups: Annotated[int | None, "C"] = None
    """With --cache, the number of nodes: each reads the same blocks in every epoch; divides L (default: no groups)."""

    read_ahead_bytes: int = READ_AHEAD_BYTES
    """The most bytes of shards that a rank fetches ahead."""
    cache: Annotated[str | None, "DIR"] = None
    """A folder on each rank's host that keeps blocks for later epochs and runs (default: none)."""
    cache_bytes: int = CACHE_BYTES
    """The most bytes that the cache of a host keeps, over all runs that use it."""
    verify: Verify = "start"
    """What is verified before the first step: lengths and indexes (start), or every byte of the split (full)."""
    bad_images: BadImages = "refuse"
    """How to treat an image that cannot be decoded: end the run (refuse), or give it weight 0 in training and leave it
    out of validation and evaluation (skip)."""
    augment: Annotated[str, "OP"] = ""
    """Random changes of the training images, such as `crop:4 flip`."""

    batchnorm: BatchNorm = "ghost"
    """Rows that batch normalisation takes statistics over: an eighth of the global batch (ghost, up to 8 ranks), all of
    it (sync), or a rank's part (local). With ghost and sync they do not depend on the number of ranks."""
    learning_rate: float | None = None
    """The optimizer's learning rate (default: the model's own)."""
    learning_rate_scaling: ScalingRule = "none"
    """How the learning rate grows with G / --base-batch."""
    base_batch: Annotated[int | None, "B"] = None
    """The global batch that the learning rate was tuned for; with --learning-rate-scaling."""
    warm_up_epochs: Annotated[float, "E"] = 0.0
    """Epochs during which the learning rate rises to its full value."""
    micro_batches: Annotated[int, "K"] = 1
    """Parts in which a rank computes its batch, for less memory; their gradients are added."""
    strategy: Strategy = "sync"
    """sync adds gradients of all ranks in each step; async lets each rank apply its own at once and those of others as
    they arrive; parameter-server lets processes of their own apply each rank's; with these two no bits are the same in
    two runs. federated trains a few --clients in each round; a step and an epoch are a round. mirrored and
    multi-worker-mirrored are TensorFlow's own, on the devices of one rank and of all ranks (docs/strategies.md)."""
    clients: Annotated[str | None, "FIELD"] = None
    """With --strategy federated, the int64 or string field whose values are the clients: rows with one value are one
    client's, and G is the batch of a client's step."""
    client_fraction: float = 0.1
    """The part of the clients that is drawn for each round."""
    local_epochs: Annotated[int, "E"] = 1
    """Passes of a client over its own samples in a round."""
    update_clip: Annotated[float | None, "NORM"] = None
    """The largest L2 norm of a client's change of the weights; larger ones are scaled to it (default: no limit)."""
    noise_multiplier: Annotated[float, "Z"] = 0.0
    """Standard deviation of the Gaussian noise on the sum of the clients' changes, in units of --update-clip; the run
    then reports epsilon for --privacy-delta (DP-FedAvg)."""
    privacy_delta: Annotated[float | None, "DELTA"] = None
    """With --noise-multiplier, delta of the differential privacy of one client; less than 1 / clients."""
    staleness: Annotated[int | None, "S"] = None
    """With --strategy async or parameter-server, the most steps that ranks are apart; 0 is sync."""
    servers: Annotated[int | None, "K"] = None
    """With --strategy parameter-server, the number of servers: processes next to the ranks, each with a part of all
    weights."""
    gradient_noise: Annotated[float, "ETA"] = 0.0
    """With --strategy async, the variance ETA / (1 + step)**0.55 of Gaussian noise that is added to each gradient."""
    devices: Annotated[int | None, "K"] = None
    """With --strategy mirrored, the devices that divide each batch: GPUs, or logical CPU devices where there is no GPU
    (default: all GPUs, or one CPU device)."""
    delay: Annotated[int, "D"] = 0
    """Steps by which a sum of gradients is applied late, so that ranks add gradients while they compute the next ones
    (docs/strategies.md)."""
    sync_every: Annotated[int, "K"] = 1
    """Steps after which ranks meet: 1 adds gradients in each step; K averages the models of ranks that trained by
    themselves for K steps; 0 averages once, at the end of the run (docs/strategies.md)."""
    sync_until_epoch: Annotated[int, "E"] = 0
    """Epochs that add gradients in each step before --sync-every begins."""
    outer_learning_rate: float = 1.0
    """With --sync-every or --strategy federated, the rate of a step along the averaged change since the last meeting or
    round; 1 is the average."""
    outer_momentum: float = 0.0
    """Nesterov momentum of the step along the averaged change (--outer-learning-rate)."""
    shard_embeddings: Annotated[int | None, "FROM_BYTES"] = None
    """Divide tables of embeddings of at least so many bytes over the ranks: two-tower and wide-deep
    (docs/embeddings.md; default: each rank has all tables)."""
    compression: Annotated[str, "METHOD"] = "none"
    """How gradients are sent: none, bf16, fp16, int8, 1bit, qsgd:LEVELS, terngrad, topk:1%, dgc:0.1%, powersgd:2 or
    auto, which compresses where it pays (docs/compression.md)."""
    precision: Precision = "float32"
    """Keras' floatx, or a dtype policy: weights in float32, layers in float16 (with loss scaling) or bfloat16."""

    checkpoint_every: Annotated[int | str, "N|Ns|auto"] = 200
    """Steps between checkpoints, seconds (60s), or auto: the interval that loses least time by their measured cost. One
    more is written at the end."""
    keep_checkpoints: Annotated[int, "K"] = 3
    """How many of the newest checkpoints are kept."""
    keep_every: Annotated[int | None, "M"] = None
    """Also keep the first checkpoint at or after each multiple of M steps."""
    keep_best: Annotated[str | None, "METRIC:max"] = None
    """Also keep the checkpoint that is best at the end of an epoch, whose weights the run's model gets; METRIC:max or
    METRIC:min, val_METRIC with --validate, else a metric of the training rows."""

    non_finite: NonFinite = "stop"
    """How to treat a loss or gradient that is not finite: stop the run, or skip the step on all ranks, up to 10 in a
    row. A step with a scaled loss is always skipped."""
    on_bad_record: OnBadRecord = "stop"
    """How to treat a record that cannot be decoded: stop the run, or let it keep its place with weight 0 (skip), which
    includes --bad-images skip. In Parquet and gzip shards skip leaves out all records of its block."""
    canonical: bool = False
    """Train the same weights, bit for bit, on 1, 2, 4, ... ranks; slower. Each lane group (or lane) is computed by
    itself, and gradients are added in one fixed tree."""
    audit: bool = False
    """List the id of each sample that was trained on, in RUN/audit."""

    launcher: Launcher = "barrier"
    """How ranks are started: in a Spark barrier stage (barrier), or as processes of this host (local)."""
    min_ranks: Annotated[int | None, "A"] = None
    """The fewest ranks that the run continues with when slots are lost (default: --num-ranks)."""
    max_ranks: Annotated[int | None, "B"] = None
    """The most ranks that the run grows to when there are slots for them (default: --num-ranks)."""
    slots_file: Annotated[str | None, "FILE"] = None
    """With --launcher local and --min-ranks or --max-ranks, a text file with the number of ranks that may run now."""
    spare_executors: int = 0
    """With --launcher barrier, slots beyond the ranks' on which a process that has imported TensorFlow waits for a rank
    whose executor is lost."""
    balance: bool = False
    """Move lanes from slow ranks to fast ones while the run trains, where steps then take 10 % less time; the batches
    stay the same (docs/operations.md)."""
    tls: Switch = "off"
    """Encrypt connections between ranks on different hosts; conf/production.toml turns it on."""
    backend: Backend = "auto"
    """What carries gradients: auto chooses by where the ranks are; nccl is for GPUs (docs/gpu.md)."""
    trust_network: Annotated[str | None, "IFACE"] = None
    """The interface (or ADDRESS/BITS) whose network may carry gRPC and NCCL, which cannot be authenticated; for the
    backends tensorflow and nccl."""

    start_limit_s: float = 300.0
    """Seconds in which all ranks must start."""
    stall_limit_s: float = 600.0
    """Seconds without a step after which ranks are ended and started again."""
    stop_grace_s: float = 30.0
    """Seconds in which all ranks must write a checkpoint after SIGTERM or Ctrl-C; then they are ended without one."""
    heartbeat_limit_s: float | None = None
    """Seconds of silence after which a rank is lost; raise it where hosts pause or swap (default 10)."""
    max_restarts: int = 3
    """Restarts in a row without a new checkpoint before the run fails."""
    max_restarts_per_hour: int = 20
    """Restarts within an hour before the run fails, with new checkpoints or without."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "datasets", several(self.datasets))
        object.__setattr__(self, "augment", " ".join(canonical(self.augment.split())))
        if self.mix is not None:
            object.__setattr__(self, "mix", tuple(self.mix))
        self._check_extra()
        for name, choices in choices_of_fields().items():
            self._check(name, getattr(self, name) in choices, " or ".join(choices))
        self._check_data()
        self._check_step()
        self._check_strategy()
        self._check_compression()
        self._check_checkpoints()
        self._check_ranks()
        if self.canonical:  # which numbers of ranks divide its lane groups or lanes: lockstep.training.plan.lane_count
            self._check_canonical()

    def _check_extra(self) -> None:
        for name, value in self.extra.items():
            right = name.isidentifier() and isinstance(value, Value)
            finite = not isinstance(value, float) or math.isfinite(value)
            self._check("extra", right and finite, "names as Python's, each a text, a finite number, true or false")
        # A copy in one order: the configuration stays as it is, and run.json has one form.
        object.__setattr__(self, "extra", {name: self.extra[name] for name in sorted(self.extra)})

    def _check_data(self) -> None:
        count = len(self.datasets)
        self._check("datasets", count > 0 and all(self.datasets), "one dataset URL or more")
        self._check("split", bool(self.split), "a split's name")
        if self.mix is not None:
            right = len(self.mix) == count >= 2 and all(type(ratio) is int and ratio >= 1 for ratio in self.mix)
            self._check("mix", right, f"two datasets or more and an integer from 1 up for each of them, here {count}")
        self._check_count("epochs", "global_batch", "window_bytes", "interleave", "read_ahead_bytes", "cache_bytes")
        self._check("seed", 0 <= self.seed < 2**63, "an integer from 0 to 2^63 - 1")
        if self.lanes is not None:
            right = self.lanes >= 1 and self.global_batch % self.lanes == 0
            self._check("lanes", right, f"a divisor of global_batch={self.global_batch}")
        self._check_validation()
        self._check("cache_groups", self.cache_groups is None or self.cache_groups >= 1, "an integer from 1 up")
        self._check("cache", self.cache is None or self.cache.startswith("/"), "an absolute path on every rank's host")

    def _check_validation(self) -> None:
        trained_on = self.split.split(",")
        held_out = self.validate is None or ("," not in self.validate and self.validate not in ("", *trained_on))
        self._check("validate", held_out, f"one split that is not trained on (--split {self.split})")
        self._check_count("validate_every")
        self._check("max_steps", self.max_steps is None or 1 <= self.max_steps < 2**63, "an integer from 1 up")
        if self.early_stop is not None:
            try:
                StopRule.parse(self.early_stop)
            except ValueError:
                self._check("early_stop", False, STOP_ALLOWED)
        for name in ("early_stop", "keep_best"):
            right = self.validate is not None or not of_validation(getattr(self, name))
            self._check(name, right, "a training metric, unless --validate SPLIT is given")

    def _check_step(self) -> None:
        self._check("model", bool(self.model), "a model's name or module:function")
        rate, base, scales = self.learning_rate, self.base_batch, self.learning_rate_scaling != "none"
        self._check("learning_rate", rate is None or 0 < rate < math.inf, "a finite number above 0")
        self._check("base_batch", base is None or scales, "unset, unless --learning-rate-scaling is given")
        self._check("base_batch", base is not None or not scales, "with scaling: the batch that the rate was tuned for")
        self._check("base_batch", base is None or base >= 1, "an integer from 1 up")
        self._check("warm_up_epochs", 0 <= self.warm_up_epochs < self.epochs, "from 0 to fewer than epochs")
        self._check_count("micro_batches")
        least = self.shard_embeddings
        self._check("shard_embeddings", least is None or 0 <= least < 2**63, "bytes from 0 up")
        stops = self.non_finite == "stop" or self.micro_batches == 1
        self._check("non_finite", stops, "stop with --micro-batches: a sum of gradients cannot be skipped in part")

    @property
    def skips_bad_images(self) -> bool:
        """Whether images that cannot be decoded are skipped, by either flag."""
        return self.bad_images == "skip" or self.on_bad_record == "skip"

    @property
    def is_async(self) -> bool:
        """Whether ranks take steps without waiting for each other's gradients: not with one rank, nor staleness 0."""
        return self.strategy == "async" and bool(self.staleness) and self.num_ranks > 1

    @property
    def num_servers(self) -> int:
        """Parameter servers that are started: none with one rank, nor staleness 0, which are sync."""
        return (self.servers or 0) if self.staleness and self.num_ranks > 1 else 0

    @property
    def processes(self) -> int:
        """Processes of a launch: ranks, then parameter servers."""
        return self.num_ranks + self.num_servers

    def _check_strategy(self) -> None:
        unset, serves = self.staleness is None, self.strategy == "parameter-server"
        late = serves or self.strategy == "async"
        self._check("staleness", unset != late, "steps from 0 up with --strategy async or parameter-server, else unset")
        self._check("staleness", unset or 0 <= (self.staleness or 0) < 2**31, "an integer from 0 up")
        servers = self.servers is None if not serves else 1 <= (self.servers or 0) < 2**31
        self._check("servers", servers, "an integer from 1 up with --strategy parameter-server, else unset")
        noise = 0 <= self.gradient_noise < math.inf and (self.is_async or self.gradient_noise == 0)
        self._check(
            "gradient_noise", noise, "0 or more; 0 unless several ranks train with --strategy async --staleness S"
        )
        self._check("delay", 0 <= self.delay < 2**31, "an integer from 0 up")
        self._check("sync_every", 0 <= self.sync_every < 2**31, "an integer from 0 up")
        for way in WAYS:
            for allowed in way.faults(self) if way.asked(self) else ():
                self._check(way.field, False, allowed)
        over = not serves or self.backend in ("auto", "tcp")
        self._check("backend", over, "auto or tcp with --strategy parameter-server, whose links are TCP")
        self._check_federated()
        self._check_of_tensorflow()
        local, several = self.sync_every != 1, self.sync_every > 1
        if local:
            whole = self.max_steps is None or (several and self.max_steps % self.sync_every == 0)
            self._check("max_steps", whole, "a multiple of --sync-every; unset with --sync-every 0")
            once = self.sync_every == 0 and (self.validate or self.keep_best)
            self._check("sync_every", not once, "1 or more with --validate or --keep-best: ranks differ until the end")
        epochs = 0 <= self.sync_until_epoch < self.epochs and (local or self.sync_until_epoch == 0)
        self._check("sync_until_epoch", epochs, "from 0 to fewer than epochs; 0 unless --sync-every is given")
        rate, momentum, meets = self.outer_learning_rate, self.outer_momentum, several or self.is_federated
        self._check("outer_learning_rate", 0 < rate < math.inf and (meets or rate == 1), "above 0; 1 without meetings")
        self._check("outer_momentum", 0 <= momentum < 1 and (meets or momentum == 0), "from 0 to 1; 0 without meetings")

    @property
    def is_federated(self) -> bool:
        """Whether clients train in rounds."""
        return self.strategy == "federated"

    def _check_federated(self) -> None:
        usual = {one.name: one.default for one in fields(TrainConfig)}
        if not self.is_federated:
            for name in OF_CLIENTS:
                self._check(name, getattr(self, name) == usual[name], f"{usual[name]}, without --strategy federated")
            return
        for name in NOT_FEDERATED:
            self._check(name, getattr(self, name) == usual[name], f"{usual[name]} with --strategy federated")
        self._check("batchnorm", self.batchnorm != "sync", "local with --strategy federated: a client's own batches")
        self._check("clients", bool(self.clients), "a field of the dataset with --strategy federated")
        self._check("client_fraction", 0 < self.client_fraction <= 1, "above 0, at most 1")
        self._check_count("local_epochs")
        clip, noise, delta = self.update_clip, self.noise_multiplier, self.privacy_delta
        self._check("update_clip", clip is None or 0 < clip < math.inf, "a finite number above 0")
        right = 0 <= noise < math.inf and (noise == 0 or clip is not None)
        self._check("noise_multiplier", right, "0 or more; above 0 only with --update-clip")
        right = (delta is None and noise == 0) or (delta is not None and noise > 0 and 0 < delta < 1)
        self._check("privacy_delta", right, "between 0 and 1 with --noise-multiplier; unset without")

    def _check_of_tensorflow(self) -> None:
        several = self.devices is None or (self.strategy == "mirrored" and self.devices >= 1)
        self._check("devices", several, "devices from 1 up with --strategy mirrored; unset without it")
        if self.strategy == "mirrored":
            self._check("num_ranks", self.num_ranks == 1, "1 with --strategy mirrored: its devices are in one process")
        if self.strategy == "multi-worker-mirrored":
            trust = "a network that only ranks can reach: TensorFlow's servers do not authenticate their peers"
            self._check("trust_network", self.trust_network is not None, trust)

    def _check_compression(self) -> None:
        try:
            method = Compression.parse(self.compression)
        except ValueError:
            self._check("compression", False, ALLOWED_COMPRESSION)
            return
        if not method:
            return
        self._check("compression", not self.delay, "none with --delay")
        self._check("compression", self.sync_every == 1, "none with --sync-every, which adds no gradients")
        unkept = "none, bf16, fp16, int8, qsgd or terngrad"
        self._check("compression", not self.canonical, "none with --canonical, whose sums are exact")
        self._check("compression", self.precision != "float64", "none with --precision float64")
        over = self.backend in UNAUTHENTICATED
        self._check("compression", not over, f"none with --backend {self.backend}, whose sums stay on the device")
        scaled = self.precision == "mixed_float16"
        self._check("compression", not (method.keeps and scaled), f"{unkept} with --precision mixed_float16")
        self._check("compression", not method.keeps or self.num_ranks > 1, f"{unkept} with one rank")
        skips = self.non_finite == "skip"
        self._check("compression", not (method.keeps and skips), f"{unkept} with --non-finite skip")

    def _check_checkpoints(self) -> None:
        self._check("run", bool(self.run.strip("/")), "the URL of a directory for this run")
        durable = not self.run.startswith(("webhdfs:", "swebhdfs:"))
        self._check("run", durable, "a local path, hdfs:// or an object store, where what is written is durable")
        try:
            every = CheckpointEvery.parse(self.checkpoint_every)
        except ValueError:
            self._check("checkpoint_every", False, ALLOWED)
        else:
            object.__setattr__(self, "checkpoint_every", every.steps or self.checkpoint_every)
        self._check_count("keep_checkpoints")
        self._check("keep_every", self.keep_every is None or self.keep_every >= 1, "steps from 1 up")
        self._check("keep_best", self.keep_best is None or BEST.fullmatch(self.keep_best) is not None, BEST_ALLOWED)

    @property
    def ranks(self) -> range:
        """The numbers of ranks that a generation may have, if the run can train on so many."""
        least, most = (self.num_ranks if some is None else some for some in (self.min_ranks, self.max_ranks))
        return range(least, most + 1)

    @property
    def elastic(self) -> bool:
        """Whether the number of ranks may change while the run trains."""
        return len(self.ranks) > 1

    def _check_ranks(self) -> None:
        self._check_count("num_ranks")
        self._check("min_ranks", 1 <= self.ranks.start <= self.num_ranks, "from 1 to --num-ranks")
        self._check("max_ranks", self.num_ranks < self.ranks.stop <= 2**31, "--num-ranks or more")
        self._check("servers", not (self.elastic and self.servers), "none with --min-ranks or --max-ranks")
        takes, words = self.launcher == "local" and self.elastic, "a file for fewer or more local ranks, else unset"
        self._check("slots_file", bool(self.slots_file) == takes, words)
        spares = self.spare_executors
        allowed = "0, or executors from 1 up with --launcher barrier and without --max-ranks, which uses every slot"
        right = spares > 0 and self.launcher == "barrier" and self.max_ranks is None
        self._check("spare_executors", spares == 0 or right, allowed)
        if self.balance:
            self._check_balance()
        self._check("trust_network", self.trust_network != "", "an interface's name, or a network as 10.1.0.0/16")
        CommOptions(backend=self.backend, trust_network=self.trust_network)  # what fits what
        self._check("start_limit_s", 0 < self.start_limit_s < math.inf, "seconds above 0")
        self._check("stall_limit_s", 0 < self.stall_limit_s < math.inf, "seconds above 0")
        self._check("stop_grace_s", 0 <= self.stop_grace_s < math.inf, "seconds from 0 up")
        silent = self.heartbeat_limit_s
        self._check("heartbeat_limit_s", silent is None or 2 <= silent < math.inf, "seconds from 2 up: two beats")
        self._check("max_restarts", self.max_restarts >= 0, "an integer from 0 up")
        self._check("max_restarts_per_hour", self.max_restarts_per_hour >= 0, "an integer from 0 up")

    def _check_balance(self) -> None:
        """Refuse what fixes each rank's rows, has none, or computes other weights for other shares."""
        only = {
            "strategy": "sync",
            "canonical": False,
            "cache_groups": None,
            "micro_batches": 1,
            "delay": 0,
            "sync_every": 1,
            "compression": "none",
        }
        for name, value in only.items():
            self._check(name, getattr(self, name) == value, f"{value} with --balance")
        self._check("batchnorm", self.batchnorm != "local", "ghost or sync with --balance: a rank's part varies")

    def _check_canonical(self) -> None:
        power_of_two = self.num_ranks.bit_count() == 1
        self._check("num_ranks", power_of_two, "with --canonical 1, 2, 4, ...: ranks add up whole subtrees")
        self._check("batchnorm", self.batchnorm != "sync", "with --canonical: ghost or local")
        self._check("micro_batches", self.micro_batches == 1, "1 with --canonical, which computes lanes one by one")
        self._check("backend", self.backend not in UNAUTHENTICATED, "with --canonical: auto, tcp or shm")

    def _check_count(self, *names: str) -> None:
        for name in names:
            self._check(name, 1 <= getattr(self, name) < 2**63, "an integer from 1 to 2^63 - 1")

    @property
    def keep(self) -> Keep:
        """Which checkpoints are kept."""
        return Keep(self.keep_checkpoints, self.keep_every, self.keep_best)

    def _check(self, name: str, right: bool, allowed: str) -> None:
        got = f"{name} = {getattr(self, name)!r}"
        require(right, f"the training configuration's `{name}`", got, allowed, f"Correct {flag_of(name)}.")

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return {**asdict(self), "datasets": list(self.datasets), "mix": None if self.mix is None else list(self.mix)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> TrainConfig:
        """The inverse of `to_json`; a field that `document` lacks has its default. Raises ConfigError for an unknown
        field, and for a missing one without a default.
        """
        known = {field.name for field in fields(cls)}
        try:
            return cls(**document)
        except TypeError as error:
            raise ConfigError(
                "a stored training configuration does not fit this version",
                got=str(error),
                allowed=", ".join(sorted(known)),
                next_step="Resume the run with the version that began it.",
            ) from None


@functools.cache
def choices_of_fields() -> dict[str, tuple[str, ...]]:
    """The allowed words of each field of TrainConfig that is one of a few."""
    hints = get_type_hints(TrainConfig)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


LANE_GROUPS = 8  # of ghost BatchNorm: its statistics cover G / 8 samples for any number of ranks


def lane_groups(config: TrainConfig) -> int | None:
    """The number of lane groups that are not divided between ranks; None if ranks may own any lanes."""
    return LANE_GROUPS if config.batchnorm == "ghost" else None
