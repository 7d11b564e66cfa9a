"""Context managers that replace an object's class by a subclass, or the value of an attribute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def swapped_class(thing: Any, mixin: type, **attributes: Any) -> Iterator[None]:
    """Make `thing` an instance of (mixin, its own class), with class attributes `attributes`, until the end.

    This bypasses Keras' tracking: variables, names and identity stay. The class keeps the plain one's name and module.
    """
    plain = type(thing)
    names = {"__module__": plain.__module__, "__doc__": plain.__doc__, **attributes}
    object.__setattr__(thing, "__class__", type(plain.__name__, (mixin, plain), names))
    try:
        yield
    finally:
        object.__setattr__(thing, "__class__", plain)


@contextmanager
def swapped(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Set the attribute `name` of `thing` to `value` until the end, without Keras' tracking of attributes."""
    own, before = name in vars(thing), getattr(thing, name)
    object.__setattr__(thing, name, value)
    try:
        yield
    finally:
        if own:
            object.__setattr__(thing, name, before)
        else:  # then the class's attribute is visible again; the class may have changed meanwhile
            object.__delattr__(thing, name)
