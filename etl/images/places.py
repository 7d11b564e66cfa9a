"""What the place of an image says: `train/cat/0001.jpg` is a cat of the training split."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from etl.split.splits import TEST, TRAIN, VALIDATION

SPLITS = {"train": TRAIN, "training": TRAIN, "test": TEST, "testing": TEST, "t10k": TEST}
SPLITS |= dict.fromkeys(("val", "valid", "validation", "dev"), VALIDATION)
_TEXTS = ("txt", "md", "csv", "tsv", "json", "jsonl", "xml", "html", "yaml", "yml", "toml", "ini", "log", "py", "sh")
_SIDE = ("__MACOSX", "Thumbs.db", "desktop.ini")
_OTHERS = frozenset((*_TEXTS, "pdf", "mat", "npy", "npz", "pkl", "bin", "db", "gz", "zip", "tar", "mp4", "avi"))


class Place(NamedTuple):
    """The split that a place names (or None), the class (or None), and the name by which the sample is known."""

    split: str | None
    label: str | None
    name: str


def split_word(text: str) -> str | None:
    """The split that a file's or folder's name tells by one of its words, the first that does: `cifar10_train.tar`."""
    return next((SPLITS[word] for word in re.split(r"[^a-z0-9]+", text.lower()) if word in SPLITS), None)


def place_of(parts: Sequence[str], hint: str | None = None) -> Place:
    """Read a relative path. The first folder named like a split is the split, and the folder in it the class; without
    one, the class is the folder that the file lies in and the split `hint`, which the archive's or root's name gave.
    """
    split, label, hinted = _of_folders(tuple(parts[:-1]), hint)
    name = "/".join(parts)
    # With the hint in front, a sample has the same name whether its split is a folder or an archive of its own.
    return Place(split, label, f"{split}/{name}" if hinted and split else name)


@lru_cache(maxsize=1 << 12)  # images come class by class
def _of_folders(folders: tuple[str, ...], hint: str | None) -> tuple[str | None, str | None, bool]:
    """(split, class, whether the split is the hint's)."""
    for number, folder in enumerate(folders):
        split = SPLITS.get(folder.lower())
        if split is not None:
            return split, next(iter(folders[number + 1 :]), None), False
    return hint, folders[-1] if folders else None, True


def is_left_out(parts: Sequence[str]) -> bool:
    """Whether a name says that there is no image: hidden, of another kind (.txt, .csv, ...), a system's side file."""
    if parts[-1].startswith(".") or parts[-1] in _SIDE or _is_hidden(tuple(parts[:-1])):
        return True
    stem, dot, suffix = parts[-1].rpartition(".")
    return bool(stem and dot) and suffix.lower() in _OTHERS


@lru_cache(maxsize=1 << 12)
def _is_hidden(folders: tuple[str, ...]) -> bool:
    return any(folder.startswith(".") or folder in _SIDE for folder in folders)
