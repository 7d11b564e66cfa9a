"""An extension of griffe, which reads docstrings for the site: examples become blocks of code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?:^|\n)((?:>>> .*)(?:\n(?!\n).*)*)")


class Doctests(griffe.Extension):
    """Fence the examples of each docstring, so that Markdown does not take `>>>` for a quotation."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each object that griffe reads."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """A docstring whose examples are fenced; its other lines stay as they are."""
    return _EXAMPLE.sub(r"\n```pycon\n\1\n```\n", text)
