"""The commands `lockstep volunteer ...`. Nothing heavy is imported before one of them runs."""

import os
from pathlib import Path
from typing import Annotated

import typer

from pipeline.command_options import (
    DEFAULT_ROOT,
    DEFAULT_RUN,
    IN_PROGRESS,
    MOST_GB,
    Commands,
    MaxGb,
    Root,
    RunFile,
)
from pipeline.stage.untrusted_files import expand

app = typer.Typer()
volunteer = typer.Typer(
    cls=Commands, help="Peers of strangers, over a store.", no_args_is_help=True
)
app.add_typer(volunteer, name="volunteer", rich_help_panel=IN_PROGRESS)

Where = Annotated[
    str, typer.Argument(metavar="STORE", help="The run's folder: file:///, s3:// or https://.")
]
KeyFile = Annotated[
    Path, typer.Option("--key", help="Your key's file.", callback=lambda f: expand(str(f), "--key"))
]
FromState = Annotated[
    bool, typer.Option("--from-state", help="Merge only the rounds since the newest state.")
]
# Outside of any checkout, whose files are committed and copied.
USERS = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
DEFAULT_KEY = Path(USERS, "lockstep", "volunteer.pem")
FIRST_HOURS = 24  # that an admission signs at once


@volunteer.command()
def key(file: KeyFile = DEFAULT_KEY) -> None:
    """Print your public key, which goes to who opened a run; the first time, make it."""
    from parts.volunteers import keys

    print(keys.public_text(keys.read(file) if file.exists() else keys.create(file)))


@volunteer.command("open")
def open_(
    store: Where,
    run: RunFile = DEFAULT_RUN,
    root: Root = DEFAULT_ROOT,
    file: KeyFile = DEFAULT_KEY,
    seal: Annotated[Path | None, typer.Option(help="By which slots of yours lie.")] = None,
) -> None:
    """Open a run in an empty folder of a store, after `lockstep download` and `convert`."""
    from parts.volunteers import joining

    joining.open_run(store, run, root, file, seal)


@volunteer.command()
def admit(
    store: Where,
    peer: Annotated[int, typer.Argument(min=0, help="The slot.")],
    public: Annotated[
        str | None, typer.Argument(metavar="KEY", help="Who has it from now on; without: nobody.")
    ] = None,
    because: Annotated[str | None, typer.Option(help="Why one is replaced or ended.")] = None,
    file: KeyFile = DEFAULT_KEY,
) -> None:
    """Give a slot of your run to who sent you its KEY, or end it."""
    from parts.volunteers import keys
    from parts.volunteers.lab import opening, signing
    from parts.volunteers.store.schemes import open_store

    run_store, lab = open_store(store), keys.read(file)
    print(f"admit: {opening.admit(run_store, peer, public, lab, because)}")
    if public is not None and store.startswith("s3://"):
        print(f"admit: signed {signing.sign_run(run_store, lab, FIRST_HOURS, [peer])}")


@volunteer.command()
def sign(
    store: Where,
    hours: Annotated[
        float, typer.Option(min=0.01, max=168, help="For how long: at most a week.")
    ] = 24,
    file: KeyFile = DEFAULT_KEY,
) -> None:
    """Sign the addresses by which peers without credentials use an s3:// store; do so daily."""
    from parts.volunteers import keys
    from parts.volunteers.lab import signing
    from parts.volunteers.store.schemes import open_store

    print(f"sign: {signing.sign_run(open_store(store), keys.read(file), hours)}")


@volunteer.command()
def gc(store: Where, file: KeyFile = DEFAULT_KEY) -> None:
    """Remove payloads and states of your run's old windows; what was signed stays."""
    from parts.volunteers import keys
    from parts.volunteers.lab import collecting
    from parts.volunteers.store.schemes import open_store

    print(f"gc: {collecting.collect(open_store(store), keys.read(file))}")


@volunteer.command()
def unseal(
    store: Where,
    seal: Annotated[Path, typer.Argument(metavar="SEAL", help="File of `open --seal`.")],
    file: KeyFile = DEFAULT_KEY,
) -> None:
    """Say at your run's end in which slots you planted lies."""
    from parts.volunteers import keys, planted
    from parts.volunteers.store.schemes import open_store

    print(f"unseal: {planted.unseal(open_store(store), keys.read(file), seal)}")


@volunteer.command()
def signatures(root: Root = DEFAULT_ROOT) -> None:
    """Check offline who signed the links and messages of the run in data/trained."""
    from parts.volunteers.chain import signed_rounds

    result = signed_rounds.check(root / "data" / "trained")
    print(
        f"signatures: {result.rounds} links and {result.signed} of {result.messages} messages are "
        f"signed by peers that {result.lab} admitted"
    )


@volunteer.command()
def join(
    store: Where,
    root: Root = DEFAULT_ROOT,
    file: KeyFile = DEFAULT_KEY,
    max_gb: MaxGb = MOST_GB,
    from_state: FromState = False,
) -> None:
    """Train in a run: fetch its data, and take part until its last round."""
    from parts.volunteers import joining

    joining.join(store, root, file, max_gb, from_state=from_state)
