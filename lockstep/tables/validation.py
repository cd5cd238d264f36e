"""What pydantic rejects, as one line: file, dotted key, value found, value expected."""

import json
from collections.abc import Collection
from datetime import date, datetime, time
from difflib import get_close_matches
from itertools import islice
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, RootModel, ValidationError
from pydantic_core import from_json

from lockstep.errors import LockstepError, brief
from lockstep.files import loads
from lockstep.tables.variant import Variant, variants_of

EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "callable_type": "a function",
    "string_type": "a string",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "invalid-json-value": "a string, number, boolean, list or table",
}
MOST_PARTS = 100  # of a value that is shown: more than `brief` leaves of it
AnyModel = TypeVar("AnyModel", bound=BaseModel)


def validate(
    model: type[AnyModel], document: Any, name: str, kind: type[LockstepError] = LockstepError
) -> AnyModel:
    """Validate a parsed document, which errors call `name`; they are of this kind."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise kind(f"{name}: {_first_error(error, document, model)}") from error


def validate_json(model: type[AnyModel], text: str | bytes, name: str) -> AnyModel:
    """Validate JSON text; arguments and errors are those of `validate`."""
    try:
        instance = model.model_validate_json(text)
        loads(text)  # of two equal keys pydantic takes the last
        return instance
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            raise LockstepError(f"{name}: {first['ctx']['error']}, expected JSON") from error
        message = _first_error(error, from_json(text), model)
        raise LockstepError(f"{name}: {message}") from error
    except ValueError as error:
        raise LockstepError(f"{name}: {error}, expected JSON") from error


def dotted(path: tuple[str | int, ...]) -> str:
    """Return the path of a validated value as a user writes it: `faults.schedule[0].peer`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{_key(part)}" for part in path)
    return "".join(parts).removeprefix(".")


def show(value: Any) -> str:
    """Return a TOML or JSON value as text for an error, shortened."""
    if isinstance(value, dict):
        return f"a table with {brief(', '.join(map(_key, value)))}" if value else "an empty table"
    if isinstance(value, datetime | date | time):
        return f"the date {value}"
    # its beginning alone: YAML of a kilobyte can stand for terabytes of lists, or endless ones
    encoder = json.JSONEncoder(default=_shown_other, ensure_ascii=False, check_circular=False)
    parts = encoder.iterencode(value)
    return brief("".join(islice(parts, MOST_PARTS)))


def _shown_other(value: Any) -> str:
    """Return a value that JSON lacks as text for an error: a date of TOML as written."""
    return str(value) if isinstance(value, datetime | date | time) else repr(value)


def _first_error(error: ValidationError, document: Any, root: type[BaseModel]) -> str:
    """Return the first rejected value as text, a misspelt key if any, and how many there are.

    A key that is misspelt is missing too, under its right name: another error, and of less use.
    """
    errors = [err for err in error.errors(include_url=False) if not _is_short_by_errors(err, error)]
    first = next((err for err in errors if _is_misspelt(err, document, root)), errors[0])
    context = {"key": (), "tag": ""} | (first.get("ctx") or {})  # the key comes from `wrong`
    path = first["loc"] + context["key"]
    path, value = _locate(path, document, missing=first["type"] == "missing")
    key = dotted(path)
    actual = f"{key} is {show(value)}" if path else f"found {show(value)}"
    match first["type"]:
        case "missing":
            field = _fields(_models(path[:-1], document, root)).get(path[-1])
            meaning = " ".join((field and field.description or "").split()).rstrip(".")
            text = f"{key}: missing, expected it" + (f" ({meaning})" if meaning else "")
        case "extra_forbidden":
            known = choices(_keys(path, document, root), path[-1])
            text = f"{key}: unknown key, expected one of {known}"
        case "union_tag_invalid" | "union_tag_not_found":
            tags = [model.tag() for model in _models(path, document, root)]
            text = f"{actual}, expected exactly one of {choices(tags, context['tag'])}"
        case _:
            text = f"{actual}, expected {_expected(first)}"
    return text + (f" (and {len(errors) - 1} more)" if len(errors) > 1 else "")


