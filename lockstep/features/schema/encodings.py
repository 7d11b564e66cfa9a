"""The encodings that a field may declare: their keys, the fields that they fit, and what a model is fed.

    kind         keys (optional ones in brackets)                 fields                      a model is fed
    vocabulary   file, max_size, min_count, oov_buckets, [output] string, (u)int64; list      columns or ids
                 [tokens]
    hash         buckets, seed, [output]                          also bytes                  columns or ids
    bucketise    boundaries, [output]                             number                      columns or ids
    standardise  file, [mean, deviation]                          number                      distance from the mean
    number       [dtype], [null_value]                            number, bool                the value
    log          [null_value]                                     number                      log(1 + value)
    clip         least, most, [null_value]                        number                      the value within bounds
    sequence     length, [keep], [with], [pad_value], [of]        list                        `length` values or ids
    normalise    mean, deviation, [divide_by]                     tensor                      float32 by channel
    image        height, width, channels, [fit], [mean ...]       bytes                       decoded pixels
    ignore                                                        any                         nothing: only stored
    baked        raw, [ids], [fitted]                             what --bake stored          the same as with `raw`

`baked` is not declared: lockstep/features/encode/bake.py writes it. docs/schema.md says how each encoding treats
nulls, unknown values and lists.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lockstep.features.images.choices import FITS
from lockstep.storage.errors import ConfigError

Encoding = Mapping[str, Any]
Form = tuple[str, tuple[int | None, ...]]
BAKED = "baked"
RAW_KEYS = ("dtype", "shape", "nullable", "encoding")
ONE_HOT, MULTI_HOT, INDEX = "one_hot", "multi_hot", "index"
# A wider one-hot row would be larger than the rest of the record; use ids and an embedding.
MAX_COLUMNS = 1 << 16
MAX_IDS = 1 << 31
MAX_SIDE = 1 << 14
_LEAST = 1e-30  # the smallest divisor: float32 cannot divide by much smaller numbers
_MOST_DEVIATION = 1e150  # its square is kept
NUMBERS = ("int64", "float32", "float64")  # what a model may be fed
STORED_NUMBERS = (*NUMBERS, "uint64")
_CATEGORICAL = ("hash", "vocabulary", "bucketise")
MAX_FILE_STEM = 101
_FILE = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_FILE_STEM - 1}}}\.json")
_HELD_OUT = re.compile(r".*\.fold-\d+\.json")


@dataclass(frozen=True, slots=True)
class _Case:
    """One encoding of one field, while its rule checks it."""

    field: str
    dtype: str
    shape: tuple[int | None, ...]
    nullable: bool
    encoding: Encoding

    @property
    def is_list(self) -> bool:
        return self.shape == (None,)

    def require(self, good: bool, got: str, allowed: str) -> None:
        """Raise ConfigError naming the field unless `good`."""
        if not good:
            raise declaration_error(f"field `{self.field}`", got, allowed)


@dataclass(frozen=True, slots=True)
class _Rule:
    """Required and optional keys with their types, the dtypes and shapes of fields that fit, and a further check."""

    required: Mapping[str, Any]
    optional: Mapping[str, Any]
    dtypes: tuple[str, ...]
    fits: tuple[str, ...] = ("a scalar",)
    check: Callable[[_Case], None] | None = None


def declaration_error(what: str, got: str, allowed: str) -> ConfigError:
    """The error for a wrong declaration."""
    return ConfigError(
        f"{what} cannot be declared like this", got=got, allowed=allowed, next_step="Correct the schema."
    )


def check_encoding(
    field: str, dtype: str, *, shape: tuple[int | None, ...], nullable: bool, encoding: Encoding
) -> None:
    """Raise ConfigError unless `encoding` is well formed and fits a field of this dtype and shape."""
    case = _Case(field, dtype, shape, nullable, encoding)
    kind = encoding.get("kind")
    rule = _RULES.get(kind) if isinstance(kind, str) else None
    case.require(rule is not None, f"encoding kind {kind!r}", ", ".join(KINDS))
    assert rule is not None
    keys = set(encoding) - {"kind"}
    missing = [key for key in rule.required if key not in keys]
    unknown = sorted(str(key) for key in keys - {*rule.required, *rule.optional})
    # Name only the wrong keys: defaults that the user never wrote, such as a hash's seed, are filled in by now.
    faults = [f"{what} {', '.join(found)}" for what, found in (("no key", missing), ("unknown key", unknown)) if found]
    known = f"the keys {', '.join(('kind', *rule.required))}"
    case.require(
        not faults,
        f"encoding {kind} with {' and '.join(faults)}",
        f"{known}, and perhaps {', '.join(rule.optional)}" if rule.optional else known,
    )
    for key, wanted in {**rule.required, **rule.optional}.items():
        if key in encoding:
            value = encoding[key]
            right = isinstance(value, wanted) and not isinstance(value, bool)
            case.require(right, f"{key} = {value!r}"[:200], f"{key} of type {getattr(wanted, '__name__', wanted)}")
    case.require(dtype in rule.dtypes, f"encoding {kind} over {dtype}", f"{kind} over {', '.join(rule.dtypes)}")
    here = "a list" if case.is_list else "a tensor" if shape else "a scalar"
    case.require(here in rule.fits, f"encoding {kind} of {here}", ", ".join(rule.fits))
    if rule.check is not None:
        rule.check(case)


def fitted_part(encoding: Encoding | None) -> Encoding | None:
    """The encoding, or the one inside a sequence, whose fitted statistics are in its `file`; None if not fitted."""
    if encoding is not None and encoding["kind"] == "sequence":
        encoding = encoding.get("of")
    return encoding if encoding is not None and "file" in encoding else None


def is_declared(part: Encoding) -> bool:
    """Whether a `fitted_part` declares its statistics, so that no row is looked at for them."""
    return "tokens" in part or "mean" in part


def output_of(encoding: Encoding, *, is_list: bool) -> str:
    """The declared or default output of a categorical encoding: one_hot, multi_hot or index."""
    return str(encoding.get("output", MULTI_HOT if is_list else ONE_HOT))


def stored_form(dtype: str, shape: tuple[int | None, ...], encoding: Encoding | None) -> Form | None:
    """The stored dtype and shape of a declared feature after its encoding is baked in.

    None if baking does not change it, or if it cannot be fed to a model.
    """
    kind = None if encoding is None else encoding["kind"]
    if encoding is None:
        return ("float32", ()) if not shape and dtype in (*STORED_NUMBERS, "bool") and dtype != "float32" else None
    if kind in ("standardise", "log", "clip"):
        return "float32", ()
    if kind == "number":
        return encoding.get("dtype", "float32"), ()
    if kind in _CATEGORICAL:
        return "int64", shape
    if kind == "sequence":
        return "int64" if "of" in encoding else "float32", shape
    if kind == "normalise":
        return "float32", shape
    if kind == "image":
        size = (encoding["height"], encoding["width"], encoding["channels"])
        return "float32" if "mean" in encoding else "uint8", size
    return None


def has_ids(encoding: Encoding | None) -> bool:
    """Whether a baked feature of this encoding stores ids, of which 0 means null, padding or unknown."""
    return encoding is not None and (encoding["kind"] in _CATEGORICAL or "of" in encoding)


def declared_ids(encoding: Encoding) -> int | None:
    """The number of ids, the id 0 included; None if it depends on a fitted vocabulary."""
    if encoding["kind"] == "hash":
        return int(encoding["buckets"]) + 1
    return len(encoding["boundaries"]) + 2 if encoding["kind"] == "bucketise" else None


def _vocabulary(case: _Case) -> None:
    declared = case.encoding
    size, buckets = declared["max_size"], declared["oov_buckets"]
    good = size >= 1 and declared["min_count"] >= 1 and buckets >= 0 and size + buckets < MAX_IDS
    case.require(good, repr(dict(declared)), "max_size >= 1, min_count >= 1, oov_buckets >= 0, below 2^31 in all")
    if "tokens" in declared:
        tokens = declared["tokens"]
        texts = all(isinstance(token, str) for token in tokens) and 0 < len(set(tokens)) == len(tokens) <= size
        case.require(texts, f"tokens {tokens!r}"[:200], f"1 to {size} different texts; of numbers their digits")
    _file(case)
    _output(case, size + buckets)


def _hash(case: _Case) -> None:
    buckets, seed = case.encoding["buckets"], case.encoding["seed"]
    case.require(1 <= buckets < MAX_IDS, f"buckets {buckets}", "1 to 2^31 - 1")
    case.require(0 <= seed < 1 << 63, f"seed {seed}", "0 to 2^63 - 1")
    _output(case, buckets)


def _bucketise(case: _Case) -> None:
    bounds = case.encoding["boundaries"]
    numbers = all(isinstance(b, int | float) and not isinstance(b, bool) and _is_finite(b) for b in bounds)
    good = len(bounds) > 0 and numbers and all(a < b for a, b in pairwise(bounds))
    case.require(good, f"boundaries {bounds!r}"[:200], "one or more numbers, strictly increasing")
    _output(case, len(bounds) + 1)


def _standardise(case: _Case) -> None:
    mean, deviation = case.encoding.get("mean"), case.encoding.get("deviation")
    case.require((mean is None) == (deviation is None), "only one of mean and deviation", "both, or neither")
    if mean is not None and deviation is not None:
        good = _is_finite(mean) and _LEAST <= deviation <= _MOST_DEVIATION
        got = f"mean {mean!r}, deviation {deviation!r}"[:200]
        case.require(good, got, f"a finite mean, a deviation from {_LEAST:g} to {_MOST_DEVIATION:g}")
    _file(case)


def _number(case: _Case) -> None:
    dtype, null = case.encoding.get("dtype", "float32"), case.encoding.get("null_value", 0)
    case.require(dtype in NUMBERS, f"dtype {dtype!r}", ", ".join(NUMBERS))
    replaced = not case.nullable or "null_value" in case.encoding
    case.require(replaced, "a nullable number without null_value", "null_value, which replaces null")
    whole = dtype != "int64" or (isinstance(null, int) and -(1 << 63) <= null < 1 << 63)
    case.require(_is_finite(null) and whole, f"null_value {null!r}", "a finite number, an integer for int64")
    exact = dtype != "int64" or case.dtype in ("int64", "uint64", "bool")
    case.require(exact, f"dtype int64 for a field of {case.dtype}", "float32 or float64, which hold fractions")


def _null_value(case: _Case) -> None:
    null = case.encoding.get("null_value", 0)
    case.require(_is_finite(null), f"null_value {null!r}", "a finite number, which replaces null and NaN")


def _clip(case: _Case) -> None:
    least, most = case.encoding["least"], case.encoding["most"]
    good = _is_finite(least) and _is_finite(most) and least < most
    case.require(good, f"least {least!r}, most {most!r}", "two finite numbers, least below most")
    _null_value(case)


def _sequence(case: _Case) -> None:
    declared, length = case.encoding, case.encoding["length"]
    keep, extra, of = declared.get("keep", "first"), declared.get("with", "mask"), declared.get("of")
    case.require(1 <= length <= MAX_COLUMNS, f"length {length}", f"1 to {MAX_COLUMNS}")
    case.require(keep in ("first", "last"), f"keep {keep!r}", "first, last")
    case.require(extra in ("mask", "length", "nothing"), f"with {extra!r}", "mask, length, nothing")
    if of is None:
        pad = declared.get("pad_value", 0)
        plain = case.dtype in (*STORED_NUMBERS, "bool")
        case.require(plain, f"a sequence of {case.dtype} without `of`", "of = a vocabulary or a hash")
        case.require(_is_finite(pad), f"pad_value {pad!r}", "a finite number")
        return
    case.require("pad_value" not in declared, "pad_value with `of`", "no pad_value: ids are padded with 0")
    case.require(of.get("kind") in ("vocabulary", "hash"), f"of kind {of.get('kind')!r}", "vocabulary, hash")
    case.require("output" not in of, f"output {of.get('output')!r} inside a sequence", "no output: a sequence of ids")
    check_encoding(case.field, case.dtype, shape=(), nullable=False, encoding={**of, "output": INDEX})


def _image(case: _Case) -> None:
    sides, channels = (case.encoding["height"], case.encoding["width"]), case.encoding["channels"]
    case.require(all(1 <= side <= MAX_SIDE for side in sides), f"sides {sides}", f"1 to {MAX_SIDE}")
    case.require(channels in (1, 3), f"channels {channels}", "1, 3")
    fit = case.encoding.get("fit", "resize")
    case.require(fit in FITS, f"fit {fit!r}", ", ".join(FITS))
    case.require(not case.nullable, "a nullable image", "an image in each row")
    if {"mean", "deviation", "divide_by"} & set(case.encoding):
        both = {"mean", "deviation"} <= set(case.encoding)
        case.require(both, "only one of mean and deviation", "both, or neither and no divide_by")
        _figures(case, channels)


def _normalise(case: _Case) -> None:
    channels = case.shape[-1]
    assert channels is not None
    case.require(not case.nullable, "a nullable tensor", "a tensor in each row")
    _figures(case, channels)


def _figures(case: _Case, channels: int) -> None:
    for key in ("mean", "deviation"):
        values = case.encoding[key]
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) and _is_finite(v) for v in values)
        case.require(
            numbers and len(values) in (1, channels), f"{key} {values!r}"[:200], f"1 or {channels} finite numbers"
        )
    case.require(all(value >= _LEAST for value in case.encoding["deviation"]), "a deviation of 0 or less", "above 0")
    divisor = case.encoding.get("divide_by", 1)
    case.require(_is_finite(divisor) and divisor >= _LEAST, f"divide_by {divisor!r}", "a number above 0, such as 255")


def _file(case: _Case) -> None:
    file = case.encoding["file"]
    good = _FILE.fullmatch(file) is not None and _HELD_OUT.fullmatch(file) is None
    case.require(good, f"file {file!r}", "a plain NAME.json that does not end in .fold-N.json")


def _output(case: _Case, columns: int) -> None:
    output = output_of(case.encoding, is_list=case.is_list)
    allowed = (MULTI_HOT,) if case.is_list else (ONE_HOT, INDEX)
    ids = "a sequence, which feeds ids" if case.is_list else "output = index"
    case.require(output in allowed, f"output {output!r}", f"{', '.join(allowed)}; or {ids}")
    small = output == INDEX or columns <= MAX_COLUMNS
    case.require(small, f"{columns} columns of {output}", f"at most {MAX_COLUMNS}; or {ids}")


def _is_finite(value: float) -> bool:
    return abs(value) <= sys.float_info.max  # math.isfinite raises OverflowError for a long int


_RULES: dict[str, _Rule] = {
    "vocabulary": _Rule(
        {"file": str, "max_size": int, "min_count": int, "oov_buckets": int},
        {"output": str, "tokens": list},
        ("string", "int64", "uint64"),
        fits=("a scalar", "a list"),
        check=_vocabulary,
    ),
    "hash": _Rule(
        {"buckets": int, "seed": int},
        {"output": str},
        ("string", "int64", "uint64", "bytes"),
        fits=("a scalar", "a list"),
        check=_hash,
    ),
    "bucketise": _Rule({"boundaries": list}, {"output": str}, STORED_NUMBERS, check=_bucketise),
    "standardise": _Rule(
        {"file": str}, {"mean": int | float, "deviation": int | float}, STORED_NUMBERS, check=_standardise
    ),
    "number": _Rule({}, {"dtype": str, "null_value": int | float}, (*STORED_NUMBERS, "bool"), check=_number),
    "log": _Rule({}, {"null_value": int | float}, STORED_NUMBERS, check=_null_value),
    "clip": _Rule(
        {"least": int | float, "most": int | float}, {"null_value": int | float}, STORED_NUMBERS, check=_clip
    ),
    "sequence": _Rule(
        {"length": int},
        {"keep": str, "with": str, "pad_value": int | float, "of": Mapping},
        (*STORED_NUMBERS, "bool", "string", "bytes"),
        fits=("a list",),
        check=_sequence,
    ),
    "normalise": _Rule(
        {"mean": list, "deviation": list},
        {"divide_by": int | float},
        (*NUMBERS, "uint8"),
        fits=("a tensor",),
        check=_normalise,
    ),
    "image": _Rule(
        {"height": int, "width": int, "channels": int},
        {"fit": str, "mean": list, "deviation": list, "divide_by": int | float},
        ("bytes",),
        check=_image,
    ),
    BAKED: _Rule(
        {"raw": Mapping},
        {"ids": int, "fitted": Mapping},
        (*NUMBERS, "uint8"),
        fits=("a scalar", "a list", "a tensor"),
    ),
    "ignore": _Rule(
        {}, {}, (*STORED_NUMBERS, "bool", "string", "bytes", "uint8"), fits=("a scalar", "a list", "a tensor")
    ),
}
KINDS = tuple(kind for kind in _RULES if kind != BAKED)  # those that may be declared
