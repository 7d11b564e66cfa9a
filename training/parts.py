"""What each part of a configuration is: a dataclass of checked fields, each an option of a run with a flag."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from dataclasses import MISSING, Field, dataclass, fields
from itertools import pairwise
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from lockstep.storage.errors import require

MOST = 2**63
"""The bound of a count: a signed integer of 64 bits has it."""


def flag_of(option: str) -> str:
    """The flag of lockstep train for an option."""
    named = {"datasets": "--dataset", "extra": "--set"}
    return named.get(option) or "--" + option.removesuffix("_s").replace("_", "-")


def require_option(name: str, value: object, right: bool, allowed: str) -> None:
    """Raise ConfigError, which names the option and its flag, unless its value is `right`."""
    if not right:
        got = f"{name} = {value!r}"
        require(right, f"the training configuration's `{name}`", got, allowed, f"Correct {flag_of(name)}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of a configuration: a frozen dataclass that checks its fields. No two parts have a field of one name,
    which is the option's name wherever parts do not show: in the constructor, in TOML and, as a flag, in --help.
    """

    title: ClassVar[str] = ""
    """The group of its flags in --help."""

    def check(self, name: str, right: bool, allowed: str) -> None:
        """Raise ConfigError unless the field `name` is `right`."""
        require_option(name, getattr(self, name), right, allowed)

    def check_count(self, *names: str) -> None:
        """Raise ConfigError unless each of these fields is an integer from 1 up."""
        for name in names:
            self.check(name, 1 <= getattr(self, name) < MOST, "an integer from 1 to 2^63 - 1")

    def check_choices(self) -> None:
        """Raise ConfigError unless each field that is one of a few words is one of them."""
        for name, choices in _choices(type(self)).items():  # type: ignore[arg-type]  # classes can be hashed
            self.check(name, getattr(self, name) in choices, " or ".join(choices))


@functools.cache
def _choices(part: type[Part]) -> dict[str, tuple[str, ...]]:
    return {name: get_args(hint) for name, hint in get_type_hints(part).items() if get_origin(hint) is Literal}


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a run."""

    name: str
    hint: Any
    """Its type, with the `Annotated` text by which --help names its value."""
    default: Any
    """MISSING for an option that every run must have."""
    sentence: str
    """The text below the field, on one line."""


def default_of(field: Field[Any]) -> Any:
    """The default of a field; MISSING without one."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def options_of(part: type) -> dict[str, Option]:
    """The options that a dataclass declares with a sentence, by name: a field without one is explained elsewhere."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
    assert isinstance(definition, ast.ClassDef)
    sentences = {}
    for one, following in pairwise(definition.body):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(following, ast.Expr):
            sentences[one.target.id] = " ".join(str(ast.literal_eval(following.value)).split())
    hints = get_type_hints(part, include_extras=True)
    return {
        field.name: Option(field.name, hints[field.name], default_of(field), sentences[field.name])
        for field in fields(part)
        if field.name in sentences
    }
