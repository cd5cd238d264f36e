"""What a request has of secrets is for one server, and is shown to nobody."""

import dataclasses
import json
import re

import pytest

from tests.pipeline.net import token_servers as sources
from tests.pipeline.net.faults.matrix import RIGHT
from tests.pipeline.net.faults.outcome import each_kind, outcome, spoil
from tests.pipeline.net.token_servers import HUB_TOKEN, PASSWORD, TRUTH, Source
from tests.servers import misbehaviour as m
from tests.servers.files import Files
from tests.servers.misbehaviour import Misbehaviour, Spoil

ECHO = "\x1b[2J \u202e %s"


def echoed(source: Source, where: str) -> Spoil:
    """Repeats what it was sent, with codes that steer a terminal, in a place of the answer."""
    word = ECHO % (HUB_TOKEN if isinstance(source.server, sources.hub_server.Hub) else PASSWORD)

    def spoil(answer):
        headers = {where: word.encode().decode("latin-1")}
        match where:
            case "reason":
                return dataclasses.replace(answer, status=403, reason=headers[where])
            case "path" | "oid" | "sha":
                text = bytes(answer.body).decode()
                body = re.sub(
                    f'"{where}": "[^"]*"', lambda _: f'"{where}": {json.dumps(word)}', text
                )
                size = {"Content-Length": str(len(body))}
                return dataclasses.replace(
                    answer, body=body.encode(), headers=answer.headers | size
                )
            case "Content-Range":
                return dataclasses.replace(answer, status=206, headers=answer.headers | headers)
        return dataclasses.replace(answer, headers=answer.headers | headers)

    return spoil


@pytest.mark.parametrize(
    ("source", "where", "of"),
    [
        ("hub", "reason", "bytes"),
        ("hub", "path", "listing"),
        ("hub", "oid", "listing"),
        ("hub", "sha", "listing"),
        ("plain", "reason", "bytes"),
        ("plain", "ETag", "bytes"),
        ("plain", "ETag", "listing"),
        ("plain", "Content-Range", "bytes"),
        ("plain", "Content-Encoding", "bytes"),
    ],
    indirect=["source"],
)
def test_what_a_server_repeats_of_a_request_is_not_shown(source, root, where, of):
    fault = Misbehaviour(echoed(source, where), where=source.places[of])
    source.server.faults.append(fault)
    message = outcome(source, root)  # one printable line, without any of SECRETS
    assert message and fault.hits


@each_kind
def test_credentials_are_for_one_server(source, request, root):
    content = TRUTH["1.ds"]
    with Files({"1.ds": content}).serving() as other:
        spoil(source, m.redirected(other.url("1.ds?Signature=hf_sentinel")), times=None)
        # whose files they are is known by checksums, where there are any
        if request.node.callspec.params["source"] == "plain":
            other.tags["1.ds"] = source.server.tags["d/1.ds"]
        assert outcome(source, root) == RIGHT
        assert [(authorization, method) for method, _, authorization in other.seen] == [
            (None, "GET")
        ]


@pytest.mark.parametrize("source", ["hub"], indirect=True)
def test_the_hubs_token_does_not_reach_the_server_of_large_files(source, root):
    assert outcome(source, root) == RIGHT
    assert {authorization for _, _, authorization in source.server.seen} == {
        f"Bearer {sources.HUB_TOKEN}"
    }
    assert {authorization for _, _, authorization in source.server.elsewhere} == {None}
