"""What a model holds on each rank, by how ranks divide it: bytes by formula, and the fewest ranks on which it fits.

Bytes of weights, gradients and optimizer state are those of Rajbhandari et al., "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models" (SC 2020), here in float32. What a transformer keeps for its backward pass is from
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (MLSys 2023), table 2, with floats
of 4 bytes and masks of 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.storage.errors import require
from lockstep.storage.shown import counted

FLOAT_BYTES = 4
SLOTS = {"sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1, "lion": 1, "adam": 2, "adamw": 2, "nadam": 2}
"""Numbers that an optimizer keeps for each weight."""
GIB, MIB = 1 << 30, 1 << 20
MOST_RANKS = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Transformer:
    """The shape that decides what layers keep. Raises ConfigError for numbers below 1."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    rows: int
    """Rows of a rank's step."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A model's bytes on one process."""

    weights: float
    gradients: float
    state: float
    """What the optimizer keeps."""
    kept: float = 0.0
    """What layers keep of a step for the backward pass."""
    transformer: Transformer | None = None

    @classmethod
    def of(cls, parameters: float, optimizer: str, transformer: Transformer | None = None) -> Size:
        """A model of so many float32 parameters, all trained. Raises ConfigError for another optimizer than SLOTS'."""
        require(1 <= parameters < 1e18, "--parameters", f"{parameters:g}", "1 up to 1e18")
        require(optimizer in SLOTS, "--optimizer", optimizer, ", ".join(SLOTS))
        one = parameters * FLOAT_BYTES
        kept = 0.0 if transformer is None else transformer.kept_bytes()
        return cls(weights=one, gradients=one, state=one * SLOTS[optimizer], kept=kept, transformer=transformer)


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to divide a model over ranks."""

    name: str
    runs: bool
    """Whether Lockstep trains so."""
    divides: tuple[str, ...]
    """The parts of a Size of which each rank has one of N equal shares."""
    gathers: float | None
    """Times that a rank sends (N-1)/N of the weights in a step; None: it sends what layers compute."""


TENSOR = "tensor parallel"
EACH_PART = ("state", "gradients", "weights")
MODES = (
    Mode("replicated", True, (), 2),
    Mode("--zero 1", True, ("state",), 2),
    Mode("--zero 2", True, ("state", "gradients"), 2),
    Mode("--zero 3", True, EACH_PART, 3),
    Mode(TENSOR, False, EACH_PART, None),
    Mode("pipeline", False, EACH_PART, None),
)
"""All modes, of which the first divides nothing."""


def held(size: Size, mode: Mode, num_ranks: int) -> dict[str, float]:
    """The bytes of each part on each of `num_ranks` ranks.

    A pipeline's first stage keeps as many micro-batches as there are stages, of its share of the layers: a whole step
    of one micro-batch through all layers, here taken as the rows of a rank's step.
    """
    parts = {name: getattr(size, name) for name in ("weights", "gradients", "state")}
    found = {name: value / num_ranks if name in mode.divides else value for name, value in parts.items()}
    shape = size.transformer
    found["kept"] = shape.kept_bytes(num_ranks) if shape is not None and mode.name == TENSOR else size.kept
    return found


def sent(size: Size, mode: Mode, num_ranks: int) -> float | None:
    """The bytes that a rank sends in a step, by the best algorithms; None where the model's shape is not known.

    A tensor-parallel layer adds up what it computes four times (Shoeybi et al., "Megatron-LM", 2019); a stage of a
    pipeline sends its outputs and their gradients once.
    """
    share, shape = (num_ranks - 1) / num_ranks, size.transformer
    if num_ranks == 1:
        return 0.0
    if mode.gathers is not None:
        return size.gradients * mode.gathers * share
    if shape is None:
        return None
    one = float(shape.rows * shape.sequence * shape.hidden * FLOAT_BYTES)
    return 4 * shape.layers * 2 * share * one if mode.name == TENSOR else 2 * one


def most_ranks(size: Size, mode: Mode) -> int:
    """The most ranks that can divide the model so: those of a pipeline its layers, tensor-parallel ones its heads."""
    shape = size.transformer
    if shape is None or mode.gathers is not None:
        return MOST_RANKS
    return shape.heads if mode.name == TENSOR else shape.layers


def fewest_ranks(size: Size, mode: Mode, limit_bytes: float) -> int | None:
    """The fewest ranks on each of which the model fits into so many bytes; None if it fits on no number of them."""
    low, high = 0, most_ranks(size, mode)
    if sum(held(size, mode, high).values()) > limit_bytes:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        fits = sum(held(size, mode, middle).values()) <= limit_bytes
        low, high = (low, middle) if fits else (middle, high)
    return high


def memory_plan(size: Size, num_ranks: Sequence[int], limit_bytes: float) -> list[dict[str, Any]]:
    """A row for each mode and number of ranks that it can have: {mode, runs, ranks, weights, gradients, state, kept,
    held, sent, fits, fewest_ranks}, all in bytes; `sent` is None where it is not known.

    Raises ConfigError for a limit or numbers of ranks below 1.
    """
    allowed = f"1 to {MOST_RANKS:,}"
    require(all(1 <= one <= MOST_RANKS for one in num_ranks), "--num-ranks", str([*num_ranks]), allowed)
    require(limit_bytes > 0, "--memory", f"{limit_bytes:g} bytes", "more than 0")
    rows = []
    for mode in MODES:
        fewest = fewest_ranks(size, mode, limit_bytes)
        for number in num_ranks:
            if number > most_ranks(size, mode) or (number == 1 and mode.divides):
                continue
            parts, out = held(size, mode, number), sent(size, mode, number)
            whole = sum(parts.values())
            row = {"mode": mode.name, "runs": mode.runs, "ranks": number, **parts, "held": whole}
            rows.append({**row, "sent": out, "fits": whole <= limit_bytes, "fewest_ranks": fewest})
    return rows


def advice(rows: Sequence[Mapping[str, Any]], limit_bytes: float) -> str:
    """The sentence that says what to do: Lockstep's first mode that fits, else the one that needs the fewest ranks."""
    limit, ours = size_words(limit_bytes), [row for row in rows if row["runs"]]
    if fitting := next((row for row in ours if row["fits"]), None):
        return f"fits into {limit}: {fitting['mode']} on {counted(fitting['ranks'], 'rank')}"
    would = [row for row in ours if row["fewest_ranks"]] or [row for row in rows if row["fewest_ranks"]]
    if not would:
        return f"does not fit into {limit}, however many ranks divide it"
    best = min(would, key=lambda row: int(row["fewest_ranks"]))
    without = "" if best["runs"] else ", which Lockstep does not have"
    return f"does not fit into {limit}: {best['mode']} on {counted(best['fewest_ranks'], 'rank')} would{without}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table; `*` marks what Lockstep does not have."""
    lines = [
        ("mode", "ranks", "weights", "gradients", "optimizer", "layers keep", "a rank", "sent a step", "fits from")
    ]
    for row in rows:
        held_words = [size_words(row[name]) for name in ("weights", "gradients", "state", "kept", "held")]
        out = "-" if row["sent"] is None else size_words(row["sent"])
        fewest = "never" if row["fewest_ranks"] is None else counted(row["fewest_ranks"], "rank")
        lines.append((row["mode"] + " *" * (not row["runs"]), str(row["ranks"]), *held_words, out, fewest))
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
