"""The command `lockstep bom`: an export's ML-BOM."""

import json
from pathlib import Path
from typing import Annotated

import typer

from lockstep.errors import RequestError
from lockstep.files import write_named
from pipeline import extras
from pipeline.command_options import DEFAULT_ROOT, DEFAULT_RUN, RESULTS, Root, RunFile

app = typer.Typer()


@app.command("bom", rich_help_panel=RESULTS)
def write_bom(
    file: Annotated[Path, typer.Argument(help="Where it is written, such as bom.cdx.json.")],
    run: RunFile = DEFAULT_RUN,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Write the accepted export's ML-BOM: what it consists of, and what it was made from."""
    from pipeline.stage import lock

    try:
        from parts.bom import bom
    except ModuleNotFoundError as error:
        raise RequestError(
            f"bom: {error.name} is not installed, expected it: {extras.install('bom')}"
        ) from error
    with lock.hold(root / "data" / ".export.lock"):  # the stage cannot replace it meanwhile
        document = bom.document(run, root)
    write_named(file, json.dumps(document, indent=2, allow_nan=False) + "\n")
    print(f"bom: {file} has CycloneDX {document['specVersion']} of {document['serialNumber']}")
