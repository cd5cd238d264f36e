"""Psyche's own example configurations are runs of ours, and so are the two that its pages show."""

import json
import re
import tomllib
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import NamedTuple

import pytest

from lockstep.errors import LockstepError
from lockstep.methods.dense import OptimizerAdamW
from lockstep.methods.schedule import ScheduleCosine
from pipeline import runfile
from pipeline.stage.keys import PROJECT
from pipeline.toml_file import read_run_file
from tests import tiny
from tests.errors import refused
from tests.servers import hub as hub_server
from tests.servers import web
from tests.servers.bucket import Bucket
from tests.servers.files import Files
from tests.servers.hub import Repo

FIXTURES = PROJECT / "tests" / "fixtures"
SAMPLE = FIXTURES / "psyche_older_spelling.toml"
FILES = {file.stem: file for file in sorted((FIXTURES / "psyche").glob("*.toml"))}
FINEWEB_EDU, FINEWEB_10BT = (PROJECT / f"params/fineweb-{name}.toml" for name in ("edu", "10bt"))

BUCKET = ("nous-pretraining-public-us", "fineweb-edu-tokenized-llama2")
SERVER = "127.0.0.1:20001"
TINY = "https://huggingface.co/pefontana/Nano-Llama/resolve/main/tiny-ci-dataset/000_tiny-test.ds"
MIX = "https://storage.googleapis.com/nous-pretraining-public-us/consilience-stage1-mix.json"


class Example(NamedTuple):
    """A configuration.

    Attributes:
      data: where its tokens are.
      run_id: of a coordinator's state file; None: it is a configuration alone.
      clients: peers of the run.
    """

    data: object
    run_id: str | None = None
    clients: int = 1


DOLMA = Example(SERVER, "llama2-20m-dolma", 2)
EXAMPLES = {
    "consilience": Example(MIX, "consilience-40b", 16),
    "consilience-match-llama2-20m-fineweb": Example(SERVER, "consilience-llama2-20m-fineweb", 2),
    "kill-test-short-epoch-checkpoint": DOLMA,
    "llama2-20m-dolma-noverify-first-checkpointer": DOLMA,
    "llama2-20m-dolma-noverify-no-checkpointer": DOLMA,
    "llama2-20m-dolma-verify-first-checkpointer": DOLMA,
    "solana-light": Example(BUCKET),
    "solana-light-gcs": Example(BUCKET),
    "solana-nano": Example(TINY),
    "solana-test": Example(BUCKET),
    "test": Example(None, "test", 2),
}
each_ready_run = pytest.mark.parametrize(
    "file", [FINEWEB_EDU, FINEWEB_10BT], ids=lambda file: file.stem
)


def lockstep(*arguments: object) -> str:
    """What a command prints, or the error that it ends with."""
    return tiny.invoked(*arguments).stdout


# ---- The configurations of Psyche's repository ----


def test_all_eleven_are_here_and_each_would_fetch_or_says_what_it_needs():
    assert set(FILES) == set(EXAMPLES) == set(WOULD_FETCH) | set(WOULD_NEED)
    assert len(EXAMPLES) == len(WOULD_FETCH) + len(WOULD_NEED) == 11


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_becomes_a_whole_run_and_loses_nothing_that_psyche_says(name, tmp_path):
    file, run_id = FILES[name], EXAMPLES[name].run_id
    document, text = tomllib.loads(file.read_text()), lockstep("import", file)
    (whole := tmp_path / "run.toml").write_text(text)
    run = runfile.load(whole)
    made = run.model_dump(mode="json", exclude_none=True)
    assert {key: made[key] for key in ("config", "model")} == {
        key: document[key] for key in ("config", "model")
    }
    assert run.peers.count == run.config.init_min_clients == EXAMPLES[name].clients
    assert document.get("run_id") == run_id
    if run_id is None:
        assert "Left out" not in text
        assert runfile.load(file).config.total_steps == 25000  # as it stands
    else:
        assert "its configuration: run_id, run_state." in text
        with refused("lockstep import", name):
            runfile.load(file)


# ---- What they would fetch ----


