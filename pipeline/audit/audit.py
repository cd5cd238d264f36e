"""The checks of a transcript that need no training: cheap, and made of every round."""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from pipeline import runfile
from pipeline.audit.verdict import Finding
from pipeline.errors import LockstepError
from pipeline.protocol import committee, consensus, driver, links
from pipeline.protocol.coordinator import CoordinatorError
from pipeline.protocol.round import Message, Round
from pipeline.swarm.begin import Setup
from pipeline.transcript.entry import TABLES, Entry
from pipeline.transcript.state import State, hashes
from pipeline.transcript.transcript import Transcript
from pipeline.wire import exchange
from pipeline.wire import message as wire


class _ContradictionError(Exception):
    """An entry does not follow from the run file and the entries before it."""

    def __init__(self, step: int, kind: str, detail: str, known: Iterable[Finding] = ()):
        super().__init__(detail)
        self.findings = [*known, _against_author(step, kind, detail)]


def audit(setup: Setup, transcript: Transcript) -> list[Finding]:
    """Make all checks that need no training: of the header, every round and every snapshot."""
    return [
        *audit_header(setup, transcript),
        *audit_rounds(setup, transcript),
        *_audit_snapshots(setup, transcript),
    ]


def audit_header(setup: Setup, transcript: Transcript) -> list[Finding]:
    """Check that the header's run and model are the auditor's own."""
    run = setup.run.model_dump(mode="json", include=TABLES)
    own, header = {"run": run, "model": setup.hf_config}, transcript.header
    return [
        _against_author(setup.start.step, "header", f"its {name} differs from the auditor's own")
        for name in own
        if getattr(header, name) != own[name]
    ]


# ---- Rounds ----


def audit_rounds(
    setup: Setup,
    transcript: Transcript,
    windows: Sequence[runfile.Window] | None = None,
    last: int | None = None,
) -> list[Finding]:
    """Recompute every round from the run file and from what was sent and attested in it.

    Seed, assignment, verifiers and witnesses follow from the run file and the rounds before; what
    honest witnesses attest follows from what was sent; the decision follows from what was sent and
    attested.

    Args:
      setup: The auditor's own set-up of the run.
      transcript: The transcript to check.
      windows: The only windows whose payloads the transcript has; None if it has all.
      last: The last round that it must have; None for the run's.
    """
    findings: list[Finding] = []
    run, form, start = setup.run, setup.programs.form, setup.start
    progress = start.progress(run)
    own_size = sum(leaf.nbytes for leaf in jax.tree.leaves(start.state.own[0]))
    for entry in transcript.rounds:
        has_payloads = form.kept and (
            windows is None or any(entry.round.step in window.rounds for window in windows)
        )
        try:
            progress = _begin_round(progress, entry)
            known = _audit_messages(entry, transcript, form) if has_payloads else []
            progress = _finish_round(progress, entry, run)
        except _ContradictionError as error:
            return findings + error.findings  # nothing after it can be attributed
        findings += _audit_arrivals(entry, run)
        findings += _audit_checks(entry, run, own_size)
        known += _audit_second_messages(entry)
        findings += [*known, *_audit_attestations(entry, run), *_audit_ejected(entry, known)]
    done, total = start.step + len(transcript.rounds), run.config.total_steps
    if done < (total if last is None else last):
        text = f"the transcript ends before this round, expected {total} rounds"
        findings.append(_against_author(done + 1, "rounds", text))
    return findings


def _begin_round(progress: driver.RunProgress, entry: Entry) -> driver.RunProgress:
    """Compute the next round, which must be the recorded one."""
    step = entry.round.step
    try:
        if progress.pausing:
            progress = driver.resume(progress)
        progress, planned = driver.next_round(driver.ask(progress, entry.asked))
        progress = driver.leave(progress, entry.left)
        if entry.paused:
            progress = driver.pause(progress)
    except CoordinatorError as error:
        raise _ContradictionError(step, "rounds", str(error)) from error
    if planned is None:
        raise _ContradictionError(step, "rounds", "the run ends before this round")
    if entry.round != planned:
        text = f"does not follow from the run file: {_differing(planned, entry.round)}"
        raise _ContradictionError(planned.step, "assignment", text)
    if text := _malformed(entry, progress.unready):
        raise _ContradictionError(step, "messages", text)
    return progress


def _finish_round(
    progress: driver.RunProgress, entry: Entry, run: runfile.Run
) -> driver.RunProgress:
    """Compute the decision, and who stores the params: these must be the recorded ones."""
    step = entry.round.step
    try:
        progress, decision = driver.finish_round(progress, entry.round, entry.evidence)
    except ValueError as error:
        raise _ContradictionError(step, "decision", str(error)) from error
    if decision != entry.decision:
        text = f"does not follow from the evidence: {_differing(decision, entry.decision)}"
        raise _ContradictionError(step, "decision", text)
    expected = driver.checkpointer(progress) if run.config.checkpointers else None
    stored = entry.checkpointed
    if expected != (stored and stored.peer):
        text = f"params stored by {stored and f'peer {stored.peer}'}, expected by {expected}"
        raise _ContradictionError(step, "decision", text)
    return driver.checkpointed(progress, stored.peer, stored.params) if stored else progress


