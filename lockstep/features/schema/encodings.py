"""The encodings that a field may declare: their keys, the fields that they fit, and what they need fitted.

    kind         keys (optional ones in brackets)                 fields                      a model is fed
    vocabulary   file, max_size, min_count, oov_buckets, [output] string, (u)int64; list      columns or ids
    hash         buckets, seed, [output]                          also bytes                  columns or ids
    bucketise    boundaries, [output]                             number                      columns or ids
    standardise  file                                             number                      distance from the mean
    number       [dtype], [null_value]                            number, bool                the value
    sequence     length, [keep], [with], [pad_value], [of]        list                        `length` values or ids
    normalise    mean, deviation, [divide_by]                     tensor                      float32 by channel
    image        height, width, channels, [fit], [mean ...]       bytes                       decoded pixels
    ignore                                                        any                         nothing: only stored
    baked        raw, [ids], [fitted]                             what --bake stored          the same as with `raw`

Nobody declares `baked` (lockstep/features/encode/bake.py). docs/schema.md says what each makes of nulls, of unknown
values and of lists.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lockstep.features.images.resize import FITS
from lockstep.storage.errors import ConfigError

BAKED = "baked"
RAW_KEYS = ("dtype", "shape", "nullable", "encoding")
Form = tuple[str, tuple[int | None, ...]]
_CATEGORICAL = ("hash", "vocabulary", "bucketise")
_PLAIN = ("int64", "uint64", "float32", "float64", "bool")


def stored_form(dtype: str, shape: tuple[int | None, ...], encoding: Mapping[str, Any] | None) -> Form | None:
    """The dtype and shape that a declared feature is stored in once its encoding is baked in.

    None where it is stored as it is declared, and where no model can be fed with it.
    """
    kind = None if encoding is None else encoding["kind"]
    if encoding is None:
        return ("float32", ()) if not shape and dtype in _PLAIN and dtype != "float32" else None
    if kind == "standardise":
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


def has_ids(encoding: Mapping[str, Any] | None) -> bool:
    """Whether what is stored of a declared feature are ids, 0 for nothing."""
    return encoding is not None and (encoding["kind"] in _CATEGORICAL or "of" in encoding)


Encoding = Mapping[str, Any]
ONE_HOT, MULTI_HOT, INDEX = "one_hot", "multi_hot", "index"
# Beyond that a row of zeros and one 1 is larger than the rest of the record: an index and an embedding do it.
MAX_COLUMNS = 1 << 16
MAX_IDS = 1 << 31
MAX_SIDE = 1 << 14
_LEAST = 1e-30  # what float32 can divide by
NUMBERS = ("int64", "float32", "float64")  # what a model may be fed
STORED_NUMBERS = (*NUMBERS, "uint64")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}\.json")
_HELD_OUT = re.compile(r".*\.fold-\d+\.json")


@dataclass(frozen=True, slots=True)
class _Case:
    """One encoding at one field; calling it raises ConfigError in the words of that field."""

    field: str
    dtype: str
    shape: tuple[int | None, ...]
    nullable: bool
    encoding: Encoding

    @property
    def is_list(self) -> bool:
        return self.shape == (None,)

    def __call__(self, good: bool, got: str, allowed: str) -> None:
        if not good:
            raise ConfigError(
                f"field `{self.field}` cannot be declared so",
                got=got,
                allowed=allowed,
                next_step="Correct the schema.",
            )


@dataclass(frozen=True, slots=True)
class _Rule:
    """Keys that must be there and keys that may, with their types; fields that fit; what else must hold."""

    required: Mapping[str, Any]
    optional: Mapping[str, Any]
    dtypes: tuple[str, ...]
    fits: tuple[str, ...] = ("a scalar",)
    check: Callable[[_Case], None] | None = None


def check_encoding(
    field: str, dtype: str, *, shape: tuple[int | None, ...], nullable: bool, encoding: Encoding
) -> None:
    """Raise ConfigError unless `encoding` is well formed and fits a field of this dtype and shape."""
    case = _Case(field, dtype, shape, nullable, encoding)
    kind = encoding.get("kind")
    rule = _RULES.get(kind) if isinstance(kind, str) else None
    case(rule is not None, f"encoding kind {kind!r}", ", ".join(KINDS))
    assert rule is not None
    keys = set(encoding) - {"kind"}
    missing = [key for key in rule.required if key not in keys]
    unknown = sorted(str(key) for key in keys - {*rule.required, *rule.optional})
    # Only what is wrong: keys that the user never wrote, such as a hash's seed, have been filled in by now.
    faults = [f"{what} {', '.join(found)}" for what, found in (("no key", missing), ("unknown key", unknown)) if found]
    known = f"the keys {', '.join(('kind', *rule.required))}"
    case(
        not faults,
        f"encoding {kind} with {' and '.join(faults)}",
        f"{known}, and perhaps {', '.join(rule.optional)}" if rule.optional else known,
    )
    for key, wanted in {**rule.required, **rule.optional}.items():
        if key in encoding:
            value = encoding[key]
            right = isinstance(value, wanted) and not isinstance(value, bool)
            case(right, f"{key} = {value!r}"[:200], f"{key} of type {getattr(wanted, '__name__', wanted)}")
    case(dtype in rule.dtypes, f"encoding {kind} over {dtype}", f"{kind} over {', '.join(rule.dtypes)}")
    here = "a list" if case.is_list else "a tensor" if shape else "a scalar"
    case(here in rule.fits, f"encoding {kind} of {here}", ", ".join(rule.fits))
    if rule.check is not None:
        rule.check(case)


def fitted_part(encoding: Encoding | None) -> Encoding | None:
    """The encoding, or the one inside a sequence, whose statistics are fitted and lie in its `file`; None without."""
    if encoding is not None and encoding["kind"] == "sequence":
        encoding = encoding.get("of")
    return encoding if encoding is not None and "file" in encoding else None


def output_of(encoding: Encoding, *, is_list: bool) -> str:
    """The declared or the default form of a categorical encoding: one_hot, multi_hot or index."""
    return str(encoding.get("output", MULTI_HOT if is_list else ONE_HOT))


def _vocabulary(case: _Case) -> None:
    declared = case.encoding
    size, buckets = declared["max_size"], declared["oov_buckets"]
    good = size >= 1 and declared["min_count"] >= 1 and buckets >= 0 and size + buckets < MAX_IDS
    case(good, repr(dict(declared)), "max_size >= 1, min_count >= 1, oov_buckets >= 0, below 2^31 in all")
    _file(case)
    _output(case, size + buckets)


def _hash(case: _Case) -> None:
    buckets, seed = case.encoding["buckets"], case.encoding["seed"]
    case(1 <= buckets < MAX_IDS, f"buckets {buckets}", "1 to 2^31 - 1")
    case(0 <= seed < 1 << 63, f"seed {seed}", "0 to 2^63 - 1")
    _output(case, buckets)


def _bucketise(case: _Case) -> None:
    bounds = case.encoding["boundaries"]
    numbers = all(isinstance(b, int | float) and not isinstance(b, bool) and _is_finite(b) for b in bounds)
    good = len(bounds) > 0 and numbers and all(a < b for a, b in pairwise(bounds))
    case(good, f"boundaries {bounds!r}"[:200], "strictly rising numbers, at least one")
    _output(case, len(bounds) + 1)


def _number(case: _Case) -> None:
    dtype, null = case.encoding.get("dtype", "float32"), case.encoding.get("null_value", 0)
    case(dtype in NUMBERS, f"dtype {dtype!r}", ", ".join(NUMBERS))
    told = not case.nullable or "null_value" in case.encoding
    case(told, "a nullable number without null_value", "null_value, which stands in")
    whole = dtype != "int64" or (isinstance(null, int) and -(1 << 63) <= null < 1 << 63)
    case(_is_finite(null) and whole, f"null_value {null!r}", "a finite number, a whole one for int64")
    exact = dtype != "int64" or case.dtype in ("int64", "uint64", "bool")
    case(exact, f"dtype int64 for a field of {case.dtype}", "float32 or float64, which hold a fraction")


def _sequence(case: _Case) -> None:
    declared, length = case.encoding, case.encoding["length"]
    keep, extra, of = declared.get("keep", "first"), declared.get("with", "mask"), declared.get("of")
    case(1 <= length <= MAX_COLUMNS, f"length {length}", f"1 to {MAX_COLUMNS}")
    case(keep in ("first", "last"), f"keep {keep!r}", "first, last")
    case(extra in ("mask", "length", "nothing"), f"with {extra!r}", "mask, length, nothing")
    if of is None:
        pad = declared.get("pad_value", 0)
        plain = case.dtype in (*STORED_NUMBERS, "bool")
        case(plain, f"a sequence of {case.dtype} without `of`", "of = a vocabulary or a hash")
        case(_is_finite(pad), f"pad_value {pad!r}", "a finite number")
        return
    case("pad_value" not in declared, "pad_value beside `of`", "no pad_value: an id of 0 stands for nothing")
    case(of.get("kind") in ("vocabulary", "hash"), f"of kind {of.get('kind')!r}", "vocabulary, hash")
    case("output" not in of, f"output {of.get('output')!r} inside a sequence", "no output: a sequence holds ids")
    check_encoding(case.field, case.dtype, shape=(), nullable=False, encoding={**of, "output": INDEX})


def _image(case: _Case) -> None:
    sides, channels = (case.encoding["height"], case.encoding["width"]), case.encoding["channels"]
    case(all(1 <= side <= MAX_SIDE for side in sides), f"sides {sides}", f"1 to {MAX_SIDE}")
    case(channels in (1, 3), f"channels {channels}", "1, 3")
    fit = case.encoding.get("fit", "resize")
    case(fit in FITS, f"fit {fit!r}", ", ".join(FITS))
    case(not case.nullable, "a nullable image", "an image in each row")
    if {"mean", "deviation", "divide_by"} & set(case.encoding):
        both = {"mean", "deviation"} <= set(case.encoding)
        case(both, "only one of mean and deviation", "both, or neither and no divide_by")
        _figures(case, channels)


def _normalise(case: _Case) -> None:
    channels = case.shape[-1]
    assert channels is not None
    case(not case.nullable, "a nullable tensor", "a tensor in each row")
    _figures(case, channels)


def _baked(case: _Case) -> None:
    from lockstep.features.schema.fields import Field  # which builds on this module

    raw, ids, fitted = (case.encoding.get(key) for key in ("raw", "ids", "fitted"))
    types = (str, list, bool, Mapping | None)
    assert isinstance(raw, Mapping)
    right = set(raw) == set(RAW_KEYS) and all(map(isinstance, (raw[key] for key in RAW_KEYS), types))
    right = right and (raw["shape"] == [None] or all(type(size) is int and size > 0 for size in raw["shape"]))
    case(right, f"raw {dict(raw)!r}"[:200], f"a field's {', '.join(RAW_KEYS)}")
    inner, shape = raw["encoding"], tuple(raw["shape"])
    case(inner is None or inner.get("kind") != BAKED, "a field baked twice", "the encoding that was declared")
    Field(**{**raw, "name": case.field, "shape": shape})  # what could not be declared was not baked
    form = stored_form(raw["dtype"], shape, inner)
    stored = f"{case.dtype}, shape {case.shape}, nullable={case.nullable}"
    case(form == (case.dtype, case.shape) and not case.nullable, stored, f"what is stored of it, never null: {form}")
    columns = has_ids(inner) and "of" not in inner and output_of(inner, is_list=case.is_list) != INDEX
    most, part = MAX_COLUMNS + 1 if columns else MAX_IDS, fitted_part(inner)
    case((ids is not None) == has_ids(inner), f"ids {ids!r}", "their number, where ids are stored")
    case(ids is None or 1 <= ids <= most, f"ids {ids!r}", f"1 to {most}")
    declared_ids = _ids_of(inner.get("of", inner)) if has_ids(inner) else None
    case(declared_ids is None or ids == declared_ids, f"ids {ids!r}", f"{declared_ids}, as follows from the encoding")
    case((fitted is None) == (part is None), f"fitted {fitted!r}"[:200], "its file and splits, where one is fitted")
    if part is not None:
        assert isinstance(fitted, Mapping)
        splits = fitted.get("splits")
        told = set(fitted) == {"file", "splits"} and fitted["file"] == part["file"]
        told = told and isinstance(splits, list) and all(isinstance(split, str) for split in splits)
        case(told, f"fitted {dict(fitted)!r}"[:200], f"file {part['file']} and a list of splits")


def _ids_of(encoding: Encoding) -> int | None:
    """How many ids there are, that of nothing among them; None where a fitted file says it."""
    if encoding["kind"] == "hash":
        return int(encoding["buckets"]) + 1
    return len(encoding["boundaries"]) + 2 if encoding["kind"] == "bucketise" else None


def _figures(case: _Case, channels: int) -> None:
    for key in ("mean", "deviation"):
        values = case.encoding[key]
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) and _is_finite(v) for v in values)
        case(numbers and len(values) in (1, channels), f"{key} {values!r}"[:200], f"1 or {channels} finite numbers")
    case(all(value >= _LEAST for value in case.encoding["deviation"]), "a deviation of 0 or less", "above 0")
    divisor = case.encoding.get("divide_by", 1)
    case(_is_finite(divisor) and divisor >= _LEAST, f"divide_by {divisor!r}", "a number above 0, such as 255")


def _file(case: _Case) -> None:
    file = case.encoding["file"]
    good = _FILE.fullmatch(file) is not None and _HELD_OUT.fullmatch(file) is None
    case(good, f"file {file!r}", "a plain NAME.json that does not end in .fold-N.json")


def _output(case: _Case, columns: int) -> None:
    output = output_of(case.encoding, is_list=case.is_list)
    allowed = (MULTI_HOT,) if case.is_list else (ONE_HOT, INDEX)
    ids = "a sequence, which holds ids" if case.is_list else "output = index"
    case(output in allowed, f"output {output!r}", f"{', '.join(allowed)}; or {ids}")
    small = output == INDEX or columns <= MAX_COLUMNS
    case(small, f"{columns} columns of {output}", f"at most {MAX_COLUMNS}; or {ids}")


def _is_finite(value: float) -> bool:
    return abs(value) <= sys.float_info.max  # math.isfinite would overflow on a long int


_RULES: dict[str, _Rule] = {
    "vocabulary": _Rule(
        {"file": str, "max_size": int, "min_count": int, "oov_buckets": int},
        {"output": str},
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
    "standardise": _Rule({"file": str}, {}, STORED_NUMBERS, check=_file),
    "number": _Rule({}, {"dtype": str, "null_value": int | float}, (*STORED_NUMBERS, "bool"), check=_number),
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
        check=_baked,
    ),
    "ignore": _Rule(
        {}, {}, (*STORED_NUMBERS, "bool", "string", "bytes", "uint8"), fits=("a scalar", "a list", "a tensor")
    ),
}
KINDS = tuple(kind for kind in _RULES if kind != BAKED)  # what may be declared
