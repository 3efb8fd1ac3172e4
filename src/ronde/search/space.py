"""The space of a search: what users write, as Optuna's distributions; how many points it has; which points are equal.

{"low": 1e-4, "high": 0.1, "log": True}     a float, here on a logarithmic scale
{"low": 1, "high": 8}                       a whole number, because both ends are
{"low": 32, "high": 256, "step": 32}        only every 32nd
{"low": 0, "high": 1, "type": "float"}      a float all the same
["relu", "gelu"]                            one of these
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from ronde.search.protocol import ParameterValue

Parameters: TypeAlias = dict[str, ParameterValue]
Space: TypeAlias = dict[str, BaseDistribution]

_KEYS = ("low", "high", "step", "log", "type")


def parse_space(space: Mapping[str, Any]) -> Space:
    """Return the distribution of each parameter. ValueError names the parameter and says what is allowed."""
    if not isinstance(space, Mapping) or not space:
        raise ValueError(
            "the space needs at least one parameter, as in {'lr': {'low': 1e-4, 'high': 0.1, 'log': True}}"
        )
    return {_check_name(name): _parse_parameter(name, written) for name, written in space.items()}


def count_points(space: Space) -> int | None:
    """Return how many different points the space has; None if they cannot be counted."""
    counts = [_count_values(distribution) for distribution in space.values()]
    return None if None in counts else math.prod(count for count in counts if count is not None)


def iterate_points(space: Space) -> Iterator[Parameters]:
    """Return all points of a space that has a number of them; the last parameter changes fastest."""
    columns = [_values(distribution) for distribution in space.values()]
    for values in itertools.product(*columns):
        yield dict(zip(space, values, strict=True))


def parse_point(space: Space, point: Mapping[str, Any]) -> Parameters:
    """Return a point that the user has written. ValueError if it is not in the space."""
    if not isinstance(point, Mapping) or point.keys() != space.keys():
        raise ValueError(f"the point {point!r} must have the parameters {', '.join(space)}")
    return {name: _parse_value(name, distribution, point[name]) for name, distribution in space.items()}


def point_key(params: Mapping[str, ParameterValue]) -> tuple[tuple[str, str, str], ...]:
    """Return a value that is equal for equal points. True, 1 and 1.0 are different choices; floats are equal if twelve
    digits are."""

    def text(value: ParameterValue) -> str:
        return f"{value:.12g}" if isinstance(value, float) else repr(value)

    return tuple((name, type(params[name]).__name__, text(params[name])) for name in sorted(params))


def _check_name(name: object) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[^-=\s][^=\s]*", name) or not name.isprintable():
        raise ValueError(f"the name of a parameter is a word, as in lr; got {name!r}")
    return name


def _parse_parameter(name: str, written: Any) -> BaseDistribution:
    if isinstance(written, CategoricalDistribution | FloatDistribution | IntDistribution):
        return written
    if isinstance(written, list):
        return _parse_choices(name, written)
    if not isinstance(written, Mapping):
        raise ValueError(
            f"{name}: write a list of choices, as in [16, 32], or the ends, as in {{low: 1, high: 8}}; got {written!r}"
        )
    for key in written:
        if key not in _KEYS:
            raise ValueError(f"{name}: unknown key {key!r}; there are {', '.join(_KEYS)}")
    missing = [key for key in ("low", "high") if key not in written]
    if missing:
        raise ValueError(f"{name}: {' and '.join(missing)} must be given, as in {{low: 1, high: 8}}")
    ends = [_parse_number(f"{name}: {key}", written[key]) for key in ("low", "high", "step") if key in written]
    low, high, *rest = ends
    step = rest[0] if rest else None
    log, kind = written.get("log", False), written.get("type")
    if not isinstance(log, bool):
        raise ValueError(f"{name}: log must be true or false, got {log!r}")
    if kind not in (None, "int", "float"):
        raise ValueError(f"{name}: type must be int or float, got {kind!r}")
    if kind == "int" and any(isinstance(end, float) for end in ends):
        raise ValueError(f"{name}: the ends and the step of a parameter of type int are whole numbers")
    try:
        if kind != "float" and not any(isinstance(end, float) for end in ends):
            return IntDistribution(int(low), int(high), log=log, step=1 if step is None else int(step))
        return FloatDistribution(float(low), float(high), log=log, step=None if step is None else float(step))
    except ValueError as error:
        raise ValueError(f"{name}: {' '.join(str(error).split())}") from None


def _parse_choices(name: str, choices: list[Any]) -> CategoricalDistribution:
    if not choices:
        raise ValueError(f"{name}: there are no choices")
    choices = [_as_plain(choice) for choice in choices]
    for choice in choices:
        if not isinstance(choice, bool | int | float | str | None):
            raise ValueError(f"{name}: a choice is a number, a text, true, false or null; got {choice!r}")
    if len({(type(choice), choice) for choice in choices}) < len(choices):
        raise ValueError(f"{name}: a choice is there twice: {list(choices)!r}")
    return CategoricalDistribution(choices)


def _parse_number(source: str, value: object) -> int | float:
    """Return a number. YAML reads 1e-4 as a text, because it has no point."""
    value = _as_plain(value)
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            pass
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{source} must be a number, got {value!r}")
    return value


def _as_plain(value: Any) -> Any:
    """Return a number of NumPy as one of Python, and anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def _parse_value(name: str, distribution: BaseDistribution, value: object) -> ParameterValue:
    found: Any = value
    if isinstance(distribution, FloatDistribution):
        found = float(_parse_number(name, value))
    elif isinstance(distribution, IntDistribution):
        found = _parse_number(name, value)
        if found != int(found):
            raise ValueError(f"{name} must be a whole number, got {value!r}")
        found = int(found)
    try:
        is_inside = distribution._contains(distribution.to_internal_repr(found))
    except ValueError:  # no such choice
        is_inside = False
    if not is_inside:
        raise ValueError(f"{name}={value!r} is not in the space: {describe_distribution(distribution)}")
    result: ParameterValue = found
    return result


def describe_distribution(distribution: BaseDistribution) -> str:
    """Write what a parameter may be, for people."""
    if isinstance(distribution, CategoricalDistribution):
        return " | ".join(map(str, distribution.choices))
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    step = f", step {distribution.step:g}" if distribution.step not in (None, 1) else ""
    return f"{distribution.low:g} to {distribution.high:g}{step}{', log' if distribution.log else ''}"


def _count_values(distribution: BaseDistribution) -> int | None:
    if isinstance(distribution, CategoricalDistribution):
        return len(distribution.choices)
    if isinstance(distribution, IntDistribution):
        return (distribution.high - distribution.low) // distribution.step + 1
    assert isinstance(distribution, FloatDistribution)
    if distribution.step is not None:
        return round((distribution.high - distribution.low) / distribution.step) + 1
    return 1 if distribution.low == distribution.high else None


def _values(distribution: BaseDistribution) -> list[ParameterValue]:
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    if isinstance(distribution, IntDistribution):
        return list(range(distribution.low, distribution.high + 1, distribution.step))
    count = _count_values(distribution)
    assert count is not None, "there are too many to list"
    low, high, step = distribution.low, distribution.high, distribution.step or 0.0
    return [min(high, low + index * step) for index in range(count)]
