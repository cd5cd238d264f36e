"""What can be checked of a transcript without training: cheap, and for every round."""

import jax

from pipeline import runfile
from pipeline.audit.verdict import Finding
from pipeline.errors import LockstepError
from pipeline.protocol import committee, consensus, links
from pipeline.protocol import driver as rounds
from pipeline.protocol.coordinator import CoordinatorError
from pipeline.protocol.dispute import Check
from pipeline.protocol.round import Message, Round
from pipeline.swarm.begin import Start
from pipeline.transcript.entry import TABLES, Entry, Header
from pipeline.transcript.state import hashes
from pipeline.transcript.transcript import Transcript
from pipeline.wire import exchange
from pipeline.wire import message as wire


def audit(
    run: runfile.Run, hf_config: dict, transcript: Transcript, form: wire.Form, begin: Start
) -> list[Finding]:
    """All checks that take no training: of the header, of every round and of every snapshot.

    Args:
      run: the run file's.
      hf_config: config.json of the model that stage convert left.
      transcript: what is checked.
      form: of the run's messages.
      begin: what training starts from.
    """
    return [
        *_audit_header(run, hf_config, transcript.header, begin.step),
        *_audit_rounds(run, transcript, form, begin),
        *_audit_snapshots(run, transcript, begin),
    ]


def _audit_header(run: runfile.Run, hf_config: dict, header: Header, step: int) -> list[Finding]:
    """What it says was run is what the run file says."""
    said = {"run": header.run, "model": header.model}
    expected = {"run": run.model_dump(mode="json", include=TABLES), "model": hf_config}
    return [
        _against(step, "header", f"its {name} is not what the run file gives")
        for name in said
        if said[name] != expected[name]
    ]


def _audit_rounds(
    run: runfile.Run, transcript: Transcript, form: wire.Form, begin: Start
) -> list[Finding]:
    """Recomputes every round from the run file and what was sent and said in it.

    Seed, assignment, verifiers and witnesses follow from the run file and the rounds before, so
    they must be equal to what is recorded; the decision follows from what was sent and said; what
    honest witnesses say follows from what was sent.
    """
    findings: list[Finding] = []
    progress = begin.progress(run)
    own_size = sum(leaf.nbytes for leaf in jax.tree.leaves(begin.state.own[0]))
    for entry in transcript.rounds:
        try:
            progress, round = rounds.next_round(rounds.ask(progress, entry.asked))
        except CoordinatorError as error:
            findings.append(_against(entry.round.step, "rounds", str(error)))
            break  # nothing after it can be attributed
        if round is None:
            findings.append(_against(entry.round.step, "rounds", "a round after the last one"))
            break
        if entry.round != round:
            found, planned = vars(entry.round), vars(round)
            differing = sorted(name for name in planned if planned[name] != found[name])
            text = f"found other {', '.join(differing)} than the run file gives"
            findings.append(_against(round.step, "assignment", text))
            break
        if text := _malformed(entry, progress.unready):
            findings.append(_against(round.step, "messages", text))
            break
        broken, found = _audit_messages(entry, transcript, form)
        if broken != list(entry.evidence.broken):
            text = f"names peers {list(entry.evidence.broken)} as those who sent no message, "
            text += f"found {broken}"
            findings += [*found, _against(round.step, "messages", text)]
            break
        try:
            progress, decision = rounds.finish_round(progress, round, entry.evidence)
        except ValueError as error:
            findings.append(_against(round.step, "decision", str(error)))
            break
        if decision != entry.decision:
            text = "found another decision than follows from what was said"
            findings.append(_against(round.step, "decision", text))
            break
        findings += _audit_times(entry, run, own_size)
        found += _audit_others(entry)
        findings += [*found, *_audit_words(entry, run), *_audit_ejected(entry, found)]
    else:
        done = len(transcript.rounds)
        if done < run.config.total_steps - begin.step:
            text = f"the transcript ends before it, expected {run.config.total_steps} rounds"
            findings.append(_against(begin.step + done + 1, "rounds", text))
    return findings


