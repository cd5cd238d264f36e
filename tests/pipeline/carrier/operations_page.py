"""The operations as a page's section: `python -m tests.pipeline.carrier.operations_page`."""

from collections.abc import Iterator

from pipeline.carrier.operation_tables import OPERATIONS
from pipeline.runfile.table import Table
from pipeline.stage.keys import PROJECT

PAGE = PROJECT / "docs/reference/sidecar.md"
BEGIN, END = "<!-- generated: operations -->\n\n", "\n<!-- end -->\n"


def lines() -> Iterator[str]:
    """Yield the section's lines: the operations, then the values of requests and of answers."""
    yield from ("| operation | what it does | arrays | gives |", "|---|---|---|---|")
    for name, one in OPERATIONS.items():
        values = ", ".join(f"`{value}`" for value in one.gives.model_fields)
        gives = "; ".join(filter(None, (values, ", ".join(one.answered))))
        yield f"| `{name}` | {one.takes.__doc__.rstrip('.')} | {', '.join(one.arrays)} | {gives} |"
    for title, which in (("takes", "takes"), ("gives", "gives")):
        yield from ("", f"| operation | it {title} | type | |", "|---|---|---|---|")
        for name, one in OPERATIONS.items():
            yield from _rows(name, getattr(one, which))


def _rows(operation: str, table: type[Table]) -> Iterator[str]:
    for name, node in table.model_json_schema().get("properties", {}).items():
        yield f"| `{operation}` | `{name}` | {_type(node)} | {node['description'].rstrip('.')} |"


def _type(node: dict) -> str:
    if "anyOf" in node:
        return " or ".join(_type(one) for one in node["anyOf"])
    if "enum" in node:
        return ", ".join(f"`{value}`" for value in node["enum"])
    if node["type"] == "array":
        return f"array: {_type(node['items'])}"
    bounds = [
        f"{word} {node[key] if node[key] < 2**20 else f'2^{node[key].bit_length() - 1}'}{unit}"
        for key, word, unit in (
            ("minimum", "from", ""),
            ("exclusiveMaximum", "below", ""),
            ("maxProperties", "at most", " keys"),
        )
        if key in node
    ]
    if "pattern" in node:
        bounds.append(f"`{node['pattern']}`")
    return ", ".join([node["type"], *bounds])


def page() -> str:
    """The page with its section as it should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return "".join((before, BEGIN, "\n".join(lines()), "\n", END, rest.partition(END)[2]))


if __name__ == "__main__":
    PAGE.write_text(page())
