"""Who has a file of keys speaks for one peer, and nobody else reads it."""

import json

import pytest

from lockstep.errors import LockstepError
from parts.carrier.channel import PeerSecret, Secrets
from tests.errors import refused


def test_each_peer_has_a_file_of_its_own_with_no_other_ones_key(tmp_path):
    secrets = Secrets(tmp_path, 3, ranks=2)
    assert sorted(secrets.places.values()) == [(p, r) for p in range(3) for r in range(2)]
    files = [*tmp_path.iterdir()]
    assert len(files) == 4 and all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    keys = [key for peer in range(3) for key in PeerSecret.read(secrets.path(peer)).private]
    assert len({*keys, secrets.private}) == 7


def test_a_trainer_started_again_accepts_the_keys_it_gave(tmp_path):
    before = Secrets(tmp_path, 2)
    again = Secrets(tmp_path, 2)
    assert (again.private, again.places) == (before.private, before.places)


def test_a_file_of_keys_that_others_may_read_is_refused(tmp_path):
    path = Secrets(tmp_path, 1).path(0)
    path.chmod(0o640)
    with refused("peer-0.json", 600):
        PeerSecret.read(path)


@pytest.mark.parametrize(
    ("damage", "flaw"),
    [
        (lambda text, secret: text.replace("{", "", 1), "no JSON"),
        (lambda text, secret: text.replace('"server":"', '"server":"ü', 1), "server"),
        # the key itself may begin with a bracket
        (
            lambda text, secret: text.replace(json.dumps(secret), json.dumps(f"{secret}1")),
            "private.0",
        ),
    ],
)
def test_a_damaged_key_is_refused_in_one_line(tmp_path, damage, flaw):
    path = Secrets(tmp_path, 1).path(0)
    text = path.read_text()
    path.write_text(damage(text, json.loads(text)["private"][0]))
    with pytest.raises(LockstepError) as caught:
        PeerSecret.read(path)
    assert str(caught.value) == f"{path}: {flaw}, expected the file of a run's secret"
