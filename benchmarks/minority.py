"""What peers that collude can do to a run: `python -m benchmarks.minority`.

Elections, attestations, disputes and decisions are the protocol's own; nothing is trained, and what
a recomputation gives is taken as known. Each plan is followed in every round, as well as the run
file and all that colluders hear lets them:

    eject   as witnesses they refuse the messages of all honest peers; as verifiers they accuse an
            honest peer wherever the rulings of their kind suffice to have it ejected
    stop    as witnesses they attest to no message, so that none is applied
    lie     they send false messages; as verifiers they find each other's true, and rule so
    safe    the same, but only in rounds whose verifiers are all of their kind
    last    they lie, and vary their messages until none of them is drawn by an honest verifier:
            what whoever sees all others' commitments before it makes its own can do

Prints a JSON line for each case: shares of runs, and counts of messages.
"""

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from lockstep.protocol import consensus, driver
from lockstep.protocol.attestation import Check, Claim, Ruling, attest, settle
from lockstep.protocol.closing import Closing
from lockstep.protocol.driver import RoundSettings
from lockstep.protocol.round import Evidence, Message, Round
from lockstep.tables.links import Links

ROUNDS = 200
LIMIT = 5.0  # seconds of a round
TRIES = 1000  # of a message that is to escape the draw
PLANS = ("eject", "stop", "lie", "safe", "last")
SWARMS = ((4, 2, 0), (8, 2, 0), (10, 4, 20), (32, 8, 10))  # peers, witnesses, verification percent
SHARES = (0.1, 0.25, 0.34, 0.4, 0.5, 0.6)
FALSE = Claim("f" * 64, "f" * 64)


@dataclass(frozen=True)
class Settings:
    """`[config]` of a run in one epoch."""

    init_min_clients: int
    min_clients: int
    witness_nodes: int
    verification_percent: int
    total_steps: int
    waiting_for_members_extra_time: float = 0
    warmup_time: float = 1
    round_witness_time: float = 1
    cooldown_time: float = 0
    epoch_time: float | None = None
    rounds_per_epoch: int | None = 10**9

    def batch_size(self, tokens: int) -> int:
        """Return enough sequences for everybody."""
        del tokens
        return 256


@dataclass
class Outcome:
    """What a plan came to in one run.

    ended: The round before which too few peers were left; None if it took them all. empty: Rounds
      in which nothing was applied. honest: When the first honest peer was ejected. colluders: How
      many colluders were. sent, applied: False messages. tries: How often they were made, by those
      of plan "last", in each round.
    """

    ended: int | None = None
    empty: int = 0
    honest: int | None = None
    colluders: int = 0
    sent: int = 0
    applied: int = 0
    tries: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Group:
    """Peers that collude by a plan, in the run with a seed."""

    peers: frozenset[int]
    plan: str
    seed: int

    def take(self, round_: Round, outcome: Outcome) -> tuple[Evidence, frozenset[int]]:
        """Return what peers send and say in a round, and who sent a false message."""
        lies = self.plan in ("lie", "last") or (
            self.plan == "safe" and self.peers.issuperset(round_.verifiers)
        )
        liars = self.peers.intersection(round_.assignment) if lies else frozenset[int]()
        outcome.sent += len(liars)
        evidence = self._sent(round_, liars, 0)
        if self.plan == "last" and liars:
            for number in range(1, TRIES):
                pairs = consensus.checked(round_, evidence)
                if not any(p in liars and v not in self.peers for v, p in pairs.items()):
                    break
                evidence = self._sent(round_, liars, number)
            outcome.tries.append(number)
        truth = {
            peer: Claim(_hash("true", self.seed, round_.step, peer), message.state or "")
            for peer, message in evidence.messages.items()
        }
        return self._judged(self._attested(evidence, round_), round_, truth), liars

    def _sent(self, round_: Round, liars: frozenset[int], number: int) -> Evidence:
        messages = {
            peer: Message(
                _hash(f"false {number}" if peer in liars else "true", self.seed, round_.step, peer),
                1,
                _hash("state", self.seed, round_.step, peer),
            )
            for peer in round_.assignment
        }
        return Evidence(messages, {}, dict.fromkeys(messages, 1.0), (), (), (), (), (), 0.0)

    def _attested(self, evidence: Evidence, round_: Round) -> Evidence:
        honest = consensus.witnessed(round_, evidence, LIMIT)
        if self.plan not in ("eject", "stop"):
            return replace(evidence, attestations=honest)
        theirs = {p: c for p, c in evidence.commitments.items() if p in self.peers}
        refused = evidence.messages.keys() - theirs.keys() if self.plan == "eject" else set[int]()
        held = theirs if self.plan == "eject" else {}
        attestations = tuple(
            attest(attestation.witness, round_.seed, round_.peers, held, refused=refused)
            if attestation.witness in self.peers
            else attestation
            for attestation in honest
        )
        return replace(evidence, attestations=attestations)

    def _judged(self, evidence: Evidence, round_: Round, truth: Mapping[int, Claim]) -> Evidence:
        """What verifiers find, and all others rule."""
        checks, rulings = [], []
        for verifier, peer in consensus.checked(round_, evidence).items():
            claimed, result = evidence.messages[peer].claim, truth[peer]
            if verifier in self.peers:
                result = claimed
                false = Check(verifier, peer, FALSE, 1.0, 1)
                ruling = self._ruling(false, claimed, truth[peer], round_)
                loser = settle(false, claimed, [ruling], len(round_.peers))
                if self.plan == "eject" and peer not in self.peers and loser == peer:
                    result = FALSE
            check = Check(verifier, peer, result, 1.0, 1)
            checks.append(check)
            if result != claimed:
                rulings.append(self._ruling(check, claimed, truth[peer], round_))
        return replace(evidence, checks=tuple(checks), rulings=tuple(rulings))

    def _ruling(self, check: Check, claimed: Claim, truth: Claim, round_: Round) -> Ruling:
        side = check.found if check.verifier in self.peers else claimed
        judges = [peer for peer in round_.peers if peer not in (check.verifier, check.peer)]
        claims = {judge: side if judge in self.peers else truth for judge in judges}
        return Ruling(check.verifier, check.peer, claims)


