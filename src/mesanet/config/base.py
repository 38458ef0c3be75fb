"""Nested config dataclasses to and from plain dictionaries and JSON, refusing what they do not know.

A config is a frozen keyword-only dataclass whose fields are bool, int, float, str, Path, None, Literal, tuple,
`dict[str, ...]`, another config, or a union of these. A union of several configs needs a Literal field (such as
`kind: Literal["cosine"] = "cosine"`) that tells them apart. A config checks itself:

    @dataclass(frozen=True, kw_only=True)
    class AdamConfig:
        \"\"\"The optimiser.\"\"\"

        learning_rate: float = 1e-3
        \"\"\"Peak learning rate.\"\"\"

        def __post_init__(self) -> None:
            check_fields(self)  # the types
            check_positive("learning_rate", self.learning_rate)

Nothing is ever guessed: "false" is no bool, 1 is no bool, True is no int, 3.0 is no int. An int is a float.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from mesanet.config.checks import (
    ConfigError,
    check_in_range,
    check_not_empty,
    check_one_of,
    check_positive,
)

__all__ = [
    "ConfigError",
    "check_fields",
    "check_in_range",
    "check_not_empty",
    "check_one_of",
    "check_positive",
    "from_dict",
    "from_json",
    "to_dict",
    "to_json",
]

Config = TypeVar("Config")

_SCALARS: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


def to_dict(config: Any) -> dict[str, Any]:
    """Return a config as nested dictionaries, lists and scalars, every field that can be given included."""
    assert not isinstance(config, type), f"expected a config, got the class {config!r}"
    return {field.name: _plain(getattr(config, field.name)) for field in fields(config) if field.init}


def from_dict(kind: type[Config], values: Mapping[str, Any]) -> Config:
    """Build a config of class `kind` from what `to_dict` gives; absent fields take their defaults.

    Raises ConfigError, a ValueError, that names the dotted field, what came, and what is accepted.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(kind.__name__, f"got {_shown(values)}, expected a table of its fields")
    declared = {field.name: field for field in fields(kind) if field.init}  # type: ignore[arg-type]
    for name in values:
        if name not in declared:
            raise ConfigError(str(name), _unknown_field(str(name), kind, list(declared)))
    for name, field in declared.items():
        if name not in values and _required(field):
            raise ConfigError(name, f"is missing, expected {_expected(_types(kind)[name])}")
    arguments = {name: _parse(name, value, _types(kind)[name]) for name, value in values.items()}
    return kind(**arguments)


def to_json(config: Any) -> str:
    """Return a config as JSON text; NaN and infinity are refused because they are not JSON."""
    values = to_dict(config)
    _check_finite(values, "")
    return json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False)


def from_json(kind: type[Config], text: str) -> Config:
    """Build a config of class `kind` from what `to_json` gives."""
    try:
        values = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except ValueError as error:
        raise ConfigError(kind.__name__, f"is not valid JSON: {error}") from error
    return from_dict(kind, values)


def check_fields(config: Any) -> None:
    """Refuse a config in which some field's value does not have the declared type; a list becomes a tuple."""
    types = _types(type(config))
    for field in fields(config):
        value, kind = getattr(config, field.name), types[field.name]
        if isinstance(value, list) and get_origin(kind) is tuple:
            # A frozen config holds nothing that can be changed.
            value = tuple(value)
            object.__setattr__(config, field.name, value)
        if not _fits(value, kind):
            raise ConfigError(field.name, f"got {_shown(value)}, expected {_expected(kind)}")


