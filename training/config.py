"""The configuration of one training run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from lockstep.features.images.augment import canonical
from lockstep.storage.errors import ConfigError
from lockstep.storage.urls import several
from training.comm.options import UNAUTHENTICATED, Algorithm, Backend, CommOptions

if TYPE_CHECKING:
    from training.run.lineage import CheckpointRef

BEST = re.compile(r"(?P<metric>.+):(?P<way>min|max)")
BEST_ALLOWED = "METRIC:min or METRIC:max, such as loss:min or auc:max"


@dataclass(frozen=True, slots=True)
class Keep:
    """The rule. A checkpoint stays if any part of it holds."""

    last: int = 3
    """The newest ones of the chain."""
    every_steps: int | None = None
    """The first one at or after each multiple of so many steps."""
    best: str | None = None
    """METRIC:min or METRIC:max: the best one at the end of an epoch, of equal ones the earliest."""

    def chosen(
        self, chain: Sequence[CheckpointRef], value_of: Callable[[CheckpointRef], float | None]
    ) -> set[CheckpointRef]:
        """Those of `chain` (newest first) that stay. `value_of` is a checkpoint's metric, None where it has none."""
        kept = set(chain[: self.last])
        if self.every_steps is not None:
            reached = 0
            for ref in reversed(chain):
                if ref.step // self.every_steps > reached:
                    reached = ref.step // self.every_steps
                    kept.add(ref)
        if (best := self.best_of(chain, value_of)) is not None:
            kept.add(best)
        return kept

    def best_of(
        self, chain: Sequence[CheckpointRef], value_of: Callable[[CheckpointRef], float | None]
    ) -> CheckpointRef | None:
        """The best checkpoint of `chain` (newest first); None without a rule for it or a value."""
        if self.best is None:
            return None
        sign = 1.0 if self.best.endswith(":min") else -1.0
        values = [(sign * value, ref.step, ref) for ref in chain if (value := value_of(ref)) is not None]
        return min(values)[2] if values else None


def check_metric(best: str | None, metrics: dict[str, Any]) -> None:
    """Raise ConfigError where a rule names a metric that an epoch's `metrics` lack."""
    found = BEST.fullmatch(best) if best is not None else None
    if found is not None and metrics and found["metric"] not in metrics:
        raise ConfigError(
            f"there is no metric `{found['metric']}` to keep the best checkpoint by",
            got=f"--keep-best {best}",
            allowed=", ".join(f"{name}:min, {name}:max" for name in sorted(metrics)),
            next_step="Correct --keep-best, or compile the model with that metric.",
        )


# A guess on the careful side for a shared cluster, where executors are preempted and nodes drained. It need not be
# good: a mean time that is 6 times off, either way, makes the cost of checkpoints and lost steps 1.43 times the least,
# which itself is sqrt(2 * cost / mean time), 0.8 % of the time for a checkpoint that costs half a second.
MEAN_TIME_BETWEEN_FAILURES_S = 4 * 3600.0
_SECONDS = re.compile(r"([0-9]+(?:\.[0-9]+)?)s")
AUTO = "auto"
ALLOWED = "steps from 1 up (200), seconds above 0 (60s) or auto"


