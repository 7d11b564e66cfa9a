"""Splits by hash: which split a record belongs to never depends on the other records."""

from __future__ import annotations

from dataclasses import dataclass

from features.sample_id import share_of, unit_hash
from storage.errors import ConfigError

NAMES = ("train", "test")
_ALLOWED = "A/B such as 80/20, group:COLUMN:A/B, or given (inputs named train-* and t10k-* or test-*)"


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSpec:
    """How records are split: by sample id (`column` None), by the value of `column`, or as the input says (`given`)."""

    weights: tuple[int, ...] = ()
    column: str | None = None
    given: bool = False

    @classmethod
    def parse(cls, text: str) -> SplitSpec:
        """Read `--split`. Raises ConfigError for anything but the forms above."""
        if text == "given":
            return cls(given=True)
        column, shares = None, text
        if text.startswith("group:"):
            column, _, shares = text.removeprefix("group:").rpartition(":")
        parts = shares.split("/")
        good = len(parts) == len(NAMES) and all(
            part.isascii() and part.isdigit() and len(part) < 10 and 0 < int(part) < 10**6 for part in parts
        )
        if not good or column == "":
            raise ConfigError(
                "--split cannot be read", got=text, allowed=_ALLOWED, next_step="Write for example --split 80/20."
            )
        return cls(weights=tuple(int(part) for part in parts), column=column)

    def place(self, value: bytes, seed: int) -> int:
        """The split, as an index into NAMES, of a record (sample id, 8 little-endian bytes) or a group (UTF-8)."""
        return share_of(unit_hash(value, seed), self.weights)
