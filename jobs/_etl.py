"""The flags that the ETL jobs share, and the summary that they print."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from typing import Any

from lockstep.etl.continued import continued
from lockstep.etl.input.files import Source
from lockstep.etl.logs.config import LogsConfig
from lockstep.etl.logs.job import SUFFIXES
from lockstep.etl.logs.pages import most_frequent
from lockstep.etl.logs.plan import ROLES
from lockstep.etl.logs.propose import propose
from lockstep.etl.logs.roles import ASKED, flag_of, said
from lockstep.etl.split.leakage import content_line
from lockstep.etl.tables import TableConfig
from lockstep.etl.write.carried import Carried, carried_files, carried_in
from lockstep.etl.write.config import DEFAULT_SHARD_BYTES, WEIGHTS, OutputConfig, WriteConfig
from lockstep.jobs._cli import JobParser, joined, names, refuse_idle
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.storage.errors import ExistsError, require
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import absolute

FIELDS = {"input": "inputs", "null_text": "null_texts"}
"""Fields of the configurations whose flags have other names."""
BY_PLACE = (
    "ids: records are known by file and position, so an edited or renamed file moves its records to other splits;"
    " --id-columns avoids that\n"
)


def add_output_flags(job: JobParser, split: str) -> None:
    """The flags of the jobs that read files."""
    read = "files, directories or patterns; plain, gzip, bzip2 or zstd"
    job.add_argument("--input", nargs="+", required=True, metavar="URL", help=read)
    root = "ids that name a file hold its path below this folder (default: below what --input names)"
    job.add_argument("--input-root", metavar="URL", help=root)
    job.add_argument("--max-bad", default="1%", metavar="SHARE", help="largest share of bad records (default 1%%)")
    more = "A/B/C | stratified:COLUMN:A/B | time:COLUMN:A/B | kfold:K | kfold:K:COLUMN:balanced | subset:COLUMN=VALUE"
    add = add_write_flags(job, f"{split} | {more}")
    kept = "fail (default) | keep: if the output was made of the same input and settings, end with 0"
    add("--if-exists", choices=["fail", "keep"], default="fail", help=kept)
    add("--quarantine", metavar="URL|none", help="where rejected input goes (default: into the dataset)")


def add_write_flags(job: JobParser, split: str) -> Any:
    """The flags of all ETL jobs; returns the parser's add_argument."""
    add = job.add_argument
    add("--output", required=True, metavar="URL", help="the dataset; must not exist")
    add("--format", default="tfrecord", dest="fmt", metavar="FORMAT", help="tfrecord (default) | parquet")
    add("--compression", default="none", metavar="C", help="none (default) | gzip, for TFRecord shards")
    add("--split", default="80/20", metavar="S", help=f"{split} (default 80/20)")
    add("--shard-bytes", type=int, default=DEFAULT_SHARD_BYTES, metavar="N", help="bytes of a shard (default 128 MiB)")
    add("--row-group-bytes", type=int, metavar="N", help="bytes of a Parquet row group (default 2 MiB; less for 64)")
    add("--seed", type=int, default=0, metavar="N", help="seed of split and order (default 0)")
    sampled = "keep this share of a class for training (`train`, all folds), such as click=0:10%%; several with `,`"
    add("--sample", type=joined, metavar="COLUMN=VALUE:SHARE", help=sampled)
    add("--weights", default="none", metavar="W", help=f"{' | '.join(WEIGHTS)}: a field `weight` by class of the label")
    further = "the dataset that the new one continues; flags that are left out are as it was made"
    add("--append-to", metavar="URL", help=further)
    add("--clean", action="store_true", help="first remove what killed jobs left next to the output")
    add("--petastorm", action="store_true", help="also write the metadata of Petastorm's make_reader (a pickle)")
    baked = "store the inputs of a model, fitted on `train` only, instead of the features (docs/schema.md)"
    add("--bake", action="store_true", help=baked)
    add("--master", metavar="URL", help="Spark master (default: spark-submit's, else local[*])")
    return add


def add_proposal_flags(job: JobParser, table: str) -> None:
    """Add --propose-schema, for what `table` calls the input, and --for."""
    text = f"write --output, a schema for {table}, from its first 10,000 rows; no dataset"
    job.add_argument("--propose-schema", action="store_true", help=text)
    text = "with --propose-schema: categories as a column each (columns, the default) or as ids for embeddings"
    job.add_argument("--for", dest="purpose", choices=("columns", "embeddings"), help=text)


def for_embeddings(args: Namespace) -> bool:
    """Whether a proposal is for embeddings. Raises ConfigError for --for without --propose-schema."""
    refuse_idle("--for", args.purpose is not None and not args.propose_schema, "--propose-schema")
    return args.purpose == "embeddings"


