"""A verdict in words: verdict.txt, and what else the pages and `verify` call alike."""

import textwrap
from collections.abc import Iterable, Sequence
from functools import partial

from pipeline.runfile.derived_run import counted

UNPRINTABLE = "\ufffd"  # Unicode's character for what cannot be shown
NAMED_LIARS = 4  # liars that one line has room for
STATED = (
    "by the transcript's author, and computed again by nobody: all losses in it, who came, left, "
    "paused or was silent, who sent two messages, who attested what, and whose message came late "
    "or never"
)
# Results on a model card, and what they were measured on.
HELD_OUT = {
    "held_out_loss": "held-out loss, nats per token",
    "perplexity": "perplexity per token",
    "bits_per_byte": "bits per byte",
}
HELD_OUT_SPLIT = "held-out split of the run's data"
SAMPLE = ("held_out_stderr", "sequences", "split_sequences")  # what a held-out loss rests on
FALSE_WINDOWS = (1, 2, 4, 8)  # of which the chance to find one is said
NOT_AT_ALL = "not at all, since no window was replayed"
LINE_WIDTH = 71  # of a line of verdict.txt: 80 with the "witness: " of the log
# A hash is longer than a line may be, and stays whole.
_wrapped = partial(textwrap.wrap, width=LINE_WIDTH, break_long_words=False, break_on_hyphens=False)


def render(verdict: dict) -> str:
    """Return verdict.txt: the verdict for a person, with the command that repeats each finding."""
    replayed = verdict["replayed_windows"]
    windows = f"{len(replayed)} of {verdict['windows']} windows"
    rows = [
        ("compared", compared(verdict)),
        ("audited", f"all {verdict['audited_rounds']:,} rounds"),
        ("replayed", f"{windows}: {_rounds(replayed)}" if replayed else windows),
        ("sampled", sampled(verdict)),
        ("drawn from", f"{verdict['sample_seed']}, {seed_origin(verdict)}"),
        ("transcript", f"sha256 {verdict['transcript']}"),
        ("stated", stated(verdict)),
        ("applied", f"nothing in {_empty(verdict)}" if verdict["empty_rounds"] else ""),
        *absences(verdict),
    ]
    lines = [f"{_outcome(verdict)}: {reason(verdict)}"]
    for name, text in rows:  # an empty text has no lines
        lines += _wrapped(text, initial_indent=f"  {name:<12}", subsequent_indent=" " * 14)
    for finding in verdict["findings"]:
        effect = "got into the params" if finding["applied"] else "did not get into the params"
        lines += [
            f"round {finding['round']}, {who(finding['peer'])}: {finding['kind']} ({effect})",
            *_wrapped(finding["detail"], initial_indent="  ", subsequent_indent="    "),
        ]
        if finding["bundle"]:
            lines.append(f"  lockstep replay data/verdict/{finding['bundle']}")
    return printable("\n".join(lines)) + "\n"


def measured_on(stderr: float | None, rows: int, split_size: int) -> str:
    """Return what a held-out loss is measured on: how many rows of how many, and its error."""
    error = "" if stderr is None else f", standard error {stderr:.3f}"
    return f"{rows:,} of {split_size:,} held-out sequences{error}"


def seen_in_train(share: float | None) -> str:
    """Return how much of the held-out split stands in the train split (tokens/seen.py)."""
    if share is None:
        return "not known how much of the held-out text stands in the train text"
    return f"{100 * share:.2f} % of the windows of 32 tokens looked up stand in the train text"


def summarize(verdict: dict) -> str:
    """Return the verdict in one line."""
    line = (
        f"{_outcome(verdict)}: {verdict['audited_rounds']:,} rounds audited, "
        f"{len(verdict['replayed_windows'])} of {verdict['windows']} windows replayed "
        "bit for bit"
    )
    if verdict["empty_rounds"]:
        line += f"; nothing was applied in {_empty(verdict)}"
    return f"{line}; {caught(verdict)}" if verdict["accepted"] and verdict["findings"] else line


def reason(verdict: dict) -> str:
    """Return in words the reason for the outcome: the policy, and what it makes of the findings."""
    if trained_nothing(verdict):
        return (
            "no message was applied in any round, so the params are those that the run began with"
        )
    count = len(verdict["findings"])
    if not count:
        return "no findings"
    if verdict["policy"] == "strict":
        return f"{counted(count, 'finding')} (policy strict refuses any)"
    applied = sum(finding["applied"] for finding in verdict["findings"])
    return f"{applied} of {counted(count, 'finding')} got into the params (policy applied)"


def trained_nothing(verdict: dict) -> bool:
    """Return whether no message was ever applied, for a verdict in words."""
    return verdict["empty_rounds"] == verdict["audited_rounds"]


def caught(verdict: dict) -> str:
    """Return how many peers lied to no effect, in words: 3 liars caught, 2 of them ejected."""
    liars = {finding["peer"] for finding in verdict["findings"]}
    ejected = liars & {int(peer) for peer in verdict["ejected"]}
    text = f"{counted(len(liars), 'liar')} caught"
    if liars <= ejected:
        return f"{text} and ejected"
    return f"{text}, {len(ejected)} of them ejected" if ejected else text


