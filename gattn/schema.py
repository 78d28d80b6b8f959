"""Frozen dataclasses from plain values: types, ranges, dotted overrides, JSON. Every refusal is a ConfigError.

No jax here. `gattn.config` holds the dataclasses and hands these names on.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")

COSMETIC = {"cosmetic": True}  # changes nothing that is trained or measured in the end: never in the fingerprint
ADDED = {"added": True}  # came later: in the fingerprint only where it is not the default, so older runs keep theirs


class ConfigError(ValueError):
    """A config that cannot work. `field` is dotted from where the check ran, the message says value and remedy."""

    def __init__(self, field: str, value: Any, remedy: str):
        super().__init__(f"{field} = {value!r}: {remedy}")
        self.field, self.value, self.remedy = field, value, remedy

    def __reduce__(self):  # worker processes send it whole
        return ConfigError, (self.field, self.value, self.remedy)


# ---- dicts and JSON ---------------------------------------------------------------------------------------------


def to_json(config: Any) -> str:
    """The config as indented JSON; `from_dict(type(config), json.loads(...))` gives it back."""
    return json.dumps(dataclasses.asdict(config), indent=1)


def from_dict(cls: type[C], values: Mapping[str, Any], where: str = "") -> C:
    """Builds a config dataclass from plain values; an unknown key, type or value raises ConfigError naming it."""
    if not isinstance(values, Mapping):
        raise ConfigError(where or cls.__name__, values, f"expected an object with the fields of {cls.__name__}")
    hints = typing.get_type_hints(cls)
    out: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{where}.{key}" if where else key
        if key not in hints:
            raise _unknown(path, value, key, hints)
        hint = hints[key]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            value = from_dict(hint, value, path)
        elif typing.get_origin(hint) is tuple:
            item = typing.get_args(hint)[0]
            if not isinstance(value, (list, tuple)):
                raise ConfigError(path, value, "expected a list")
            value = tuple(v if isinstance(v, item) else from_dict(item, v, f"{path}.{i}") for i, v in enumerate(value))
        out[key] = value
    with _located(where):
        return cls(**out)


def override(config: C, changes: Mapping[str, Any]) -> C:
    """A copy with dotted fields replaced, e.g. `override(config, {"model.num_layers": 8})`; all at once, then checked.

    Raises:
      ConfigError: for an unknown key (naming the nearest known one) or a value that does not fit.
    """
    values = dataclasses.asdict(config)
    for path, value in changes.items():
        *parents, last = path.split(".")
        node: Any = values
        for name in parents:
            node = node.get(name) if isinstance(node, dict) else None
        if not isinstance(node, dict) or last not in node:
            raise _unknown(path, value, path, _dotted(dataclasses.asdict(config)))
        node[last] = [_plain(item) for item in value] if isinstance(value, tuple) else value
    return from_dict(type(config), values)


def _plain(item: Any) -> Any:
    return dataclasses.asdict(item) if dataclasses.is_dataclass(item) and not isinstance(item, type) else item


# ---- checks -----------------------------------------------------------------------------------------------------


class _located:
    """Prefixes the field of a ConfigError raised inside with the place in the config tree."""

    def __init__(self, where: str):
        self.where = where

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if self.where and isinstance(error, ConfigError):
            raise ConfigError(f"{self.where}.{error.field}", error.value, error.remedy) from None


def check_types(config: Any) -> None:
    for name, hint in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if not _fits(value, hint):
            raise ConfigError(name, value, f"expected {_spell(hint)}")
        if hint is float:
            object.__setattr__(config, name, float(value))  # 1 and 1.0 are one value, with one fingerprint


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return value in typing.get_args(hint) and isinstance(value, str)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(v, typing.get_args(hint)[0]) for v in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _spell(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    if isinstance(hint, types.GenericAlias):
        return f"a list of {typing.get_args(hint)[0].__name__}"
    return {float: "a finite number", int: "a whole number", bool: "true or false", str: "text"}.get(
        hint, hint.__name__
    )


def at_least(config: Any, low: float, *names: str) -> None:
    for name in names:
        if getattr(config, name) < low:
            raise ConfigError(name, getattr(config, name), f"must be at least {low:g}")


def above(config: Any, low: float, *names: str) -> None:
    for name in names:
        if getattr(config, name) <= low:
            raise ConfigError(name, getattr(config, name), f"must be above {low:g}")


def _dotted(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    out = []
    for key, value in values.items():
        out += _dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]
    return out


def _unknown(path: str, value: Any, key: str, known) -> ConfigError:
    close = difflib.get_close_matches(key, list(known), n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"
    return ConfigError(path, value, f"no such field; {hint}")