def _malformed(entry: Entry, unready: tuple[int, ...]) -> str | None:
    """What makes an entry one that no round can leave behind."""
    round, evidence = entry.round, entry.evidence
    senders = evidence.messages.keys()
    if not senders <= round.assignment.keys() - set(evidence.silent):
        expected = sorted(round.assignment.keys() - set(evidence.silent))
        return f"of peers {sorted(senders)}, expected some of {expected}"
    missing = round.assignment.keys() - set(evidence.silent) - senders
    if missing:
        return f"none of peers {sorted(missing)}, and they were heard"
    if not evidence.others.keys() <= senders:
        return f"other messages of peers {sorted(evidence.others)}, expected of {sorted(senders)}"
    if not {*unready} <= {*evidence.silent} <= {*round.peers}:
        return f"silent peers {list(evidence.silent)}, expected members, {list(unready)} among them"
    if round.verifiers and not all(message.state for message in evidence.messages.values()):
        return "without the state after the step, which verifiers need"
    words = [word.witness for word in evidence.attestations]
    if words != [peer for peer in round.witnesses if peer not in evidence.silent]:
        return f"attestations of peers {words}, expected of all witnesses that were heard"
    if evidence.checks and not round.verifiers:
        return "checks, and the round has no verifiers"
    if bool(entry.joined_params) != bool(round.joined):
        return f"params of those who joined, which are {list(round.joined)}"
    return None


def _audit_times(entry: Entry, run: runfile.Run, own_size: int) -> list[Finding]:
    """No message arrives before `[links]` allows it: later is its sender's affair. Checks and
    rulings are of those whom the round's seed elects, and take the time that `[links]` gives."""
    round, step, evidence = entry.round, entry.round.step, entry.evidence
    length = run.llm.max_seq_len
    present = [peer for peer in round.peers if peer not in evidence.silent]
    tokens = {peer: (last - first + 1) * length for peer, (first, last) in round.assignment.items()}
    sizes = {peer: message.bytes for peer, message in evidence.messages.items()}
    earliest = links.arrivals(run.links, present, tokens, sizes)
    findings = [
        _against(
            step, "arrivals", f"of peer {peer} after {at} s, expected {earliest[peer]} or more"
        )
        for peer, at in evidence.arrivals.items()
        if at < earliest[peer]
    ]
    expected = [
        (verifier, peer)
        for verifier, peer in sorted(round.verifiers.items())
        if verifier not in evidence.silent and peer in evidence.messages
    ]
    if [(check.verifier, check.peer) for check in evidence.checks] != expected:
        text = f"checks other than the pairs {expected}"
        return [*findings, _against(step, "checks", text)]
    disputed = [check for check, _ in consensus.disputes(evidence, evidence.checks)]
    judges = [
        (c.verifier, c.peer, committee.tie_breakers(round.seed, present, (c.verifier, c.peer)))
        for c in disputed
    ]
    if [(r.verifier, r.peer, tuple(r.found)) for r in evidence.rulings] != judges:
        text = f"rulings other than of {judges} (verifier, peer, tie-breakers)"
        return [*findings, _against(step, "checks", text)]

    def takes(who: int, check: Check) -> float:
        count = tokens[check.peer]
        return links.check_seconds(run.links, who, check.peer, tokens=count, size=own_size)

    settling = [
        takes(judge, check)
        for check, (_, _, those) in zip(disputed, judges, strict=True)
        for judge in those
    ]
    if any(check.bytes != own_size for check in evidence.checks):
        findings.append(_against(step, "checks", f"of states other than of {own_size} bytes"))
    times = [check.seconds for check in evidence.checks] + [evidence.settle_seconds]
    if times != [takes(c.verifier, c) for c in evidence.checks] + [max([0.0, *settling])]:
        findings.append(_against(step, "checks", "found other times than [links] gives"))
    return findings


