"""The command line of lockstep train: the options of TrainConfig are its flags, and their sentences its --help."""

from __future__ import annotations

import tomllib
import types
from argparse import SUPPRESS, Action, ArgumentTypeError, Namespace
from collections.abc import Collection
from dataclasses import MISSING
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from lockstep.features.images.augment import forms
from lockstep.jobs._cli import JobParser, joined, refuse_idle
from lockstep.training.config import TrainConfig, Value, flag_of, groups, names_by_part, option_names
from lockstep.training.parts import Option

# Flags of one call and not of a run, in the group of this field.
OF_THE_CALL: dict[str, tuple[str, dict[str, Any]]] = {
    "launcher": ("--master", {"metavar": "URL", "help": "Spark master, such as local[2] (default: spark-submit's)"}),
    "start_limit_s": ("--take-over", {"action": "store_true", "help": "Replace another driver of this run"}),
    "datasets": (
        "--dry-run",
        {"action": "store_true", "help": "Print what the run would do and need, and end: nothing is written"},
    ),
    "checkpoint_every": (
        "--on-event",
        {"metavar": "COMMAND", "help": "Called with JSON on standard input at a restart, a slow rank, and the end"},
    ),
}
OF_ONE_RUN = ("--dry-run", "--on-event")  # not of jobs that train several, or none
MIB = 1 << 20


class Joined(Action):
    """Several words of a flag as one text."""

    def __call__(self, _parser: Any, namespace: Namespace, values: Any, _flag: str | None = None) -> None:
        setattr(namespace, self.dest, " ".join(values))


class Settings(Action):
    """NAME=VALUE pairs, of every time the flag is given; the last value of a name counts."""

    def __call__(self, _parser: Any, namespace: Namespace, values: Any, _flag: str | None = None) -> None:
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), **dict(values)})


def setting(text: str) -> tuple[str, Value]:
    """NAME=VALUE, the value as TOML reads it if that is a number, true, false or a text in quotes; else as it is."""
    name, mark, value = text.partition("=")
    if not mark or not name.isidentifier():
        raise ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as width=64")
    try:
        read = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return name, value
    return name, read["value"] if len(read) == 1 and isinstance(read["value"], Value) else value


# What the type of an option does not say.
SPECIAL: dict[str, dict[str, Any]] = {
    "split": {"type": joined},
    "extra": {"required": False, "default": SUPPRESS, "nargs": "+", "type": setting, "action": Settings},
    "augment": {"nargs": "+", "action": Joined, "help": f"Random changes of the training images: {forms()}"},
}


def parser(description: str, job_name: str = "train", without: Collection[str] = ()) -> JobParser:
    """The command line of a job that trains; its TOML table has the job's name. `without`: flags that it leaves out."""
    job = JobParser(job_name, description, job_name)
    job.add_code_flag()
    job.parts = {part: {flag_of(name) for name in names} for part, names in names_by_part().items()}
    for title, options in groups().items():
        group = job.add_argument_group(title)
        extra = OF_THE_CALL.get(options[0].name)
        if extra is not None and extra[0] not in without and (job_name == "train" or extra[0] not in OF_ONE_RUN):
            group.add_argument(extra[0], **extra[1])
        for option in options:
            if flag_of(option.name) not in without:
                group.add_argument(flag_of(option.name), dest=option.name, **flag_options(option))
    return job


def flag_options(option: Option) -> dict[str, Any]:
    """What argparse needs to know of an option. A flag that is not given leaves it to its default."""
    hint = option.hint
    hint, metavar = (hint.__origin__, *hint.__metadata__) if get_origin(hint) is Annotated else (hint, None)
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [each for each in get_args(hint) if each is not types.NoneType]
        hint = str if str in kinds else kinds[0]
    options: dict[str, Any] = {"help": help_text(option)}
    if option.default is MISSING:
        options["required"] = True
    else:
        options["default"] = SUPPRESS
    if hint is bool:
        options["action"] = "store_true"
    elif get_origin(hint) is Literal:
        options["choices"] = get_args(hint)
    else:
        if get_origin(hint) is tuple:
            hint, options["nargs"] = get_args(hint)[0], "+"
        options["type"] = hint
        options["metavar"] = metavar or ("S" if option.name.endswith("_s") else "X" if hint is float else "N")
    return options | SPECIAL.get(option.name, {})


def help_text(option: Option) -> str:
    """An option's sentence as a line of --help, with its default."""
    text = option.sentence.removesuffix(".").replace("`", "").replace("%", "%%")
    default = option.default
    if default in (MISSING, None, "", {}) or default is False or "(default" in text:
        return text
    if option.name.endswith("_bytes"):
        default = f"{default // MIB} MiB" if default < 1 << 30 else f"{default >> 30} GiB"
    elif isinstance(default, float):
        default = f"{default:g}"
    return f"{text} (default {default})"


def config_of(args: Namespace) -> TrainConfig:
    """The configuration that the flags give; `take_over` belongs to this call and not to the run.

    Raises ConfigError for invalid values, and for a flag that does nothing without another one; with --since what
    reading the datasets' manifests raises.
    """
    given = {name: getattr(args, name) for name in option_names() if hasattr(args, name)}
    # Asked of flags and not of TrainConfig: a stored run, which always names all options, must stay readable.
    refuse_idle("--validate-every", "validate_every" in given and "validate" not in given, "--validate SPLIT")
    refuse_idle("--cache-bytes", "cache_bytes" in given and "cache" not in given, "--cache DIR")
    refuse_idle("--master", args.master is not None and given.get("launcher") == "local", "--launcher barrier")
    return TrainConfig(**given).with_all_datasets()
