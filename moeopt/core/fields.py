"""Fields of values, checked against their types: what does not fit is one line."""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from moeopt.errors import InvalidInputError

T = TypeVar("T")

# A description is what a message says that one has to give.
Count = Annotated[int, Meta(ge=1, description="a whole number of at least 1")]
Size = Annotated[int, Meta(ge=0, description="a whole number of at least 0")]
Rate = Annotated[float, Meta(ge=0, le=sys.float_info.max, description="a number of at least 0")]
_PLAIN: Final[Mapping[Any, str]] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    tuple: "a list",
}


def check_fields(value: Any) -> None:
    """Checks a frozen dataclass, in its ``__post_init__``: a list becomes the tuple that its field is of.

    Fields whose types only a type checker can see are not looked at.

    Raises:
        InvalidInputError: A field has a value of another type or out of its range.
    """
    for name, kind in field_types(value.__class__).items():
        object.__setattr__(value, name, checked(getattr(value, name), kind, name))


def checked(given: Any, kind: Any, name: str) -> Any:
    """A value of this type.

    Args:
        given: What was given.
        kind: The type; its description is what the message asks for.
        name: Of the value, for the message.

    Raises:
        InvalidInputError: It is of another type or out of its range.
    """
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError:
        choices = [choice for part in _parts(kind) for choice in _choices(part)]
        if choices:
            wanted = " or ".join(map(repr, choices)) if len(choices) < 3 else f"one of {', '.join(choices)}"
            raise InvalidInputError(f"{name} {given!r} is unknown: give {wanted}") from None
        wanted = " or ".join(dict.fromkeys(filter(None, map(_words, _parts(kind)))))
        raise InvalidInputError(f"{name} is {given!r}: give {wanted or 'another value'}") from None


def from_mapping(kind: type[T], data: object, what: str) -> T:
    """A dataclass from a mapping of its fields, such as a table of a file.

    Args:
        kind: A dataclass.
        data: What was read.
        what: Its name, for the message.

    Raises:
        InvalidInputError: It is not a mapping, or a key is unknown or missing.
    """
    dataclass: Any = kind
    known, types = {field.name: field for field in fields(dataclass)}, field_types(dataclass)
    given = {name: checked(value, types[name], name) for name, value in check_keys(data, known, what).items()}
    for name, field in known.items():
        if name not in given and field.default is MISSING and field.default_factory is MISSING:
            raise InvalidInputError(f"{what} key {name!r} is missing")
    return kind(**given)


def check_keys(data: object, known: Collection[str], what: str) -> dict[str, Any]:
    """A mapping that was read from a file, all of whose keys are known.

    Raises:
        InvalidInputError: It is something else, or a key is unknown.
    """
    if not isinstance(data, Mapping):
        raise InvalidInputError(f"{what} is {data!r}: a mapping of its fields is expected")
    for key in data:
        if key not in known:
            raise InvalidInputError(f"{what} key {key!r} is unknown: the keys are {', '.join(sorted(known))}")
    return dict(data)


@cache
def field_types(kind: type) -> dict[str, Any]:
    """Types of a dataclass's fields by name, without those that only a type checker can see."""
    names = vars(sys.modules[kind.__module__])
    found = {}
    for field in fields(kind):
        try:
            found[field.name] = eval(field.type, names) if isinstance(field.type, str) else field.type
        except NameError:  # imported under TYPE_CHECKING
            continue
    return found


def _parts(kind: Any) -> Iterator[Any]:
    """The members of a union but None; a type that is none is its own only part."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        yield from (part for part in typing.get_args(kind) if part is not type(None))
    else:
        yield kind


def _choices(part: Any) -> tuple[str, ...]:
    return typing.get_args(part) if typing.get_origin(part) is Literal else ()


def _words(part: Any) -> str:
    described = (meta.description for meta in getattr(part, "__metadata__", ()) if meta.description)
    return next(described, _PLAIN.get(typing.get_origin(part) or part, ""))
