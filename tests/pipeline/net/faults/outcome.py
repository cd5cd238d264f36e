"""What the stage download says of a server that does something wrong."""

from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from lockstep.files import read_json
from tests import tiny
from tests.pipeline.net import token_servers as sources
from tests.pipeline.net.faults.matrix import RIGHT
from tests.pipeline.net.token_servers import KINDS, SECRETS, TRUTH, Source
from tests.servers.misbehaviour import Misbehaviour, Spoil

each_kind = pytest.mark.parametrize("source", KINDS, indirect=True)


def spoil(source: Source, wrong: Spoil, **how: int | None) -> Misbehaviour:
    """What a server does wrong with the bytes of 1.ds; once, unless something else is said."""
    fault = Misbehaviour(wrong, where=source.places["bytes"], **({"times": 1} | how))
    source.server.faults.append(fault)
    return fault


def outcome(source: Source, root: Path, pin: str = "") -> str:
    """Runs the stage; the error's words, or RIGHT. Whatever comes, nothing wrong lies anywhere."""
    outside = elsewhere(root)
    try:
        folder = sources.fetch(source.location, root, pin)
    except LockstepError as error:
        message = str(error)
        assert message and message.isprintable(), "one line"
        assert not any(secret in message for secret in SECRETS), message
        assert "1.ds" in message or "ours" in message or source.server.address[7:] in message, (
            message
        )
        assert not (root / "data" / "shards").exists()
        folder = None
    else:
        message = RIGHT
        sources.check(folder, TRUTH)
    assert elsewhere(root) == outside
    return message


def elsewhere(root: Path) -> dict[str, bytes]:
    """What lies around a project's data."""
    inside = f"{root.relative_to(root.parent)}/data/"
    files = tiny.contents(root.parent).items()
    return {name: content for name, content in files if not name.startswith(inside)}


def pin_of(source: Source, root: Path, limit: dict | None = None) -> str:
    folder = sources.fetch(source.location, root, limit=limit)
    return read_json(folder / "shards.json")["source"]["sha256"]
