"""`lockstep verify` asks here what is known of a run of volunteers without a key."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from lockstep.errors import LockstepError, RequestError
from lockstep.files import read_bytes
from parts.volunteers import joining, layout, planted
from parts.volunteers.joining import FollowedRun
from parts.volunteers.keys import SCHEME, PublicKey, parse_public
from parts.volunteers.replaying import (
    AuditState,
    RepeatedWindow,
    ReplayRequest,
    StateError,
    audit_states,
    replay,
)
from parts.volunteers.signed import MOST_BYTES
from parts.volunteers.store.schemes import open_store
from parts.volunteers.training.process import Onlooker
from pipeline.audit.verdict import Finding
from pipeline.command_options import MOST_GB
from pipeline.net.limits import NetSettings
from pipeline.recheck.claim import PublicClaim

DRAWN = "drawn"


def is_run(source: str, network: NetSettings) -> bool:
    """Return whether an address is that of a run of volunteers; a web server is asked."""
    scheme, _, rest = source.partition("://")
    if not rest or scheme not in ("file", "http", "https", "s3"):
        return False
    if not scheme.startswith("http"):
        return True
    try:
        return open_store(source, network).look(layout.RUN, MOST_BYTES) is not None
    except LockstepError:
        return False  # whatever else is there says why


def verify(  # noqa: PLR0913
    source: str,
    root: Path,
    replays: Sequence[str],
    say: Callable[[str], object],
    *,
    follows: bool,
    key: Path | None = None,
    network: NetSettings = joining.PATIENCE,
    max_gb: int = MOST_GB,
) -> tuple[bool, list[PublicClaim], list[str], str]:
    """Follow a run to its newest link, or to its end, and replay some windows.

    Args:
      source: Its address.
      root: Where it is followed to.
      replays: PEER:WINDOW, both counted from 0, or DRAWN for all that were drawn and can be.
      say: Gets a line a round.
      follows: Whether to wait for the links that come.
      key: The lab's KEY as the reader knows it, or a file that has it.
      network: How long to wait for the store.
      max_gb: The most that its data and checkpoint may have together, 10^9 bytes.

    Returns:
      Whether what was replayed was compared bit for bit; what is known; why it is not verified; and
      how much was computed again.

    Raises:
      LockstepError: A message is not the result of its peer's work, or no link can ever follow.
    """
    requested = {ReplayRequest.parse(text): None for text in replays if text != DRAWN}
    lab = None if key is None else _lab(key)
    followed = joining.follow(source, root, Onlooker(follows, say), network, lab, max_gb)
    setup, transcript, chain, end = followed
    audits = audit_states(setup, transcript, chain)
    drawn = {a.request: a for a in audits if DRAWN in replays and a.state in ("known", "shown")}
    replayed, lacking = list[RepeatedWindow](), dict[ReplayRequest, RequestError]()
    with closing(setup.programs.steps.by):
        for w in requested | drawn:
            try:
                replayed.append(replay(setup, transcript, chain, w))
            except RequestError as error:
                lacking[w] = error
    accused = {w.request: bool(w.findings) for w in replayed if w.messages and not w.why}
    lies = planted.report(chain, transcript, accused)
    others = (
        f for w in replayed for f in w.findings if (f.kind, f.peer, f.round) not in lies.shown
    )
    if wrong := [*(end.wrong if end else ()), *map(_accusation, others)]:
        raise LockstepError("; ".join([*wrong, *lies.texts]))
    for w in requested.keys() & lacking.keys():
        raise lacking[w]
    repeated = [w for w in replayed if w.messages and not w.findings]
    why_not = [] if repeated else ["no window with messages was repeated: --replay PEER:WINDOW"]
    why_not += [] if lab else ["that the run is its lab's is its own word: --key KEY, the lab's"]
    why_not += [w.why for w in repeated if w.why]
    why_not += ["messages are lies that the lab planted, or may be"] if lies.texts else []
    why_not += end.refused if end else []
    why_not += _not_shown(audits, lacking, source, asks_all=DRAWN in replays)
    claims = [*_claims(followed, repeated), _drawn_claim(audits)]
    claims += [_lab_claim(chain.document.lab, knows=lab is not None)]
    known = "sampled" if lies.values else "stated"
    claims += [PublicClaim("planted", known, text, lies.values) for text in lies.texts]
    after = chain.signed_later(chain.snapshots.end, "closed", in_all=not follows)
    if beyond := end.beyond if end else [name for name, _ in after]:
        text = f"{len(beyond)} objects of later rounds, which count for nothing: {beyond[0]}"
        claims.append(PublicClaim("beyond", "proven", text, {"names": beyond}))
    share = f"{claims[1].values['rounds']} of {claims[1].values['of']} rounds"
    return bool(repeated) and not any(w.why for w in repeated), claims, why_not, share


def _not_shown(
    audits: Sequence[AuditState],
    lacking: Mapping[ReplayRequest, RequestError],
    source: str,
    *,
    asks_all: bool,
) -> list[str]:
    """Say which drawn windows `verify` cannot repeat, and whose slot the lab may end for it."""
    texts = []
    for audit in audits:
        error, peer = lacking.get(audit.request), audit.drawn.peer
        is_its_fault = isinstance(error, StateError) and error.is_its_fault
        if error or audit.state in ("missing", "unsigned", "awaited" if asks_all else ""):
            text = f"peer {peer}, window {audit.drawn.number}: {error or audit.state}"
            if is_its_fault or audit.state == "missing":
                ended = f"lockstep volunteer admit {source} {peer} --because {audit.name}"
                text += f": `{ended}` ends its slot"
            texts.append(text)
    return texts


def _lab(key: Path) -> PublicKey:
    """Return the lab's key that `verify` was given: KEY itself, or what a file has."""
    text = str(key)
    if not text.startswith(SCHEME):
        text = read_bytes(key, MOST_BYTES).decode(errors="replace").strip() if key.is_file() else ""
    try:
        return parse_public(text, f"--key {key}")
    except LockstepError as error:
        raise RequestError(str(error)) from None


