"""The space of a search: which fields of TrainConfig and which settings of the model it varies, and within what."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from lockstep.storage.errors import nearest, require
from lockstep.training.config import TrainConfig, Value, all_options, flag_of, option_names
from lockstep.training.run.command import setting_word

SETTING = "set."
"""What precedes the name of a setting of the model (`lockstep train --set NAME=VALUE`)."""
# A call that resumes a search may give these fields other values.
ELASTIC = ("min_ranks", "max_ranks", "slots_file")
"""Fields that let the number of ranks change, which a trial does not."""
OPERATIONAL = frozenset({
    "run", "num_ranks", "servers", "devices", "read_ahead_bytes", "cache", "cache_bytes", "verify", "checkpoint_every",
    "keep_checkpoints", "keep_every", "launcher", "tls", "trust_network", "start_limit_s", "stall_limit_s",
    "heartbeat_limit_s", "max_restarts", "max_restarts_per_hour", "stop_grace_s", "spare_executors",
    *ELASTIC,
})  # fmt: skip
# With another value of these, the metrics of two trials measure different things; `extra` is searched by `set.NAME`.
FIXED = frozenset({"datasets", "split", "mix", "tasks", "audit", "extra", "validate", "validate_every", "keep_best"})
SEARCHED = tuple(name for name in option_names() if name not in OPERATIONAL | FIXED)
NOT_OF_FOLDS = ("split", "since", "mix", "tasks", "replay", "validate_every")
"""Fields of a run that no caller of a cross-validation chooses; `validate` is refused with the reason."""
KEYS = ("low", "high", "step", "log", "choices")
MOST_STEPS = 2**53  # of a range: beyond, neighbouring doubles are further apart than the step
EXAMPLES = "{low = 0.001, high = 1.0, log = true}, {low = 8, high = 64, step = 8} or {choices = [64, 128]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter: the numbers from `low` to `high`, both included, or one of `choices`."""

    name: str
    """A field of TrainConfig, or `set.NAME`."""
    low: int | float | None = None
    """An int, as is `high`, if the parameter is an integer."""
    high: int | float | None = None
    step: int | float | None = None
    """The distance of neighbouring values; without it, any number (of integers: each)."""
    log: bool = False
    """Whether the logarithm is proposed evenly, and not the number."""
    choices: tuple[Value, ...] = ()

    def ends(self) -> tuple[Value, ...]:
        """The values to check before a search: the ends of a range, or all choices."""
        if self.low is None or self.high is None:
            return self.choices
        return (self.low, self.high)

    def points(self) -> int:
        """The number of all values. Raises ConfigError for a range of real numbers without a step."""
        if self.low is None or self.high is None:
            return len(self.choices)
        step = self.step if self.step is not None or isinstance(self.low, float) else 1
        allowed = "choices, integers, or a range with a step"
        require(step is not None, f"`{self.name}` in a grid search", "a range without a step", allowed, "Add a step.")
        return int(_steps(self.low, self.high, step or 1)) + 1

    def grid(self) -> list[Value]:
        """All values. Raises ConfigError for a range of real numbers without a step."""
        if self.low is None or self.high is None:
            return list(self.choices)
        low, step = _exact(self.low), _exact(self.step or 1)
        kind = type(self.low)
        return [kind(low + number * step) for number in range(self.points())]

    def to_json(self) -> dict[str, Any]:
        """The parameter as a JSON object, without what is not given."""
        if self.choices:
            return {"name": self.name, "choices": list(self.choices)}
        given = {"low": self.low, "high": self.high, "step": self.step, "log": self.log or None}
        return {"name": self.name, **{key: value for key, value in given.items() if value is not None}}


def space_of(document: Mapping[str, Any], where: str) -> tuple[Parameter, ...]:
    """The space that a TOML document (or a dict of the same form) declares, in its order; `where` names it in errors.

    Raises ConfigError for an unknown field, with the nearest one, and for values that do not fit the field's type.
    """
    flat: dict[str, Any] = {}
    for name, spec in document.items():
        if name == "set" and isinstance(spec, Mapping):
            flat |= {f"{SETTING}{setting}": value for setting, value in spec.items()}
        else:
            flat[name] = spec
    require(bool(flat), f"the space in {where}", "no parameter", "one parameter or more", f"Add one: {EXAMPLES}.")
    kinds = {name: _kind(option.hint) for name, option in all_options().items()}
    found = []
    for name, spec in flat.items():
        setting = name.startswith(SETTING) and len(name) > len(SETTING)
        known = ", ".join((*SEARCHED, "set.NAME"))
        advice = "Correct the name; a setting of the model is set.NAME."
        require(setting or name in SEARCHED, f"the parameter `{name}` in {where}", name + nearest(name, SEARCHED),
                known, advice)  # fmt: skip
        found.append(_parameter(name, spec, None if setting else kinds[name], f"`{name}` in {where}"))
    return tuple(found)


def _exact(number: int | float) -> Fraction:
    """A number as it is written in decimals: 0.1 is a tenth."""
    return Fraction(str(number))