class Elsewhere(NamedTuple):
    """All that the configurations name, on servers of this machine."""

    bucket: Bucket
    files: Files
    hub: hub_server.Hub

    def here(self, text: str) -> str:
        """A run file that names web addresses, with these servers' own; buckets and hubs keep
        their names."""
        for address in (TINY, MIX):
            text = text.replace(address, self.files.url(address.rpartition("/")[2]))
        return text

    def sent(self) -> set[str]:
        """Names of the files of which servers sent anything."""
        servers: tuple[web.Served, ...] = self
        return {name for server in servers for name in server.sent}


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Iterator[Elsewhere]:
    bucket, files = Bucket(name=BUCKET[0]), Files()
    for number in range(3):  # what is listed, and never read: shards of 100 GB
        name = f"{BUCKET[1]}/{number:03}_fineweb-edu.ds"
        bucket.put(name, b"")
        bucket.claims[name] = {"size": str(100 * 10**9)}
    bucket.put(f"{BUCKET[1]}/README.md", b"No tokens.")
    bucket.put(f"{BUCKET[1]}-sample/000_fineweb-edu.ds", bytes(2 * 2048))
    with (
        bucket.serving(),
        files.serving(),
        hub_server.running_hub(monkeypatch, tmp_path / "hf") as hub,
    ):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", bucket.address)
        files.put("000_tiny-test.ds", bytes(2 * 64 * 200_000))
        files.put("code.ds", bytes(2 * 2048 * 7))
        files.put("prose.ds", bytes(2 * (2048 * 3 + 5)))
        weights = {"code.ds": 0.7, "prose.ds": 0.3}
        weighted = [[single_url(files.url(name)), weight] for name, weight in weights.items()]
        mix = {"shuffle": {"Seeded": list(range(32))}, "providers": weighted}
        files.put(MIX.rpartition("/")[2], json.dumps(mix).encode())
        hub.datasets["emozilla/fineweb-10bt-tokenized-datatrove-llama2"] = dataset = Repo()
        shards = {f"{number:03}_fineweb-10bt.ds": bytes(80 * 10**6) for number in range(5)}
        dataset.commit(shards | {"README.md": b"No tokens."})
        yield Elsewhere(bucket, files, hub)


def single_url(url: str) -> dict:
    how = {"token_size_in_bytes": "TwoBytes", "shuffle": "DontShuffle"}
    return how | {"location": {"SingleUrl": url}}


def dry_run(run_file: Path, root: Path) -> tuple[str, dict[str, str]]:
    """What is said of the location, and each row of the table below it but for the time."""
    done = tiny.invoked("download", "--dry-run", "--run", run_file, "--root", root)
    assert done.exit_code == (" there are" in done.stdout)
    first, *rows = done.stdout.splitlines()
    table = [row.strip().split("  ", 1) for row in rows if row.startswith("  ")]
    said = {name: text.strip() for name, text in table}
    # some files are here, and some servers say sizes that they do not have
    expected = r"about [\d,]+ (seconds|minutes) over one connection at |not known: "
    assert re.match(expected, said.pop("time", "not known: "))
    return first.removeprefix("download: "), said


FROM_BUCKET = {
    "files": "2 to train on, 1 held out",
    "bytes": "300.0 GB to fetch, 100.0 GB of them held out",
    "tokens": "100,000,000,000 to train on",
    # each file has 24,414,062 and a half
    "sequences": "48,828,124 of 2,048 tokens",
}
LIGHT_RUN = "200,000 sequences in 25,000 steps: 409,600,000 tokens, 0.004096 epochs"
WOULD_FETCH = {
    "consilience": {
        "files": "2 to train on, 0 held out",
        "bytes": "41.0 kB to fetch, 0 bytes of them held out",
        "tokens": "20,485 to train on",
        "sequences": "10 of 2,048 tokens",
        # the batch grows, so this is no product
        "the run": "10,496,756,348 sequences in 325,000 steps: 21,497,357,000,704 tokens, "
        "10,496,756,338 more than 1 x the 10 there are",
    },
    "solana-light": FROM_BUCKET | {"the run": LIGHT_RUN},
    "solana-light-gcs": FROM_BUCKET | {"the run": LIGHT_RUN},
    "solana-nano": {
        "files": "1 to train on, 0 held out",
        "bytes": "25.6 MB to fetch, 0 bytes of them held out",
        "tokens": "12,800,000 to train on",
        "sequences": "200,000 of 64 tokens",
        "the run": "100,000 sequences in 25,000 steps: 6,400,000 tokens, 0.5 epochs",
    },
    "solana-test": FROM_BUCKET
    | {
        "the run": "51,200,000 sequences in 25,000 steps: 104,857,600,000 tokens, "
        "2,371,876 more than 1 x the 48,828,124 there are"
    },
}
WOULD_NEED = {
    "test": "model.LLM.optimizer.Dummy: would need an optimizer that leaves the params as they are"
} | {
    name: f"model.LLM.data_location.Server: would need a Psyche data server at {SERVER}"
    for name, example in EXAMPLES.items()
    if example.data == SERVER
}


