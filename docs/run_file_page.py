"""The page of the run file, docs/reference/run-file.md, generated from its models.

python -m docs.run_file_page > docs/reference/run-file.md       as `make generated` does
"""

import json
from collections.abc import Iterator

from pipeline.runfile.schema import plain_schema

MOST_VALUES = 8  # of a type cell
INTRODUCTION = """\
# The run file

One TOML file describes a whole run. `[config]` and `[model.LLM]` are Psyche's tables, with Psyche's
names and rules; the other tables are Lockstep's own. An unknown key, a value of the wrong type or
an impossible combination is an error. `params/run.toml` is the default run, with a comment for each
choice. A key or table that `dvc.yaml` tracks has to be in the file when a stage runs, also where it
has a default here; the stage names one that is missing.

This page is generated from the models in `pipeline/runfile` by `make generated`.
"""


def markdown() -> str:
    """Return the reference of a run file, a section per table and per enum, as Markdown."""
    return "\n".join([INTRODUCTION, *_Reference(plain_schema()).sections()]) + "\n"


class _Reference:
    """Renders the tidied schema of the whole run file, a section per table and per enum."""

    def __init__(self, schema: dict):
        self.schema = schema
        self._rendered: list[list] = []  # forms of an enum that stands in several tables come once

    def sections(self) -> Iterator[str]:
        for name, node in self.schema["properties"].items():
            yield from self._sections(name, node)

    def _sections(self, path: str, node: dict) -> Iterator[str]:
        """The sections of the tables and enums at a dotted path, and of those within."""
        if self._is_enum(node):
            yield from self._enum(path, node)
            return
        tables = self._tables(node)
        sections = [
            (table["description"], "", *rows, "") for table in tables if (rows := self._rows(table))
        ]
        if sections:
            yield from (f"## [{path}]", "")
        for section in sections:
            yield from section
        for table in tables:
            for name, inner in table["properties"].items():
                yield from self._sections(f"{path}.{name}", inner)

    def _enum(self, path: str, node: dict) -> Iterator[str]:
        """The section of an enum: its variants, and then the enums within these."""
        if any(all(form in done for form in node["oneOf"]) for done in self._rendered):
            return
        self._rendered.append(node["oneOf"])
        yield from (f"## {path}", "", node["description"], "")
        within: list[tuple[str, dict]] = []
        for form in node["oneOf"]:
            if "const" in form:
                key = path.rpartition(".")[2]
                yield from (f'### {key} = "{form["const"]}"', "", form["description"], "")
                continue
            ((tag, payload),) = form["properties"].items()
            tables = self._tables(payload)
            heading = f"[{path}.{tag}]" if tables else f"{path}.{tag}"
            yield from (f"### {heading}", "", form["description"], "")
            if not tables:
                yield from (f"Value: {self._type(payload)}. {payload['description']}", "")
            for table in tables:
                yield from (*self._rows(table), "")
                for name, inner in table["properties"].items():
                    of_variant = "" if self._is_enum(self._resolved(inner)) else f"{path}.{tag}."
                    within.append((of_variant + name, inner))
        for name, inner in within:
            yield from self._sections(name, inner)

    def _rows(self, table: dict) -> list[str]:
        """The Markdown table of a table's keys; empty if there are only tables in it."""
        rows = []
        for key, node in table["properties"].items():
            required = key in table.get("required", ())
            is_list = self._resolved(node).get("type") == "array"
            if required and self._tables(node) and not (is_list or self._is_enum(node)):
                continue  # it has a section
            absent = "required" if required else "absent"
            default = f"`{json.dumps(node['default'])}`" if "default" in node else absent
            meaning = node["description"].replace("|", r"\|")
            for value in node.get("enum", ()):
                meaning = meaning.replace(f" {value}: ", f"<br>`{value}`: ")
            rows.append(f"| `{key}` | {self._type(node)} | {default} | {meaning} |")
        return ["| key | type | default | meaning |", "|---|---|---|---|", *rows] if rows else []

    def _type(self, node: dict) -> str:
        """The type of a value and the values that are allowed, as text."""
        node = self._resolved(node)
        if self._is_enum(node):
            tags = [form.get("const") or form["required"][0] for form in node["oneOf"]]
            return f"one of {', '.join(tags)}"
        if "enum" in node:
            values = [f"`{json.dumps(value)}`" for value in node["enum"]]
            return " or ".join(values) if len(values) <= MOST_VALUES else "one of those below"
        forms = node.get("anyOf") or node.get("oneOf")
        if forms:
            return "; or ".join(self._type(form) for form in forms)
        if node["type"] == "array":
            kind, comma, bounds = self._type(node["items"]).partition(",")
            plural = "" if kind.endswith("`") else "s"  # a list of quoted values
            return f"list of {kind}{plural}{comma}{bounds}"
        names = {"boolean": "true or false", "object": "table"}
        return names.get(node["type"], node["type"]) + _range(node)

    def _tables(self, node: dict) -> list[dict]:
        """The tables that a key can hold: itself one, a list of them, or one of several."""
        node = self._resolved(node)
        if "properties" in node:
            return [node]
        forms = [node["items"]] if node.get("type") == "array" else node.get("anyOf", [])
        return [table for form in forms for table in self._tables(form)]

    def _is_enum(self, node: dict) -> bool:
        return all(
            "const" in form or len(form.get("required", ())) == 1
            for form in node.get("oneOf", [{}])
        )

    def _resolved(self, node: dict) -> dict:
        if "$ref" not in node:
            return node
        return node | self.schema["$defs"][node["$ref"].rpartition("/")[2]]


def _range(node: dict) -> str:
    """The bounds of a number as text, those of Rust's larger integers left out."""
    low, high = node.get("minimum"), node.get("maximum")
    high = None if high in (2**32 - 1, 2**63 - 1, 2**64 - 1) else high
    if low is not None and high is not None:
        return f", {low} to {high}"
    bounds = {
        "at least": low,
        "above": node.get("exclusiveMinimum"),
        "at most": high,
        "below": node.get("exclusiveMaximum"),
    }
    return "".join(f", {word} {bound}" for word, bound in bounds.items() if bound is not None)


if __name__ == "__main__":
    print(markdown(), end="")
