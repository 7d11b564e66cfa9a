"""Pages of errors, read from the code that raises them: what, got, allowed and next step of each, by room."""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = "reference/errors"
# The room of a file is the first of these prefixes of its path; with the page that explains the matter.
ROOMS = {
    "lockstep/storage": ("Files and stores", "docs/guarantees.md"),
    "lockstep/features": ("Schemas and features", "docs/schema.md"),
    "lockstep/spark": ("Spark", "docs/cluster.md"),
    "etl": ("Making datasets", "docs/formats.md"),
    "training/batches": ("Batches", "docs/batches.md"),
    "training/plan": ("Batches", "docs/batches.md"),
    "training/reading": ("Batches", "docs/batches.md"),
    "training/config": ("Options of a training", "docs/operations.md"),
    "training/comm": ("Ranks that talk", "docs/failures.md"),
    "training/control": ("Ranks that talk", "docs/failures.md"),
    "training/exchange": ("Ranks that talk", "docs/failures.md"),
    "training/launch": ("Launching", "docs/operations.md"),
    "training/driver": ("A run from its driver", "docs/operations.md"),
    "training/run": ("A run from its driver", "docs/operations.md"),
    "training/models": ("Models and steps", "docs/models.md"),
    "training/steps": ("Models and steps", "docs/models.md"),
    "training/ways": ("Ways to exchange", "docs/strategies.md"),
    "training/strategies": ("Ways to exchange", "docs/strategies.md"),
    "training/results": ("Evaluation, prediction, reports", "docs/evaluate.md"),
    "training/scoring": ("Evaluation, prediction, reports", "docs/evaluate.md"),
    "training": ("Training", "docs/operations.md"),
    "jobs": ("Command lines", "docs/operations.md"),
    "lockstep": ("Python", "docs/python.md"),
    "pyspark_tfrecord": ("Spark", "docs/cluster.md"),
}
PARTS = ("got", "allowed", "next_step")


@dataclass(frozen=True)
class Raised:
    """One place that raises an error: the class, and the texts of its parts with `...` for what is filled in."""

    kind: str
    what: str
    parts: dict[str, str]


def error_pages(root: Path) -> dict[str, str]:
    """The text of each page by its path, and of the page that lists them."""
    rooms: dict[str, tuple[str, list[Raised]]] = {}
    for path, error in raised(root):
        title, page = next(room for prefix, room in ROOMS.items() if path.as_posix().startswith(f"{prefix}/"))
        rooms.setdefault(title, (page, []))[1].append(error)
    pages, rows = {}, []
    for title in sorted(rooms):
        page, errors = rooms[title]
        name = f"{re.sub('[^a-z]+', '-', title.lower())}.md"
        pages[f"{FOLDER}/{name}"] = room_page(title, page, errors)
        rows.append(f"| [{title}]({name}) | {len(errors)} | [{Path(page).stem}](../../{page}) |")
    head = (
        "# Errors\n\nPaste a part of an error's first line into the search, or find its room here. Each error says "
        "what happened, what was found, what is allowed and what to do next; `...` stands for what is filled in.\n\n"
        "| where | errors | the page that explains |\n| --- | --- | --- |\n"
    )
    pages[f"{FOLDER}/index.md"] = head + "\n".join(rows) + "\n"
    return pages


def room_page(title: str, page: str, errors: list[Raised]) -> str:
    """A page with each error of a room once, sorted by its first words."""
    parts = [f"# Errors: {title.lower()}\n\n[{Path(page).stem}](../../{page}) explains what these are about.\n"]
    seen = set()
    for error in sorted(errors, key=lambda error: (error.what.lstrip(". `").lower(), error.kind)):
        lines = [f"* {name.replace('next_step', 'next')}: {shown(text)}" for name, text in error.parts.items() if text]
        entry = f"## {shown(error.what)}\n\n`{error.kind}`\n\n" + "\n".join(lines) + "\n"
        if entry not in seen:
            seen.add(entry)
            parts.append(entry)
    return "\n".join(parts)


def raised(root: Path) -> Iterator[tuple[Path, Raised]]:
    """Each call in the product that names a next step, with the file that it is in."""
    for top in ("lockstep", "etl", "training", "jobs", "pyspark_tfrecord"):
        for file in sorted((root / top).rglob("*.py")):
            path = file.relative_to(root)
            if any((root / parent).is_symlink() for parent in path.parents):
                continue
            tree = ast.parse(file.read_text(encoding="utf-8"))
            names = _constants(tree)
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and (error := _error(node, names)) is not None:
                    yield path, error


def _constants(tree: ast.Module) -> dict[str, str]:
    """The texts that a module keeps under names."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _error(call: ast.Call, names: dict[str, str]) -> Raised | None:
    """The error that a call makes, if its first argument says what happened."""
    kind = call.func.id if isinstance(call.func, ast.Name) else ""
    if not kind.endswith("Error") or not call.args:
        return None
    given = {keyword.arg: text_of(keyword.value, names) for keyword in call.keywords if keyword.arg in PARTS}
    what = text_of(call.args[0], names)
    if "next_step" not in given or not re.search("[a-z]{3}", what.replace("...", "")):
        return None
    return Raised(kind, what, {name: given.get(name, "") for name in PARTS})


def text_of(node: ast.expr, names: dict[str, str]) -> str:
    """An expression's text: constants as they are, all else as `...`."""
    if isinstance(node, ast.Constant):
        text = str(node.value)
    elif isinstance(node, ast.JoinedStr):
        text = "".join(text_of(part, names) for part in node.values)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        text = text_of(node.left, names) + text_of(node.right, names)
    elif isinstance(node, ast.IfExp):
        choices = [text_of(node.body, names), text_of(node.orelse, names)]
        text = " or ".join(choice for choice in choices if choice)
    elif isinstance(node, ast.Name):
        text = names.get(node.id, "...")
    else:
        text = "..."
    return " ".join(re.sub(r"(\.\.\.[\s,]*)+\.\.\.", "...", text).split()) if text.strip() else text


def shown(text: str) -> str:
    """A text of an error as Markdown, to the letter."""
    special = r"([\[\]|])" if "`" in text else r"([\\*_\[\]#|~])"
    return re.sub(special, r"\\\1", html.escape(text, quote=False))