@pytest.mark.parametrize("name", WOULD_FETCH)
def test_dry_run_of_an_example_says_what_it_would_fetch_and_tries_one_file_at_most(
    name, elsewhere, tmp_path
):
    run_file, root = tmp_path / "run.toml", tmp_path / "root"
    run_file.write_text(elsewhere.here(lockstep("import", FILES[name])))
    read, table = dry_run(run_file, root)
    where = EXAMPLES[name].data
    assert read == ("gs://" + "/".join(BUCKET) if where == BUCKET else elsewhere.here(where))
    assert table == WOULD_FETCH[name]
    assert len([sent for sent in elsewhere.sent() if sent.endswith(".ds")]) <= 1
    assert not (root / "data" / "shards").exists()


@pytest.mark.parametrize("name", WOULD_NEED)
def test_dry_run_of_an_example_without_what_it_needs_is_one_line(name, tmp_path):
    run_file = tmp_path / "run.toml"
    run_file.write_text(lockstep("import", FILES[name]))
    with refused(WOULD_NEED[name]):
        lockstep("download", "--dry-run", "--run", run_file, "--root", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"run.toml"}


SERVED = [name for name, example in EXAMPLES.items() if example.data == SERVER]
DATA_TOML = """dir = "../../data/dolma"
token_size = "TwoBytes"
seq_len = {length}
shuffle_seed = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23,
  24, 25, 26, 27, 28, 29, 30, 31, 32]
"""


def beside_data_toml(name: str, root: Path, data_toml: str = DATA_TOML) -> Path:
    """An example as in Psyche's repository: config/NAME/state.toml, and what its server serves."""
    state = root / "config" / name / "state.toml"
    state.parent.mkdir(parents=True)
    state.write_text(FILES[name].read_text())
    length = tomllib.loads(state.read_text())["model"]["LLM"]["max_seq_len"]
    state.with_name("data.toml").write_text(data_toml.format(length=length))
    return state


@pytest.mark.parametrize("name", SERVED)
def test_example_with_a_data_server_imports_to_the_files_that_it_serves(name, tmp_path):
    state, tokens, run_file = beside_data_toml(name, tmp_path), 2048 * 7, tmp_path / "run.toml"
    (tmp_path / "data" / "dolma").mkdir(parents=True)
    for file in "ab":
        (tmp_path / "data" / "dolma" / f"{file}.ds").write_bytes(bytes(2 * tokens))
    text = lockstep("import", state)
    assert f"# The files of data.toml, in place of a data server at {SERVER}.\n" in text
    run_file.write_text(text)
    llm = runfile.load(run_file).llm
    location, length = llm.data_location, llm.max_seq_len
    assert location.path == str(tmp_path / "data" / "dolma")
    assert location.shuffle.seed == tuple(range(1, 33))
    _, table = dry_run(run_file, tmp_path)
    assert table["files"] == "1 to train on, 1 held out"
    assert table["sequences"] == f"{tokens // length} of {length:,} tokens"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("{length}", "999"), "seq_len is 999, expected 2048, the value of model.LLM.max_seq_len"),
        (("TwoBytes", "Two"), 'token_size is "Two", expected '),
        (("dir =", "folder ="), "dir: missing, expected it"),
        (("[1, 2,", "[2,"), "shuffle_seed is .*, expected at least 32 items"),
        (("../../data/dolma", "/" + 200 * "x"), "path.*, expected at most 192 bytes"),
    ],
)
def test_data_toml_that_does_not_fit_is_one_line(change, named, tmp_path):
    state = beside_data_toml(
        "kill-test-short-epoch-checkpoint", tmp_path, DATA_TOML.replace(*change)
    )
    with pytest.raises(LockstepError, match=f"data.toml: .*{named}") as caught:
        lockstep("import", state)
    assert "\n" not in str(caught.value)


