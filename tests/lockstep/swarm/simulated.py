"""Tiny runs of six peers in this process; a form's programs are compiled once for all of them."""

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax

from benchmarks.simulated import Lab
from lockstep.swarm.faults import FaultSchedule
from lockstep.swarm.peers import make_peers
from lockstep.swarm.swarm import Swarm
from lockstep.transcript.entry import Entry
from lockstep.transcript.recomputed import follow
from lockstep.transcript.transcript import RoundsFile, Transcript
from pipeline import runfile
from pipeline.audit.verdict import Finding
from pipeline.start.round_settings import round_settings
from tests import tiny

PEERS = 6
BATCH = 15  # 6 trainers have as many sequences at most as 5, so one shape of a program
MODEL = tiny.MODEL | {
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LOCAL = {
    "local": tiny.DILOCO,
    "average": tiny.FEDAVG,
    "fragments": tiny.STREAMING,
    "places": tiny.SPARTA,
    "codes": tiny.DILOCO_IN_4_BITS,
    "largest": tiny.SPARSELOCO,
    "two parts": tiny.SPARTA_DILOCO,
}
"""Optimizers of local steps, by the form of their messages."""
LATE = {"late": tiny.DECOUPLED, "late codes": tiny.DECOUPLED_IN_SIGNS}
"""The same, of rounds that close without those that are late."""
BY_TIME = tiny.BY_TIME


def run_of(form: str = "signs", *schedule: dict, verified: bool = False, **changes) -> runfile.Run:
    """A run of 8 rounds and 2 windows.

    Args:
      form: of its messages: "signs", "values", "plain" signs on Psyche's wire, those of steps by
        "rules", "dense" ones, or after local steps those of LOCAL or LATE.
      schedule: what goes wrong.
      verified: whether half of the six take the others' steps again: so each message is checked,
        whatever is drawn from its bits, which may be others on another machine.
      changes: of `[config]`.
    """
    document = tiny.run_document(
        Path("/nowhere"),
        config__init_min_clients=3,
        config__witness_nodes=2,
        config__total_steps=8,
        config__verification_percent=50 if verified else 0,
        config__global_batch_size_start=BATCH,
        config__global_batch_size_end=BATCH,
        peers__count=PEERS,
        peers__micro_batch=1,
        faults__schedule=list(schedule),
        witness__snapshot_every=4,
    )
    document["config"] |= changes
    if form == "values":
        document["model"]["LLM"]["optimizer"]["Distro"]["quantize_1bit"] = False
    elif form == "plain":
        document["peers"]["wire"] = "psyche"
    elif form == "rules":
        document["peers"] |= {"bits": "everywhere", "product_bits": 8}
    elif form == "dense":
        document["model"]["LLM"]["optimizer"] = tiny.ADAMW
    elif form in LOCAL | LATE:  # 2 steps of 6 trainers, or of 3 where peers verify
        document["model"]["LLM"]["optimizer"] = (LOCAL | LATE)[form]
        document["peers"]["micro_batch"] = 3
        for key in ("global_batch_size_start", "global_batch_size_end"):
            document["config"][key] = 24
    return runfile.parse(document.unwrap(), "run.toml")


@cache
def lab(form: str) -> Lab:
    return Lab(run_of(form), MODEL, devices=1)


class Seen(NamedTuple):
    """What became of a run: who was ejected or dropped and when, and what an audit found."""

    transcript: Transcript
    fired: Counter[str]
    ejected: dict[int, tuple[int, str]]
    dropped: dict[int, int]
    findings: list[Finding]

    @property
    def blamed(self) -> list[tuple[int, int | None, str, bool]]:
        return [(f.round, f.peer, f.kind, f.applied) for f in self.findings]


def see(form: str, run: runfile.Run, folder: Path) -> Seen:
    """Trains a run and audits all of it."""
    trained = lab(form).train(run, folder)
    ejected, dropped = {}, {}
    for entry in trained.transcript.rounds:
        ejected |= {p: (entry.round.step, why) for p, why in entry.decision.ejected.items()}
        dropped |= dict.fromkeys(entry.decision.dropped, entry.round.step)
    findings = lab(form).audit(run, trained.transcript)
    return Seen(trained.transcript, trained.fired, ejected, dropped, findings)


def entries(form: str, run: runfile.Run, *, killed: bool) -> tuple[list[str], Counter[str]]:
    """The rounds of a run, as JSON, and how often each fault fired; `killed` after every round,
    it goes on from the rounds so far, and from the arrays of its state."""
    made = lab(form)
    faults = FaultSchedule(run.faults.schedule, run.peers.seed, made.programs.form)
    settings = round_settings(run)
    travelling: list = []
    state, progress, told = made.begin.state, made.begin.progress(settings), []
    peers = make_peers(made.programs, run.peers.layout, state, made.devices)
    while True:
        swarm = Swarm(settings, peers, lambda _: made.data, faults)
        swarm.travelling.restore(travelling, made.programs.form)
        progress, taken = swarm.take_round(progress)
        if taken is None:
            return told, faults.fired
        told.append(taken.entry.model_dump_json())
        travelling = swarm.travelling.to_json(made.programs.form)
        if killed:
            saved, travelling = json.dumps(faults.to_json()), json.loads(json.dumps(travelling))
            state = jax.device_get(peers.state())
            layout, absent = run.peers.layout, peers.absent
            peers = make_peers(made.programs, layout, state, made.devices, absent)
            faults = FaultSchedule(run.faults.schedule, run.peers.seed, made.programs.form)
            faults.restore(json.loads(saved))
            rounds = [Entry.model_validate_json(line) for line in told]
            followed = follow(made.begin.progress(settings), rounds, RoundsFile(Path("told")))
            assert followed == progress
            progress = followed
