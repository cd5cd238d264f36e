"""A run file (params/run.toml) as frozen models: Psyche's tables and Lockstep's own.

    from pipeline import runfile

    run = runfile.load(Path("params/run.toml"))
    run.config.total_steps

An unknown key, a value of the wrong type or an impossible combination is one line of
`LockstepError`.
"""

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
    DataFiles,
    DataHttp,
    DataHub,
    DataLocal,
    DataPreprocessed,
    DataServer,
    DataText,
    DataUrl,
    DataWeightedHttp,
    DataWeightedText,
    DataWorkload,
    LocationGcp,
    LocationSingleUrl,
    ShuffleDontShuffle,
)
from pipeline.runfile.psyche import CurrentConfig, OlderConfig
from pipeline.runfile.run import Run, load, parse
from pipeline.runfile.tables import Evaluate, Network, Peers, Runtime
