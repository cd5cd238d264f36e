"""What can be checked of a transcript without training: cheap, and for every round."""

from dataclasses import asdict, dataclass

from pipeline import config
from pipeline.errors import LockstepError
from pipeline.start import Start
from pipeline.swarm import exchange, links, rounds, wire
from pipeline.swarm.entry import TABLES, Entry, Header
from pipeline.swarm.state import hashes
from pipeline.swarm.transcript import Transcript


@dataclass(frozen=True)
class Finding:
    """Something that is not as an honest run would have it.

    round: the step; peer: who is to blame, None where it is the transcript's author; kind: what was
    found wrong; detail: found and expected, in one line.
    """

    round: int
    peer: int | None
    kind: str
    detail: str

    def to_json(self) -> dict:
        """The finding as verdict.json holds it."""
        return asdict(self)


def audit(
    run: config.Run, hf_config: dict, transcript: Transcript, form: wire.Form, begin: Start
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


def _audit_header(run: config.Run, hf_config: dict, header: Header, step: int) -> list[Finding]:
    """What it says was run is what the run file says."""
    said = {"run": header.run, "model": header.model}
    expected = {"run": run.model_dump(mode="json", include=TABLES), "model": hf_config}
    return [
        Finding(step, None, "header", f"its {name} is not what the run file gives")
        for name in said
        if said[name] != expected[name]
    ]


def _audit_rounds(
    run: config.Run, transcript: Transcript, form: wire.Form, begin: Start
) -> list[Finding]:
    """Recomputes every round's seed, assignment, committee, arrivals, quorum and commitments.

    All of them are pure functions of the run file, so each must be equal to what is recorded; a
    payload must decode to a message of the run's form that hashes to its peer's commitment.
    """
    findings: list[Finding] = []
    progress = rounds.start(
        run.config,
        run.peers.count,
        run.peers.seed,
        run.llm.max_seq_len,
        begin.step,
        begin.data_index,
    )
    for entry in transcript.rounds:
        progress, round = rounds.next_round(progress)
        if round is None:
            findings.append(_against(entry, "rounds", "a round after the last one"))
            break
        if entry.round != round:
            found, planned = vars(entry.round), vars(round)
            differing = sorted(name for name in planned if planned[name] != found[name])
            text = f"found other {', '.join(differing)} than the run file gives"
            findings.append(_against(entry, "assignment", text))
            break  # nothing after it can be attributed
        if entry.messages.keys() != round.assignment.keys():
            text = f"of peers {sorted(entry.messages)}, expected {sorted(round.assignment)}"
            findings.append(_against(entry, "messages", text))
            break
        findings += _audit_messages(entry, transcript, form)
        sizes = {peer: message.bytes for peer, message in entry.messages.items()}
        tokens = {
            peer: (last - first + 1) * run.llm.max_seq_len
            for peer, (first, last) in round.assignment.items()
        }
        arrivals = links.arrivals(run.links, range(run.peers.count), tokens, sizes)
        if arrivals != entry.arrivals:
            findings.append(_against(entry, "arrivals", "found other times than [links] gives"))
        commitments = {
            peer: bytes.fromhex(message.commitment) for peer, message in entry.messages.items()
        }
        progress, decision = rounds.finish_round(progress, round, arrivals, commitments)
        if decision != entry.decision:
            text = "found another decision or other attestations than the commitments give"
            findings.append(_against(entry, "decision", text))
    else:
        progress, round = rounds.next_round(progress)
        if round is not None:
            text = f"the transcript ends before it, expected {run.config.total_steps} rounds"
            findings.append(Finding(round.step, None, "rounds", text))
    return findings


def _audit_messages(entry: Entry, transcript: Transcript, form: wire.Form) -> list[Finding]:
    """Payload against form and commitment, for every message of a form whose payload is kept."""
    if form.kind == wire.DENSE:
        return []
    findings, step = [], entry.round.step
    for peer, message in entry.messages.items():
        if message.payload is None or message.offset is None:
            findings.append(Finding(step, peer, "payload", "is not kept, expected its bytes"))
            continue
        try:
            decoded = wire.decode(transcript.payload(message), form)
        except wire.WireError as error:
            findings.append(Finding(step, peer, "payload", str(error)))
            continue
        found = exchange.commit(decoded, peer, entry.round).hex()
        if found != message.commitment:
            text = f"payload hashes to {found[:12]}, expected its commitment "
            findings.append(Finding(step, peer, "commitment", text + message.commitment[:12]))
    return findings


def _audit_snapshots(run: config.Run, transcript: Transcript, begin: Start) -> list[Finding]:
    """Snapshots lie where the run file puts them, their files are what was committed to, and the
    first is what stage convert gives."""
    every, total = run.witness.snapshot_every, run.config.total_steps
    due = [begin.step, *(s for s in range(begin.step + 1, total) if s % every == 0), total]
    if transcript.snapshots != due:
        text = f"found after rounds {transcript.snapshots}, expected after {due}"
        return [Finding(begin.step, None, "snapshot", text)]
    findings = []
    for step in due:
        try:
            found, recorded = hashes(transcript.state(step, begin.state)), transcript.recorded(step)
        except LockstepError as error:
            text = str(error).removeprefix(f"{transcript.folder}/")  # a verdict knows no machine
            findings.append(Finding(step, None, "snapshot", text))
            continue
        if recorded != {"step": step} | found:
            text = "its files hash to other than recorded"
            findings.append(Finding(step, None, "snapshot", text))
        elif step == begin.step and found != hashes(begin.state):
            text = "the first snapshot is not the state that stage convert gives"
            findings.append(Finding(step, None, "snapshot", text))
    return findings


def _against(entry: Entry, kind: str, detail: str) -> Finding:
    return Finding(entry.round.step, None, kind, detail)