def proposed_of_csv(config: TableConfig, *, embeddings: bool) -> str:
    """Propose a schema for CSV files, which lockstep etl_logs reads."""
    step = "Leave it out: the file has all columns, and says which --label lockstep etl_logs takes."
    for flag, given in (("--label", config.label), ("--exclude", config.exclude), ("--schema", config.schema)):
        require(
            not given, flag, "with --propose-schema of CSV files", "none: lockstep etl_logs reads these files", step
        )
    lines = LogsConfig(output=config.output, inputs=config.inputs, log_format="csv", columns=config.columns)
    header = f" --columns {','.join(config.columns)}" if config.columns else ""
    flags = f"--log-format csv{header} --input {' '.join(config.inputs)}"
    return propose(lines, embeddings=embeddings, flags=flags)


def add_label_window(job: JobParser, default: str) -> None:
    """The flag of the jobs whose records have a time; `default` is its default, for the help."""
    window = (
        "with --split time:...: leave out records whose label looks up to so many seconds ahead and so into the next"
    )
    window += " split (for a column of whole numbers: in its unit)"
    job.add_argument("--label-window", type=int, metavar="SECONDS", help=f"{window} (default {default})")


def add_web_flags(job: JobParser) -> None:
    """The flags of web requests: the columns of their roles, and what counts as a page."""
    for role, words in ASKED.items():
        column = f"web logs in tsv, csv, json, w3c: the column of {words} (default: one of a known name)"
        job.add_argument(flag_of(role), metavar="COLUMN", help=column)
    for kind, effect in (("page", "count as pages"), ("asset", "do not count as pages")):
        help_text = f"web logs: suffixes that {effect}, besides those of docs/decisions/012-web-log.md"
        job.add_argument(f"--{kind}-suffixes", type=names, default=(), metavar="A,B", help=help_text)


def web_values(args: Namespace) -> dict[str, Any]:
    """The fields of LogsConfig from the flags of add_web_flags."""
    fields_of = (*(f"{role}_column" for role in ASKED), "page_suffixes", "asset_suffixes")
    return {name: getattr(args, name) for name in fields_of}


def write_values(args: Namespace) -> dict[str, Any]:
    """The fields of WriteConfig from the flags."""
    return {field.name: getattr(args, field.name) for field in fields(WriteConfig) if hasattr(args, field.name)}


def continuing(values: dict[str, Any], given: Collection[str] | None) -> dict[str, Any]:
    """Return `values` of the flags; with --append-to, flags that are not `given` have the values of that dataset.
    `given` None: all are given.
    """
    return continued(values, values.keys() if given is None else {FIELDS.get(name, name) for name in given})


def output_values(args: Namespace) -> dict[str, Any]:
    """The fields of OutputConfig from the flags of add_output_flags."""
    return {
        "inputs": tuple(args.input),
        "input_root": args.input_root,
        "max_bad": args.max_bad,
        **write_values(args),
    }


def finished(args: Namespace, config: OutputConfig, sources: Callable[[], Sequence[Source]]) -> DatasetManifest | None:
    """With --if-exists keep, return the dataset at --output if it was made of the same input and settings; else None.
    `sources` finds the input as the job does.

    Raises ExistsError for another dataset.
    """
    if args.if_exists != "keep" or not filesystem(config.output).exists(config.output):
        return None
    found = load_dataset(absolute(config.output))
    created = found.created_by
    parent = None if config.append_to is None else absolute(config.append_to)
    there = sources()
    different = {
        "settings": {name: created["config"].get(name) for name in config.to_json()} != config.to_json(),
        "--seed": created["seed"] != config.seed,
        "--append-to": (found.parent or {}).get("url") != parent,
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
    """Counts, splits, what is carried, leakage and digest, in two to four lines; for web requests also the columns of
    their roles and the most frequent suffixes of pages.
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
        + ("" if carried is None else f"{_carried_line(manifest, carried)}\n")
        + "".join(f"{line}\n" for line in _web_lines(manifest))
        + ("" if leaks is None else f"{leaks}\n")
        + (BY_PLACE if manifest.created_by["config"].get("id_columns") == [] else "")
        + f"digest {manifest.digest}"
    )


def _web_lines(manifest: DatasetManifest) -> list[str]:
    config = manifest.created_by["config"]
    columns, suffixes = config.get(ROLES), config.get(SUFFIXES)
    lines = [f"columns: {said(columns)}"] if columns else []
    if suffixes:
        counts = (f"{count} {suffix}" for suffix, count in most_frequent(suffixes, len(suffixes)).items())
        lines.append(f"pages by suffix: {', '.join(counts)}")
    return lines
