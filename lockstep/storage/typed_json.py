"""Dataclasses as JSON objects: written from their fields, read and checked by their type hints."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
SHOWN_CHARS = 80
NOT_FINITE = ("nan", "inf", "-inf")  # what JSON cannot hold as numbers


class MismatchError(ValueError):
    """An object that does not fit its dataclass: `what` is wrong, and what it has and may have."""

    def __init__(self, what: str, got: str, allowed: str) -> None:
        super().__init__(f"{what}: {got}, allowed: {allowed}")
        self.what, self.got, self.allowed = what, got, allowed


def fields_to_json(value: Any) -> dict[str, Any]:
    """The fields of a dataclass as a JSON object."""
    return {each.name: _to_json(getattr(value, each.name)) for each in fields(value)}


def fields_from_json(kind: type[T], document: Mapping[str, Any]) -> T:
    """The inverse of `fields_to_json`, for a dataclass with type hints that JSON can hold.

    Raises MismatchError for an object with an unknown or a missing part, or a part of another type.
    """
    known = fields(kind)  # type: ignore[arg-type] # a dataclass
    names = [each.name for each in known]
    needed = [each.name for each in known if each.default is MISSING and each.default_factory is MISSING]
    got, allowed = f"{kind.__name__} with {', '.join(map(str, document))}", ", ".join(names)
    for name in needed:
        if name not in document:
            raise MismatchError(f"lacks {name}", got, allowed)
    for name in document:
        if name not in names:
            raise MismatchError(f"has the unknown part {name}", got, allowed)
    hints = _hints(kind)  # type: ignore[arg-type] # a class is hashable
    return kind(**{name: _from_json(hints[name], value, name) for name, value in document.items()})


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _to_json(value: Any) -> Any:
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return fields_to_json(value)
    if isinstance(value, Mapping):
        return {key: _to_json(item) for key, item in value.items()}
    return [_to_json(item) for item in value] if isinstance(value, list | tuple) else value


def _from_json(hint: Any, value: Any, at: str) -> Any:
    """`value` as the type `hint`; `at` names its place."""
    origin, of = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, UnionType):
        return _one_of(hint, value, at)
    if origin is Literal:
        if any(value == each and type(value) is type(each) for each in of):
            return value
    elif origin in (list, tuple):
        if isinstance(value, list | tuple) and (origin is list or of[1:] == (...,) or len(value) == len(of)):
            kinds = [of[0]] * len(value) if origin is list or of[1:] == (...,) else of
            return origin(_from_json(kinds[n], item, f"{at}[{n}]") for n, item in enumerate(value))
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        if isinstance(value, Mapping):
            return {key: _from_json(of[1], item, f"{at}.{key}") for key, item in value.items()}
    elif hasattr(hint, "from_json") or is_dataclass(hint):
        if isinstance(value, Mapping):
            return hint.from_json(value) if hasattr(hint, "from_json") else fields_from_json(hint, value)
    elif hint is float:
        if value in NOT_FINITE or (isinstance(value, int | float) and not isinstance(value, bool)):
            return float(value)
    elif isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    name = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
    raise MismatchError(f"has {at} of another type", repr(value)[:SHOWN_CHARS], name)


def _one_of(hint: Any, value: Any, at: str) -> Any:
    wrong: MismatchError | None = None
    for each in get_args(hint):
        if value is None and each is NoneType:
            return None
        if each is not NoneType:
            try:
                return _from_json(each, value, at)
            except MismatchError as error:
                wrong = wrong or error
    raise wrong or MismatchError(f"has {at} of another type", repr(value)[:SHOWN_CHARS], str(hint))
