"""The settings of several runs side by side, as far as they are known."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from lockstep.errors import LockstepError
from lockstep.tables.explain import validate_json
from pipeline import runfile

UNKNOWN = "unknown"


class KnownSettings(NamedTuple):
    """What is known of a run file.

    Attributes:
      values: The JSON of each value, by dotted name; one that is absent or null has none.
      tables: Dotted names of the tables and values that are known.
    """

    values: dict[str, str]
    tables: Collection[str]

    @classmethod
    def of(cls, document: Mapping[str, Any], tables: Mapping[str, Any]) -> "KnownSettings":
        """Return the settings of a run.

        Args:
          document: Whole tables, with defaults.
          tables: Further ones by dotted name, as they were written.
        """
        known = {
            name: _with_defaults(name, value)
            for name, value in tables.items()
            if name.partition(".")[0] not in document
        }
        known |= document
        values = dict(pair for name, value in known.items() for pair in flat(value, name))
        return cls(values, known.keys())

    def value(self, name: str) -> str:
        """Return the JSON of a value; nothing if it is not set, `UNKNOWN` if nobody knows."""
        known = any(name == table or name.startswith(f"{table}.") for table in self.tables)
        return self.values.get(name, "" if known else UNKNOWN)


def differences(settings: Sequence[KnownSettings]) -> list[tuple[str, list[str]]]:
    """Return each name whose known values are not all the same; of one run, all names."""
    names = dict.fromkeys(name for one in settings for name in one.values)
    rows = [(name, [one.value(name) for one in settings]) for name in sorted(names)]
    return [
        (name, values)
        for name, values in rows
        if len(values) == 1 or len({*values} - {UNKNOWN}) > 1
    ]


def flat(value: object, name: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the JSON of each value in a table that is not null."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}" if name else key)
    elif value is not None:
        yield name, json.dumps(value, ensure_ascii=False)


def _with_defaults(name: str, value: Any) -> Any:
    """A whole table with its defaults, or the value as it is."""
    field = runfile.Run.model_fields.get(name)
    if field is not None and isinstance(field.annotation, type):  # [config] has two spellings
        with suppress(LockstepError):  # of another release
            table = validate_json(field.annotation, json.dumps(value).encode(), name)
            return table.model_dump(mode="json")
    return value
