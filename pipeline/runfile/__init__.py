"""A run file (params/run.toml) as frozen models: Psyche's tables and Lockstep's own.

    from pipeline import runfile

    run = runfile.load(Path("params/run.toml"))
    run.config.total_steps

An unknown key, a value of the wrong type or an impossible combination is one line of
`LockstepError`.
"""

from typing import TYPE_CHECKING, Any

from lockstep.tables.variant import variant_name
from pipeline.runfile.checkpoint import (
    CheckpointEphemeral,
    CheckpointGcs,
    CheckpointHub,
    CheckpointInit,
    CheckpointP2P,
    CheckpointP2PGcs,
    CheckpointRun,
    CheckpointVariant,
)
from pipeline.runfile.data import (
    Data,
    DataCorpus,
    DataHttp,
    DataHub,
    DataLocal,
    DataPreprocessed,
    DataServer,
    DataText,
    DataUrl,
    DataWeightedHttp,
    DataWeightedText,
    LocationGcp,
    LocationSingleUrl,
    ShuffleDontShuffle,
)
from pipeline.runfile.tables import Evaluate, Network, Peers

if TYPE_CHECKING:
    from pipeline.runfile.run import CurrentConfig, OlderConfig, Run, Runtime, load, parse

OF_WHOLE_RUNS = ("CurrentConfig", "OlderConfig", "Run", "Runtime", "load", "parse")


def __getattr__(name: str) -> Any:
    """Return what is made once, of the core's tables and those of the parts that are there.

    A part's tables are made of the core's, so this package is there before these names are.
    """
    if name not in OF_WHOLE_RUNS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pipeline.runfile import run

    return getattr(run, name)
