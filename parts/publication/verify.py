"""`lockstep verify`: each stage is asked to make its outputs again from what is published."""

import hashlib
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

from lockstep import __version__
from lockstep.errors import LockstepError, brief, expecting
from lockstep.files import read_json, sha256_file
from lockstep.tables.validation import validate
from lockstep.transcript import curves
from lockstep.transcript.transcript import Transcript
from parts.publication import in_toto, layout
from parts.publication import transcript as published_transcript
from parts.publication.claims import Verified, in_order
from parts.publication.layout import MANIFEST, DrawnWindow, Publication, ReaderAsks
from parts.publication.transcript import Unpacked
from pipeline import recheck, runfile
from pipeline.audit import rows_file
from pipeline.audit.audit import audit_header, audit_rounds
from pipeline.audit.sample import Beacon, read_beacon
from pipeline.audit.verdict import contradictions
from pipeline.pages.card import without_commit
from pipeline.recheck import outputs, report
from pipeline.recheck.claim import PublicClaim
from pipeline.recheck.outputs import CARD, HEADER, TRANSCRIPT, MadeFile, PublishedFile
from pipeline.recheck.published import (
    Draw,
    PublishedRun,
    PublishedTranscript,
    ReaderFiles,
    SeedOf,
    refuse,
)
from pipeline.stage.keys import STAGES, digest, needs
from pipeline.start import set_up
from pipeline.subject import subject_of, subject_of_model


def verify(
    folder: Path,
    publication: Publication,
    run: runfile.Run,
    asks: ReaderAsks,
    own: ReaderFiles,
    max_gb: int,
) -> Verified:
    """Verify a publication whose files match its list.

    Files of windows that were not chosen may be missing. The transcript's files may have at most
    `max_gb` 10^9 bytes together.
    """
    rows = layout.choose(publication, asks)
    skip = layout.not_needed(publication, rows)
    unpacked = published_transcript.unpack(folder, own.aside, publication, skip, int(max_gb * 1e9))
    published = _audited(folder, unpacked, publication, run, rows, own, asks.seed)
    count, total = len(publication.files) - len(skip), len(publication.files)
    text = f"{count}{'' if count == total else f' of {total}'} files as published"
    claims = [PublicClaim("files", "proven", text, {"count": count})]
    with closing(published.setup.programs.steps.by):
        for stage in STAGES:
            claims += import_module(f"{recheck.__name__}.{stage}").recheck(published)
    why_not = ["windows are not comparable here"] if published.why is not None else []
    why_not += published.draw.why_not_verified(len(published.chosen))
    if not published.same_release:
        why_not.append(f"release {brief(publication.release)} wrote it, and this is {__version__}")
    claims = in_order(claims)
    share, odds = in_toto.sampled({claim.name: claim.values for claim in claims})
    training = _training(published) | {"share": share, "odds": odds}
    validate(in_toto.TrainedRun, training, f"{outputs.PROOF}/")  # what records say may be anything
    return Verified(published.why is None, claims, why_not, _share(published), training)


def _share(published: PublishedRun) -> str:
    """Return how much of the run `verify` computed again."""
    rounds, stated = len(published.transcript.rounds), published.stated_rounds
    text = f"{len(published.repeated)} of {published.draw.total} windows were repeated"
    return f"{text}, and {stated} of {rounds} rounds are its author's word" if stated else text


def _training(published: PublishedRun) -> dict[str, Any]:
    """Return what was trained, as `in_toto.TrainedRun` has it, but for its sample."""
    run, transcript = published.run, published.transcript
    llm, made = run.model_dump(mode="json")["model"]["LLM"], published.made["train"]
    method, rounds, folder = run.llm.optimizer.tag(), transcript.rounds, published.folder
    code = {k: v for k, v in made.content.items() if not k.startswith(("[", "stage "))}
    with expecting(f"{outputs.PROOF}/", "records of the stages", *in_toto.NONE_OF_OURS):
        source = read_json(folder / outputs.SHARDS)["source"]
        start = read_json(folder / outputs.SOURCE)
        data = {"name": brief(source["read"]), "listing": source["sha256"], "pin": run.pins.data}
        start = {"kind": start["checkpoint"], "seed": start.get("seed"), "sha256": start["sha256"]}
    return {
        "format": 1,
        "method": method,
        "settings": {} if isinstance(llm["optimizer"], str) else llm["optimizer"][method],
        "schedule": llm["lr_schedule"],
        "peers": run.peers.count,
        "data": data | {"shards": published.files[outputs.SHARDS]},
        "start": start | {"params": transcript.hashes(transcript.snapshots[0]).params},
        "rounds": len(rounds),
        "tokens": curves.rows(transcript)[-1]["tokens"],
        "bytes": sum(m.bytes for entry in rounds for m in entry.evidence.messages.values()),
        "machines": [transcript.header.environment],
        "digests": {"transcript": transcript.hash, "code": digest(code)},
    }


