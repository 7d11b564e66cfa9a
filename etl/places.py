"""What the place of an image says: `train/cat/0001.jpg` is a cat of the training split."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from etl.splits import TEST, TRAIN, VALIDATION

SPLITS = {"train": TRAIN, "training": TRAIN, "test": TEST, "testing": TEST, "t10k": TEST}
SPLITS |= dict.fromkeys(("val", "valid", "validation", "dev"), VALIDATION)
_TEXTS = ("txt", "md", "csv", "tsv", "json", "jsonl", "xml", "html", "yaml", "yml", "toml", "ini", "log", "py", "sh")
_OTHERS = frozenset((*_TEXTS, "pdf", "mat", "npy", "npz", "pkl", "bin", "db", "gz", "zip", "tar", "mp4", "avi"))


@dataclass(frozen=True, slots=True)
class Place:
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
    folders = parts[:-1]
    for number, folder in enumerate(folders):
        split = SPLITS.get(folder.lower())
        if split is not None:
            below = folders[number + 1 :]
            return Place(split, below[0] if below else None, "/".join(parts))
    # With the hint in front, a sample has the same name whether its split is a folder or an archive of its own.
    return Place(hint, folders[-1] if folders else None, "/".join([hint, *parts] if hint else parts))


def is_left_out(parts: Sequence[str]) -> bool:
    """Whether a name says that there is no image: hidden, of another kind (.txt, .csv, ...), a system's side file."""
    if any(part.startswith(".") or part == "__MACOSX" for part in parts) or parts[-1] in ("Thumbs.db", "desktop.ini"):
        return True
    stem, dot, suffix = parts[-1].rpartition(".")
    return bool(stem and dot) and suffix.lower() in _OTHERS
