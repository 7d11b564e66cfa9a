"""The flags that the ETL jobs share, and the fields of configurations that they give."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from lockstep.etl.choices import DEFAULT_SHARD_BYTES, ROLES_ASKED, WEIGHTS, role_flag
from lockstep.jobs._cli import JobParser, joined, names, refuse_idle
from lockstep.storage.errors import require

# Flags that a proposal uses, or refuses by itself.
_OF_PROPOSALS = (
    "propose-schema", "for", "output", "config", "debug", "master", "input", "input-format", "table", "query",
    "table-version", "log-format", "delimiter", "columns", "null-text", "quoted-newlines", "label", "id-columns",
    "time-columns", "exclude", "schema", "page-suffixes", "asset-suffixes", *(f"{role}-column" for role in ROLES_ASKED),
)  # fmt: skip


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
    new = "rows whose label is not known yet, for lockstep predict: all in the split `test` (docs/prediction.md)"
    add("--unlabelled", action="store_true", help=new)
    add("--master", metavar="URL", help="Spark master (default: spark-submit's, else local[*])")
    return add


def add_proposal_flags(job: JobParser, table: str) -> None:
    """Add --propose-schema, for what `table` calls the input, and --for."""
    text = f"write --output, a schema for {table}, from its first 10,000 rows; no dataset"
    job.add_argument("--propose-schema", action="store_true", help=text)
    text = "with --propose-schema: categories as a column each (columns, the default) or as ids for embeddings"
    job.add_argument("--for", dest="purpose", choices=("columns", "embeddings"), help=text)


def for_embeddings(args: Namespace, argv: Sequence[str]) -> bool:
    """Whether a proposal is for embeddings. Raises ConfigError for --for without --propose-schema, and with it for
    flags of `argv` that a proposal does not use. Those of a file may be for the dataset that is made later.
    """
    refuse_idle("--for", args.purpose is not None and not args.propose_schema, "--propose-schema")
    if args.propose_schema:
        flags = [word.partition("=")[0] for word in argv if word.startswith("--") and word != "--"]
        idle = ", ".join(flag for flag in flags if flag[2:] not in _OF_PROPOSALS)
        step = f"Leave out {idle} here; give it to the job that makes the dataset by the schema."
        require(not idle, idle, "with --propose-schema", "flags that say what to read and which column is what", step)
    return args.purpose == "embeddings"


def add_label_window(job: JobParser, default: str) -> None:
    """The flag of the jobs whose records have a time; `default` is its default, for the help."""
    window = (
        "with --split time:...: leave out records whose label looks up to so many seconds ahead and so into the next"
    )
    window += " split (for a column of whole numbers: in its unit)"
    job.add_argument("--label-window", type=int, metavar="SECONDS", help=f"{window} (default {default})")


def add_web_flags(job: JobParser) -> None:
    """The flags of web requests: the columns of their roles, and what counts as a page."""
    for role, words in ROLES_ASKED.items():
        column = f"web logs in tsv, csv, json, w3c: the column of {words} (default: one of a known name)"
        job.add_argument(role_flag(role), metavar="COLUMN", help=column)
    for kind, effect in (("page", "count as pages"), ("asset", "do not count as pages")):
        help_text = f"web logs: suffixes that {effect}, besides those of docs/decisions/012-web-log.md"
        job.add_argument(f"--{kind}-suffixes", type=names, default=(), metavar="A,B", help=help_text)


def web_values(args: Namespace) -> dict[str, Any]:
    """The fields of LogsConfig from the flags of add_web_flags."""
    fields_of = (*(f"{role}_column" for role in ROLES_ASKED), "page_suffixes", "asset_suffixes")
    return {name: getattr(args, name) for name in fields_of}


def write_values(args: Namespace) -> dict[str, Any]:
    """The fields of WriteConfig from the flags."""
    from lockstep.etl.write.config import WriteConfig

    return {field.name: getattr(args, field.name) for field in fields(WriteConfig) if hasattr(args, field.name)}


def output_values(args: Namespace) -> dict[str, Any]:
    """The fields of OutputConfig from the flags of add_output_flags."""
    return {
        "inputs": tuple(args.input),
        "input_root": args.input_root,
        "max_bad": args.max_bad,
        **write_values(args),
    }
