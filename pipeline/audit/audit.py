"""The checks of a transcript that need no training: cheap, and made of every round."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from lockstep.errors import LockstepError
from lockstep.machine import cores
from lockstep.protocol import consensus, links
from lockstep.protocol.driver import RoundSettings
from lockstep.protocol.round import Message, Round
from lockstep.transcript.entry import TABLES, Entry
from lockstep.transcript.recomputed import ContradictionError, begin_round, differing, finish_round
from lockstep.transcript.state import State, hashes
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.windows import Window
from lockstep.wire import bound, exchange
from lockstep.wire import message as wire
from pipeline.audit.verdict import Finding
from pipeline.start.set_up import Setup


def audit(setup: Setup, transcript: Transcript, since: int | None = None) -> list[Finding]:
    """Make all checks that need no training: of the header, every round and every snapshot.

    Messages and snapshots may be missing before round `since`, if somebody started from its state.
    """
    since, windows = since or setup.start.step, None
    if since > setup.start.step:
        run_windows = setup.run.snapshots(setup.start.step).windows
        windows = [window for window in run_windows if window.opening >= since]
    return [
        *audit_header(setup, transcript),
        *audit_rounds(setup, transcript, windows),
        *_audit_snapshots(setup, transcript, since),
    ]


def audit_header(setup: Setup, transcript: Transcript) -> list[Finding]:
    """Check that the header's run and model are the auditor's own."""
    own = {"run": setup.run.model_dump(mode="json", include=TABLES), "model": setup.model}
    names = [name for name in own if getattr(transcript.header, name) != own[name]]
    text = "its {} differs from the auditor's own"
    return [_against_author(setup.start.step, "header", text.format(name)) for name in names]


# ---- Rounds ----


def audit_rounds(
    setup: Setup,
    transcript: Transcript,
    windows: Sequence[Window] | None = None,
    last: int | None = None,
) -> list[Finding]:
    """Recompute every round from the run file and from what was sent and attested in it.

    Seed, assignment, verifiers and witnesses follow from the run file and the rounds before; what
    honest witnesses attest, and whom verifiers check, follows from what was sent; the decision
    follows from what was sent and attested. The transcript may have the payloads of some `windows`
    only, and end with round `last` instead of the run's.
    """
    findings: list[Finding] = []
    run, form, start = setup.run, setup.programs.form, setup.start
    settings = setup.settings
    progress = start.progress(settings)
    own_size = sum(leaf.nbytes for leaf in jax.tree.leaves(start.state.own[0]))
    for entry in transcript.rounds:
        present = windows is None or any(entry.round.step in window.rounds for window in windows)
        round_findings: list[Finding] = []
        try:
            progress = begin_round(progress, entry)
            if not form.kept:
                _check_not_kept(entry, form)
            elif present:
                round_findings, refused = _audit_messages(entry, transcript, form)
                if refused != (broken := list(entry.evidence.broken)):
                    text = f"broken is {broken}, but the messages of peers {refused} are"
                    raise ContradictionError(entry.round.step, "messages", text)
            progress = finish_round(progress, entry)
        except ContradictionError as error:  # nothing after it can be attributed
            return [*findings, *round_findings, _against_author(error.step, error.kind, str(error))]
        findings += _audit_arrivals(entry, settings, setup.programs.optimizer.overlapped)
        findings += _audit_checks(entry, settings, own_size)
        round_findings += _audit_second_messages(entry)
        findings += [*round_findings, *_audit_attestations(entry, settings)]
        findings += _audit_ejected(entry, round_findings)
    done, total = start.step + len(transcript.rounds), run.config.total_steps
    if done < (total if last is None else last):
        text = f"the transcript ends before this round, expected {total} rounds"
        findings.append(_against_author(done + 1, "rounds", text))
    return findings


def _audit_messages(
    entry: Entry, transcript: Transcript, form: wire.Form
) -> tuple[list[Finding], list[int]]:
    """Check every payload against its commitment, and its size against the others' (`bound`).

    Also return the senders whose bytes everybody refuses.
    """
    reasons = []
    for messages in (entry.evidence.messages, entry.evidence.others):
        refusals = {
            peer: reason
            for peer, message in messages.items()
            if (reason := why_refused(message, peer, entry.round, transcript, form))
        }
        if messages is entry.evidence.messages:
            accepted = {peer: m for peer, m in messages.items() if peer not in refusals}
            sizes = {p: bound.largest(transcript.message(m, form)) for p, m in accepted.items()}
            refusals |= {peer: ("payload", why) for peer, why in bound.beyond(sizes).items()}
            refused = [peer for peer in messages if peer in refusals]
        reasons += refusals.items()
    step, applied = entry.round.step, entry.decision.applied
    return [Finding(step, peer, *why, peer in applied) for peer, why in reasons], refused


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


def _check_not_kept(entry: Entry, form: wire.Form) -> None:
    """Check that there is nothing of a round's messages but commitments and true sizes.

    Raises:
      ContradictionError: The transcript's author recorded something else.
    """
    evidence = entry.evidence
    for peer, message in (*evidence.messages.items(), *evidence.others.items()):
        if message.payload is not None:
            text = f"the message of peer {peer} has the payload {message.payload}, expected none"
            raise ContradictionError(entry.round.step, "messages", f"{text}: it is not kept")
    for peer, message in evidence.messages.items():
        broken, size = peer in evidence.broken, form.bytes_about
        if not broken and not form.packed and message.bytes != size:
            text = f"the message of peer {peer} has {message.bytes} bytes, expected {size}"
            raise ContradictionError(entry.round.step, "messages", text)


def _audit_arrivals(entry: Entry, settings: RoundSettings, overlapped: float) -> list[Finding]:
    """Check that no message arrives before `[links]` allows it; later is its sender's affair.

    By a real clock nobody can tell.
    """
    if not settings.links.computed:
        return []
    sizes = {peer: message.bytes for peer, message in entry.evidence.messages.items()}
    tokens = _tokens(entry.round, settings)
    present = entry.evidence.present(entry.round.peers)
    earliest = links.arrivals(settings.links, present, tokens, sizes, overlapped)
    return [
        _against_author(
            entry.round.step,
            "arrivals",
            f"peer {peer}'s message arrived after {at} s, expected {earliest[peer]} s or later",
        )
        for peer, at in entry.evidence.arrivals.items()
        if at < earliest[peer]
    ]


def _audit_checks(entry: Entry, settings: RoundSettings, own_size: int) -> list[Finding]:
    """Check that the right peers made checks and rulings, in times that `[links]` allows."""

    def differ(text: str) -> Finding:
        return _against_author(entry.round.step, "checks", text)

    def seconds(peer: int, checked: int) -> float:
        count = tokens[checked]
        return links.check_seconds(settings.links, peer, checked, tokens=count, size=own_size)

    plan, evidence, tokens = entry.round, entry.evidence, _tokens(entry.round, settings)
    present = evidence.present(plan.peers)
    due = consensus.checked(plan, evidence)
    if bad := set(evidence.withheld).difference(due.values()):
        return [differ(f"peers {sorted(bad)} withheld a state that nobody was to check")]
    pairs = [(verifier, peer) for verifier, peer in due.items() if peer not in evidence.withheld]
    if [(check.verifier, check.peer) for check in evidence.checks] != pairs:
        return [differ(f"checks differ from the pairs (verifier, peer) {pairs}")]
    rulings = [
        (pair, tuple(peer for peer in present if peer not in pair))
        for check, _ in consensus.disputes(evidence, evidence.checks)
        for pair in [(check.verifier, check.peer)]
    ]
    if [((r.verifier, r.peer), tuple(r.found)) for r in evidence.rulings] != rulings:
        return [differ(f"rulings differ from {rulings}: pairs (verifier, peer), and all others")]
    findings = []
    if any(check.bytes != own_size for check in evidence.checks):
        findings.append(differ(f"checks of states of other than {own_size} bytes"))
    settling = [seconds(judge, peer) for (_, peer), judges in rulings for judge in judges]
    times = [seconds(*pair) for pair in pairs] + [max([0.0, *settling])]
    if [check.seconds for check in evidence.checks] + [evidence.settle_seconds] != times:
        findings.append(differ("checks take other times than [links] gives"))
    return findings


def _tokens(plan: Round, settings: RoundSettings) -> dict[int, int]:
    """Return the tokens that each peer trains on in a round that is audited."""
    length = settings.row_tokens
    return {peer: (last - first + 1) * length for peer, (first, last) in plan.assignment.items()}


def _audit_attestations(entry: Entry, settings: RoundSettings) -> list[Finding]:
    """Check that each witness attests what an honest one attests that received the same."""
    limit = settings.closing.closes(entry.round, entry.evidence)
    honest = consensus.witnessed(entry.round, entry.evidence, limit)
    step, text = entry.round.step, "attested what did not arrive: {}"
    return [
        Finding(step, found.witness, "attestation", text.format(differing(expected, found)), False)
        for found, expected in zip(entry.evidence.attestations, honest, strict=True)
        if found != expected
    ]


def _audit_second_messages(entry: Entry) -> list[Finding]:
    """Name peers that sent two messages in one round, whether or not a witness received both."""
    findings = []
    for peer, other in entry.evidence.others.items():
        text = f"sent {entry.evidence.messages[peer].commitment[:12]}, and to peers "
        text += f"{list(other.to)} {other.commitment[:12]}"
        findings.append(Finding(entry.round.step, peer, "equivocation", text, False))
    return findings


def _audit_ejected(entry: Entry, findings: list[Finding]) -> list[Finding]:
    """Name peers that were caught in the round itself, unless a finding already does."""
    named = {finding.peer for finding in findings}
    return [
        Finding(entry.round.step, peer, "ejected", f"caught in its round: {why}", False)
        for peer, why in entry.decision.ejected.items()
        if peer not in named
    ]


# ---- Snapshots ----


def _audit_snapshots(setup: Setup, transcript: Transcript, since: int) -> list[Finding]:
    """Check that every snapshot exists, has its hashes, and starts from what convert gives."""
    first, like = setup.start.step, setup.start.state
    plan = setup.run.snapshots(first)
    steps, kept = ([s for s in d if s == first or s >= since] for d in (plan.steps, plan.kept))
    for found, expected in ((transcript.snapshots, steps), (transcript.kept_snapshots, kept)):
        if found != expected:
            text = f"snapshots after rounds {found}, expected after {expected}"
            return [_against_author(first, "snapshot", text)]
    findings = []
    for step in sorted({*steps}.difference(kept)):  # a replay compares their hashes
        try:
            transcript.hashes(step, len(like.own))
        except LockstepError as error:
            findings.append(_unreadable(transcript, step, error))
    for step in kept:
        owners = whose_own_is_here(setup, transcript, step)
        found = audit_snapshot(transcript, step, like, owners)
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
        expected = transcript.hashes(step, len(like.own))
        params, shared = transcript.agreed(step, like)
        with ThreadPoolExecutor(cores.count()) as pool:
            futures = {p: pool.submit(transcript.own, step, p, like.own[p]) for p in peers}
        own = {peer: found.result() for peer, found in futures.items()}
    except LockstepError as error:
        return [_unreadable(transcript, step, error)]
    found = hashes(step, State(params, shared, tuple(own.values())))
    if found != expected.model_copy(update={"own": tuple(expected.own[peer] for peer in own)}):
        text = "its files do not have the hashes that state.json gives"
        return [_against_author(step, "snapshot", text)]
    return []


def whose_own_is_here(setup: Setup, transcript: Transcript, step: int) -> list[int]:
    """Return the peers whose own state a snapshot that is kept whole must have.

    These are all peers; where peers do not show what they own, those that the transcript has.
    """
    all_show, peers = setup.settings.reports.show_own, range(setup.run.peers.count)
    return [peer for peer in peers if all_show or transcript.has_own(step, peer)]


def audit_ends(
    setup: Setup, transcript: Transcript, window: Window, peers: Iterable[int]
) -> list[Finding]:
    """Check the two snapshots between which some peers of a window are replayed.

    What a peer owned before may be missing, where it began anew.
    """
    step, fresh = window.opening, [peer for peer in peers if transcript.begins_anew(window, peer)]
    first = [peer for peer in peers if peer not in fresh or transcript.has_own(step, peer)]
    last = [peer for peer in peers if transcript.has_own(window.last, peer)]
    like = setup.start.state
    ends = ((window.opening, first), (window.last, last))
    return [f for step, owners in ends for f in audit_snapshot(transcript, step, like, owners)]


def _unreadable(transcript: Transcript, step: int, error: LockstepError) -> Finding:
    text = str(error).removeprefix(f"{transcript.folder}/")  # a verdict names no machine
    return _against_author(step, "snapshot", text)


def _against_author(step: int, kind: str, detail: str) -> Finding:
    """Return a finding against a transcript's author: nothing can be built on the transcript."""
    return Finding(step, None, kind, detail, True)
