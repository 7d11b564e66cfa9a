"""A page for each command, from its parser: what `lockstep JOB --help` prints, as tables to search and to link to."""

from __future__ import annotations

import argparse
import html
import importlib
import re
from pathlib import Path

from lockstep.__main__ import job_names, sentence

FOLDER = "reference/commands"
_PAGE = re.compile(r"docs/[a-z-]+\.md")
_IN_BRACKETS = re.compile(r" \([^)]*docs/[^)]*\)")


def command_pages() -> dict[str, str]:
    """The text of each page by its path, and of the page that lists them."""
    names = [name for name in job_names() if hasattr(importlib.import_module(f"lockstep.jobs.{name}"), "parser")]
    pages = {f"{FOLDER}/{name}.md": command_page(name) for name in names}
    rows = "\n".join(f"| [`lockstep {name}`]({name}.md) | {cell(sentence(name))} |" for name in names)
    head = (
        "# Commands\n\nEach command with its flags, as `lockstep JOB --help` prints them. Flags may stand in a "
        "TOML file that `--config` names.\n\n"
    )
    pages[f"{FOLDER}/index.md"] = f"{head}| command | what it does |\n| --- | --- |\n{rows}\n"
    return pages


def command_page(name: str) -> str:
    """One command's page: its sentence, its usage, and a table for each group of flags."""
    parser: argparse.ArgumentParser = importlib.import_module(f"lockstep.jobs.{name}").parser()
    usage = argparse.HelpFormatter(parser.prog, width=90)
    usage.add_usage(None, [action for action in parser._actions if action.required], [])
    words = usage.format_help().removeprefix("usage: ").strip()
    parts = [f"# lockstep {name}\n\n{sentence(name)}\n\n```text\n{words} [flags]\n```\n"]
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.help is not argparse.SUPPRESS]
        if actions:
            title = group.title or ""
            rows = "\n".join(f"| {flag(action)} | {cell(help_of(parser, action))} |" for action in actions)
            pages = ", ".join(page_link(page) for page in _PAGE.findall(title))
            parts.append(f"## {_IN_BRACKETS.sub('', title).capitalize()}\n" + (f"\nSee {pages}.\n" if pages else ""))
            parts.append(f"| flag | what it does |\n| --- | --- |\n{rows}\n")
    return "\n".join(parts)


def page_link(page: str) -> str:
    """A link to a page of docs from that of a command."""
    return f"[{Path(page).stem}](../../{page})"


def flag(action: argparse.Action) -> str:
    """An action's names, with the name of its value, as code."""
    value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if action.choices is not None:
        value = ",".join(map(str, action.choices))
    if not action.option_strings:
        return f"<code>{cell(value)}</code>"
    shown = "" if action.nargs == 0 else f" {cell(value)}"
    return ", ".join(f"<code>{name}{shown}</code>" for name in action.option_strings)


def help_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """An action's help with its placeholders filled in, and whether it must be given."""
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return f"{text} (required)" if action.required and action.option_strings else text


def cell(text: str) -> str:
    """A text as a cell of a table."""
    escaped = html.escape(" ".join(text.split()), quote=False)
    safe = re.sub(r"[|*_\[\]`~]", lambda found: f"&#{ord(found[0])};", escaped)
    return _PAGE.sub(lambda found: page_link(found[0]), safe)
