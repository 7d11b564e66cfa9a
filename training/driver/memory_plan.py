"""What a model holds on each rank, by how ranks divide it: bytes by formula, what is sent, and the time of a step.

Bytes of weights, gradients and optimizer state are those of Rajbhandari et al., "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models" (SC 2020). What a transformer keeps for its backward pass is from Korthikanti et
al., "Reducing Activation Recomputation in Large Transformer Models" (MLSys 2023), table 2, with floats of 4 bytes and
masks of 1. A pipeline's time is that of Huang et al., "GPipe" (2019): with p stages, m micro-batches take m + p - 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lockstep.storage.errors import ConfigError, require
from lockstep.storage.shown import counted
from lockstep.training import ways
from lockstep.training.comm.cost import Counts, Links, fastest, predict_s
from lockstep.training.exchange.buckets import BUCKET_BYTES

FLOAT_BYTES = 4
SLOTS = {"sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1, "lion": 1, "adam": 2, "adamw": 2, "nadam": 2}
"""Numbers that an optimizer keeps for each weight."""
GIB, MIB = 1 << 30, 1 << 20
MOST_RANKS = 1 << 20
SEARCHED_RANKS = 64  # up to so many, and then each power of two, are tried for the fewest ranks on which a model fits
ZERO_BUFFERS = 3  # of buckets, with --zero 2 and 3
LAYERS_AT_ONCE = 2  # whose weights --zero 3 has gathered: one in use, and the next one


@dataclass(frozen=True, kw_only=True, slots=True)
class Transformer:
    """The shape that decides what layers keep. Raises ConfigError for numbers below 1."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    rows: int
    """Rows of a rank's step, and of a micro-batch where several ranks compute the same rows."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            require(value >= 1, f"--{name}", str(value), "1 or more")

    def kept_bytes(self, tensor_ranks: int = 1) -> float:
        """The bytes that all layers keep of a step on each of `tensor_ranks` ranks that divide every layer."""
        tokens = self.sequence * self.rows * self.hidden
        # Inputs of two normalisations, of attention and of the dense layers, and two masks are whole on each rank.
        whole, divided, attention = 4 * FLOAT_BYTES + 2, 12 * FLOAT_BYTES, 2 * FLOAT_BYTES + 1
        scores = attention * self.heads * self.sequence / self.hidden
        return self.layers * tokens * (whole + (divided + scores) / tensor_ranks)

    @property
    def parameters(self) -> int:
        """The weights and biases of its blocks, without tables: 12 h^2 + 13 h for each."""
        return self.layers * (12 * self.hidden**2 + 13 * self.hidden)

    @property
    def output_bytes(self) -> float:
        """What one layer hands to the next."""
        return float(self.rows * self.sequence * self.hidden * FLOAT_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A model's bytes on one process."""

    weights: float
    gradients: float
    """The bytes of gradients: of the weights that are trained."""
    state: float
    """What the optimizer keeps."""
    kept: float = 0.0
    """What layers keep of a step for the backward pass."""
    transformer: Transformer | None = None
    step_s: float | None = None
    """What one rank computes for a step of its rows."""

    @classmethod
    def of(
        cls, parameters: float, optimizer: str, transformer: Transformer | None = None, *, step_s: float | None = None
    ) -> Size:
        """A model of so many float32 parameters, all trained. Raises ConfigError for another optimizer than SLOTS'."""
        require(1 <= parameters < 1e18, "--parameters", f"{parameters:g}", "1 up to 1e18")
        require(optimizer in SLOTS, "--optimizer", optimizer, ", ".join(SLOTS))
        one = parameters * FLOAT_BYTES
        kept = 0.0 if transformer is None else transformer.kept_bytes()
        state = one * SLOTS[optimizer]
        return cls(weights=one, gradients=one, state=state, kept=kept, transformer=transformer, step_s=step_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """A way to divide a model over ranks: `stages` of layers, each layer over `tensor` ranks, copies by ZeRO."""

    ranks: int
    zero: int = 0
    stages: int = 1
    tensor: int = 1

    @property
    def name(self) -> str:
        """The flags that ask for it."""
        flags = {"--zero": self.zero, "--pipeline-stages": self.stages, "--tensor-parallel": self.tensor}
        return " ".join(f"{flag} {value}" for flag, value in flags.items() if value > (flag != "--zero")) or "plain"

    @property
    def shares(self) -> int:
        """The ranks that together hold one copy of the model."""
        return self.stages * self.tensor

    @property
    def copies(self) -> int:
        """The ranks that hold the same share of the model, without what ZeRO divides."""
        return self.ranks // self.shares

    @property
    def runs(self) -> bool:
        """Whether Lockstep trains so."""
        asked = {"zero": self.zero, "pipeline_stages": self.stages, "tensor_parallel": self.tensor}
        given = {name: value for name, value in asked.items() if value > (name != "zero")}
        return not given or any(_takes(way, given) for way in ways.WAYS)


def _takes(way: type[ways.Way], given: Mapping[str, Any]) -> bool:
    try:
        return given.keys() <= way.__dataclass_fields__.keys() and bool(way(**given))
    except ConfigError:
        return False


def modes(ranks: int, shape: Transformer | None) -> Iterator[Mode]:
    """All modes of so many ranks, from the one that divides nothing; at most one has stages and divided layers too."""
    yield Mode(ranks=ranks)
    if ranks == 1:
        return
    yield from (Mode(ranks=ranks, zero=stage) for stage in (1, 2, 3))
    most_stages, most_tensor = (ranks, ranks) if shape is None else (shape.layers, shape.heads)
    if ranks <= most_stages:
        yield Mode(ranks=ranks, stages=ranks)
    if ranks <= most_tensor:
        yield Mode(ranks=ranks, tensor=ranks)
    # Divided layers send most, so at most as many ranks as a host has divide one. The others are stages, then copies.
    for tensor in (8, 4, 2):
        rest = ranks // tensor
        if ranks % tensor == 0 and rest > 1 and tensor <= most_tensor:
            stages = next(one for one in range(min(rest, most_stages), 0, -1) if rest % one == 0)
            yield Mode(ranks=ranks, stages=stages, tensor=tensor)
            return


def held(size: Size, mode: Mode) -> dict[str, float]:
    """The bytes of each part on each rank: weights, gradients, state, kept and buffers.

    A pipeline's first stage keeps as many micro-batches as there are stages, of its share of the layers: a whole step
    of one micro-batch through all layers, here taken as the rows of a rank's step.
    """
    shares, copies, shape = mode.shares, mode.copies, size.transformer
    gradients = size.gradients / shares
    bucket = min(gradients, float(BUCKET_BYTES))
    buffers = ZERO_BUFFERS * bucket if mode.zero >= 2 and copies > 1 else 0.0
    if mode.zero == 3 and copies > 1:
        buffers += size.weights / shares * min(1.0, LAYERS_AT_ONCE / shape.layers) if shape else bucket
    divided = shape.kept_bytes(mode.tensor) / shape.kept_bytes() if shape is not None else 1.0
    return {
        "weights": size.weights / shares / (copies if mode.zero == 3 else 1),
        "gradients": gradients / (copies if mode.zero >= 2 else 1),
        "state": size.state / shares / (copies if mode.zero >= 1 else 1),
        "kept": size.kept * divided,
        "buffers": buffers,
    }


def sent(size: Size, mode: Mode) -> float | None:
    """The bytes that a rank sends in a step of `rows` for each rank, by the best algorithms; None where the model's
    shape decides and is not known.

    A tensor-parallel layer adds up what it computes four times (Shoeybi et al., "Megatron-LM", 2019); a stage of a
    pipeline sends its outputs and their gradients once for each micro-batch, of which there are `mode.shares`.
    """
    shape, share = size.transformer, (mode.copies - 1) / mode.copies
    found = (3 if mode.zero == 3 else 2) * share * size.gradients / mode.shares
    if mode.shares == 1:
        return found
    if shape is None:
        return None
    within = 8 * (mode.tensor - 1) / mode.tensor * shape.layers / mode.stages
    return found + mode.shares * shape.output_bytes * (within + (2 if mode.stages > 1 else 0))


def step_s(size: Size, mode: Mode, links: Links | None) -> float | None:
    """Seconds of a step of `rows` for each rank if nothing that is sent overlaps with arithmetic; None where the time
    of one rank's step or the shape is not known.
    """
    shape, shares = size.transformer, mode.shares
    if size.step_s is None or (mode.ranks > 1 and (links is None or (shape is None and shares > 1))):
        return None
    micro, turns = shares, shares + mode.stages - 1
    found = turns * size.step_s / shares

    def summed_s(ranks: int, nbytes: float) -> float:
        assert links is not None
        return predict_s(fastest(ranks, int(nbytes), links), ranks, int(nbytes), links)

    if mode.copies > 1:
        found += summed_s(mode.copies, size.gradients / shares) * (1.5 if mode.zero == 3 else 1)
    if mode.tensor > 1 and shape is not None:
        found += turns * 4 * shape.layers / mode.stages * summed_s(mode.tensor, shape.output_bytes)
    if mode.stages > 1 and shape is not None and links is not None:
        found += 2 * (micro + mode.stages - 1) * links.of("ring").seconds(Counts(1, shape.output_bytes, 0))
    return found


def fits(size: Size, mode: Mode, limit_bytes: float) -> bool:
    """Whether a rank holds no more than so many bytes."""
    return sum(held(size, mode).values()) <= limit_bytes


def fewest_ranks(size: Size, kind: Mode, limit_bytes: float) -> int | None:
    """The fewest ranks on which the model fits into so many bytes in the way that `kind` divides it; None if it fits on
    no number of them. Above SEARCHED_RANKS only powers of two are tried.
    """
    power = 2 * SEARCHED_RANKS
    numbers = [*range(2, SEARCHED_RANKS + 1)]
    while power <= MOST_RANKS:
        numbers.append(power)
        power *= 2
    if fits(size, Mode(ranks=1), limit_bytes):
        return 1
    for number in numbers:
        same = (one for one in modes(number, size.transformer) if _kind(one) == _kind(kind))
        if any(fits(size, one, limit_bytes) for one in same):
            return number
    return None


def _kind(mode: Mode) -> tuple[int, bool, bool]:
    return mode.zero, mode.stages > 1, mode.tensor > 1


def memory_plan(
    size: Size, num_ranks: Sequence[int], limit_bytes: float, links: Links | None = None
) -> list[dict[str, Any]]:
    """A row for each number of ranks and mode: {mode, runs, ranks, weights, gradients, state, kept, buffers, held,
    sent, step_s, fits, fewest_ranks}, bytes and seconds; `sent` and `step_s` are None where they are not known.

    Raises ConfigError for a limit or numbers of ranks below 1.
    """
    allowed = f"1 to {MOST_RANKS:,}"
    require(all(1 <= one <= MOST_RANKS for one in num_ranks), "--num-ranks", str([*num_ranks]), allowed)
    require(limit_bytes > 0, "--memory", f"{limit_bytes:g} bytes", "more than 0")
    rows = []
    for mode in (one for number in num_ranks for one in modes(number, size.transformer)):
        parts = held(size, mode)
        row: dict[str, Any] = {
            "mode": mode.name,
            "runs": mode.runs,
            "ranks": mode.ranks,
            **parts,
            "held": sum(parts.values()),
        }
        row |= {"sent": sent(size, mode), "step_s": step_s(size, mode, links)}
        rows.append(
            {**row, "fits": fits(size, mode, limit_bytes), "fewest_ranks": fewest_ranks(size, mode, limit_bytes)}
        )
    return rows


def advice(rows: Sequence[Mapping[str, Any]], limit_bytes: float) -> str:
    """The sentence that says what to do: Lockstep's first mode that fits, else the one that needs the fewest ranks."""
    limit, ours = size_words(limit_bytes), [row for row in rows if row["runs"]]
    if fitting := next((row for row in ours if row["fits"]), None):
        return f"fits into {limit}: {_flags(fitting['mode'])} on {counted(fitting['ranks'], 'rank')}"
    would = [row for row in ours if row["fewest_ranks"]] or [row for row in rows if row["fewest_ranks"]]
    if not would:
        return f"does not fit into {limit}, however many ranks divide it"
    best = min(would, key=lambda row: int(row["fewest_ranks"]))
    without = "" if best["runs"] else ", which Lockstep does not have"
    mode = _flags(str(best["mode"]))
    return f"does not fit into {limit}: {mode} on {counted(best['fewest_ranks'], 'rank')} would{without}"


def smaller(size: Size, ranks: int, rank_bytes: float, limit_bytes: float) -> str | None:
    """What would fit in place of a plain run whose rank needs `rank_bytes` on `ranks` ranks, in words such as
    "`--zero 2` on 4 ranks would (612.0 MiB a rank)"; None if no mode of Lockstep would on up to 64 ranks.

    What a rank needs besides weights, gradients and state is taken to stay.
    """
    own = sum(held(replace(size, kept=0.0), Mode(ranks=ranks)).values())
    if rank_bytes <= limit_bytes:
        return None
    for number in [one for one in range(max(2, ranks), SEARCHED_RANKS + 1) if one == ranks or one.bit_count() == 1]:
        for mode in modes(number, size.transformer):
            need = rank_bytes - own + sum(held(replace(size, kept=0.0), mode).values())
            if mode.zero and mode.runs and need <= limit_bytes:
                return f"`{mode.name}` on {number} ranks would ({size_words(need)} a rank)"
    return None


def _flags(mode: str) -> str:
    return f"`{mode}`" if mode.startswith("--") else mode


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table; `*` marks what Lockstep does not have."""
    names = ("weights", "gradients", "state", "kept", "buffers", "held")
    lines = [
        ("mode", "ranks", "weights", "gradients", "optimizer", "layers keep", "buffers", "a rank", "sent a step",
         "seconds", "fits from")
    ]  # fmt: skip
    for row in rows:
        out = "-" if row["sent"] is None else size_words(row["sent"])
        seconds = "-" if row["step_s"] is None else f"{row['step_s']:,.3g}"
        fewest = "never" if row["fewest_ranks"] is None else counted(row["fewest_ranks"], "rank")
        words = [size_words(row[name]) for name in names]
        lines.append((row["mode"] + " *" * (not row["runs"]), str(row["ranks"]), *words, out, seconds, fewest))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )


def size_words(size: float) -> str:
    """Bytes in GiB, small ones in MiB."""
    if size == 0:
        return "0"
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / MIB:,.1f} MiB"