@dataclass(frozen=True, slots=True)
class CheckpointEvery:
    """`steps`, or `seconds`, or neither: as often as is best (`auto`)."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, value: int | str) -> CheckpointEvery:
        """Of 200 or `200`, `60s`, `auto`; ValueError for anything else."""
        text = str(value)
        if text == AUTO:
            return cls()
        if text.isascii() and text.isdigit() and int(text) >= 1:
            return cls(steps=int(text))
        found = _SECONDS.fullmatch(text)
        if found is None or float(found[1]) <= 0:
            raise ValueError(ALLOWED)
        return cls(seconds=float(found[1]))


READ_AHEAD_BYTES = 64 << 20


BatchNorm = Literal["ghost", "sync", "local"]
Precision = Literal["float32", "float64", "mixed_float16", "mixed_bfloat16"]
ScalingRule = Literal["none", "linear", "sqrt"]
Launcher = Literal["barrier", "local"]
BadImages = Literal["refuse", "skip"]
Switch = Literal["on", "off"]
Verify = Literal["start", "full"]
CACHE_BYTES = 16 << 30
NonFinite = Literal["stop", "skip"]


def flag_of(field: str) -> str:
    """The command line's flag for a field of TrainConfig."""
    return "--dataset" if field == "datasets" else "--" + field.removesuffix("_s").replace("_", "-")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """All that a run is made from; saved in run.json and handed to every rank. Its fields are the options of
    `lockstep.train` and the flags of `jobs.train`. Raises ConfigError for values that do not fit.

    >>> import lockstep
    >>> config = lockstep.TrainConfig(
    ...     datasets="data", run="run", model="logistic", num_ranks=2, global_batch=16, epochs=1
    ... )
    >>> config.seed, config.checkpoint_every
    (0, 200)
    """

    datasets: tuple[str, ...]
    """URLs of the datasets to train on, in this order: different ones that fit together (training.plan.datasets)."""
    run: str
    """URL of the run directory; an existing one is resumed."""
    model: str
    """A name of training.models or `module:function`."""
    num_ranks: int
    """Training processes."""
    global_batch: int
    """Samples of one optimizer step over all ranks."""
    epochs: int
    """Passes over the split, in all (a resumed run counts the epochs it has done)."""
    split: str = "train"
    """The split to train on; of folds, those that are not held out, with `,` between them."""
    mix: tuple[int, ...] | None = None
    """A weight for each dataset, of which each global batch takes exactly so large a share; None: datasets end to end.
    An epoch is then a pass of the first dataset."""
    lanes: int | None = None
    """Streams of samples a global batch is taken from; None is the largest divisor of global_batch up to 64."""
    window_bytes: int = 8 << 20
    """Bytes of the window in which a rank shuffles, over all lanes."""
    interleave: int = 1
    """Places of its part of an epoch that a lane reads at once, for data that lie sorted (docs/batches.md)."""
    cache_groups: int | None = None
    """Blocks stay in so many groups, each read by neighbouring lanes: for a cache on as many nodes (divides lanes)."""
    cache_rotation: int | None = None
    """Every so many epochs the groups are made anew; None is never."""
    read_ahead_bytes: int = READ_AHEAD_BYTES
    """Bytes of shards that a rank fetches ahead of their use, at most."""
    cache: str | None = None
    """A folder on a disk of each rank's host: blocks that were read once are kept there, for all ranks of the host."""
    cache_bytes: int = CACHE_BYTES
    """The most that the cache of a host holds, of all runs that use it."""
    verify: Verify = "start"
    """`full`: before the first step the ranks read every byte of the split and hold it against its digest."""
    bad_images: BadImages = "refuse"
    """Whether an image of the training split that cannot be decoded ends the run, or keeps its place with weight 0."""
    augment: str = ""
    """Random changes of the training images, such as `crop:4 flip` (docs/batches.md); the empty text is none."""
    init_from: str | None = None
    """Where the first weights come from (a run, a checkpoint, an exported model, a .keras); None: drawn by the seed."""
    batchnorm: BatchNorm = "ghost"
    """`ghost`: over lane groups, up to 8 ranks; `sync`: over the rows of all ranks; both the same at any number of
    ranks. `local`: Keras' own, over each rank's part."""
    seed: int = 0
    """Of the order of samples and the first weights."""
    checkpoint_every: int | str = 200
    """Steps between checkpoints, or seconds (`60s`), or `auto`: as often as their cost and the time between failures
    make best (docs/operations.md). One more is written at the end."""
    mean_time_between_failures_s: float = MEAN_TIME_BETWEEN_FAILURES_S
    """What `auto` reckons with: of all ranks together."""
    keep_checkpoints: int = 3
    """The newest checkpoints of the chain, which stay; others go at the next checkpoint but for the next two rules."""
    keep_every: int | None = None
    """One checkpoint for so many steps stays too: the first at or after each multiple."""
    keep_best: str | None = None
    """METRIC:min or METRIC:max: the best checkpoint at the end of an epoch stays too."""
    audit: bool = False
    """Whether ranks list each sample id they train on."""
    canonical: bool = False
    """Whether each lane group (or lane) is computed by itself and gradients are added in one fixed tree: the same
    weights, bit for bit, at any number of ranks that is a power of two and divides these (docs/guarantees.md)."""
    non_finite: NonFinite = "stop"
    """What a loss or gradient that is not finite does: `stop` the run, or `skip` the step on all ranks, up to 10 in a
    row (docs/guarantees.md). A scaled loss skips by itself."""
    compare_every: int = 100
    """Steps between comparisons of the ranks' weights; one is made with each checkpoint too."""
    precision: Precision = "float32"
    """Keras' floatx, or a dtype policy: weights in float32, layers in float16 (with loss scaling) or bfloat16."""
    learning_rate: float | None = None
    """None is the model's own."""
    learning_rate_scaling: ScalingRule = "none"
    """How the learning rate grows from `base_batch` to `global_batch` (docs/models.md)."""
    base_batch: int | None = None
    """The global batch that the learning rate was found for."""
    warm_up_epochs: float = 0.0
    """Over so many epochs the learning rate rises to its full height."""
    micro_batches: int = 1
    """A rank's part of a global batch is computed in so many parts, whose gradients are added: less memory."""
    launcher: Launcher = "barrier"
    """`barrier`: ranks in a Spark barrier stage; `local`: processes of this host."""
    tls: Switch = "off"
    """Whether ranks on different hosts encrypt what they send; conf/production.toml turns it on (docs/security.md)."""
    backend: Backend = "auto"
    """What carries gradients: `auto` by where the ranks are; `nccl` between GPUs (docs/gpu.md)."""
    algorithm: Algorithm = "auto"
    """Of all_reduce: `auto` by size and a cost model, fixed at the first start; else this one (docs/performance.md)."""
    trust_network: str | None = None
    """Interface (or ADDRESS/BITS) whose network may carry gRPC and NCCL, which cannot be authenticated."""
    start_limit_s: float = 300.0
    """A rank absent for so long after the start is a failure."""
    stall_limit_s: float = 600.0
    """A rank that lives but makes no step for so long is a failure."""
    heartbeat_limit_s: float | None = None
    """A rank that is not heard for so long, once it has opened the dataset, is lost; None is 10."""
    max_restarts: int = 3
    """Restarts in a row without a new checkpoint before the run gives up."""
    max_restarts_per_hour: int = 20
    """Restarts within an hour, whatever checkpoints they bring: what fails every three minutes only creeps."""
    spare: bool = False
    """Whether each supervisor keeps a process that has imported TensorFlow for the next restart."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "datasets", several(self.datasets))
        object.__setattr__(self, "augment", " ".join(canonical(self.augment.split())))
        counts = ("num_ranks", "global_batch", "epochs", "keep_checkpoints", "compare_every")
        for name in (*counts, "window_bytes", "interleave"):
            self._check(name, 1 <= getattr(self, name) < 2**63, "an integer from 1 to 2^63 - 1")
        self._check("keep_every", self.keep_every is None or self.keep_every >= 1, "steps from 1 up")
        self._check("keep_best", self.keep_best is None or BEST.fullmatch(self.keep_best) is not None, BEST_ALLOWED)
        self._check("max_restarts", self.max_restarts >= 0, "an integer from 0 up")
        self._check("max_restarts_per_hour", self.max_restarts_per_hour >= 0, "an integer from 0 up")
        self._check("seed", 0 <= self.seed < 2**63, "an integer from 0 to 2^63 - 1")
        try:
            every = CheckpointEvery.parse(self.checkpoint_every)
        except ValueError:
            self._check("checkpoint_every", False, ALLOWED)
        else:
            object.__setattr__(self, "checkpoint_every", every.steps or self.checkpoint_every)
        between = self.mean_time_between_failures_s
        self._check("mean_time_between_failures_s", 0 < between < float("inf"), "seconds above 0")
        self._check("start_limit_s", 0 < self.start_limit_s < float("inf"), "seconds above 0")
        self._check("stall_limit_s", 0 < self.stall_limit_s < float("inf"), "seconds above 0")
        silent = self.heartbeat_limit_s
        self._check("heartbeat_limit_s", silent is None or 2 <= silent < float("inf"), "seconds from 2 up: two beats")
        self._check("datasets", len(self.datasets) > 0 and all(self.datasets), "one dataset URL or more")
        self._check("run", bool(self.run.strip("/")), "the URL of a directory of its own")
        durable = not self.run.startswith(("webhdfs:", "swebhdfs:"))
        self._check("run", durable, "a local path or hdfs://, which sync durably")
        self._check("model", bool(self.model), "a model's name or module:function")
        self._check("split", bool(self.split), "a split's name")
        self._check("batchnorm", self.batchnorm in get_args(BatchNorm), " or ".join(get_args(BatchNorm)))
        self._check("precision", self.precision in get_args(Precision), " or ".join(get_args(Precision)))
        self._check("non_finite", self.non_finite in get_args(NonFinite), " or ".join(get_args(NonFinite)))
        alone = self.non_finite == "stop" or self.micro_batches == 1
        self._check("non_finite", alone, "stop with --micro-batches: what is added up cannot be skipped in part")
        if self.canonical:  # which of these divide its lane groups or lanes, training.plan.lane_count tells
            power_of_two = self.num_ranks.bit_count() == 1
            self._check("num_ranks", power_of_two, "with --canonical 1, 2, 4, ...: ranks add up whole subtrees")
            self._check("batchnorm", self.batchnorm != "sync", "with --canonical: ghost or local")
            self._check("micro_batches", self.micro_batches == 1, "1 with --canonical, which goes unit by unit anyway")
            self._check("algorithm", self.algorithm == "auto", "auto with --canonical, which has an order of its own")
            self._check("backend", self.backend not in UNAUTHENTICATED, "with --canonical: auto, tcp or shm")
        self._check("bad_images", self.bad_images in get_args(BadImages), " or ".join(get_args(BadImages)))
        self._check("launcher", self.launcher in get_args(Launcher), " or ".join(get_args(Launcher)))
        self._check("tls", self.tls in get_args(Switch), " or ".join(get_args(Switch)))
        self._check("backend", self.backend in get_args(Backend), " or ".join(get_args(Backend)))
        self._check("algorithm", self.algorithm in get_args(Algorithm), " or ".join(get_args(Algorithm)))
        self._check("trust_network", self.trust_network != "", "an interface's name, or a network as 10.1.0.0/16")
        CommOptions(backend=self.backend, algorithm=self.algorithm, trust_network=self.trust_network)  # what fits what
        rules = get_args(ScalingRule)
        self._check("learning_rate_scaling", self.learning_rate_scaling in rules, " or ".join(rules))
        scales, base = self.learning_rate_scaling != "none", self.base_batch
        self._check("base_batch", base is None or scales, "nothing without --learning-rate-scaling, which it is for")
        self._check("base_batch", base is not None or not scales, "with scaling: the batch that the rate was found for")
        self._check("base_batch", base is None or base >= 1, "an integer from 1 up")
        self._check("warm_up_epochs", 0 <= self.warm_up_epochs < self.epochs, "from 0 to fewer than epochs")
        self._check("micro_batches", self.micro_batches >= 1, "an integer from 1 up")
        rate = self.learning_rate
        self._check("learning_rate", rate is None or 0 < rate < float("inf"), "a finite number above 0")
        if self.mix is not None:
            object.__setattr__(self, "mix", tuple(self.mix))
            count = len(self.datasets)
            right = len(self.mix) == count >= 2 and all(type(ratio) is int and ratio >= 1 for ratio in self.mix)
            self._check("mix", right, f"two datasets or more and an integer from 1 up for each of them, here {count}")
        self._check("read_ahead_bytes", self.read_ahead_bytes >= 1, "an integer from 1 up")
        self._check("cache_bytes", self.cache_bytes >= 1, "an integer from 1 up")
        self._check("cache", self.cache is None or self.cache.startswith("/"), "an absolute path on every rank's host")
        self._check("verify", self.verify in get_args(Verify), " or ".join(get_args(Verify)))
        groups, rotation = self.cache_groups, self.cache_rotation
        self._check("cache_groups", groups is None or groups >= 1, "an integer from 1 up")
        self._check("cache_rotation", rotation is None or 1 <= rotation < 2**63, "epochs from 1 to 2^63 - 1")
        self._check("cache_rotation", rotation is None or groups is not None, "nothing without --cache-groups")
        if self.lanes is not None:
            right = self.lanes >= 1 and self.global_batch % self.lanes == 0
            self._check("lanes", right, f"a divisor of global_batch={self.global_batch}")

    @property
    def keep(self) -> Keep:
        """Which checkpoints stay."""
        return Keep(self.keep_checkpoints, self.keep_every, self.keep_best)

    def _check(self, name: str, right: bool, allowed: str) -> None:
        if not right:
            raise ConfigError(
                f"the training configuration's `{name}` cannot be right",
                got=f"{name} = {getattr(self, name)!r}",
                allowed=allowed,
                next_step=f"Correct {flag_of(name)}.",
            )

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return {**asdict(self), "datasets": list(self.datasets), "mix": None if self.mix is None else list(self.mix)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> TrainConfig:
        """The inverse of `to_json`; raises ConfigError for an unknown or missing field."""
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


LANE_GROUPS = 8  # of ghost BatchNorm: its statistics are over G / 8 samples, whatever the number of ranks


def lane_groups(config: TrainConfig) -> int | None:
    """The number of lane groups that ranks own whole; None where ranks may own any lanes."""
    return LANE_GROUPS if config.batchnorm == "ghost" else None
