"""What a round costs besides arrays, by number of peers: `python -m benchmarks.scale`.

Prints one JSON line per case, each measured in a process of its own: milliseconds of CPU time,
medians over rounds in which peers send what nobody trained. MAX_PEERS is lifted. All witnesses of a
round are computed in turn, by one core; in a run of many hosts each computes its own share. In the
case "honest" everybody answers in time; in "rough" a tenth verifies, and in every round some are
silent, late or lie.

    coordinator   driver.next_round and driver.finish_round, consensus among it
    committee     elections: witnesses, verifiers
    links         when messages arrive on simulated links
    attestation   all witnesses' attestations
    write, read   the round's line of rounds.jsonl
    audit         audit.audit_rounds of the same rounds, by another process

`growth` is d log(milliseconds) / d log(peers), from the size before to this one.
"""

import argparse
import functools
import gc
import hashlib
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

from benchmarks.measuring import alone, peak

CASES = ("honest", "rough")
BYTES = 14_245  # of a message: DisTrO's, of 5.1 M parameters
SILENT, LATE, BROKEN, TWO_FACED, FALSE = 0.05, 0.05, 0.01, 0.01, 0.02  # shares of a rough round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, nargs="+", default=[10, 100, 1_000, 10_000])
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.alone:
        print(json.dumps(measure(chosen.peers[0], chosen.case[0], chosen.rounds)))
        return
    for case in chosen.case:
        before = None
        for peers in chosen.peers:
            options = {"--peers": peers, "--case": case, "--rounds": chosen.rounds}
            line = alone("scale", options, "--alone")
            print(json.dumps(line | {"growth": _growth(before, line)}), flush=True)
            before = line


def measure(peers: int, case: str, rounds: int) -> dict:
    """Takes rounds of one case, and audits them."""
    from lockstep.protocol import coordinator, driver
    from pipeline.audit import audit  # noqa: F401, for what it takes is not an audit's

    coordinator.MAX_PEERS = driver.MAX_PEERS = max(peers, coordinator.MAX_PEERS)
    swarm = Rounds(peers, case)
    rounds_peak = peak(lambda: [swarm.take_round() for _ in range(rounds)])
    for cache in gc.get_objects():  # an auditor has none of the trainer's
        if isinstance(cache, functools._lru_cache_wrapper):
            cache.cache_clear()
    audit_peak = peak(swarm.audit)
    milliseconds = {part: round(1000 * median(s), 3) for part, s in swarm.seconds.items()}
    return {
        "benchmark": "scale",
        "case": case,
        "peers": peers,
        "witnesses": len(swarm.entries[0].round.witnesses),
        "milliseconds": milliseconds,
        "bytes_per_round": round(median(swarm.sizes)),
        "attestation_bytes": round(median(swarm.attested)),
        "memory_mb": {"rounds": round(rounds_peak / 1e6, 1), "audit": round(audit_peak / 1e6, 1)},
        "gone_but_healthy": f"{swarm.unnoticed} of {swarm.silent}",
    }


