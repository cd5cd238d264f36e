"""Two engines, one truth: however they take turns, results are what the run file says."""

import random
import re
import shutil
from pathlib import Path

import pytest
import tomlkit

from lockstep.files import read_json
from pipeline.stage.keys import OUT, RUN_FILE
from tests import tiny

pytestmark = pytest.mark.long

# One number of each of four tables, and the values it goes back and forth between.
EDITS = {
    ("model", "LLM", "optimizer", "Distro", "compression_topk"): (4, 2),
    ("witness", "replay_percent"): (100, 50),
    ("export", "dtype"): ("float32", "bfloat16"),
    ("evaluate", "max_new_tokens"): (4, 6),
}


class Engines:
    """A project, and every result seen so far by the key it was made under."""

    def __init__(self, folder: Path, seed: int):
        self.project = tiny.make_project(folder)
        self.random = random.Random(seed)
        self.seen: dict[str, dict[str, bytes]] = {}
        self.log: list[str] = []

    def edit(self, names: tuple[str, ...]) -> None:
        file = self.project / RUN_FILE
        document = tomlkit.parse(file.read_text())
        table = document
        for name in names[:-1]:
            table = table[name]
        first, second = EDITS[names]
        table[names[-1]] = second if table[names[-1]] == first else first
        file.write_text(tomlkit.dumps(document))
        self.log.append(f"edit {names[-1]} = {table[names[-1]]}")

    def dvc_repro(self) -> str:
        said = tiny.run(self.project, "dvc", "repro", "-q")
        self.check()
        return said

    def snakemake(self) -> None:
        tiny.run(self.project, "snakemake", "-q", "all")
        self.check()

    def dvc_exp_run(self) -> None:
        topk = self.random.choice([2, 4])
        name = f"{RUN_FILE}:model.LLM.optimizer.Distro.compression_topk={topk}"
        tiny.run(self.project, "dvc", "exp", "run", "-q", "-S", name)
        self.check()

    def commit_and_go_back(self) -> None:
        """Commits what there is, then checks out the state of an earlier commit, data included."""
        tiny.run(self.project, "git", "add", "-A")
        tiny.commit(self.project, f"step {len(self.log)}")
        commits = tiny.run(self.project, "git", "rev-list", "HEAD").split()
        chosen = self.random.choice(commits[:3])
        tiny.run(self.project, "git", "checkout", "-q", chosen, "--", ".")
        tiny.run(self.project, "git", "reset", "-q")  # `dvc exp run` wants a clean index
        if "dvc.lock" in tiny.run(self.project, "git", "ls-files"):
            # data that only Snakemake made is not in DVC's cache, and is then made again
            tiny.run(self.project, "sh", "-c", "dvc checkout -q --force || true")

    def check(self) -> None:
        """Every stage's result is of today's key, says today's numbers, and is as first made."""
        run = tomlkit.parse((self.project / RUN_FILE).read_text()).unwrap()
        story = " / ".join(self.log)
        keys = tiny.keys_of(self.project)
        for stage, made in keys.items():
            assert (self.project / made).is_file(), f"{stage} is stale after: {story}"
            found = tiny.contents(self.project / OUT[stage])
            assert found == self.seen.setdefault(made, found), f"{stage} differs after: {story}"
            for copy, data in tiny.contents(self.project / OUT[stage] / "metrics").items():
                published = (self.project / "metrics" / copy).read_bytes()
                assert published == data, f"metrics/{copy} is stale after: {story}"
        header = read_json(self.project / "data/trained/transcript/header.json")
        optimizer = run["model"]["LLM"]["optimizer"]["Distro"]
        trained_with = header["run"]["model"]["LLM"]["optimizer"]["Distro"]
        assert trained_with["compression_topk"] == optimizer["compression_topk"]
        verdict = read_json(self.project / "data/verdict/verdict.json")
        share = 100 * len(verdict["replayed_windows"]) / verdict["windows"]
        assert share == run["witness"]["replay_percent"]
        exported = read_json(self.project / "data/export/config.json")
        assert exported["dtype"] == run["export"]["dtype"]
        html = (self.project / "data/report/report.html").read_text()
        key = re.search(r"made-(\w+)\.json", keys["train"])[1]
        assert key in html

    def take(self, names: tuple[str, ...], act: str) -> None:
        self.edit(names)
        self.log.append(act)
        getattr(self, act)()


ACTS = ("dvc_repro", "snakemake", "dvc_exp_run", "commit_and_go_back")


def test_alternating_engines_never_leave_a_stale_result(tmp_path):
    *_, new_tokens = EDITS
    engines = Engines(tmp_path, seed=0)
    tiny.make(engines.project / RUN_FILE, engines.project)
    said = engines.dvc_repro()
    # download and convert read what lies outside, and look at it again
    assert said.count("exists already") == 5, "DVC made again what was made without it"
    engines.take(new_tokens, "snakemake")
    engines.take(new_tokens, "dvc_repro")  # back to the first value
    shutil.rmtree(tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_alternating_engines_for_long_never_leave_a_stale_result(tmp_path, seed):
    engines = Engines(tmp_path, seed)
    engines.dvc_repro()
    for _ in range(30):
        engines.take(engines.random.choice(list(EDITS)), engines.random.choice(ACTS))
    engines.snakemake()
    shutil.rmtree(tmp_path)
