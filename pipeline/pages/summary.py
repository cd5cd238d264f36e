"""What a run came to: the results of all stages in one place, and a short table of them.

The report's page and the table that `make repro` ends with say the same, because both say it in the
words of this file.
"""

import math
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.errors import LockstepError
from pipeline.stage.artifacts import METRICS, Paths, read_json

PAGE = "report.html"
READ = ("train", "witness", "export", "evaluate", "report")  # stages whose results are shown
LINES_OF_TEXT = 6
UNKNOWN = "\ufffd"  # Unicode's character for what cannot be shown
NAMED = 4  # liars that one line has room for
WIDTH = 90  # of a line of verdict.txt, which also stands behind "witness: "


class Results(NamedTuple):
    """What the stages left, as they wrote it.

    header: the transcript's; trained, evaluated: the numbers of metrics/train.json and of
    evaluate.json; verdict: of verdict.json.
    """

    header: dict
    trained: dict
    verdict: dict
    evaluated: dict

    @property
    def held_out_loss(self) -> float | None:
        """Nats per token of the exported weights; where there are none, at the end of training."""
        measured = self.evaluated["held_out_loss"]
        return self.trained["held_out_loss"] if measured is None else measured

    @property
    def chance(self) -> float:
        """The loss of a model that knows nothing: ln(vocabulary)."""
        return math.log(self.header["model"]["vocab_size"])

    @property
    def times_less(self) -> float:
        """How many times as much plain data parallelism sends, per peer and round."""
        return self.trained["bytes_up_of_data_parallel"] / self.trained["bytes_up"]


def read(trained: Path, verdict: Path, evaluated: Path) -> Results:
    """Reads the folders of the stages train, witness and evaluate."""
    return Results(
        read_json(trained / "transcript" / "header.json"),
        read_json(trained / METRICS / "train.json"),
        read_json(verdict / "verdict.json"),
        read_json(evaluated / "evaluate.json"),
    )


def show(paths: Paths) -> int:
    """Prints the table, and returns the exit status: 1 where the export was refused.

    Raises:
      LockstepError: a stage has not run with today's parameters.
    """
    for stage in READ:
        if not paths.is_made(stage):
            raise LockstepError(
                f"{paths.root / paths.keys.made(stage)}: not there, expected from stage {stage} "
                f"with today's {paths.run}; run `lockstep {stage}`, or an engine"
            )
    results = read(paths.out("train"), paths.out("witness"), paths.out("evaluate"))
    accepted = results.verdict["accepted"]
    _print_table(_rows(results, paths), visible(results.evaluated["text"] or ""), accepted)
    if accepted:
        print(f"The export is ready: {paths.out('export')}")
        return 0
    print(f"REFUSED, no weights were exported: {blame(results.verdict['findings'])}")
    return 1


def _rows(results: Results, paths: Paths) -> list[tuple[str, str]]:
    """Names and values, top to bottom."""
    trained, evaluated = results.trained, results.evaluated
    before, after = trained["held_out_loss_before"], results.held_out_loss
    loss = "not measured: the data has no held-out split"
    if before is not None and after is not None:
        loss = f"{before:.3f} -> {after:.3f} nats per token (chance: {results.chance:.3f})"
    bits = evaluated["bits_per_byte"]
    up, data_parallel = trained["bytes_up"], trained["bytes_up_of_data_parallel"]
    return [
        ("held-out loss", loss),
        ("bits per byte", "not measured" if bits is None else f"{bits:.3f}"),
        ("tokens", f"{trained['tokens']:,} in {trained['rounds']:,} rounds"),
        (
            "sent",
            f"{size(up)} per peer and round; plain data parallelism {size(data_parallel)}, "
            f"{times(results.times_less)} as much",
        ),
        *_verified(trained["bytes_to_verify"]),
        ("verdict", verdict_line(results.verdict)),
        ("export", str(paths.out("export")) if results.verdict["accepted"] else "refused"),
        ("report", str(paths.out("report") / PAGE)),
    ]


def _verified(fetched: float) -> list[tuple[str, str]]:
    """What verifying cost, where anyone did."""
    text = f"{size(fetched)} of others' states fetched per peer and round, to take steps again"
    return [("verified", text)] if fetched else []


def _print_table(rows: list[tuple[str, str]], text: str, accepted: bool) -> None:
    lines = [line for line in text.splitlines() if line.strip()][:LINES_OF_TEXT]
    if not sys.stdout.isatty():
        width = max(len(name) for name, _ in rows)
        plain = [f"{name:<{width}}  {value}" for name, value in rows]
        plain += ["generated text:", *(f"    {line}" for line in lines)] if lines else []
        said = "\n".join(plain).replace(UNKNOWN, "?")
        print(said.encode("ascii", "backslashreplace").decode())
        return

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        style = "" if name != "verdict" else "bold green" if accepted else "bold red"
        table.add_row(Text(name, style="dim"), Text(value, style=style))
    if lines:
        table.add_row(Text("generated text", style="dim"), Text("\n".join(lines), style="cyan"))
    console.print(table)


# ---- Words that the page uses too ----


def verdict_line(verdict: dict) -> str:
    """The verdict in one line."""
    word = "accepted" if verdict["accepted"] else "REFUSED"
    how = "bit for bit" if verdict["method"] == "bitwise" else "within a tolerance"
    line = (
        f"{word}: {verdict['audited_rounds']:,} rounds audited, {len(verdict['replayed_windows'])} "
        f"of {verdict['windows']} windows replayed {how}"
    )
    return f"{line}; {caught(verdict)}" if verdict["accepted"] and verdict["findings"] else line