def _audited(
    folder: Path,
    unpacked: Unpacked,
    publication: Publication,
    run: runfile.Run,
    rows: list[str],
    own: ReaderFiles,
    seed: str | None,
) -> PublishedRun:
    """Audit the header and every round for `verify`, with all messages that are published.

    `rows` names the rows of the windows to repeat; `seed` is the reader's, or None.
    """
    transcript = _read_transcript(folder, unpacked, publication, run)
    header, start = transcript.header, transcript.rounds[0].round.step - 1
    columns, bound = publication.columns, subject_of(run).vocab_size(header.model)
    pieces = [rows_file.read(folder / name, columns, run, bound) for name in rows]
    index = transcript.rounds[0].round.data_index
    setup = set_up.blank(run, header.model, rows_file.joined(pieces), columns, start, index)
    due, kept = run.snapshots(start), setup.programs.form.kept
    if transcript.snapshots != due.steps:
        raise LockstepError(
            f"{TRANSCRIPT}/snapshots: are after rounds {transcript.snapshots}, expected {due.steps}"
        )
    beacon = read_beacon(run.witness.beacon)
    drawn = layout.draw(
        transcript, due.windows, layout.seed_of(transcript, publication.seed, beacon),
        publication.windows, kept=kept, show_own=setup.settings.reports.show_own,
    )  # fmt: skip
    check_transcript(publication, transcript, drawn, run, kept=kept)
    audited = None if kept else [w.window for w in drawn]
    findings = audit_header(setup, transcript) + audit_rounds(setup, transcript, audited)
    refuse(contradictions(findings))
    made = check_made(folder, publication, transcript, unpacked)
    possible = len(layout.possible(transcript, due.windows, kept))
    draw = Draw(
        len(drawn), possible, 0 if kept else 1, _seed_of(publication, seed, beacon),
        beacon.text if beacon else None,
    )  # fmt: skip
    files = {name: file.sha256 for name, file in publication.files.items()}
    chosen = [w for w in drawn if layout.row_file(w, kept) in rows]
    return PublishedRun(
        folder, files, own, setup, transcript, due.windows, chosen, rows, findings, draw, made,
        publication.release, publication.commit,
    )  # fmt: skip


def _read_transcript(
    folder: Path, unpacked: Unpacked, publication: Publication, run: runfile.Run
) -> PublishedTranscript:
    """Return the transcript for `verify`: the listed one, of all rounds, and of the run's model."""
    weights = folder if run.export.dtype == "float32" else None
    transcript = PublishedTranscript(unpacked.folder, weights)
    entries, total = transcript.rounds, run.config.total_steps
    if publication.rounds != transcript.hash:
        raise LockstepError(
            f"{MANIFEST}: rounds is {publication.rounds[:12]}, expected {transcript.hash[:12]} of "
            f"{TRANSCRIPT}/rounds.jsonl"
        )
    start = entries[0].round.step - 1 if entries else -1
    if start < 0 or len(entries) != total - start:
        raise LockstepError(
            f"{TRANSCRIPT}/rounds.jsonl: {len(entries)} rounds, expected all of {total}"
        )
    model_file = subject_of_model(transcript.header.model).exports.model_file
    if model_file not in publication.files:
        raise LockstepError(f"{MANIFEST}: lists no {model_file}, expected it as {HEADER} says")
    subject_of(run).check_model(run, transcript.header.model, HEADER)
    return transcript


def _seed_of(publication: Publication, seed: str | None, beacon: Beacon | None) -> SeedOf:
    """Return whose seed drew the windows that `verify` repeats, if the reader's is `seed`."""
    if seed is not None:
        return "asked" if seed == publication.seed else "reader"
    if publication.seed is not None:
        return "author"
    return "hash" if beacon is None else "beacon"


# ---- Records ----


