"""What others said, fit for a log: one line, and no credentials."""

import pytest

from pipeline.net import redact


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
    ],
)
def test_credentials_are_hidden_and_all_else_stays(text, shown):
    assert redact.hide(text, "hf_secret", None) == shown


def test_an_error_is_one_line_without_advice_and_without_steering_a_terminal():
    error = OSError("No such model.\nFor more information check: https://x\n\n\x1b[31mred\nlast")
    assert redact.message(error) == "No such model: ?[31mred"
    assert redact.message(TimeoutError()) == "TimeoutError"  # without words, by its kind


def test_the_cause_is_said_where_the_error_does_not_say_it():
    error = RuntimeError("Error while uploading 'a'.")
    error.__cause__ = ValueError("403 for hf_secret")
    assert redact.message(error, "hf_secret") == "Error while uploading 'a': 403 for ..."


def test_a_page_is_cut():
    said = redact.message(OSError("<html>" * 1000))
    assert len(said) < 500
    assert said.endswith("...")