def _differing(expected: object, found: object) -> str:
    """Names of the attributes in which two objects of one class differ."""
    attributes = vars(expected)
    return ", ".join(sorted(name for name in attributes if attributes[name] != vars(found)[name]))


def _malformed(entry: Entry, unready: tuple[int, ...]) -> str | None:
    """Why no round could have produced this entry, or None."""
    plan, evidence = entry.round, entry.evidence
    senders = evidence.messages.keys()
    heard = plan.assignment.keys() - set(evidence.silent)
    speakers = evidence.present(plan.witnesses)
    attesting = [attestation.witness for attestation in evidence.attestations]
    problems = [
        (senders != heard, f"messages of peers {sorted(senders)}, expected of {sorted(heard)}"),
        (
            not evidence.others.keys() <= senders,
            f"second messages of peers {sorted(evidence.others)}, expected of {sorted(senders)}",
        ),
        (
            not {*unready} <= {*evidence.silent} <= {*plan.peers},
            f"silent peers {list(evidence.silent)}, expected members, {list(unready)} among them",
        ),
        (
            plan.verifiers and not all(message.state for message in evidence.messages.values()),
            "messages without the sender's state, which the verifiers need",
        ),
        (attesting != speakers, f"attestations of peers {attesting}, expected of {speakers}"),
        (evidence.checks and not plan.verifiers, "checks in a round without verifiers"),
        (
            bool(entry.joined_params) != bool(plan.joined),
            f"joined_params is {entry.joined_params}, and peers {list(plan.joined)} joined",
        ),
    ]
    return next((text for wrong, text in problems if wrong), None)


def _audit_messages(entry: Entry, transcript: Transcript, form: wire.Form) -> list[Finding]:
    """Check every payload against the run's form and its commitment.

    Raises:
      _ContradictionError: The senders whose bytes all must refuse are not the recorded ones.
    """
    refused, findings = [], []
    for messages in (entry.evidence.messages, entry.evidence.others):
        for peer, message in messages.items():
            if reason := why_refused(message, peer, entry.round, transcript, form):
                applied = peer in entry.decision.applied
                findings.append(Finding(entry.round.step, peer, *reason, applied))
                if messages is entry.evidence.messages:
                    refused.append(peer)
    if refused != list(entry.evidence.broken):
        text = f"broken is {list(entry.evidence.broken)}, but the messages of peers {refused} are"
        raise _ContradictionError(entry.round.step, "messages", text, findings)
    return findings


def why_refused(
    message: Message, peer: int, plan: Round, transcript: Transcript, form: wire.Form
) -> tuple[str, str] | None:
    """Return why every receiver refuses a message, as kind and detail of a finding, or None."""
    if message.payload is None or message.offset is None:
        return "payload", "is not kept, expected its bytes"
    try:
        sent = transcript.message(message, form)
        exchange.check(sent, bytes.fromhex(message.commitment), peer, plan)
    except exchange.CommitmentError as error:
        return "commitment", str(error)
    except wire.WireError as error:
        return "payload", str(error)
    return None


def _audit_arrivals(entry: Entry, run: runfile.Run) -> list[Finding]:
    """Check that no message arrives before `[links]` allows it; later is its sender's affair.

    On the wall's clock nobody can tell.
    """
    if run.links.clock == "wall":
        return []
    sizes = {peer: message.bytes for peer, message in entry.evidence.messages.items()}
    tokens, overlap = _tokens(entry.round, run), run.peers.overlap
    present = entry.evidence.present(entry.round.peers)
    earliest = links.arrivals(run.links, present, tokens, sizes, overlap)
    return [
        _against_author(
            entry.round.step,
            "arrivals",
            f"peer {peer}'s message arrived after {at} s, expected {earliest[peer]} s or later",
        )
        for peer, at in entry.evidence.arrivals.items()
        if at < earliest[peer]
    ]