def follow(
    peers: int, witnesses: int, percent: int, colluders: int, plan: str, seed: int, rounds: int
) -> Outcome:
    """Follow a plan through a run in which the last peers collude."""
    least = max(peers // 2, witnesses)
    settings = Settings(least, least, witnesses, percent, rounds)
    rounds_of = RoundSettings(
        coordinator=settings, links=Links(), peers=peers, seed=seed, row_tokens=1, micro_batch=1,
        closing=Closing(limit=LIMIT, most_rows=256),
    )  # fmt: skip
    progress = driver.ask(driver.start(rounds_of, 0, 0, [0.0] * peers), range(peers))
    group = Group(frozenset(range(peers - colluders, peers)), plan, seed)
    outcome = Outcome()
    while True:
        step = progress.state.step
        progress, round_ = driver.next_round(progress)
        if round_ is None:
            if progress.waiting:  # too few are left
                outcome.ended = step
            return outcome
        evidence, liars = group.take(round_, outcome)
        progress, decision = driver.finish_round(progress, round_, evidence)
        outcome.applied += len(liars.intersection(decision.applied))
        outcome.colluders += len(group.peers.intersection(decision.ejected))
        if decision.ejected.keys() - group.peers and outcome.honest is None:
            outcome.honest = step
        outcome.empty += not decision.applied


def measure(
    peers: int, witnesses: int, percent: int, colluders: int, plan: str, seeds: int
) -> dict:
    """Follow a plan under many seeds."""
    case = peers, witnesses, percent, colluders, plan
    runs = [follow(*case, seed, ROUNDS) for seed in range(seeds)]
    total = Counter(sent=0, applied=0)
    for run in runs:
        total.update(sent=run.sent, applied=run.applied, colluders=run.colluders)
    tries = [number for run in runs for number in run.tries]
    return {
        "benchmark": "minority",
        "plan": plan,
        "peers": peers,
        "witnesses": witnesses,
        "verification_percent": percent,
        "colluders": colluders,
        "runs": seeds,
        "honest_ejected": _share(runs, "honest"),
        "first_honest": _median(runs, "honest"),
        "ended": _share(runs, "ended"),
        "ended_in_round": _median(runs, "ended"),
        "empty_rounds": sum(run.empty for run in runs) / seeds,
        "colluders_ejected": total["colluders"] / seeds,
        "lies_sent": total["sent"] / seeds,
        "lies_applied": total["applied"] / seeds,
        "tries": sum(tries) / len(tries) if tries else None,
    }


def _share(runs: list[Outcome], what: str) -> float:
    return sum(getattr(run, what) is not None for run in runs) / len(runs)


def _median(runs: list[Outcome], what: str) -> float | None:
    rounds = [value for run in runs if (value := getattr(run, what)) is not None]
    return median(rounds) if rounds else None


def _hash(*words: object) -> str:
    return hashlib.sha256(" ".join(map(str, words)).encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", nargs="*", choices=PLANS, default=list(PLANS))
    parser.add_argument("--peers", nargs="*", type=int, default=[peers for peers, *_ in SWARMS])
    parser.add_argument("--seeds", type=int, default=30)
    chosen = parser.parse_args()
    for peers, witnesses, percent in (swarm for swarm in SWARMS if swarm[0] in chosen.peers):
        for colluders in sorted({max(1, int(share * peers)) for share in SHARES}):
            for plan in chosen.plans:
                if percent or plan in ("eject", "stop"):
                    line = measure(peers, witnesses, percent, colluders, plan, chosen.seeds)
                    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
