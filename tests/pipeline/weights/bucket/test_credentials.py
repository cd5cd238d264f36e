"""Credentials reach the server that they are for, and nothing else."""

import json
import logging
import sys

import pytest

from lockstep.errors import LockstepError
from pipeline.net import google
from tests.pipeline.conversion import check_silence, same_params
from tests.pipeline.weights.bucket.our_bucket import WHERE, push, put, read, refusal


def test_without_credentials_nobody_asks_and_an_emulator_sees_no_login(tmp_path, served, model):
    push(model)
    read(tmp_path)
    login = tmp_path / "gcloud" / "application_default_credentials.json"
    login.parent.mkdir()
    said = {"type": "authorized_user", "client_id": "c", "client_secret": "s"}
    said |= {"refresh_token": "r", "token_uri": f"{served.address}/token"}
    login.write_text(json.dumps(said))
    push(model)
    assert {said for _, _, said in served.seen} == {None}


@pytest.mark.parametrize("status", [401, 403, 500])
@pytest.mark.parametrize("what", ["GET", "POST /upload", "download"])
def test_the_token_reaches_the_server_and_nothing_else(
    tmp_path, served, model, account, capfd, caplog, status, what
):
    caplog.set_level(logging.DEBUG)
    asked = f"Bearer {served.token}"
    if what == "download":
        push(model)
    served.refuse = (what, status)
    if what == "download":
        said = refusal(tmp_path)
    else:
        with pytest.raises(LockstepError) as caught:
            push(model)
        said = str(caught.value)
    assert asked in {said for _, _, said in served.seen}
    assert said.startswith(WHERE)
    assert (f"answered {status}" if what == "download" else "we do not like") in said or (
        status == 500 and what != "download"
    )
    check_silence(served.token, tmp_path, said, capfd, caplog)
    served.refuse = None
    push(model)
    read(tmp_path)
    check_silence(served.token, tmp_path, "", capfd, caplog)


def test_credentials_that_are_none_are_one_line(tmp_path, served, model, monkeypatch):
    monkeypatch.setenv(google.KEY, str(tmp_path / "none.json"))
    said = refusal(tmp_path)
    assert said.startswith(f"{WHERE}: {google.KEY}: ")
    assert said.endswith("expected a file of credentials")


def test_without_google_auth_a_public_bucket_is_read_and_a_push_is_one_line(
    tmp_path, served, model, monkeypatch
):
    monkeypatch.setitem(sys.modules, "google.auth.exceptions", None)
    put(served, model)
    assert same_params(read(tmp_path), model)
    with pytest.raises(LockstepError, match=r"is not installed.*\[gcs\]"):
        push(model)