class Rounds:
    """Peers without arrays, and the seconds that each part of their rounds took."""

    def __init__(self, peers: int, case: str):
        from lockstep.protocol import driver
        from pipeline import runfile
        from pipeline.start.round_settings import round_settings

        run = runfile.load(Path("params/run.toml"))
        config = run.config.model_copy(
            update={
                "init_min_clients": peers,
                "min_clients": 1,
                "witness_nodes": 0,
                "verification_percent": 10 if case == "rough" else 0,
                "total_steps": 10**6,
                "epoch_time": 10**12,
                "max_round_train_time": 10**6,  # slow links alone make nobody late
                "global_batch_size_start": 2 * peers,
                "global_batch_size_end": 2 * peers,
            }
        )
        rng = self.rng = random.Random(peers)
        speeds = [rng.uniform(10, 1000) for _ in range(peers)]
        links = run.links.model_copy(update={"upload_mbps": speeds, "download_mbps": speeds})
        own = run.peers.model_copy(update={"count": peers})
        self.run = run.model_copy(update={"config": config, "links": links, "peers": own})
        self.case, self.entries, self.sizes, self.attested = case, [], [], []
        self.silent = self.unnoticed = 0
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.begin = driver.start(round_settings(self.run), 0, 0, [0.0] * peers)
        self.progress = self.begin

    def take_round(self) -> None:
        """Takes a round, from the committee to a line of the transcript and back."""
        from lockstep.protocol import consensus, driver, links
        from lockstep.protocol.round import Evidence
        from lockstep.transcript.entry import Entry

        started = time.process_time()
        askers = () if self.entries else tuple(range(self.run.peers.count))
        progress, round_ = driver.next_round(driver.ask(self.progress, askers))
        coordinator = time.process_time() - started
        self._elect(progress.state)

        limit = self.run.config.max_round_train_time
        silent, messages, others, broken = self._sent(round_)
        present = sorted(set(round_.peers) - set(silent))
        sizes = {peer: message.bytes for peer, message in messages.items()}
        sequences, length = round_.sequences, self.run.llm.max_seq_len
        tokens = {peer: sequences[peer] * length for peer in messages}
        with self._timed("links"):
            arrivals = links.arrivals(self.run.links, present, tokens, sizes)
        for peer in self._sample(arrivals, LATE):
            arrivals[peer] += limit
        evidence = Evidence(messages, others, arrivals, silent, broken, (), (), (), 0.0)
        checks, rulings, settling = self._verified(round_, present, evidence, tokens)
        evidence = replace(evidence, checks=checks, rulings=rulings, settle_seconds=settling)
        with self._timed("attestation"):
            attestations = consensus.witnessed(round_, evidence, limit)
        evidence = replace(evidence, attestations=attestations)

        started = time.process_time()
        self.progress, decision = driver.finish_round(progress, round_, evidence)
        self.seconds["coordinator"].append(coordinator + time.process_time() - started)
        quiet = {"joined_params": None, "loss": None, "held_out_loss": None}
        record = {"asked": askers, "round": round_, "evidence": evidence, "decision": decision}
        entry = Entry(**record, **quiet)
        with self._timed("write"):
            line = entry.model_dump_json()
        with self._timed("read"):
            self.entries.append(Entry.model_validate_json(line))
        self.sizes.append(len(line))
        self.attested.append(len(json.dumps(json.loads(line)["evidence"]["attestations"])))
        self.silent += len(silent)
        self.unnoticed += len(set(silent) - set(decision.dropped))

    def audit(self) -> None:
        """Checks all rounds, as an auditor with no arrays to replay."""
        from pipeline.audit import audit
        from pipeline.start.round_settings import round_settings

        setup = SimpleNamespace(
            run=self.run,
            settings=round_settings(self.run),
            programs=SimpleNamespace(
                form=SimpleNamespace(kept=True), optimizer=SimpleNamespace(overlapped=0.0)
            ),
            start=SimpleNamespace(
                progress=lambda settings: self.begin, state=SimpleNamespace(own=[{}]), step=0
            ),
        )
        started = time.process_time()
        transcript = SimpleNamespace(rounds=self.entries)
        findings = audit.audit_rounds(setup, transcript, windows=())  # no payloads are here
        took = (time.process_time() - started) / len(self.entries)
        self.seconds["audit"].append(took)
        unexpected = {finding.kind for finding in findings} - {"rounds", "ejected", "equivocation"}
        assert not unexpected, findings[:3]

    def _elect(self, state: object) -> None:
        from lockstep.protocol import committee

        committee.order.cache_clear()
        with self._timed("committee"):
            committee.witnesses(state.seed, len(state.peers), 0)
            committee.verifiers(state.seed, len(state.peers), 10)

    def _sent(self, round_: object) -> tuple:
        from lockstep.protocol.round import Message

        def message(peer: int, what: str, to: tuple[int, ...] = ()) -> Message:
            text = hashlib.sha256(f"{what} {round_.step} {peer}".encode()).hexdigest()
            return Message(text, BYTES, text if round_.verifiers else None, to)

        silent = tuple(sorted(self._sample(round_.peers, SILENT)))
        senders = sorted(round_.assignment.keys() - set(silent))
        messages = {peer: message(peer, "message") for peer in senders}
        liars = self._sample(senders, TWO_FACED)
        others = {peer: message(peer, "other", round_.peers[1::2]) for peer in sorted(liars)}
        broken = tuple(sorted(self._sample(senders, BROKEN) - liars))
        return silent, messages, others, broken

    def _verified(self, round_: object, present: list, evidence: object, tokens: dict) -> tuple:
        from lockstep.protocol import consensus, links
        from lockstep.protocol.attestation import Check, Claim, Ruling

        def seconds(other: int, peer: int) -> float:
            return links.check_seconds(self.run.links, other, peer, tokens=tokens[peer], size=0)

        false = self._sample(round_.verifiers, FALSE)
        checks, rulings, settling = [], [], [0.0]
        for verifier, peer in consensus.checked(round_, evidence).items():
            claimed = evidence.messages[peer].claim
            claim = Claim("f" * 64, "f" * 64) if verifier in false else claimed
            checks.append(Check(verifier, peer, claim, seconds(verifier, peer), 0))
            if verifier in false:
                judges = [judge for judge in present if judge not in (verifier, peer)]
                claims = dict.fromkeys(judges, claimed)
                rulings.append(Ruling(verifier, peer, claims))
                settling += [seconds(judge, peer) for judge in judges]
        return tuple(checks), tuple(rulings), max(settling)

    def _sample(self, peers: object, share: float) -> set[int]:
        pool = sorted(peers) if self.case == "rough" else []
        return set(self.rng.sample(pool, math.ceil(share * len(pool))))

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.process_time()
        yield
        self.seconds[part].append(time.process_time() - started)


def _growth(before: dict | None, line: dict) -> dict[str, float] | None:
    if before is None:
        return None
    old, new = before["milliseconds"], line["milliseconds"]
    larger = math.log(line["peers"] / before["peers"])
    return {part: round(math.log(new[part] / old[part]) / larger, 2) for part in new}


if __name__ == "__main__":
    main()