def _drawn_claim(audits: Sequence[AuditState]) -> PublicClaim:
    states = Counter(audit.state for audit in audits)
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    text = (
        f"{len(audits)} windows are drawn for audits, and what their peers owned is: {counts}; "
        "what is shown was put, and is looked at by --replay"
    )
    values = {"drawn": [[audit.drawn.peer, audit.drawn.number, audit.state] for audit in audits]}
    return PublicClaim("audits", "proven", text if audits else "no window is drawn yet", values)


def _accusation(finding: Finding) -> str:
    """Say what a replay found, and what in the store shows it."""
    text = f"round {finding.round}, {finding.kind}: {finding.detail}"
    if finding.peer is None:
        return text
    name = layout.of_peer(finding.round, finding.peer, "record")
    return f"peer {finding.peer}, {text}; it signed {name}"


def _claims(followed: FollowedRun, replayed: Sequence[RepeatedWindow]) -> list[PublicClaim]:
    setup, transcript = followed.setup, followed.transcript
    entries, run = transcript.rounds, setup.run
    count, total = len(entries), run.config.total_steps - setup.start.step
    merged = sum(len(entry.decision.applied) for entry in entries)
    ejected = {p: why for entry in entries for p, why in entry.decision.ejected.items()}
    out = "".join(f"; peer {peer} was ejected ({why})" for peer, why in sorted(ejected.items()))
    # each that is over, of who sent a message in it
    total_windows = len(followed.chain.draws.drawn) + len(followed.chain.draws.spared)
    asked, left = (sum(len(getattr(e, what)) for e in entries) for what in ("asked", "left"))
    values = {"rounds": count, "of": total, "messages": merged, "ejected": sorted(ejected)}
    values |= {"asked": asked, "left": left}
    if entries and transcript.snapshots[-1] == entries[-1].round.step:
        values["params"] = transcript.hashes(transcript.snapshots[-1]).params
    claims = [
        PublicClaim("start", "proven", "the state before the first round, made again here"),
        PublicClaim(
            "links",
            "proven",
            f"{count} of {total} rounds: each link and its signature, each decision, each merge of "
            f"{merged} signed messages, {asked} requests to take part, {left} notices of leaving, "
            f"and the params after it{out}",
            values,
        ),
    ]
    repeat = [rerun for rerun in replayed if rerun.why is None]
    if repeat:
        text = "; ".join(f"{_window(rerun)} repeats bit for bit" for rerun in repeat)
        repeated = [[*rerun.request] for rerun in repeat]
        values = {"repeated": repeated, "total": total_windows}
        claims.append(PublicClaim("windows", "sampled", text, values))
    for rerun in replayed:
        if rerun.why is not None:
            text = f"{_window(rerun)} is not comparable here: {rerun.why}"
            claims.append(PublicClaim("not_comparable", "stated", text, {"why": rerun.why}))
    if left := total_windows - len(replayed):
        text = f"the work in {left} of {total_windows} windows"
        claims.append(PublicClaim("other_windows", "stated", text, {"count": left}))
    stated = (
        "losses and machines by those who signed them, times by the store; states for who begins "
        "later are not read"
    )
    claims.append(PublicClaim("losses", "stated", stated))
    return claims


def _window(rerun: RepeatedWindow) -> str:
    peer, number = rerun.request
    rounds = f"rounds {rerun.window.first}-{rerun.window.last}, {rerun.messages} messages"
    return f"window {number} of peer {peer} ({rounds})"


def _lab_claim(lab: str, *, knows: bool) -> PublicClaim:
    own = "" if knows else f"that {lab} is the lab's key, "
    text = "that the store shows all the same, and that keys are of different people"
    return PublicClaim("keys", "stated", own + text, {"lab": lab})
