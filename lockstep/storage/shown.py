"""How results show themselves: in a notebook by a few lines, whatever their size; numbers with their nouns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

MOST_LINES = 20


def short(text: str, most: int = MOST_LINES) -> str:
    """The first lines of a text, and how many more it has: `most` lines in all."""
    lines = text.splitlines()
    if len(lines) <= most:
        return text
    return "\n".join([*lines[: most - 1], f"... {len(lines) - most + 1} more lines"])


def counted(number: int | str, noun: str) -> str:
    """`1 epoch`, `2 epochs`; of a text such as `0.5 of 1` the last number counts."""
    return f"{number} {noun}{'' if str(number).split(' ')[-1] == '1' else 's'}"


class ShownList(list[T]):
    """A list that shows itself with an item a line, up to MOST_LINES lines; an empty one as []."""

    def __repr__(self) -> str:
        return short("\n".join(map(str, self))) if self else "[]"


class Shown(dict[str, Any]):
    """A result: a dict that shows itself as a text of up to MOST_LINES lines."""

    def __init__(self, result: Mapping[str, Any], text: Callable[[Mapping[str, Any]], str]) -> None:
        super().__init__(result)
        self._text = text

    def __repr__(self) -> str:
        keys = f"keys: {', '.join(self)}"
        return f"{short(self._text(self), MOST_LINES - 1)}\n{keys}"

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # a copy in another process needs no text