def _steps(low: int | float, high: int | float, step: int | float) -> Fraction:
    """The number of steps from `low` to `high`."""
    return (_exact(high) - _exact(low)) / _exact(step)


def _kind(hint: Any) -> Any:
    """The type of an option's values other than None; a Literal as it is."""
    if get_origin(hint) is Annotated:
        hint = hint.__origin__
    if get_origin(hint) in (Union, types.UnionType):
        return next(each for each in get_args(hint) if each is not types.NoneType)
    return hint


def _parameter(name: str, spec: Any, kind: Any, where: str) -> Parameter:
    """`kind` is the type of the field, None for a setting of the model."""
    require(isinstance(spec, Mapping), where, f"{spec!r}"[:200], EXAMPLES, "Write a table in braces.")
    for key in spec:
        require(key in KEYS, where, f"{key}{nearest(key, KEYS)}", ", ".join(KEYS), "Correct the key.")
    if "choices" in spec:
        return Parameter(name=name, choices=_choices(spec, kind, where))
    low, high, step, log = (spec.get(key) for key in ("low", "high", "step", "log"))

    def check(right: bool, allowed: str, next_step: str) -> None:
        got = ", ".join(f"{key} = {value!r}" for key, value in spec.items())
        require(right, where, got, allowed, next_step)

    given = [low, high] if step is None else [low, high, step]
    check(kind in (int, float, None), "choices, since it is no number", "Give choices = [A, B].")
    numbers = all(type(value) in (int, float) and math.isfinite(value) for value in given)
    check(numbers, EXAMPLES, "Give low and high, as numbers.")
    whole = all(type(value) is int for value in given)
    check(kind is not int or whole, "integers", "Give low, high and step without a decimal point.")
    check(low < high, "low below high", "Correct the range.")
    check(log in (None, True, False) and type(log) is not int, "log = true or false", "Correct log.")
    check(not log or low > 0, "with log, low above 0", "Raise low, or leave log out.")
    check(step is None or not log, "log or step, not both", "Leave one of them out.")
    check(math.isfinite(float(high) - float(low)), "a range whose width is a finite number", "Correct the range.")
    fits = step is None or (step > 0 and _steps(low, high, step).denominator == 1)
    check(fits, "a step that leads from low to high exactly", "Correct step or high.")
    few = step is None or _steps(low, high, step) <= MOST_STEPS
    check(few, f"{MOST_STEPS} steps at most", "Raise step, or leave it out.")
    if kind is float or not whole:
        low, high, step = float(low), float(high), None if step is None else float(step)
    return Parameter(name=name, low=low, high=high, step=step, log=bool(log))


def _choices(spec: Mapping[str, Any], kind: Any, where: str) -> tuple[Value, ...]:
    choices = spec["choices"]
    require(len(spec) == 1, where, ", ".join(spec), "choices, or a range, not both", "Leave one of them out.")
    several = isinstance(choices, list | tuple) and len(choices) > 0
    require(several, where, f"choices = {choices!r}"[:200], "a list of values", "Write choices = [A, B].")
    words = get_args(kind) if get_origin(kind) is Literal else ()
    kinds = {float: (int, float), None: (int, float, str, bool)}.get(kind, (kind,))
    allowed = " or ".join(words) or "values of type " + " or ".join(each.__name__ for each in kinds)
    for value in choices:
        right = value in words if words else type(value) in kinds and value == value  # NaN does not equal itself
        require(right, where, f"{value!r}"[:200], allowed, "Correct the choices.")
    found = tuple(float(value) if kind is float else value for value in choices)
    require(
        len(set(map(repr, found))) == len(found), where, f"{choices!r}"[:200], "each choice once", "Remove doubles."
    )
    return found


def config_of_trial(base: TrainConfig, parameters: Mapping[str, Any], run: str) -> TrainConfig:
    """Return `base` with a trial's parameters, as the run at URL `run`. Raises ConfigError for wrong values."""
    changed = {name: value for name, value in parameters.items() if not name.startswith(SETTING)}
    settings = {name.removeprefix(SETTING): value for name, value in parameters.items() if name.startswith(SETTING)}
    if settings:
        changed["extra"] = {**base.model.extra, **settings}
    return base.but(run=run, **changed)


def flags_of(parameters: Mapping[str, Any]) -> list[str]:
    """The flags of lockstep train that give a run these parameters."""
    flags = []
    for name, value in parameters.items():
        if name.startswith(SETTING):
            flags += ["--set", f"{name.removeprefix(SETTING)}={setting_word(value)}"]
        elif isinstance(value, bool):
            flags += [flag_of(name)] if value else []
        else:
            flags += [flag_of(name), str(value)]
    return flags


def corners(base: TrainConfig, space: tuple[Parameter, ...], run: str) -> list[TrainConfig]:
    """Configurations to check before a search: each end and choice of each parameter, the others at their first.

    Raises ConfigError for one that does not fit.
    """
    first = {parameter.name: parameter.ends()[0] for parameter in space}
    found = [config_of_trial(base, first, run)]
    for parameter in space:
        found += [config_of_trial(base, {**first, parameter.name: value}, run) for value in parameter.ends()[1:]]
    return found