def _audit_checks(entry: Entry, run: runfile.Run, own_size: int) -> list[Finding]:
    """Check that the seed elects who made checks and rulings, and `[links]` allows their times."""

    def differ(text: str) -> Finding:
        return _against_author(entry.round.step, "checks", text)

    def seconds(peer: int, checked: int) -> float:
        if run.links.clock == "wall":
            return 0.0
        count = tokens[checked]
        return links.check_seconds(run.links, peer, checked, tokens=count, size=own_size)

    plan, evidence, tokens = entry.round, entry.evidence, _tokens(entry.round, run)
    present = evidence.present(plan.peers)
    able = set(present) & plan.verifiers.keys()
    pairs = [
        (verifier, peer)
        for verifier, peer in sorted(plan.verifiers.items())
        if verifier in able and peer in evidence.messages
    ]
    if [(check.verifier, check.peer) for check in evidence.checks] != pairs:
        return [differ(f"checks differ from the pairs (verifier, peer) {pairs}")]
    rulings = [
        (pair, committee.tie_breakers(plan.seed, present, pair))
        for check, _ in consensus.disputes(evidence, evidence.checks)
        for pair in [(check.verifier, check.peer)]
    ]
    if [((r.verifier, r.peer), tuple(r.found)) for r in evidence.rulings] != rulings:
        return [differ(f"rulings differ from {rulings}: pairs (verifier, peer) and tie-breakers")]
    findings = []
    if any(check.bytes != own_size for check in evidence.checks):
        findings.append(differ(f"checks of states of other than {own_size} bytes"))
    settling = [seconds(judge, peer) for (_, peer), judges in rulings for judge in judges]
    times = [seconds(*pair) for pair in pairs] + [max([0.0, *settling])]
    if [check.seconds for check in evidence.checks] + [evidence.settle_seconds] != times:
        findings.append(differ("checks take other times than [links] gives"))
    return findings


def _tokens(plan: Round, run: runfile.Run) -> dict[int, int]:
    """Tokens that each peer trains on in a round."""
    length = run.llm.max_seq_len
    return {peer: (last - first + 1) * length for peer, (first, last) in plan.assignment.items()}


def _audit_attestations(entry: Entry, run: runfile.Run) -> list[Finding]:
    """Check that each witness attests what an honest one does to whom the same arrived."""
    limit = run.config.max_round_train_time
    honest = consensus.witnessed(entry.round, entry.evidence, limit)
    return [
        Finding(
            entry.round.step,
            found.witness,
            "attestation",
            f"attested what did not arrive: {_differing(expected, found)}",
            False,
        )
        for found, expected in zip(entry.evidence.attestations, honest, strict=True)
        if found != expected
    ]


def _audit_second_messages(entry: Entry) -> list[Finding]:
    """Name who sent two messages in one round, whether or not a witness received the second."""
    return [
        Finding(
            entry.round.step,
            peer,
            "equivocation",
            f"sent {entry.evidence.messages[peer].commitment[:12]}, and to peers "
            f"{list(message.to)} {message.commitment[:12]}",
            False,
        )
        for peer, message in entry.evidence.others.items()
    ]


def _audit_ejected(entry: Entry, known: list[Finding]) -> list[Finding]:
    """Name those who were caught in the round itself, unless a finding already does."""
    named = {finding.peer for finding in known}
    return [
        Finding(entry.round.step, peer, "ejected", f"caught in its round: {why}", False)
        for peer, why in entry.decision.ejected.items()
        if peer not in named
    ]


# ---- Snapshots ----


def _audit_snapshots(setup: Setup, transcript: Transcript) -> list[Finding]:
    """Check that every snapshot is there, has its hashes, and starts from what convert gives."""
    first, like = setup.start.step, setup.start.state
    due = setup.run.snapshots(first)
    for found, expected in ((transcript.snapshots, due.steps), (transcript.kept, due.kept)):
        if found != expected:
            text = f"snapshots after rounds {found}, expected after {expected}"
            return [_against_author(first, "snapshot", text)]
    findings = []
    for step in due.kept:
        found = audit_snapshot(transcript, step, like, range(len(like.own)))
        if not found and step == first and transcript.hashes(step) != hashes(step, like):
            text = "the first snapshot is not the state that stage convert gives"
            found = [_against_author(step, "snapshot", text)]
        findings += found
    return findings


def audit_snapshot(
    transcript: Transcript, step: int, like: State, peers: Iterable[int]
) -> list[Finding]:
    """Check a snapshot's params, shared state and what `peers` own against its recorded hashes."""
    try:
        expected = transcript.hashes(step)
        if (expected.step, len(expected.own)) != (step, len(like.own)):
            text = f"state.json is of step {expected.step} and {len(expected.own)} peers"
            return [_against_author(step, "snapshot", text)]
        params, shared = transcript.agreed(step, like)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            read = {p: pool.submit(transcript.own, step, p, like.own[p]) for p in peers}
        own = {peer: found.result() for peer, found in read.items()}
    except LockstepError as error:
        text = str(error).removeprefix(f"{transcript.folder}/")  # a verdict names no machine
        return [_against_author(step, "snapshot", text)]
    found = hashes(step, State(params, shared, tuple(own.values())))
    if found != expected.model_copy(update={"own": tuple(expected.own[peer] for peer in own)}):
        text = "its files do not have the hashes that state.json gives"
        return [_against_author(step, "snapshot", text)]
    return []


def _against_author(step: int, kind: str, detail: str) -> Finding:
    """A finding against the author of the transcript: nothing that it says can be built on."""
    return Finding(step, None, kind, detail, True)
