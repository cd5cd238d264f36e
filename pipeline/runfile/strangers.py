"""What a run file that is not the reader's own may say: the one door for strangers' run files.

A run in a store, a bundle, a publication and a trainer's request to a peer's process bring a run
file along. It gives no command, no path of this disk, no credential, no push and no consent, and
what is fetched for it is pinned. So each key has an answer in `ANSWERS`; one without is refused
unless it has its default. `[runtime]` is the reader's own.
"""

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from pydantic_core import PydanticUndefined, to_jsonable_python

from lockstep.errors import RequestError
from lockstep.tables.table import Table
from lockstep.tables.validation import show
from lockstep.tables.variant import Variant
from pipeline.runfile.parts import TABLES
from pipeline.runfile.run import Run, Runtime, parse
from pipeline.runfile.strangers_values import (
    BOUNDED,
    FREE,
    HTTPS,
    HUB_NAME,
    LIE,
    NEVER,
    NOWHERE,
    OWN_TASKS,
    SAID,
    SIDE,
    SOURCE,
    AnswerRow,
    KeyAnswer,
    Use,
)
from pipeline.toml_file import check_values

CONSENTED = ("workload.factory",)  # keys whose values a reader may take by a word of its own
MOST_SNAPSHOTS = 2**20  # a reader lists them
MADE_HERE = {"data_location": ("Dummy",), "checkpoint": ("Init", "Ephemeral")}  # nothing is read


# Of several rows the first counts.
ANSWERS: tuple[AnswerRow, ...] = (
    ("runtime*", "*", FREE),  # taken out before anything reads it
    (
        "config",
        "warmup_time cooldown_time epoch_time max_round_train_time round_witness_time min_clients "
        "init_min_clients waiting_for_members_extra_time verification_percent witness_nodes "
        "total_steps global_batch_size_start global_batch_size_end rounds_per_epoch "
        "global_batch_size global_batch_size_warmup_tokens",
        FREE,
    ),
    ("config", "checkpointers", NOWHERE),
    ("model.LLM", "architecture data_type max_seq_len cold_start_warmup_steps", FREE),
    # numbers, and words of a list (a test checks that)
    ("model.LLM.lr_schedule*", "*", FREE),
    ("model.LLM.optimizer*", "compression_chunk", SIDE),
    ("model.LLM.optimizer*", "*", FREE),
    ("model.LLM.checkpoint", "Ephemeral Init Hub P2P Gcs P2PGcs Run", FREE),
    ("model.LLM.checkpoint", "Dummy", SAID),
    ("model.LLM.checkpoint.Dummy", "repo_id revision", SAID),
    ("model.LLM.checkpoint.Init", "config seed", FREE),
    ("model.LLM.checkpoint.*", "repo_id", HUB_NAME),
    ("model.LLM.checkpoint.*", "revision bucket prefix generation key", FREE),
    ("model.LLM.data_location", "Dummy Http Hub Corpus Text WeightedText Preprocessed", FREE),
    # of this disk, with the reader's credentials, or a list of addresses that comes later
    ("model.LLM.data_location", "Server Local WeightedHttp Url", SAID),
    ("model.LLM.data_location.Preprocessed", "source", HUB_NAME),
    ("model.LLM.data_location.Hub", "repo_id", HUB_NAME),
    ("model.LLM.data_location.*Text", "sources", FREE),
    ("model.LLM.data_location.*Text*", "source", SOURCE),
    ("model.LLM.data_location.*", "tokenizer", HUB_NAME),
    ("model.LLM.data_location.Http.location", "Gcp SingleUrl NumberedFiles", FREE),
    ("model.LLM.data_location.Http.location.Gcp", "bucket_name filter_directory", FREE),
    ("model.LLM.data_location.Http.location.*", "url url_template", HTTPS),
    ("model.LLM.data_location.Http.location.*", "start_index n_left_pad_zeros num_files", FREE),
    ("model.LLM.data_location.*shuffle*", "DontShuffle Seeded seed", FREE),
    # installed packages may be the reader's own: weights would tell of their source
    ("model.LLM.data_location.*", "address path url packages", SAID),
    (
        "model.LLM.data_location.*",
        "token_size_in_bytes held_out_percent most_seen_percent vocab_size tokenizer_revision "
        "revision subset split files column weight patterns",
        FREE,
    ),
    ("download", "stream", SAID),  # what is read while training has no hash
    ("download*", "limit files tokens steps batch max_seq_len", FREE),
    ("peers", "micro_batch", BOUNDED),
    (
        "peers",
        "count layout fsdp processes precision attention bits product_bits remat head_tokens seed "
        "passes threads overlap wire aggregation liars balance_speed scan_layers",
        FREE,
    ),
    ("links", "upload_mbps download_mbps latency_seconds tokens_per_second topology clock", FREE),
    ("faults*", "schedule kind peer rounds size", LIE),
    ("witness", "snapshot_every keep_every replay_percent replay policy seed beacon", FREE),
    ("held_out", "sequences rows every stop_above", FREE),
    ("pins", "data checkpoint tasks", FREE),
    ("export", "dtype", FREE),
    ("export", "every_epoch", SAID),
    ("evaluate", "tasks sample_tasks", OWN_TASKS),
    ("evaluate", "trust_task_code", SAID),
    ("evaluate", "batch_size", BOUNDED),
    (
        "evaluate",
        "questions few_shot few_shot_seed limit every sample prompt max_new_tokens temperature "
        "seed",
        FREE,
    ),
    *(row for part in TABLES for row in part.ANSWERS),
)