def _audit_messages(
    entry: Entry, transcript: Transcript, form: wire.Form
) -> tuple[list[int], list[Finding]]:
    """Payload against form and commitment, for every message of a form whose payload is kept.

    Returns:
      The senders whose bytes every receiver has to refuse, and what was found.
    """
    if form.kind == wire.DENSE:  # not kept: what the entry says is all there is to know
        return list(entry.evidence.broken), []
    broken, findings = [], []
    for messages in (entry.evidence.messages, entry.evidence.others):
        for peer, message in messages.items():
            if refusal := why_refused(message, peer, entry.round, transcript, form):
                kind, text = refusal
                applied = peer in entry.decision.applied
                findings.append(Finding(entry.round.step, peer, kind, text, applied))
                if messages is entry.evidence.messages:
                    broken.append(peer)
    return broken, findings


def why_refused(
    message: Message, peer: int, round: Round, transcript: Transcript, form: wire.Form
) -> tuple[str, str] | None:
    """The kind of finding that a message is, and what was found; None: every receiver takes it."""
    if message.payload is None or message.offset is None:
        return "payload", "is not kept, expected its bytes"
    try:
        sent = transcript.message(message, form)
        exchange.check(sent, bytes.fromhex(message.commitment), peer, round)
    except exchange.CommitmentError as error:
        return "commitment", str(error)
    except wire.WireError as error:
        return "payload", str(error)
    return None


def _audit_words(entry: Entry, run: runfile.Run) -> list[Finding]:
    """Each witness said what an honest one says who got what arrived."""
    round, limit = entry.round, run.config.max_round_train_time
    honest = consensus.witnessed(round, entry.evidence, limit)
    findings = []
    for said, expected in zip(entry.evidence.attestations, honest, strict=True):
        if said != expected:
            names = [name for name in vars(expected) if vars(expected)[name] != vars(said)[name]]
            text = f"attested other {', '.join(names)} than what arrived"
            findings.append(Finding(round.step, said.witness, "attestation", text, False))
    return findings


def _audit_others(entry: Entry) -> list[Finding]:
    """Two messages of one peer in one round, whether a witness had the other or not."""
    return [
        Finding(
            entry.round.step,
            peer,
            "equivocation",
            f"sent {entry.evidence.messages[peer].commitment[:12]}, "
            f"and to peers {list(message.to)} {message.commitment[:12]}",
            False,
        )
        for peer, message in entry.evidence.others.items()
    ]


def _audit_ejected(entry: Entry, known: list[Finding]) -> list[Finding]:
    """Those who were caught in the round itself, unless a finding names them already."""
    named = {finding.peer for finding in known}
    return [
        Finding(entry.round.step, peer, "ejected", f"caught in its round: {why}", False)
        for peer, why in entry.decision.ejected.items()
        if peer not in named
    ]


def _audit_snapshots(run: runfile.Run, transcript: Transcript, begin: Start) -> list[Finding]:
    """Snapshots lie where the run file puts them, their files are what was committed to, and the
    first is what stage convert gives."""
    due = run.snapshots(begin.step)
    for found, expected in ((transcript.snapshots, due.steps), (transcript.kept, due.kept)):
        if found != expected:
            text = f"found after rounds {found}, expected after {expected}"
            return [_against(begin.step, "snapshot", text)]
    findings = []
    for step in due.kept:
        try:
            found, recorded = hashes(transcript.state(step, begin.state)), transcript.recorded(step)
        except LockstepError as error:
            text = str(error).removeprefix(f"{transcript.folder}/")  # a verdict knows no machine
            findings.append(_against(step, "snapshot", text))
            continue
        if recorded != {"step": step} | found:
            text = "its files hash to other than recorded"
            findings.append(_against(step, "snapshot", text))
        elif step == begin.step and found != hashes(begin.state):
            text = "the first snapshot is not the state that stage convert gives"
            findings.append(_against(step, "snapshot", text))
    return findings


def _against(step: int, kind: str, detail: str) -> Finding:
    """A finding against the author of the transcript: nothing that it says can be built on."""
    return Finding(step, None, kind, detail, True)
