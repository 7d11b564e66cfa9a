"""What the ETL jobs share around their work: settings of the dataset that they continue, output that is there already,
and the summary that they print.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from typing import Any

from lockstep.etl.continued import continued
from lockstep.etl.input.files import Source
from lockstep.etl.logs.config import LogsConfig
from lockstep.etl.logs.job import SUFFIXES
from lockstep.etl.logs.pages import most_frequent
from lockstep.etl.logs.plan import ROLES
from lockstep.etl.logs.propose import propose
from lockstep.etl.logs.roles import said
from lockstep.etl.split.leakage import content_line
from lockstep.etl.tables import TableConfig
from lockstep.etl.write.carried import Carried, carried_files, carried_in
from lockstep.etl.write.config import OutputConfig
from lockstep.etl.write.quarantine import rejected_of
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.storage.errors import ExistsError, require
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import absolute

FIELDS = {"input": "inputs", "null_text": "null_texts"}
"""Fields of the configurations whose flags have other names."""
MOST_REASONS = 5  # in the summary
BY_PLACE = (
    "ids: records are known by file and position, so an edited or renamed file moves its records to other splits;"
    " --id-columns avoids that\n"
)


def proposed_of_csv(config: TableConfig, *, embeddings: bool) -> str:
    """Propose a schema for CSV files, which lockstep etl_logs reads."""
    step = "Leave it out: the file has all columns."
    for flag, given in (("--exclude", config.exclude), ("--schema", config.schema)):
        allowed = "none: lockstep etl_logs reads these files"
        require(not given, flag, "with --propose-schema of CSV files", allowed, step)
    lines = LogsConfig(
        output=config.output, inputs=config.inputs, log_format="csv", columns=config.columns, label=config.label,
        id_columns=config.id_columns,
    )  # fmt: skip
    header = f" --columns {','.join(config.columns)}" if config.columns else ""
    header += f" --id-columns {','.join(config.id_columns)}" if config.id_columns else ""
    flags = f"--log-format csv{header} --input {' '.join(config.inputs)}"
    return propose(lines, embeddings=embeddings, flags=flags)


def continuing(values: dict[str, Any], given: Collection[str] | None) -> dict[str, Any]:
    """Return `values` of the flags; with --append-to, flags that are not `given` have the values of that dataset.
    `given` None: all are given.
    """
    return continued(values, values.keys() if given is None else {FIELDS.get(name, name) for name in given})


def finished(args: Namespace, config: OutputConfig, sources: Callable[[], Sequence[Source]]) -> DatasetManifest | None:
    """With --if-exists keep, return the dataset at --output if it was made of the same input and settings; else None.
    `sources` finds the input as the job does.

    Raises ExistsError for another dataset.
    """
    if args.if_exists != "keep" or not filesystem(config.output).exists(config.output):
        return None
    found = load_dataset(absolute(config.output))
    created = found.created_by
    parent = None if config.append_to is None else load_dataset(absolute(config.append_to)).digest
    there = sources()
    different = {
        "settings": {name: created["config"].get(name) for name in config.to_json()} != config.to_json(),
        "--seed": created["seed"] != config.seed,
        "--append-to": (found.parent or {}).get("digest") != parent,
        "--input": {(one.url, one.bytes) for one in found.source} != {(one.url, one.size_bytes) for one in there},
        "--input-root": not {one.path for one in found.source} <= {None, *(one.path for one in there)},
    }
    names = [name for name, differs in different.items() if differs]
    if names:
        raise ExistsError(
            f"{config.output} exists already and is another dataset",
            got=f"other {', '.join(names)}",
            allowed="the dataset that these flags make, or a name that is free",
            next_step="Choose another output, or delete this one first.",
        )
    print(f"{config.output} is finished: the same input and settings, nothing to do")
    return found


def _carried_line(manifest: DatasetManifest, carried: Carried) -> str:
    held = sum(info.bytes for info in carried_files(manifest).values())
    return f"carried for an append: {carried.open} open requests, the past of {carried.past} visitors, {held} bytes"


def summary(manifest: DatasetManifest, output: str) -> str:
    """Counts, splits, what was rejected and why, what is carried, leakage and digest; of web requests also the columns
    of their roles and the most frequent suffixes of pages.
    """
    counts = manifest.counts
    dropped = ", ".join(f"{n} {reason}" for reason, n in counts.dropped.items()) or "0"
    splits = ", ".join(
        f"{name} {split.records} in {len(split.shards)} shards" for name, split in manifest.splits.items()
    )
    carried = carried_in(manifest, output)
    reopened = 0 if carried is None else carried.reopened
    again = f" and {reopened} reopened" if reopened else ""
    leaks = None if manifest.leakage is None else content_line(manifest.leakage)
    return (
        f"{output}: {counts.read - reopened} read{again}, {counts.written} written ({splits}),"
        f" {counts.quarantined} quarantined, dropped {dropped}\n"
        + rejected_line(manifest, output)
        + ("" if carried is None else f"{_carried_line(manifest, carried)}\n")
        + "".join(f"{line}\n" for line in _web_lines(manifest))
        + ("" if leaks is None else f"{leaks}\n")
        + (BY_PLACE if manifest.created_by["config"].get("id_columns") == [] else "")
        + f"digest {manifest.digest}"
    )


def rejected_line(manifest: DatasetManifest, output: str) -> str:
    """Return a line that counts what was rejected by reason, names the first places and where all of it is; "" for no
    rejected input.
    """
    if not manifest.counts.quarantined:
        return ""
    found = rejected_of(absolute(output), manifest, apart=True)
    if found is None:
        return "quarantine: not kept (--quarantine none)\n"
    reasons = [f"{count} {why}" for why, count in list(found.reasons.items())[:MOST_REASONS]]
    more = [f"{len(found.reasons) - MOST_REASONS} more reasons"] if len(found.reasons) > MOST_REASONS else []
    return f"quarantine: {', '.join([*reasons, *more])}; first {', '.join(found.first)}; all in {found.url}\n"


def _web_lines(manifest: DatasetManifest) -> list[str]:
    config = manifest.created_by["config"]
    columns, suffixes = config.get(ROLES), config.get(SUFFIXES)
    lines = [f"columns: {said(columns)}"] if columns else []
    if suffixes:
        counts = (f"{count} {suffix}" for suffix, count in most_frequent(suffixes, len(suffixes)).items())
        lines.append(f"pages by suffix: {', '.join(counts)}")
    return lines
