"""For a while, an object's class is a subclass of it, or an attribute has another value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def swapped_class(thing: Any, mixin: type, **attributes: Any) -> Iterator[None]:
    """`thing` is an instance of (mixin, its own class), whose class attributes are `attributes`, until the end.

    Past Keras' tracking: its variables, names and identity stay. The class keeps the plain one's name and module.
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
    """The attribute `name` of `thing` is `value` until the end, past Keras' tracking of attributes."""
    own, before = name in vars(thing), getattr(thing, name)
    object.__setattr__(thing, name, value)
    try:
        yield
    finally:
        if own:
            object.__setattr__(thing, name, before)
        else:  # its class's again, which may be another one by then
            object.__delattr__(thing, name)
