"""The words of --augment, such as `crop:4 flip cutout:8 mixup:0.2`, as operations and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from lockstep.features.images.looks import Colour, Cutout
from lockstep.features.images.mixup import Mixup
from lockstep.features.images.moves import Crop, Flip, Rotate, Rotate90, Scale
from lockstep.features.images.operation import Operation, name_of
from lockstep.storage.errors import ConfigError

_KINDS: dict[str, type[Any]] = {
    kind.__name__.lower(): kind for kind in (Crop, Flip, Rotate, Rotate90, Scale, Colour, Cutout, Mixup)
}
_NUMBERS: dict[str, type] = {"int": int, "float": float}


@dataclass(frozen=True, slots=True)
class Operations:
    """What is done to each sample, in order, and with which others it is mixed at the end."""

    single: tuple[Operation, ...] = ()
    mixup: Mixup | None = None


def parse(words: Sequence[str]) -> Operations:
    """The operations that `words` say. Raises ConfigError naming the first that cannot be right."""
    found = [_operation(word) for word in words]
    for place, operation in enumerate(found):
        if isinstance(operation, Mixup) and place < len(found) - 1:
            raise _wrong(words[place], "mixup as the last word: it mixes images that are changed already")
    mixup = found.pop() if found and isinstance(found[-1], Mixup) else None
    return Operations(tuple(found), mixup)


def canonical(words: Sequence[str]) -> tuple[str, ...]:
    """One way to write the same operations: defaults written out, numbers as Python prints them."""
    operations = parse(words)
    every: list[Any] = [*operations.single, *filter(None, [operations.mixup])]
    return tuple(":".join([name_of(op), *(str(getattr(op, field.name)) for field in fields(op))]) for op in every)


def forms() -> str:
    """How each operation is written, with its settings; those in brackets may be left out."""
    return ", ".join(_form(name) for name in _KINDS)


def _operation(word: str) -> Any:
    name, *settings = word.split(":")
    kind = _KINDS.get(name)
    if kind is None:
        raise _wrong(word, forms())
    wanted = fields(kind)
    if not sum(field.default is MISSING for field in wanted) <= len(settings) <= len(wanted):
        raise _wrong(word, _form(name))
    return kind(*(_value(word, field, text) for field, text in zip(wanted, settings, strict=False)))


def _value(word: str, field: Field[Any], text: str) -> Any:
    number = _NUMBERS.get(str(field.type))
    if number is None:
        return text
    try:
        return number(text)
    except ValueError:
        raise _wrong(word, f"{field.name} as a {'whole ' if number is int else ''}number") from None


def _form(name: str) -> str:
    parts = [name]
    for field in fields(_KINDS[name]):
        parts.append(f"[:{field.name}]" if field.default is not MISSING else f":{field.name}")
    return "".join(parts)


def _wrong(word: str, allowed: str) -> ConfigError:
    return ConfigError("--augment cannot be right", got=word, allowed=allowed, next_step="Correct --augment.")