def _types(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _check_finite(value: Any, name: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(name, f"got {value!r}, expected a finite number, the only kind that JSON can hold")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_finite(item, f"{name}.{key}" if name else key)
    if isinstance(value, list):
        for position, item in enumerate(value):
            _check_finite(item, f"{name}[{position}]")


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"{sorted(twice)[0]!r} is given twice")
    return dict(pairs)


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return to_dict(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Path):
        return value.as_posix()
    return value


def _parse(name: str, value: Any, kind: Any) -> Any:
    """Turn plain data into a value of type `kind`, or raise ConfigError for the field `name`."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _parse_union(name, value, get_args(kind))
    if is_dataclass(kind):
        if type(value) is kind:
            return value
        return _parse_config(name, value, kind)
    if origin is tuple and isinstance(value, list | tuple):
        return _parse_tuple(name, value, kind)
    if origin is dict and isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _parse(f"{name}.{key}", item, get_args(kind)[1]) for key, item in value.items()}
    if kind is Path and isinstance(value, str):
        return Path(value)
    if not _fits(value, kind):
        raise ConfigError(name, f"got {_shown(value)}, expected {_expected(kind)}")
    return _as_float(name, value) if kind is float else value


def _as_float(name: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise ConfigError(name, "got a whole number too large for a float, expected a smaller one") from error


def _parse_config(name: str, value: Any, kind: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ConfigError(name, f"got {_shown(value)}, expected {_expected(kind)}")
    try:
        return from_dict(kind, value)
    except ValueError as error:
        raise _inside(name, kind, error) from error


def _inside(owner: str, kind: Any, error: ValueError) -> ConfigError:
    """Return the error of a nested config of class `kind`, with its field named from the outside."""
    if isinstance(error, ConfigError):
        return ConfigError(f"{owner}.{error.field}", error.problem)
    field, separator, problem = str(error).partition(": ")
    if separator and field in _types(kind):
        return ConfigError(f"{owner}.{field}", problem)
    return ConfigError(owner, str(error))


def _parse_tuple(name: str, value: Any, kind: Any) -> tuple[Any, ...]:
    items = get_args(kind)
    if items[-1:] == (Ellipsis,):
        items = (items[0],) * len(value)
    if len(items) != len(value):
        raise ConfigError(name, f"got {_shown(value)}, expected {_expected(kind)}")
    return tuple(_parse(f"{name}[{i}]", item, type_) for i, (item, type_) in enumerate(zip(value, items, strict=True)))


def _parse_union(name: str, value: Any, members: tuple[Any, ...]) -> Any:
    """Parse with the one member that the value is meant for, so that a mistake inside is reported as such."""
    configs = [member for member in members if is_dataclass(member)]
    if isinstance(value, Mapping) and configs:
        return _parse_config(name, value, configs[0] if len(configs) == 1 else _chosen(name, value, configs))
    exact_first = sorted(members, key=lambda member: (type(value) is not member, not _fits(value, member)))
    for member in exact_first:
        try:
            return _parse(name, value, member)
        except ConfigError as error:
            if error.field != name:  # The value is of this member's kind, and the mistake is inside it.
                raise
    raise ConfigError(name, f"got {_shown(value)}, expected {_expected(Union[members])}")  # noqa: UP007 - built at run time


def _chosen(name: str, value: Mapping[str, Any], configs: list[Any]) -> Any:
    """Return the config class whose Literal field has the value that came."""
    tags = [
        field for field, kind in _types(configs[0]).items()
        if get_origin(kind) is Literal and all(get_origin(_types(config).get(field)) is Literal for config in configs)
    ]  # fmt: skip
    assert tags, f"{name}: {[config.__name__ for config in configs]} share no Literal field that tells them apart"
    tag = tags[0]
    known = {option: config for config in configs for option in get_args(_types(config)[tag])}
    if tag not in value:
        raise ConfigError(f"{name}.{tag}", f"is missing, expected one of {', '.join(map(repr, known))}")
    came = value[tag]
    if not isinstance(came, str) or came not in known:
        raise ConfigError(f"{name}.{tag}", f"got {_shown(came)}, expected one of {', '.join(map(repr, known))}")
    return known[came]


def _fits(value: Any, kind: Any) -> bool:
    """Whether `value` is already a value of type `kind`; no conversions but int to float."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, member) for member in arguments)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and _tuple_fits(value, arguments)
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(k, arguments[0]) and _fits(v, arguments[1]) for k, v in value.items()
        )
    if kind is type(None):
        return value is None
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _tuple_fits(value: tuple[Any, ...], items: tuple[Any, ...]) -> bool:
    if items[-1:] == (Ellipsis,):
        items = (items[0],) * len(value)
    return len(items) == len(value) and all(_fits(item, kind) for item, kind in zip(value, items, strict=True))


def _unknown_field(name: str, kind: type, declared: list[str]) -> str:
    close = get_close_matches(name, declared, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"is no field of {kind.__name__}, expected one of {', '.join(declared) or 'none'}{hint}"


def _expected(kind: Any) -> str:
    """What a field of type `kind` accepts, in words."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(_expected(member) for member in arguments)
    if origin is Literal:
        return repr(arguments[0]) if len(arguments) == 1 else f"one of {', '.join(map(repr, arguments))}"
    if origin is tuple:
        if arguments[-1:] == (Ellipsis,):
            return f"a list of which each item is {_expected(arguments[0])}"
        return f"a list of {len(arguments)}: {', '.join(map(_expected, arguments))}"
    if origin is dict:
        return f"a table of which each value is {_expected(arguments[1])}"
    if is_dataclass(kind):
        return f"a table with the fields of {typing.cast(type, kind).__name__}"
    if kind is type(None):
        return "null"
    return _SCALARS.get(kind) or ("a path" if kind is Path else str(getattr(kind, "__name__", kind)))


def _shown(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"