Consents = Mapping[str, Callable[[Any], str]]
NONE: Consents = {}


def read(
    document: Any,
    name: str,
    use: Use,
    runtime: Runtime,
    consents: Consents = NONE,
    consent: str = "",
) -> Run:
    """Return a stranger's run, which has the reader's own `[runtime]`.

    Args:
      document: The parsed run file.
      name: What errors call it.
      use: What the reader does with the run.
      runtime: The reader's own.
      consents: Keys to whose values the reader consents -> what such a value lacks even then.
      consent: How a reader consents to a workload, which an error says.

    Raises:
      RequestError: It sets a key that a stranger may not set, or does not pin what is fetched.
      LockstepError: It is no valid run file.
    """
    if isinstance(document, dict):
        own, sent = runtime.model_dump(mode="json", exclude_defaults=True), document.get("runtime")
        if use is Use.REPEATED:  # the rest is about the sender's machine, and differs by release
            own = {key: sent[key] for key in runtime.told if isinstance(sent, dict) and key in sent}
        document = document | {"runtime": own}
    run = parse(document, name)
    check(run, name, use, consents, consent)
    return run.model_copy(update={"runtime": runtime})


def check(run: Run, name: str, use: Use, consents: Consents = NONE, consent: str = "") -> None:
    """Check that others may use a run so; arguments and errors are those of `read`."""
    for key, value, default in keys_of(run, ""):
        if isinstance(value, dict):  # of anybody's keys
            check_values(name, {key: value})
        is_kind = isinstance(value, Variant)
        answer = answer_to(f"{key}.{value.tag()}" if is_kind else key) or NEVER
        if use <= answer.until or (value == default and not is_kind):
            continue
        if is_kind:
            expected = f"one of {', '.join(_kinds(key))}"
        elif lacks := consents.get(key):
            expected = lacks(value)
        elif answer.lacks:
            expected = answer.lacks(value)
        else:
            expected = "none" if default is PydanticUndefined else show(default)
        if expected:
            by = f", or {consent}," * bool(consent and key in CONSENTED and key not in consents)
            found = show(value.tag() if is_kind else to_jsonable_python(value, exclude_none=True))
            raise RequestError(
                f"{name}: {key} is {found}, expected {expected}{by} in a run file for others"
            )
    if (every := run.witness.snapshot_every) * MOST_SNAPSHOTS < run.config.total_steps:
        least = -(-run.config.total_steps // MOST_SNAPSHOTS)
        raise RequestError(f"{name}: witness.snapshot_every is {every}, expected at least {least}")
    for key, made_here in MADE_HERE.items() if use > Use.REPEATED else ():
        pin = key.partition("_")[0]
        if getattr(run.llm, key).tag() not in made_here and not getattr(run.pins, pin):
            raise RequestError(
                f'{name}: pins.{pin} is "", expected the SHA-256 that `lockstep pin` writes, of '
                "what others fetch"
            )


def answer_to(key: str) -> KeyAnswer | None:
    """Return the answer to a stranger's key, or kind of an enum, by its dotted name."""
    table, _, last = key.rpartition(".")
    for pattern, names, answer in ANSWERS:
        if fnmatchcase(table, pattern) and (names == "*" or last in names.split()):
            return answer
    return None


def _kinds(enum: str) -> list[str]:
    """Return the kinds of an enum that a stranger's run file may name."""
    rows = (names for table, names, answer in ANSWERS if table == enum and answer is FREE)
    return [kind for names in rows for kind in names.split()]


def keys_of(table: Table, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key of a stranger's table and of those in it: dotted name, value and default."""
    for name, field in type(table).model_fields.items():
        value, key = getattr(table, name), f"{path}{name}"
        if not isinstance(value, Table) or isinstance(value, Variant):
            yield key, value, field.get_default()
        inner = f"{key}.{value.tag()}" if isinstance(value, Variant) else key
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Table):
                yield from keys_of(item, f"{inner}.")
