"""Sphinx's configuration: `make docs` builds docs/ into docs/_build/html."""

import builtins

import jax
import optax
from docutils.nodes import Text
from sphinx.addnodes import desc_annotation, pending_xref
from sphinx.domains.python import PyObject
from sphinx.util.typing import stringify_annotation

import lockstep

project = "Lockstep"
author = "The Lockstep authors"
project_copyright = f"2026, {author}"
release = version = lockstep.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
html_theme = "furo"
html_title = f"Lockstep {release}"
html_static_path = ["_static"]
html_css_files = ["code.css"]

# Pages are Markdown, as GitHub shows them: a link to a heading is checked like any other.
myst_heading_anchors = 4

# Files outside docs/ that are pages of the site. Other pages link to the files, which GitHub shows.
SHOWN = {
    "benchmarks/RESULTS.md": "/reference/measurements.md",
    "CHANGELOG.md": "/project/changelog.md",
    "CONTRIBUTING.md": "/project/contributing.md",
}

# API pages come from docstrings: Google style, `code` in single backticks.
default_role = "code"
autosummary_generate = True
autodoc_member_order = "bysource"
napoleon_use_ivar = True
napoleon_attr_annotations = False  # the signature has the types
napoleon_custom_sections = [("References", "notes_style")]

# Unions that signatures call by their names.
UNIONS = {
    "optax.ScalarOrSchedule": optax.ScalarOrSchedule,
    "optax.OptState": optax.OptState,
    "ArrayLike": jax.typing.ArrayLike,
}

# References inside the documented packages are checked, those to other libraries and rooms are not.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!(models|lockstep\.(optim|protocol|transcript|wire))\.).*"),
]


def lead_to_pages(app, docname: str, source: list[str]) -> None:
    """Make links to files that the site shows as pages lead to those."""
    root = "../" * (docname.count("/") + 1)
    for file, page in SHOWN.items():
        source[0] = source[0].replace(f"]({root}{file}", f"]({page}")


def list_tables(app, what, name, obj, options, lines: list[str]) -> None:
    """Turn an indented table of bars into a table; a row whose cells are indented continues."""
    found: list[str] = []
    for line in lines:
        bars = line.strip()
        if not bars.startswith("| ") or not bars.endswith("|"):
            found += [] if bars.startswith("|---") else [line]
            continue
        cells = [cell[1:] for cell in bars[1:-1].split("|")]
        if not found or not found[-1].startswith("     - "):
            found += [".. list-table::", "   :header-rows: 1", ""]
        elif all(not cell.strip() or cell.startswith("  ") for cell in cells):
            for number, cell in enumerate(cells):
                found[number - len(cells)] += f" {cell.strip()}"
            continue
        first, *others = (cell.strip() for cell in cells)
        found += [f"   * - {first}", *(f"     - {cell}" for cell in others)]
    lines[:] = found


def mark_code_blocks(app, what, name, obj, options, lines: list[str]) -> None:
    """Turn every indented block after a blank line, an equation or a table, into a code block."""
    marked = []
    outside, inside = 0, None  # indents of the text before a block, and of the block
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            marked.append(line)
            continue
        if inside is not None and indent < inside:
            inside = None
        if inside is None and indent > outside and marked and not marked[-1].strip():
            marked += ["::", ""]
            inside = indent
        if inside is None:
            outside = indent
        marked.append(line)
    lines[:] = marked


def list_references(app, what, name, obj, options, lines: list[str]) -> None:
    """Make the lines under "References:" a list, one item for each that is not indented further."""
    titles = [line.strip() for line in lines]
    if "References:" not in titles:
        return
    start = titles.index("References:") + 1
    indent = len(lines[start]) - len(lines[start].lstrip())
    for number in range(start, len(lines)):
        text = lines[number][indent:]
        item = text and not text.startswith(" ")
        lines[number] = " " * indent + ("* " if item else "  ") + text.lstrip() if text else ""


def skip_tuple_fields(app, what, name, obj, skip, options) -> bool | None:
    """Leave out fields of named tuples, which the signature shows and the docstring explains."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def name_types(app, what, name, obj, options, signature, returns) -> tuple[str, str] | None:
    """Write types in a signature as the source does."""
    return signature and (_as_in_the_source(signature), returns and _as_in_the_source(returns))


def name_types_of_fields(app, doctree) -> None:
    """Write the types of fields as the source does."""
    for annotation in list(doctree.findall(desc_annotation)):
        if "Annotated[" in annotation.astext():
            annotation.children = [Text(_as_in_the_source(annotation.astext()))]


def _as_in_the_source(types: str) -> str:
    """Return types with unions by their names, and without the rules of pydantic."""
    for alias, type_ in UNIONS.items():
        types = types.replace(stringify_annotation(type_, "smart"), alias)
    return _without_rules(types)


def _without_rules(types: str) -> str:
    """Return types with `X` in place of each `Annotated[X, rules]`."""
    before, annotated, rest = types.partition("Annotated[")
    if not annotated:
        return types
    depth, end_of_type, end = 0, None, 0
    for end, character in enumerate(rest):
        depth += (character in "[(") - (character in "])")
        if character == "," and not depth and end_of_type is None:
            end_of_type = end
        if depth < 0:
            break
    return before + _without_rules(rest[:end_of_type]) + _without_rules(rest[end + 1 :])


def unlink_builtins(app, doctree) -> None:
    """Keep the type `bytes` in a signature from linking to a field of that name."""
    for reference in list(doctree.findall(pending_xref)):
        if reference["refdomain"] == "py" and hasattr(builtins, reference["reftarget"]):
            reference.replace_self(reference.children)


def setup(app) -> None:
    """Connect the functions above; those on docstrings run before napoleon reads the sections."""
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"  # as docstrings call them
    app.connect("source-read", lead_to_pages)
    app.connect("autodoc-process-docstring", list_tables, priority=300)
    app.connect("autodoc-process-docstring", mark_code_blocks, priority=400)
    app.connect("autodoc-process-docstring", list_references, priority=400)
    app.connect("autodoc-skip-member", skip_tuple_fields)
    app.connect("autodoc-process-signature", name_types)
    app.connect("doctree-read", unlink_builtins)
    app.connect("doctree-read", name_types_of_fields)
