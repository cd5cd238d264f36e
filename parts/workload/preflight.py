"""What a workload adds to the table of `lockstep check`: what its worker says of the model."""

from collections.abc import Iterator

from pipeline.preflight.row import CheckRow, Look, Mark
from pipeline.runfile import Run


def _described(run: Run) -> Iterator[CheckRow]:
    if run.workload.factory:
        from parts.workload import sanity

        for line in sanity.lines(run):
            name, _, said = line.partition(" ")
            yield CheckRow(Mark.FINE, name, said.strip())


NEEDS = ()
LOOKS = (Look("model", None, _described),)