# ---- Ready runs: what Psyche's pages show ----


def test_fineweb_edu_has_every_word_and_value_of_the_sample():
    sample = tomllib.loads(SAMPLE.read_text())
    ours = tomllib.loads(FINEWEB_EDU.read_text())
    # a key that the sample leaves to its default, and DVC wants written
    assert ours["model"]["LLM"].pop("cold_start_warmup_steps") == 0
    assert {"config": ours["config"], "model": ours["model"]} == sample


def test_fineweb_10bt_is_the_train_example_with_its_defaults():
    run = runfile.load(FINEWEB_10BT)
    assert run.llm.checkpoint == runfile.CheckpointHub(repo_id="emozilla/llama2-20m-init")
    assert run.llm.data_location == runfile.DataHub(
        repo_id="emozilla/fineweb-10bt-tokenized-datatrove-llama2",
        patterns=("*.ds",),
        token_size_in_bytes="TwoBytes",
        shuffle=runfile.ShuffleDontShuffle(),
    )
    assert (run.config.global_batch_size_start, run.config.global_batch_size_end) == (2, 2)
    assert (run.peers.count, run.peers.micro_batch) == (1, 1)
    assert run.llm.max_seq_len == 2048
    assert run.llm.optimizer == OptimizerAdamW(
        betas=(0.9, 0.95), weight_decay=0.1, eps=1e-8, clip_grad_norm=1.0
    )
    assert run.llm.lr_schedule == ScheduleCosine(
        base_lr=4e-4, warmup_init_lr=0.0, warmup_steps=500, total_steps=25000, final_lr=4e-5
    )


@each_ready_run
def test_ready_run_has_every_table_and_fetches_what_its_rounds_need_and_no_more(file):
    assert set(read_run_file(file)) == set(runfile.Run.model_fields)
    run = runfile.load(file)
    limit, c = run.download.limit, run.config
    assert limit.steps == c.total_steps == run.llm.lr_schedule.total_steps
    assert limit.sequences == c.total_steps * c.global_batch_size_end
    assert limit.max_seq_len == run.llm.max_seq_len


@each_ready_run
@pytest.mark.parametrize(
    ("table", "key", "named"),
    [
        (("config",), "total_steps", "download.limit.steps is 25000"),
        (("model", "LLM"), "max_seq_len", "download.limit.max_seq_len is 2048"),
    ],
)
def test_edit_that_the_limit_does_not_follow_is_refused_in_one_line(file, table, key, named):
    document = read_run_file(file)
    place = reduce(getitem, table, document)
    place[key] += 1
    with refused(named, place[key]):
        runfile.parse(document, "run.toml")


@pytest.mark.parametrize(
    ("file", "table"),
    [
        (
            FINEWEB_EDU,
            {
                "files": "1 of 2 to train on, 1 held out",
                "bytes": "821.3 MB to fetch, 2.1 MB of them held out",
                "tokens": "409,600,000 to train on",
                "sequences": "200,000 of 2,048 tokens",
                "the run": "200,000 sequences in 25,000 steps: 409,600,000 tokens, 1 epoch",
            },
        ),
        (
            FINEWEB_10BT,
            {
                "files": "3 of 4 to train on, 1 held out",
                "bytes": "206.9 MB to fetch, 2.1 MB of them held out",
                # with what the first two files have beyond whole sequences
                "tokens": "102,401,024 to train on",
                "sequences": "50,000 of 2,048 tokens",
                "the run": "50,000 sequences in 25,000 steps: 102,400,000 tokens, 1 epoch",
            },
        ),
    ],
    ids=["fineweb-edu", "fineweb-10bt"],
)
def test_dry_run_of_a_ready_run_is_one_pass_over_the_first_shards(file, table, elsewhere, tmp_path):
    assert dry_run(file, tmp_path)[1] == table
    assert len(elsewhere.sent()) <= 1