def caught(verdict: dict) -> str:
    """Of an accepted run: how many lied to no effect, as in "3 liars caught, 2 of them ejected"."""
    liars = {finding["peer"] for finding in verdict["findings"]}
    ejected = liars & {int(peer) for peer in verdict["ejected"]}
    said = f"{_count(len(liars), 'liar')} caught"
    if liars <= ejected:
        return f"{said} and ejected"
    return f"{said}, {len(ejected)} of them ejected" if ejected else said


def why(verdict: dict) -> str:
    """What decided: the policy, and what it makes of the findings."""
    findings = verdict["findings"]
    applied = sum(finding["applied"] for finding in findings)
    if not findings:
        return "nothing was found"
    if verdict["policy"] == "strict":
        return f"{_count(len(findings), 'finding')}, and policy strict refuses any"
    if applied:
        return f"{_count(applied, 'finding')} got into the params, and policy applied refuses those"
    return f"none of {_count(len(findings), 'finding')} got into the params (policy applied)"


def how(why_not_bitwise: str | None, tolerance: float | None) -> str:
    """How a replay was compared with what was sent."""
    if why_not_bitwise is None:
        return "bit for bit"
    return f"within a tolerance of {tolerance}, because {why_not_bitwise}"


def whose_seed(verdict: dict) -> str:
    """Who chose what the sample was drawn from, and what that does not protect from."""
    if verdict["sample_seed_of"] == "auditor":
        return "the auditor's own"
    return (
        "the transcript's own hash; whoever wrote the whole transcript could have tried until the "
        "sample suited: supply [witness] seed against that"
    )


def left(verdict: dict) -> list[tuple[str, str]]:
    """Who was ejected, who dropped out and whose messages were late: each with rounds or counts."""
    since = [
        (name, ", ".join(f"peer {p} in round {r}" for p, r in verdict[key].items()))
        for name, key in (("ejected", "ejected"), ("dropped out", "dropped"))
    ]
    late = ", ".join(
        f"peer {peer} {_count(count, 'time')}" for peer, count in verdict["late"].items()
    )
    return [(name, said) for name, said in (*since, ("late", late)) if said]


def of_verdict(verdict: dict) -> str:
    """verdict.txt: the verdict for a person, with the command that repeats each finding."""
    word = "accepted" if verdict["accepted"] else "REFUSED"
    replayed = verdict["replayed_windows"]
    lines = [f"{word}: {why(verdict)}"]
    lines += _wrapped("method", how(verdict["why_not_bitwise"], verdict["tolerance"]))
    lines += _wrapped("audited", f"{verdict['audited_rounds']:,} rounds, all of them")
    windows = f"{len(replayed)} of {verdict['windows']} windows"
    lines += _wrapped("replayed", windows + (f": {_windows(replayed)}" if replayed else ""))
    lines += _wrapped("drawn from", f"{verdict['sample_seed']}, {whose_seed(verdict)}")
    lines += _wrapped("transcript", f"sha256 {verdict['transcript']}")
    for name, said in left(verdict):
        lines += _wrapped(name, said)
    for finding in verdict["findings"]:
        got = "got into the params" if finding["applied"] else "did not get into the params"
        lines += [
            f"round {finding['round']}, {who(finding['peer'])}, {finding['kind']}; it {got}:",
            *textwrap.wrap(finding["detail"], WIDTH, initial_indent="  ", subsequent_indent="    "),
        ]
        if finding["bundle"]:
            lines.append(f"  lockstep replay data/verdict/{finding['bundle']}")
    return visible("\n".join(lines)) + "\n"


def _windows(replayed: Iterable[dict]) -> str:
    """Replayed windows by their rounds: 1-50 of peers 0 and 3; 51-100 of peer 1."""
    of: dict[tuple[int, int], list[int]] = {}
    for window in replayed:
        of.setdefault((window["first"], window["last"]), []).append(window["peer"])
    return "; ".join(f"{first}-{last} of {peers(of[first, last])}" for first, last in sorted(of))


def _wrapped(name: str, text: str) -> list[str]:
    """A name and its text in a column of its own."""
    return textwrap.wrap(text, WIDTH, initial_indent=f"  {name:<12}", subsequent_indent=" " * 14)


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def blame(findings: Iterable[dict]) -> str:
    """Who did what in which round: one entry for each peer and kind, with its first round."""
    first: dict[tuple[str, str], int] = {}
    for finding in findings:
        entry = (who(finding["peer"]), finding["kind"])
        first[entry] = min(first.get(entry, finding["round"]), finding["round"])
    said = [f"{name} in round {round} ({kind})" for (name, kind), round in first.items()]
    more = len(said) - NAMED
    return "; ".join(said[:NAMED]) + (f"; and {more} more" if more > 0 else "")


def peers(numbers: int | Sequence[int]) -> str:
    """One peer or several: peer 2; peers 0, 1 and 3."""
    *first, last = [numbers] if isinstance(numbers, int) else numbers
    return f"peers {', '.join(map(str, first))} and {last}" if first else f"peer {last}"


def who(peer: int | None) -> str:
    """Who a finding is about."""
    return "the transcript" if peer is None else f"peer {peer}"


def size(count: float) -> str:
    """Bytes as a person reads them, in powers of 1000: 34.1 kB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def times(ratio: float) -> str:
    """A ratio: 249 times, or 1.5 times where it is small."""
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.1f} times"


def visible(text: str) -> str:
    """Text that a model wrote, without characters that would steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else UNKNOWN for c in text)
