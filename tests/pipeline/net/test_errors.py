"""What libraries say, fit for an error."""

from lockstep import errors
from pipeline.net import errors as net_errors


def test_an_error_is_one_line_without_advice_and_without_steering_a_terminal():
    error = OSError("No such model.\nFor more information check: https://x\n\n\x1b[31mred\nlast")
    assert net_errors.message(error) == "No such model: \\x1b[31mred"
    assert net_errors.message(TimeoutError()) == "TimeoutError"  # without words, by its kind


def test_the_cause_is_said_where_the_error_does_not_say_it(monkeypatch):
    monkeypatch.setattr(errors, "_secrets", {"hf_secret"})
    error = RuntimeError("Error while uploading 'a'.")
    error.__cause__ = ValueError("403 for hf_secret")
    assert net_errors.message(error) == "Error while uploading 'a': 403 for ..."


def test_a_page_is_cut():
    message = net_errors.message(OSError("<html>" * 1000))
    assert len(message) < 500
    assert message.endswith("...")