def cannot_be_audited(verdict: dict) -> bool:
    """Return whether windows were drawn and none could be compared on the auditor's machine."""
    return verdict["not_comparable"] is not None and not verdict["replayed_windows"]


def why_refused(verdict: dict) -> str:
    """Return why no weights are exported: who did what, or that nothing was trained."""
    return reason(verdict) if trained_nothing(verdict) else blame(verdict["findings"])


def blame(findings: Iterable[dict]) -> str:
    """Return in words who did what: an entry a peer and kind of finding, with its first round."""
    first: dict[tuple[str, str], int] = {}
    for finding in findings:
        entry = who(finding["peer"]), finding["kind"]
        first[entry] = min(first.get(entry, finding["round"]), finding["round"])
    entries = [f"{name} in round {step} ({kind})" for (name, kind), step in first.items()]
    more = len(entries) - NAMED_LIARS
    return "; ".join(entries[:NAMED_LIARS]) + (f"; and {more} more" if more > 0 else "")


def compared(verdict: dict) -> str:
    """Return in words how replays were compared with what was sent, or why some could not be."""
    if (why := verdict["not_comparable"]) is None:
        return "bit for bit" if verdict["replayed_windows"] else NOT_AT_ALL
    done = "the other windows bit for bit; " if verdict["replayed_windows"] else ""
    return f"{done}not comparable here, which shows nothing and accuses nobody: {why}"


def chance(share: float, false: int) -> float:
    """Return 1 - (1 - s)^n: how surely a draw of a share s of all windows has one of n false ones.

    At least so: without replacement it is 1 - C(N - n, s N) / C(N, s N), and more where the false
    ones are among fewer than N that can be compared. Whoever lied did not know what would be drawn.
    """
    return 1 - (1 - share) ** false


def share(verdict: dict) -> float:
    """Return the share s of all windows that were drawn, and compared."""
    return verdict["drawn_windows"] / verdict["windows"] if verdict["windows"] else 0.0


def sampled(verdict: dict) -> str:
    """Return in words how surely a lie is found, and on what condition; empty without a draw."""
    if not (s := share(verdict)):
        return ""
    chances = ", ".join(f"{chance(s, n):.2f} for n = {n}" for n in FALSE_WINDOWS)
    return (
        f"s = {verdict['drawn_windows']} of {verdict['windows']} windows = {s:.2f}: a peer that "
        "lied in n of its windows that can be compared here, and did not know which would be "
        f"drawn, is found with probability 1 - (1 - s)^n at least, {chances}"
    )


def stated(verdict: dict) -> str:
    """Return in words which parts of a transcript nobody recomputes: they are its author's word."""
    text = STATED
    if not verdict["messages_kept"]:
        text += ", whose bytes were no message"
    clock = verdict["clock"]
    return text if clock == "simulated" else f"{text}, on the {clock}'s clock every arrival"


def seed_origin(verdict: dict) -> str:
    """Return in words who chose the sample's seed, and from what that does not protect."""
    if verdict["sample_seed_of"] == "auditor":
        return "the auditor's own"
    if verdict["sample_seed_of"] == "beacon":
        return (
            "the beacon of [witness] and the transcript's hash; that rules out a chosen sample if "
            "the transcript was public before the beacon's value"
        )
    return (
        "the transcript's own hash; whoever wrote the whole transcript could have tried until the "
        "sample suited them: set [witness] seed to rule that out"
    )


def absences(verdict: dict) -> list[tuple[str, str]]:
    """Return who was ejected, dropped out or sent messages late: pairs of a name and a text."""
    rounds = [
        (name, ", ".join(f"peer {peer} in round {step}" for peer, step in verdict[key].items()))
        for name, key in (("ejected", "ejected"), ("dropped out", "dropped"))
    ]
    late = [f"peer {p} ({counted(count, 'message')})" for p, count in verdict["late"].items()]
    return [(name, text) for name, text in (*rounds, ("late", ", ".join(late))) if text]


def peers(numbers: int | Sequence[int]) -> str:
    """Return peers in words: peer 2; peers 0, 1 and 3."""
    *others, last = [numbers] if isinstance(numbers, int) else numbers
    return f"peers {', '.join(map(str, others))} and {last}" if others else f"peer {last}"


def who(peer: int | None) -> str:
    """Return whom a finding is about, in words."""
    return "the transcript" if peer is None else f"peer {peer}"


def printable(text: str) -> str:
    """Return text that a model or a liar wrote, without characters that would steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else UNPRINTABLE for c in text)


def _outcome(verdict: dict) -> str:
    if not verdict["accepted"]:
        return "REFUSED"
    return "NOT COMPARABLE HERE" if cannot_be_audited(verdict) else "accepted"


def _rounds(replayed: Iterable[dict]) -> str:
    """Return replayed windows in words, by rounds: rounds 1-50 of peers 0 and 3; 51-100 of 1."""
    by_rounds: dict[tuple[int, int], list[int]] = {}
    for window in replayed:
        by_rounds.setdefault((window["first"], window["last"]), []).append(window["peer"])
    texts = [f"{first}-{last} of {peers(ids)}" for (first, last), ids in sorted(by_rounds.items())]
    return f"rounds {'; '.join(texts)}"


def _empty(verdict: dict) -> str:
    return f"{verdict['empty_rounds']:,} of {verdict['audited_rounds']:,} rounds"
