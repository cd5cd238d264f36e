"""The benchmark of text."""

from benchmarks import text


def test_text_is_timed_next_to_the_tokenizer_alone():
    found = text.measure(repeats=1, times=1, documents=200)
    assert found["documents"] == 200 and found["speed_of_encode_batch"] > 0
    assert 20 < found["peak_mb"] < 2000