def _is_short_by_errors(err: Any, error: ValidationError) -> bool:
    """Whether a rejected list is too short only because some items are wrong."""
    size = len(err["loc"])
    return err["type"] == "too_short" and any(
        other["loc"][:size] == err["loc"] and len(other["loc"]) > size for other in error.errors()
    )


def _is_misspelt(error: Any, document: Any, root: type[BaseModel]) -> bool:
    """Whether a rejected key is unknown, while one of nearly the same name is missing."""
    if error["type"] != "extra_forbidden":
        return False
    path, _ = _locate(error["loc"], document, missing=False)
    _, table = _locate(path[:-1], document, missing=False)
    return bool(_near(path[-1], [key for key in _keys(path, document, root) if key not in table]))


def _keys(path: tuple, document: Any, root: type[BaseModel]) -> list[str]:
    """Return the valid keys of the table in which a key stands."""
    return list(_fields(_models(path[:-1], document, root)))


def _key(key: object) -> str:
    text = str(key)  # in Python, keys may be of any kind
    return brief(text if text.isprintable() else json.dumps(text))


def _expected(error: dict) -> str:
    match error["type"]:
        case kind if kind in EXPECTED:
            return EXPECTED[kind]
        case "too_short":
            count = error["ctx"]["min_length"]
            return f"at least {count} item{'' if count == 1 else 's'}"
        case "too_long":
            return f"at most {error['ctx']['max_length']} items"
        case "string_too_long":
            return f"at most {error['ctx']['max_length']} characters"
        case "string_pattern_mismatch":
            return f"a string that matches {error['ctx']['pattern']}"
    text = error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return f"a number {text}" if text.startswith(("greater", "less")) else text


def choices(names: Collection[str], word: object) -> str:
    """Return the valid names in place of a word, and the one that it may have been meant to be."""
    return ", ".join(names) + meant(names, word)


def meant(names: Collection[str], word: object) -> str:
    """Return a question for the valid name that a word may have been meant to be; "" for none."""
    matches = _near(word, names)
    return f"; did you mean {matches[0]}?" if matches else ""


def _near(word: object, names: Collection[str]) -> list[str]:
    close = get_close_matches(str(word), names, n=1)
    return close or get_close_matches(str(word).lower().replace("_", "-"), names, n=1)


def _locate(path: tuple, document: Any, *, missing: bool) -> tuple[tuple, Any]:
    """Return the part of a rejected value's path that is in the document, and the value there.

    The rest are names of the models' own: of a union's branch, or of the field that a bare value
    stands for, such as `path` in `Local = "folder"`.
    """
    located: tuple[str | int, ...] = ()
    value = document
    for part in path[:-1] if missing else path:
        in_table = isinstance(value, dict) and part in value
        if in_table or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            located, value = (*located, part), value[part]
    return (*located, path[-1]) if missing else located, value


def _models(path: tuple, document: Any, root: type[BaseModel]) -> list[type[BaseModel]]:
    """Return the model that validates the table at `path`, or none; of an enum all variants'."""
    models, value, is_enum = _models_in(root), document, False
    for part in path:
        value = value[part]
        if isinstance(part, int):
            continue  # `models` are already those of the list's items, as for a dictionary's values
        variants = [model for model in models if is_enum and model.tag() == part]
        if variants:
            models = variants
        elif part in _fields(models):
            models = _models_in(_fields(models)[part].annotation)
        is_enum = not variants and any(issubclass(model, Variant) for model in models)
        if not is_enum and isinstance(value, dict):  # [config] has two spellings: the likelier
            models = sorted(models, key=lambda model: -len(model.model_fields.keys() & value))
    return models


def _fields(models: list[type[BaseModel]]) -> dict[str, Any]:
    return models[0].model_fields if models else {}


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, RootModel):
        annotation = annotation.model_fields["root"].annotation
    if isinstance(annotation, type) and issubclass(annotation, Variant):
        return variants_of(annotation) or [annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]
