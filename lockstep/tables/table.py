"""The base of every table of a run file: strict, frozen and closed to unknown keys."""

import re
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

NUMBER = re.compile("0|[1-9][0-9]{0,17}")
NAME_BYTES, URL_BYTES = 64, 192  # the capacities of Psyche's strings

# Rust's unsigned integers, which bound Psyche's numbers.
U8 = Annotated[int, Field(ge=0, le=2**8 - 1)]
U16 = Annotated[int, Field(ge=0, le=2**16 - 1)]
U32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
U64 = Annotated[int, Field(ge=0, le=2**64 - 1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]


def wrong(key: str | tuple[str | int, ...], expected: str) -> PydanticCustomError:
    """Return the error of a table's broken rule, for validators to raise.

    `key` is the key, or the path to it, relative to the validated value; () is the value itself.
    `expected` completes "expected ...".
    """
    path = (key,) if isinstance(key, str) else key
    return PydanticCustomError("rule", "{expected}", {"key": path, "expected": expected})


def missing(*path: str) -> PydanticCustomError:
    """Return the error of a table's missing key that only the rest of the file makes necessary."""
    return PydanticCustomError("missing", "missing", {"key": path})


def text(capacity: int, *, empty: bool = False) -> Any:
    """Return the type of a table's string that fits into `capacity` bytes of UTF-8.

    Psyche keeps strings in fixed arrays and silently cuts longer ones; here they are refused.
    """

    def check(value: str) -> str:
        size = len(value.encode())
        if size > capacity:
            raise wrong((), f"at most {capacity} bytes; this has {size}")
        if not value and not empty:
            raise wrong((), "a non-empty string")
        return value

    schema = {"type": "string", "minLength": 0 if empty else 1, "maxLength": capacity}
    return Annotated[str, AfterValidator(check), WithJsonSchema(schema)]


Name, Url = text(NAME_BYTES), text(URL_BYTES)


def _check_no_password(value: str) -> str:
    scheme, _, rest = value.partition("://")
    user, at, _ = re.split("[/?#]", rest)[0].rpartition("@")
    if at and (scheme in ("http", "https") or ":" in user):  # sftp://user@host has no password
        raise wrong(
            (),
            "no user or password, since the run file is copied into many outputs; put them into "
            "~/.netrc",
        )
    return value


NoPassword = AfterValidator(_check_no_password)
"""An address without credentials: it reaches git, DVC's cache, the report and the transcript."""


# A frozen list; strict tuples refuse lists.
AsTuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
# A number as a key of JSON has one text: "01", " 1" and "1" would be three keys, and one number.
AsKey = BeforeValidator(lambda key: int(key) if NUMBER.fullmatch(str(key)) else key)
NumberKey = Annotated[int, AsKey]


def _distinct(items: tuple) -> tuple:
    if len(set(items)) < len(items):
        raise wrong((), "each of them once")
    return items


Distinct = AfterValidator(_distinct)


def one_or_list(number: Any, numbers: Any) -> Any:
    """Return a table's type of a number or a list; an error is about the one that was written."""
    return Annotated[
        Annotated[number, Tag("number")] | Annotated[numbers, Tag("list")],
        Discriminator(lambda value: "list" if isinstance(value, list | tuple) else "number"),
    ]


def per_peer(number: Any) -> Any:
    """Return a table's type of one number for all peers, or a list with one number per peer."""
    return one_or_list(number, Annotated[tuple[number, ...], AsTuple])


class Table(BaseModel):
    """A table of the run file. The string below a field describes it in schema and reference."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
