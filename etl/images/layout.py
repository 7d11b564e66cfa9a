"""What the class folders of an image set say together: layouts whose labels would be wrong are refused or reported."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.etl.images.source import composed
from lockstep.storage.errors import DataError

log = logging.getLogger(__name__)
# Folders that are called after what they hold, next to class folders or in place of them.
_NO_CLASSES = frozenset(("images", "image", "imgs", "img", "jpegimages", "annotations", "trimaps", "labels"))
_NAMED = 5  # in a message


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassFolder:
    """A class by its name: images in `train` and elsewhere, and the first name of an image, of all and of those that
    are not in `train` (None if all are).
    """

    label: str
    in_train: int
    elsewhere: int
    first: str
    first_elsewhere: str | None


def refuse_layout(classes: Sequence[ClassFolder]) -> None:
    """Raise DataError for folders that are probably no classes, each of which would shift the labels of the others."""
    trained = [found.label for found in classes if found.in_train]
    strange = [found for found in classes if not found.in_train] if trained else []
    if strange:
        raise DataError(
            "there are classes without an image in train",
            got=_listed(f"{found.label} ({found.elsewhere} images, as {found.first_elsewhere})" for found in strange),
            allowed=f"the class folders of train: {_listed(sorted(trained))}",
            next_step="Sort these images into class folders, or leave them out; if they are classes, name all by"
            " --classes.",
        )
    if general := [found for found in classes if found.label.lower() in _NO_CLASSES]:
        raise DataError(
            "a folder is probably not a class",
            got=_listed(f"{found.label} (as {found.first})" for found in general),
            allowed="a folder for each class, named like it",
            next_step="Put the images of each class into a folder of its name; or name all classes by --classes.",
        )
    holders = {_folder(found.first): found.label for found in classes}
    if nested := [found for found in classes if _folder(_folder(found.first)) in holders]:
        raise DataError(
            "a class folder is inside another",
            got=_listed(
                f"{found.label} in {holders[_folder(_folder(found.first))]} ({found.first})" for found in nested
            ),
            allowed="images of a class directly in its folder, or below train/CLASS/",
            next_step="Move the inner folder's images into the outer folder, or the inner folder out of it; if both are"
            " classes, name all by --classes.",
        )


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:_NAMED])[:500] + (f" and {len(every) - _NAMED} more" if len(every) > _NAMED else "")


def log_names(names: Sequence[str]) -> None:
    """Report classes whose names differ in case only, and numbers that are not the labels that they get."""
    spelled: dict[str, list[str]] = {}
    for name in names:
        spelled.setdefault(name.strip().casefold(), []).append(name)
    if alike := [" and ".join(map(repr, group)) for group in spelled.values() if len(group) > 1]:
        log.warning("classes whose names differ only in case or blanks are separate classes: %s", _listed(alike))
    if not all(name.isascii() and name.isdigit() for name in names):
        return
    if other := [(name, label) for label, name in enumerate(names) if int(name) != label]:
        log.warning(
            "the classes are numbers, and their labels are others, since names are sorted as text: class %s has"
            " the label %d; --classes fixes the order",
            *other[0],
        )


def log_spellings(folders: Iterable[str]) -> None:
    """Report folders whose names differ only in the form of their letters (é as one character or two): they are one."""
    spelled: dict[str, set[str]] = {}
    for name in {name for folder in set(folders) for name in folder.split("/")}:
        spelled.setdefault(composed(name), set()).add(name)
    if alike := sorted(name for name, forms in spelled.items() if len(forms) > 1):
        log.warning("folders whose names differ only in Unicode's form (NFC, NFD) are one class: %s", _listed(alike))