def check_made(
    folder: Path, publication: Publication, transcript: Transcript, unpacked: Unpacked
) -> dict[str, MadeFile]:
    """Check in `verify` that stages read each other's results; return their made files."""
    stages = [stage for stage in STAGES if layout.made(stage) in publication.files]
    made = {stage: layout.read_made(folder, stage) for stage in stages}
    for stage, file in made.items():
        for need in needs(stage):
            if file.needs.get(need) != sha256_file(folder / layout.made(need)):
                raise LockstepError(
                    f"{layout.made(stage)}: was made from a different {layout.made(need)}, "
                    "expected the published one"
                )
        _check_key(stage, made)
    if made["train"].key != transcript.header.key:
        raise LockstepError(
            f"{outputs.HEADER}: key {transcript.header.key}, expected {made['train'].key} as "
            f"{layout.made('train')} says"
        )
    stage_files = _left(made)
    files = {f"{TRANSCRIPT}/{name}": file for name, file in unpacked.files.items()}
    files |= {name: publication.files[name] for name in layout.RECORDS} | publication.exported
    if publication.commit is not None:
        files[CARD] = _stages_card(folder, publication.commit)
    for name, file in files.items():
        stage, expected = stage_files.get(name, (_maker(name), None))
        if expected != file:
            raise LockstepError(
                f"{name}: sha256 {file.sha256[:12]}, expected the one in {layout.made(stage)}"
            )
    exported = {name for name, (stage, _) in stage_files.items() if stage == "export"}
    if missing := sorted(exported - publication.exported.keys()):
        raise LockstepError(
            f"{missing[0]}: not published, expected it as {layout.made('export')} says"
        )
    return made


def _stages_card(folder: Path, commit: str) -> PublishedFile:
    """Return the card for `verify` as its stage left it, without the author's commit."""
    text = without_commit(report.read_card(folder), commit)
    if text is None:
        raise LockstepError(f"{CARD}: expected {brief(commit)[:12]} in it as {MANIFEST} says")
    content = text.encode()
    return PublishedFile(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def _left(made: dict[str, MadeFile]) -> dict[str, tuple[str, PublishedFile]]:
    """Return the stages' files that `verify` makes again: by published name, stage and file.

    Files that a user's own code wrote into the export are not published.
    """
    files, result = made["export"].files, {}
    only = next((names for model, names in outputs.EXPORTS.items() if model in files), None)
    for stage, file in made.items():
        for name, entry in file.files.items():
            output = outputs.find(stage, name)
            if output is None or (stage == "export" and only is not None and name not in only):
                continue
            if (published := output.name(name)) is not None:
                result[published] = stage, entry
    return result


def _maker(name: str) -> str:
    """Return the stage that leaves a published file, for errors of `verify`."""
    for stage, stage_outputs in outputs.OUTPUTS.items():
        if any(output.published == name for output in stage_outputs):
            return stage
    return "train" if name.startswith(TRANSCRIPT) else "export"


def _check_key(stage: str, made: dict[str, MadeFile]) -> None:
    """Check a stage's key: its content has its tables, and the keys that it needs."""
    file = made[stage]
    due = {f"[{table}]": digest(value) for table, value in file.tables.items()}
    due |= {f"stage {need}": made[need].key for need in needs(stage)}
    for name, value in due.items():
        if file.content.get(name, value) != value:
            raise LockstepError(
                f"{layout.made(stage)}: content of {brief(name)} is "
                f"{brief(file.content[name])[:12]}, expected {value[:12]}"
            )


def check_transcript(
    publication: Publication,
    transcript: Transcript,
    published: list[DrawnWindow],
    run: runfile.Run,
    *,
    kept: bool,
) -> None:
    """Check that a published transcript holds what the published windows need, and nothing else."""
    listed = {name for name in publication.files if name.startswith(f"{TRANSCRIPT}/")}
    due = {
        f"{TRANSCRIPT}/{layout.packed_name(name)}"
        for name in published_transcript.files(transcript, published, run, kept=kept)
    }
    listed |= set(publication.row_files)
    due |= {layout.row_file(drawn, kept) for drawn in published}
    if missing := sorted(due - listed):
        raise LockstepError(
            f"{missing[0]}: no such file, expected it, since a drawn window needs it"
        )
    if useless := sorted(listed - due):
        raise LockstepError(f"{useless[0]}: a file that no drawn window needs, expected none")
    ranges: dict[str, list[tuple[int, int]]] = {}  # of the messages in each payload
    for entry in transcript.rounds:
        for message in (*entry.evidence.messages.values(), *entry.evidence.others.values()):
            if message.payload is not None and message.offset is not None:
                ranges.setdefault(message.payload, []).append((message.offset, message.bytes))
    for payload, of_messages in ranges.items():
        name, end = f"{TRANSCRIPT}/payloads/{payload}", 0
        if name not in listed:
            continue
        for offset, count in sorted(of_messages):
            if offset != end:
                raise LockstepError(f"{name}: a message at {offset}, expected one at {end}")
            end += count
        if publication.files[name].bytes != end:
            raise LockstepError(
                f"{name}: {publication.files[name].bytes} bytes, expected the {end} of its messages"
            )
