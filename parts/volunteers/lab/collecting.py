"""What the lab removes from a store: payloads and states of old windows, and never what is signed.

Links, records and admissions stay. Before anything goes, the lab signs up to where it went, so that
who looks for it hears the truth.
"""

from lockstep.errors import LockstepError
from parts.volunteers import layout
from parts.volunteers.bodies import CollectedNotice, RunDocument
from parts.volunteers.chain.statements import collected_notices
from parts.volunteers.keys import PrivateKey
from parts.volunteers.lab.opening import put_over, read_own
from parts.volunteers.lab.signing import MOST_NAMES, rounds_over, times_put
from parts.volunteers.store.verbs import Store
from pipeline import runfile


def collect(store: Store, lab: PrivateKey) -> str:
    """Remove what is older than `[volunteers] keep_windows` from the lab's store, and say what.

    A window is kept too while a peer that was drawn in it may still show what it owned.

    Raises:
      LockstepError: the run is another's.
    """
    document, run = read_own(store, lab)
    last = _old(store, document)
    if not last:
        return "nothing is old enough"
    notices = [*collected_notices(store, run, lab.public_key())]
    if all(last > notice.round for notice in notices):
        notice = CollectedNotice(run=run, number=len(notices), round=last)
        if not put_over(store, name := layout.collected(notice.number), notice, lab):
            raise LockstepError(f"{name}: another process put it, expected one gc at a time")
    rounds = [layout.round_folder(step) for step in range(1, last + 1)]
    names = [name for folder in rounds for name in store.names(folder, MOST_NAMES)]
    gone = [name for name in names if (slot := layout.parse(name)) and slot.what == "payload"]
    for folder in (layout.STATES, layout.OWN):
        steps = {name: layout.step_of(name) for name in store.names(folder, MOST_NAMES)}
        gone += [name for name, step in steps.items() if step is not None and step < last]
    for name in gone:
        store.remove(name)
    return f"removed {len(gone)} objects, of rounds up to {last}"


def _old(store: Store, document: RunDocument) -> int:
    """Return the last round of the windows that are old enough to collect; 0 without any.

    Nobody else can make a window old: a round is over where `min_clients` sent messages in the next
    one, and the latest of its links says when.
    """
    run = runfile.parse(document.run, layout.RUN)
    newest, volunteers = rounds_over(store, run.config.min_clients), run.volunteers
    over = [window for window in run.snapshots(0).windows if window.last <= newest]
    now = max(times_put(store, newest)) if newest else 0
    old = [
        window
        for window in over[: -volunteers.keep_windows]
        if max(times_put(store, window.last)) + volunteers.audit_seconds < now
    ]
    return old[-1].last if old else 0
