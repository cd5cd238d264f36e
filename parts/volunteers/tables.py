"""What volunteers add to a run file: `[volunteers]`, and the store, the key and the start."""

from typing import TYPE_CHECKING, cast

from lockstep.tables.table import Count, Positive, Table, wrong
from pipeline.runfile.strangers_values import FREE, AnswerRow
from pipeline.runfile.tables import CoreRuntime, Percent

if TYPE_CHECKING:
    from pipeline.runfile import Run


class Volunteers(Table):
    """Rounds over an object store that peers of strangers share, with links.clock = "store"."""

    most_bytes: Count = 2**28
    """Maximum size of a message in bytes; each volunteer downloads the messages of all others in
    every round."""
    settle_seconds: Count = 10
    """Seconds after a round's time limit, by the store's clock, after which anybody may close the
    round without the messages that are missing."""
    stagger_seconds: Positive = 2.0
    """Seconds between the turns of volunteers that try to close a round, in addition to the 5 that
    a look at the store may take."""
    replay_percent: Percent = 6.25
    """Percentage of windows that are drawn for an audit while the run goes on, 0 to 100, in
    addition to the first two windows of each newcomer."""
    audit_seconds: Count = 3600
    """Seconds after the end of a window, by the store's clock, within which a drawn volunteer must
    upload its own states from before and after the window."""
    keep_windows: Count = 4
    """Number of newest windows whose payloads and states `lockstep volunteer gc` keeps."""


class StoreRuntime(CoreRuntime):
    """The keys of `[runtime]` for a run of volunteers."""

    store: str = ""
    """Address of the store of the run of volunteers to follow, with links.clock = "store":
    file:///FOLDER, s3://BUCKET/FOLDER or https://SERVER/FOLDER."""
    volunteer_key: str = ""
    """File with the key of the volunteer that trains here; if empty, the run is followed without
    training."""
    from_state: bool = False
    """Whether following a run of volunteers begins with the newest state in its store, which is
    trusted on the word of those who signed its link; by default it begins with the first round, and
    merges every round."""

    @property
    def begins_late(self) -> bool:
        """Whether a volunteer's training may begin after rounds that others trained."""
        return self.from_state


TABLES = {"volunteers": Volunteers}
RUNTIME = StoreRuntime
ANSWERS: tuple[AnswerRow, ...] = (
    (
        "volunteers",
        "most_bytes settle_seconds stagger_seconds replay_percent audit_seconds keep_windows",
        FREE,
    ),
)


def volunteers_of(run: "Run") -> Volunteers:
    """Return the table `[volunteers]` of a run."""
    return cast("Volunteers", run.volunteers)


def runtime_of(run: "Run") -> StoreRuntime:
    """Return the table `[runtime]` of a run, with the keys for volunteers."""
    return cast("StoreRuntime", run.runtime)


def rules(run: "Run") -> None:
    """Check that a run over a store is one that volunteers can train."""
    if run.links.clock != "store":
        for key in ("store", "volunteer_key", "from_state"):
            if getattr(runtime_of(run), key):
                raise wrong(("runtime", key), f"none with links.clock = {run.links.clock}")
        return
    config, peers = run.config, run.peers
    faults = [fault for fault in run.faults.schedule if not fault.changes_only_message]
    for table, key, value, expected in (
        ("config", "verification_percent", config.verification_percent, 0),
        ("config", "witness_nodes", config.witness_nodes, 0),
        ("peers", "layout", peers.layout, "each"),
        ("peers", "processes", peers.processes, 1),
        ("faults", "schedule", faults, []),
    ):
        if value != expected:
            besides = " besides lies in messages" if table == "faults" else ""
            raise wrong((table, key), f'{expected}{besides} with links.clock = "store"')
    if not run.runtime.in_one_process:
        raise wrong(("runtime", "carrier"), 'in_process with links.clock = "store"')
