"""The questions that errors raise, read from the code that raises them: what, got, allowed and next step of each."""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = "reference/errors"
STORAGE = ("StorageError", "StorageTimeoutError", "RetryableStorageError", "StorageAwayError", "LostWriteError")
RANKS = ("CommunicationError", "ConnectionLostError", "LauncherGoneError", "SharedMemoryUnavailableError")
ENDED = ("TrainingFailedError", "SupersededError", "ApplicationEndedError", "NotRestoredError", "NonFiniteError")


@dataclass(frozen=True)
class Question:
    """A question that readers have when they meet an error, and which errors belong to it."""

    title: str
    answer: str
    """One or two sentences that hold for all of them."""
    page: str
    kinds: tuple[str, ...] = ()
    """The classes of its errors; empty: all."""
    rooms: tuple[str, ...] = ()
    """The folders whose code raises them; empty: all."""

    def asks(self, path: Path, kind: str) -> bool:
        """Whether an error of the class `kind`, raised in the file `path`, belongs to this question."""
        here = not self.rooms or any(path.as_posix().startswith(f"{room}/") for room in self.rooms)
        return here and (not self.kinds or kind in self.kinds)


# An error belongs to the first that asks for it.
QUESTIONS = (
    Question(
        "Why does the storage not answer?",
        "A call is tried for 60 s. Bring the store back and repeat the same command: nothing half done is published.",
        "docs/operations.md#failures-and-limits",
        STORAGE,
    ),
    Question(
        "Why may I not write, or is there no room?",
        "Free space, raise a quota or ask the owner that the error names, then repeat the same command.",
        "docs/failures.md#training",
        ("DiskFullError", "DeniedError"),
    ),
    Question(
        "Why is a path not found, or already there?",
        "A dataset, run or model appears by one rename: what is not there was not published, and what is there stays.",
        "docs/formats.md#what-a-killed-job-leaves",
        ("NotFoundError", "ExistsError"),
    ),
    Question(
        "Why do ranks not meet, or lose each other?",
        "Look at the rank that the error names and at its last log lines; the driver starts new ranks by itself.",
        "docs/failures.md#training",
        RANKS,
    ),
    Question(
        "Why did my run end?",
        "The same command resumes it at its last checkpoint, once what the error names is mended.",
        "docs/operations.md#restarts",
        ENDED,
    ),
    Question(
        "Why is my dataset refused, or cannot be read?",
        "`lockstep verify DATASET` says which files are damaged. Restore these, or make the dataset again.",
        "docs/guarantees.md",
        ("DataError", "CorruptionError", "SameIdError", "NotAuditedError"),
        ("lockstep/storage", "lockstep/features", "training/reading", "training/batches", "training/plan"),
    ),
    Question(
        "Why does my run not resume?",
        "A run resumes by the same command. What would change batches or weights is refused by name.",
        "docs/operations.md#resuming",
        (),
        ("training/run", "training/driver", "training/rank"),
    ),
    Question(
        "Why do ranks not start?",
        "Ranks need a task slot each, at the same time, and executors that stay.",
        "docs/operations.md#starting-ranks",
        (),
        ("training/launch", "training/control", "training/comm", "training/exchange", "lockstep/spark"),
    ),
    Question(
        "Why can my logs, tables or images not be read?",
        "The error names the file and place. Single bad records go to the quarantine, up to `--max-bad`.",
        "docs/formats.md#rejected-records",
        ("DataError", "CorruptionError", "SameIdError"),
        ("etl",),
    ),
    Question(
        "Why is my ETL job refused?",
        "A flag, a column or a combination does not fit; nothing was written.",
        "docs/formats.md",
        (),
        ("etl",),
    ),
    Question(
        "Why does my schema not fit?",
        "`lockstep etl_table --propose-schema` writes a first version that fits.",
        "docs/schema.md",
        (),
        ("lockstep/features",),
    ),
    Question(
        "Why is my model refused?",
        "A model is a function of the signature; what its inputs, losses and layers must be is checked before a step.",
        "docs/models.md",
        (),
        ("training/models", "training/steps", "training/embeddings"),
    ),
    Question(
        "Why are my options refused, or do not go together?",
        "Nothing was started. `lockstep train --dry-run` makes the same checks without training.",
        "docs/strategies.md",
        (),
        ("training/config", "training/ways", "training/strategies", "training/plan", "training/batches"),
    ),
    Question(
        "Why can I not evaluate, predict or export?",
        "These need a run with a checkpoint or a model, and rows of the schema that it was trained with.",
        "docs/evaluate.md",
        (),
        ("training/results", "training/scoring", "training/search", "training/profiling"),
    ),
    Question(
        "Why does an agent not learn?",
        "An environment, a model or an actor does not do what the error names.",
        "docs/agents.md",
        (),
        ("training/actors",),
    ),
    Question(
        "Why does Spark not read or write TFRecord files?",
        'Options and types that Spark\'s `format("tfrecord")` takes are few, and others are refused by name.',
        "docs/reading-elsewhere.md#spark-formattfrecord",
        (),
        ("pyspark_tfrecord",),
    ),
    Question(
        "Why does a Horovod script fail?",
        "Names and arguments are Horovod's; some are not here, and the error names what to use.",
        "docs/models.md#horovods-names",
        (),
        ("lockstep/horovod",),
    ),
    Question(
        "Why is a command or a call refused?",
        "`--help` lists the flags of a command, `help(lockstep.train)` the arguments of a call.",
        "docs/operations.md",
    ),
)
PARTS = ("got", "allowed", "next_step")


