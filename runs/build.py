"""Plain data (YAML, JSON) to frozen dataclasses, strictly: one line names whatever does not fit."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from runs.errors import UserError

T = TypeVar("T")


def build(cls: type[T], data: object, where: str) -> T:
    """An instance of the dataclass `cls` from a mapping, nested dataclasses included.

    Lists become tuples; a whole number is taken where a float is declared, nothing else is converted. where: prefix of
    every message ("replay", "prereg/claims.yaml: claim-1").
    Raises UserError for a missing key, an unknown key or a value of another type; a UserError of the dataclass's own
    checks passes through with `where` in front.
    """
    if not isinstance(data, Mapping):
        raise UserError(f"{where}: {_show(data)} where a mapping was expected")
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    for key in data:
        if key not in known:
            raise UserError(f"{where}: unknown key {key!r}; expected {', '.join(known)}")
    for name, field in known.items():
        if name not in data and _required(field):
            raise UserError(f"{where}: key {name!r} is missing")
    types = get_type_hints(cls)
    values = {name: convert(types[name], value, f"{where}.{name}") for name, value in data.items()}
    try:
        return cls(**values)
    except UserError as error:
        raise UserError(f"{where}.{error}") from None


def convert(kind: Any, value: object, where: str) -> Any:
    """`value` as the annotated type `kind`, or UserError."""
    origin = get_origin(kind)
    if origin is UnionType:
        if value is None and NoneType in get_args(kind):
            return None
        (kind,) = (arg for arg in get_args(kind) if arg is not NoneType)
        return convert(kind, value, where)
    if is_dataclass(kind) and isinstance(kind, type):
        return value if isinstance(value, kind) else build(kind, value, where)
    if origin is tuple:
        item = get_args(kind)[0]
        if not isinstance(value, list | tuple):
            raise UserError(f"{where}: {_show(value)} where a list was expected")
        return tuple(convert(item, x, f"{where}[{i}]") for i, x in enumerate(value))
    if origin in (dict, Mapping):
        return _mapping(get_args(kind)[1], value, where)
    return _scalar(kind, value, where)


def _mapping(kind: Any, value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise UserError(f"{where}: {_show(value)} where a mapping with names as keys was expected")
    return {key: convert(kind, item, f"{where}.{key}") for key, item in value.items()}


def _scalar(kind: Any, value: object, where: str) -> Any:
    if kind is object:
        return value
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:  # not isinstance: True is no number here
        raise UserError(f"{where}: {_show(value)} where {_NAMES[kind]} was expected")
    return value


_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _show(value: object) -> str:
    return f"{value!r:.60}".replace("\n", " ")
