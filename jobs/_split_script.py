"""Split the command line of lockstep launch into its flags, the script, and the script's arguments."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence

TOML = ".toml"


def split_script(job: ArgumentParser, argv: Sequence[str]) -> tuple[list[str], str, tuple[str, ...]]:
    """Split a command line into (flags, script, the script's arguments): the script is the first word that is no flag
    of `job` and no value.

    Words after it are not examined, so the script may have flags with the same names. `--` may precede it. `--config`
    takes all TOML files that follow. Without a script, the flags are parsed first: --help is one.
    """
    takes = {option: action.nargs for action in job._actions for option in action.option_strings}
    index = 0
    while index < len(argv):
        word = argv[index]
        if word == "--":
            return _split(job, argv, index, index + 1)
        if not word.startswith("-") or word == "-":
            return _split(job, argv, index, index)
        index += 1
        if "=" in word or takes.get(word, 0) == 0:  # the parser reports an unknown flag
            continue
        if takes[word] is None:
            index += 1
        else:
            while index < len(argv) and argv[index].endswith(TOML):
                index += 1
    return _split(job, argv, index, index)


def _split(
    job: ArgumentParser, argv: Sequence[str], end_of_flags: int, script: int
) -> tuple[list[str], str, tuple[str, ...]]:
    flags = list(argv[:end_of_flags])
    if script >= len(argv):
        job.parse_args(flags)  # ends with --help, and reports invalid flags first
        job.error("no script: name one after the flags")
    return flags, argv[script], tuple(argv[script + 1 :])