@dataclass(frozen=True)
class Raised:
    """One place that raises an error: the class, and the texts of its parts with `...` for what is filled in."""

    kind: str
    what: str
    parts: dict[str, str]


def error_pages(root: Path) -> dict[str, str]:
    """The text of each question's page by its path, and of the page that lists them."""
    found: dict[Question, list[Raised]] = {question: [] for question in QUESTIONS}
    for path, error in raised(root):
        found[next(question for question in QUESTIONS if question.asks(path, error.kind))].append(error)
    pages, rows = {}, []
    for question, errors in found.items():
        name = f"{re.sub('[^a-z]+', '-', question.title.lower()).strip('-')}.md"
        pages[f"{FOLDER}/{name}"] = question_page(question, errors)
        rows.append(f"| [{question.title}]({name}) | {len(errors)} | {_link(question.page)} |")
    head = (
        "# Questions and errors\n\nPaste a part of an error's first line into the search, or find your question here. "
        "Each error says what happened, what was found, what is allowed and what to do next; `...` stands for what is "
        "filled in. [Failures](../../docs/failures.md#errors-by-their-text) explains the frequent ones.\n\n"
        "| question | errors | the page that explains |\n| --- | --- | --- |\n"
    )
    pages[f"{FOLDER}/index.md"] = head + "\n".join(rows) + "\n"
    return pages


def question_page(question: Question, errors: list[Raised]) -> str:
    """A page with each error of a question once, sorted by its first words."""
    parts = [f"# {question.title}\n\n{question.answer} More: {_link(question.page)}.\n"]
    seen = set()
    for error in sorted(errors, key=lambda error: (error.what.lstrip(". `").lower(), error.kind)):
        lines = [f"* {name.replace('next_step', 'next')}: {shown(text)}" for name, text in error.parts.items() if text]
        entry = f"## {shown(error.what)}\n\n`{error.kind}`\n\n" + "\n".join(lines) + "\n"
        if entry not in seen:
            seen.add(entry)
            parts.append(entry)
    return "\n".join(parts)


def _link(page: str) -> str:
    return f"[{Path(page.partition('#')[0]).stem.replace('-', ' ')}](../../{page})"


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
