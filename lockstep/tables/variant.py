"""Externally tagged enums, as Rust's serde writes them, for the fields of a run file."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import model_serializer
from pydantic_core import core_schema

from lockstep.tables.table import Table, wrong


class Variant(Table):
    """One variant of an externally tagged enum, as serde writes it.

    A variant without fields is a string, `optimizer = "Dummy"`; one with a single value is a table
    with one key, `{ Server = "host:port" }`; the others are `[...optimizer.Distro]`. A subclass of
    this class is an enum, and its subclasses are the variants. Their names start with the enum's:
    `OptimizerDistro` is `Distro` of `OptimizerVariant`.
    """

    where: ClassVar[str]
    """Dotted name of the enum in a run file."""
    newtype: ClassVar[str | None] = None
    """Name of the field that a plain value stands for, in place of a table."""

    @classmethod
    def tag(cls) -> str:
        """Return the variant's name in a run file."""
        return cls.__name__.removeprefix(_prefix(cls))

    @classmethod
    def takes_table(cls) -> bool:
        """Return whether a variant can be written as a table of its fields."""
        return len(cls.model_fields) > (cls.newtype is not None)

    @classmethod
    def unwrap(cls, value: Any) -> Any:
        """Return the fields inside the tagged form of a variant."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            if cls.model_fields:
                raise wrong((), f"a table with the key {cls.tag()}")
            return {}
        payload = value[cls.tag()]
        if not cls.model_fields:
            raise wrong(cls.tag(), f'the string "{cls.tag()}"')
        if cls.newtype is None or (cls.takes_table() and isinstance(payload, dict)):
            return payload
        if isinstance(payload, dict):
            raise wrong(cls.tag(), "a plain value instead of a table")
        return {cls.newtype: payload}

    @model_serializer(mode="wrap")
    def _wrap(self, fields: Any) -> Any:
        payload = fields(self)
        if not payload:
            return self.tag()
        return {self.tag(): payload if self.takes_table() else payload[self.newtype]}


def variants_of(enum: type[Variant]) -> list[type[Variant]]:
    """Return the variants of an enum or of a part of one, in the order of their definition."""

    def below(base: type[Variant]) -> Iterator[type[Variant]]:
        for derived in base.__subclasses__():
            if derived.__name__.startswith(_prefix(enum)):
                yield derived
            yield from below(derived)

    return list(dict.fromkeys(below(enum)))  # a variant may be two kinds


def _prefix(kind: type[Variant]) -> str:
    """Return what the names of the variants of a kind's enum start with."""
    enum = next(base for base in kind.__mro__ if Variant in base.__bases__)
    return enum.__name__.removesuffix("Variant")


def variant_name(variant: Variant) -> str:
    """Return the variant's full name in a run file, such as `model.LLM.optimizer.Dummy`."""
    return f"{variant.where}.{variant.tag()}"


class ExternallyTagged:
    """Tells pydantic how variants are written; made by `one_of`."""

    def __init__(self, enum: type[Variant]):
        self.enum = enum

    @property
    def variants(self) -> list[type[Variant]]:
        """The variants of the enum, those defined so far."""
        return variants_of(self.enum)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.tagged_union_schema(
            {
                variant.tag(): core_schema.no_info_before_validator_function(
                    variant.unwrap, handler.generate_schema(variant)
                )
                for variant in self.variants
            },
            discriminator=self._tag_of,
        )

    @staticmethod
    def _tag_of(value: Any) -> str | None:
        if isinstance(value, dict) and len(value) == 1:
            return next(iter(value))
        if isinstance(value, Variant):
            return value.tag()
        return value if isinstance(value, str) else None

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict:
        return {
            "oneOf": [
                self._form(variant, handler(schema["choices"][variant.tag()]), handler)
                for variant in self.variants
            ]
        }

    @staticmethod
    def _form(variant: type[Variant], fields: dict, handler: Any) -> dict:
        tag, description = variant.tag(), variant.__doc__
        if not variant.model_fields:
            return {"const": tag, "description": description}
        payload = fields
        if variant.newtype is not None:
            bare = handler.resolve_ref_schema(fields)["properties"][variant.newtype]
            payload = {"anyOf": [bare, fields]} if variant.takes_table() else bare
        return {
            "type": "object",
            "properties": {tag: payload},
            "required": [tag],
            "additionalProperties": False,
            "description": description,
        }


def one_of(enum: type[Variant]) -> Any:
    """Return the type of a field that holds one of `variants_of(enum)`.

    These are those defined when the field's table is made; `model_rebuild` takes up later ones.
    """
    return Annotated[enum, ExternallyTagged(enum)]
