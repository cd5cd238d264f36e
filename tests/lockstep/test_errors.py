"""What others said, fit for a terminal and a log: one line, and no credentials."""

import pytest

from lockstep import errors
from lockstep.errors import LockstepError


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    monkeypatch.setattr(errors, "_secrets", set())
    errors.keep_secret("hf_secret", 'pass"wörd/1', "of", "", None, "dXM6cA==")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("401: hf_secret is no token", "401: ... is no token"),
        ("sent Authorization: Bearer another.one to us", "sent Authorization: Bearer ... to us"),
        ("sent authorization: basic dXM6cGFzcw==", "sent authorization: basic ..."),
        (
            "GET https://us:pass@host/a?X-Amz-Signature=1&b=2 failed",
            "GET https://host/a?... failed",
        ),
        ("GET https://host/a#access_token=1", "GET https://host/a#..."),
        ("no such model as owner/name.", "no such model as owner/name."),
        ("HF_Secret and hf_SECRET", "... and ..."),
        ("Credential=AK/1/s3, signature=ab12;x", "Credential=..., signature=...;x"),
        ("pass%22W%c3%b6rd%2f1 and dXM6cA==, DXM6CA", "... and ..., ..."),
        ('pass"wörd/1, pass%22w%C3%B6rd%2F1 or "pass\\"w\\u00f6rd/1"', '..., ... or "..."'),
    ],
)
def test_credentials_are_hidden_and_all_else_stays(text, shown):
    assert errors.hide(text) == shown
    assert str(LockstepError(text)) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nerror: forged", "a\\nerror: forged"),
        ("\x1b[2Jred\x07\x9b31m\x00", "\\x1b[2Jred\\x07\\x9b31m\\x00"),
        ("\u202egnp.ds \ufeff\u2028", "\\u202egnp.ds \\ufeff\\u2028"),
        ("\udcff é 字", "\\udcff é 字"),
    ],
)
def test_an_error_is_one_line_that_steers_no_terminal_however_often_it_is_quoted(text, shown):
    once = LockstepError(text)
    assert str(once) == shown
    assert str(LockstepError(f"{once}")) == shown


def test_a_short_password_is_in_a_hash_by_chance():
    errors.keep_secret("c0ff")
    assert errors.reveals("hf_secret.ds")
    assert not errors.reveals("c0ffee")


def test_a_text_is_cut_only_after_its_secrets_are_hidden():
    assert errors.brief("x" * 55 + "hf_secret") == "x" * 55 + "..."
    assert errors.brief("x" * 70) == "x" * 57 + "..."


def test_an_error_that_echoes_a_value_keeps_its_beginning_and_what_was_expected():
    line = str(LockstepError(f"a.json: found {'x' * 10**6}, expected y"))
    assert len(line) <= errors.LONGEST
    assert line.startswith("a.json: found xx") and line.endswith("xx... expected y")


@pytest.mark.parametrize(
    ("secret", "parts"),
    [
        ("hf_secret", "hf_ sec cre ret"),
        ("https://us:word@host", "us: wor ord"),
        ("bearer token", "tok oke ken"),
        ("https://host/?a=token", "?a tok oke ken"),
    ],
)
def test_no_part_of_a_secret_is_shown_wherever_a_long_text_is_cut(secret, parts):
    for before in range(errors.BOUND - len(secret) - 1, errors.BOUND + 1):
        first = "x " * (before // 2) + " " * (before % 2)
        last = " " + "z " * (before // 2) + "z" * (before % 2)
        whole = f"{first}{secret}{'-' * 9999}{secret}{last}"
        error = LockstepError(whole)
        for line in (errors.brief(whole, 2 * errors.BOUND), str(error)):
            assert not [part for part in parts.split() if part in line], before
