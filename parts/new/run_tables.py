"""A whole new run: its tables from a model, data, an optimizer and a number of tokens."""

import hashlib
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from lockstep.errors import LockstepError
from lockstep.methods import CARDS, card_of
from lockstep.methods.card import Card
from lockstep.tables.peers import MAX_CLIENTS
from lockstep.tables.validation import choices
from parts.new.data_tables import NewData, data_named
from parts.new.time_limits import FOREVER
from pipeline import runfile
from pipeline.command_options import AS_WRITTEN, number_of
from pipeline.preflight.model import StartingModel
from pipeline.runfile.derived_run import CALLED, MOST_BATCH, Reasons, check_batch, counted, short
from pipeline.subject import programs_of

AIMED_STEPS = 2000  # local steps that a run is aimed at
FEWEST_ROUNDS = 20
MOST_STEP = 2**19  # tokens of a local step, over all peers, at most
MOST_LENGTH = 2048  # tokens of a sequence
AT_ONCE, AT_ONCE_GPU = 1024, 8192  # tokens of a micro-batch: params/run.toml, params/paper/
LOGITS_GPU = 2**29  # made at a time: 2 GB
TILE_TOKENS = 128  # tokens: a product's rows are a multiple of it
WARMUP, MOST_WARMUP = 10, 500  # one in so many local steps, and at most so many
DECAYED = 10  # the learning rate ends at one in so many
HELD_OUT_TOKENS = 2**17  # at least, of a measurement: fewer say little
FINE_TUNING = 2e-5  # of AdamW, between 1e-5 of LLaMA-Factory and 5e-5 of transformers' Trainer
EXPORT_DTYPES = "float32", "bfloat16", "float16"  # of an export
MANY_LAYERS = 16  # above it, layers are compiled once for all
MOST_TOKENS, MOST_GPUS = 1e15, 2**16
BY_RULES = {"bits": "everywhere", "product_bits": 8}  # keys of [peers]


class NewRun(NamedTuple):
    """A user's wishes for a new run."""

    model: StartingModel
    data: NewData
    card: Card
    tokens: int  # to train on, over all peers
    peers: int
    gpus: int
    # what has a default here, by the names of the options of `lockstep new`: length, batch, uplink,
    # downlink, learning_rate, seed and dtype; None, or no entry, leaves the default
    options: Mapping[str, Any] = MappingProxyType({})

    @property
    def rate(self) -> float:
        """The new run's highest learning rate."""
        if self.options.get("learning_rate"):
            return self.options["learning_rate"]
        if self.model.is_trained:
            adamw = CARDS["adamw"].rates[0].rate
            return short(FINE_TUNING * self.card.rates[0].rate / adamw)
        return self.card.rate_for(self.model.params).rate

    @property
    def exported(self) -> str:
        """The dtype of a new run's exported weights: a model keeps its own."""
        own = self.model.config.get("dtype") or self.model.config.get("torch_dtype")
        if dtype := self.options.get("dtype"):
            return dtype
        return own if self.model.is_trained and own in EXPORT_DTYPES else EXPORT_DTYPES[0]

    @property
    def length(self) -> int:
        """Tokens of a new run's sequence."""
        longest = self.model.longest
        length = self.options.get("length") or min(longest, MOST_LENGTH)
        if length > longest:
            raise LockstepError(
                f"--length {length}: expected at most the {longest} tokens that the model takes"
            )
        return length

    @property
    def rows(self) -> int:
        """Sequences of a new run's local step of a peer: a power of two, or as a batch has.

        Raises:
          LockstepError: The tokens are less than one round's; or a given batch is not the same for
            each peer and local step.
        """
        steps, of_one = self.card.local_steps, self.length * self.peers
        if batch := self.options.get("batch"):
            return self._rows_of(batch, self.peers * steps)
        least = of_one * steps
        if self.tokens < least:
            raise LockstepError(
                f"--tokens {self.tokens:,}: expected at least {least:,}, one round of a sequence "
                f"for each of {self.peers} peers and each local step"
            )
        check_batch(self.peers * steps, f"--peers {self.peers}")
        wanted = min(self.tokens / AIMED_STEPS, MOST_STEP) / of_one
        most = min(self.tokens / (FEWEST_ROUNDS * least), MOST_BATCH / (self.peers * steps))
        return 2 ** max(0, min(round(math.log2(wanted)), math.floor(math.log2(most))))

    def _rows_of(self, sequences: int, together: int) -> int:
        """Return `rows` for a new run's batch, which `together` local steps of all peers share."""
        if sequences % together:
            raise LockstepError(
                f"--batch {sequences}: expected a multiple of {together}, a sequence for each of "
                f"{self.peers} peers and each local step"
            )
        check_batch(sequences, f"--batch {sequences}")
        if self.tokens < (round_of := sequences * self.length):
            raise LockstepError(
                f"--tokens {self.tokens:,}: expected at least {round_of:,}, one round of --batch"
            )
        return sequences // together

    @property
    def batch(self) -> int:
        """Sequences of a new run's round, over all peers."""
        return self.rows * self.peers * self.card.local_steps

    @property
    def rounds(self) -> int:
        """A new run's number of rounds, whose tokens are nearest to the wanted number."""
        return max(1, round(self.tokens / (self.batch * self.length)))

    @property
    def links(self) -> dict[str, float]:
        """The new run's wanted speeds of links, by their keys."""
        names = {"upload_mbps": "uplink", "download_mbps": "downlink"}
        return {key: self.options[name] for key, name in names.items() if self.options.get(name)}

    @property
    def seed(self) -> int | None:
        """A new run's seed of fresh weights, of the data's order and of the peers, or None."""
        return self.options.get("seed")

    @property
    def devices_of_a_peer(self) -> int:
        """The number of GPUs that share a peer's params in a new run."""
        return self.gpus // self.peers if self.gpus and self.gpus % self.peers == 0 else 1


def new_run(answers: Mapping[str, Any], model: StartingModel) -> NewRun:
    """Return the new run that the answers to all questions ask for."""
    card, tokens = card_named(answers["optimizer"]), number(answers["tokens"])
    data = data_named(answers["data"], model)
    groups = card.for_groups(model.groups)
    return NewRun(model, data, groups, tokens, answers["peers"], answers["gpus"], answers)


def card_named(name: str) -> Card:
    """Return the card that --optimizer of a new run names."""
    if card := card_of(name):
        return card
    raise LockstepError(f"--optimizer {name}: expected one of {choices(CARDS, name)}")


def checked(
    name: str, answer: Any, answers: Mapping[str, Any], model_of: Callable[[str], StartingModel]
) -> Any:
    """Return the checked answer to a new run's question, given the answers before it."""
    answers = {**answers, name: answer}
    if name == "model":
        model_of(answer)
    elif name == "data":
        data_named(answer, model_of(answers["model"]))
    elif name == "optimizer":
        card_named(answer)
    elif name == "gpus":
        answers[name] = _whole_number(answer, 0, MOST_GPUS)
    elif name == "peers":
        answers[name] = _whole_number(answer, 1, MAX_CLIENTS)
    if name in ("tokens", "peers"):  # which must suffice for a round
        enough = {"gpus": 0, "peers": answers["peers"] or 1}
        assert new_run(answers | enough, model_of(answers["model"])).rows
    return answers[name]


def _whole_number(answer: str | int, least: int, most: int) -> int:
    if not str(answer).isdecimal() or not least <= int(answer) <= most:
        raise LockstepError(f"{answer}: expected a whole number from {least} to {most}")
    return int(answer)


def number(tokens: str) -> int:
    """Return a new run's number of tokens, as 1B."""
    if not 1 <= (number := number_of(tokens)) <= MOST_TOKENS:
        raise LockstepError(f"--tokens {tokens}: expected a number from 1 to 1e15, {AS_WRITTEN}")
    return int(number)


def tables(new: NewRun) -> dict[str, Any]:
    """Return the tables of the new run file, with times that may still be too short."""
    fewest = max(1, new.peers - 1)
    limit = {"steps": new.rounds, "batch": new.batch, "max_seq_len": new.length}
    return {
        "config": {
            "warmup_time": 30,
            "cooldown_time": 10,
            "epoch_time": FOREVER,
            "max_round_train_time": 30,
            "round_witness_time": 1,
            "min_clients": fewest,
            "init_min_clients": new.peers,
            "waiting_for_members_extra_time": 3,
            "verification_percent": 0,
            "witness_nodes": min(2, fewest),
            "total_steps": new.rounds,
            "global_batch_size_start": new.batch,
            "global_batch_size_end": new.batch,
            "global_batch_size_warmup_tokens": 0,
        },
        "model": {"LLM": _model(new)},
        "download": {"stream": False, **({"limit": limit} if new.data.far else {})},
        "peers": _peers(new),
        "links": new.links,
        "witness": {"snapshot_every": max(1, new.rounds // 4)},
        "held_out": {
            "sequences": -(-HELD_OUT_TOKENS // new.length),
            "every": max(1, new.rounds // 20),
        },
        "export": {"dtype": new.exported},
        "evaluate": {"prompt": "The history of"},
        "runtime": {"checkpoint_every": max(1, new.rounds // 8)},
    }


def _model(new: NewRun) -> dict[str, Any]:
    warmup = min(MOST_WARMUP // new.card.local_steps, new.rounds // WARMUP)
    return {
        "architecture": new.model.architecture,
        "data_type": "Pretraining",
        "max_seq_len": new.length,
        "cold_start_warmup_steps": 0,
        "checkpoint": _seeded(new.model.checkpoint, new.seed),
        "data_location": _seeded(new.data.table, new.seed),
        "lr_schedule": {
            "Cosine": {
                "base_lr": new.rate,
                "warmup_init_lr": 0.0,
                "warmup_steps": warmup,
                "total_steps": new.rounds,
                "final_lr": short(new.rate / DECAYED),
            }
        },
        "optimizer": {new.card.tag: new.card.settings},
    }


def _seeded(variant: Any, seed: int | None) -> Any:
    """Return a new run's checkpoint or data location with another seed, if it has one."""
    if seed is None or isinstance(variant, str):
        return variant
    ((tag, table),) = variant.items()
    if not isinstance(table, dict):
        return variant
    if "seed" in table:
        table = table | {"seed": seed}
    if "shuffle" in table and table["shuffle"] != "DontShuffle":
        table = table | {"shuffle": {"Seeded": [*hashlib.sha256(str(seed).encode()).digest()]}}
    return {tag: table}


def _peers(new: NewRun) -> dict[str, Any]:
    parts = new.devices_of_a_peer
    at_once = max(1, (AT_ONCE_GPU if new.gpus else AT_ONCE) // new.length)
    scan = bool(new.gpus) or new.model.config["num_hidden_layers"] > MANY_LAYERS
    vocabulary = new.model.config["vocab_size"]  # 0 where the model is a workload's
    of_gpus: dict[str, Any] = {"remat": "dots_with_no_batch_dims_saveable"}
    if vocabulary:
        of_gpus["head_tokens"] = parts * head_tokens(vocabulary)
    return {
        "count": new.peers,
        **({} if new.seed is None else {"seed": new.seed}),
        "micro_batch": parts * divided(max(1, new.rows // parts), at_once),
        "fsdp": parts,
        "precision": "bfloat16" if new.gpus else "float32",
        "attention": "cudnn" if new.gpus else "matmul",
        "scan_layers": scan,
        "remat": "nothing_saveable" if scan else "everything_saveable",
        **(of_gpus if new.gpus else {}),
    }


def head_tokens(vocabulary: int) -> int:
    """Return for how many tokens a new run's GPU makes logits at a time: up to `LOGITS_GPU`."""
    return min(AT_ONCE_GPU, max(TILE_TOKENS, LOGITS_GPU // vocabulary // TILE_TOKENS * TILE_TOKENS))


def divided(rows: int, most: int) -> int:
    """Return the largest divisor of a new run's `rows` that is at most `most`, and at least 1."""
    return max(part for part in range(1, max(1, min(rows, most)) + 1) if rows % part == 0)


def bits_that_audit(document: dict[str, Any], model: dict[str, Any]) -> Reasons:
    """Set a new run's `[peers] bits` to those of every machine, if all operations have rules.

    Then an audit can be made anywhere. Return why the bits are what they are.
    """
    peers = document["peers"]
    if peers["attention"] == "cudnn":
        why = "cuDNN's attention has no rule"
    else:
        try:
            programs_of(runfile.parse(document | {"peers": peers | BY_RULES}, CALLED), model)
        except LockstepError as error:
            why = str(error)
        else:
            peers |= BY_RULES
            return {
                "peers.bits": "any machine can audit it, bit for bit; a step takes 1.4 times as "
                'long on a CPU as with "machine"',
                "peers.product_bits": '20 takes half as much time again; bits = "machine" needs 20',
            }
    peers["bits"] = "machine"
    return {"peers.bits": f"only a machine like the trainer's can audit it: {why}"}


def reasons(new: NewRun) -> Reasons:
    """Return why a new run's keys that were chosen have their values."""
    length, steps = new.length, new.card.local_steps
    tokens = new.rounds * new.batch * length
    schedule = "model.LLM.lr_schedule.Cosine"
    local = f" x {steps} local steps" if steps > 1 else ""
    most = f"the model takes {new.model.longest:,} tokens at once; {MOST_LENGTH:,} at most here"
    aimed = f", so that the run has about {AIMED_STEPS:,} of them, not tuned"
    return {
        "model.LLM.max_seq_len": "--length" if new.options.get("length") else most,
        "config.global_batch_size_end": f"{new.peers} peers x {counted(new.rows, 'sequence')}"
        f"{local}; {new.rows * new.peers * length:,} tokens a local step"
        f"{', of --batch' if new.options.get('batch') else aimed}",
        "config.total_steps": f"rounds of {new.batch * length:,} tokens: {tokens:,} in all, "
        f"{new.tokens:,} asked for",
        **_local_steps(new.card),
        f"{schedule}.base_lr": _why_rate(new),
        f"{schedule}.warmup_steps": f"rounds: a tenth of them, at most {MOST_WARMUP} local steps; "
        "then a cosine down to a tenth of the rate",
        **_why_devices(new),
        "links.upload_mbps": "simulated, a home connection's, as in params/run.toml",
        **{f"links.{key}": "simulated, as asked for" for key in new.links},
        "witness.snapshot_every": "a quarter of the rounds, as in params/run.toml",
        "held_out.every": "20 measurements",
        "held_out.sequences": f"at least {HELD_OUT_TOKENS:,} tokens a measurement, or all that "
        "are held out",
        "export.dtype": _why_dtype(new),
        **({} if new.seed is None else {"peers.seed": f"--seed {new.seed}, as all seeds"}),
        "runtime.checkpoint_every": "an eighth of the rounds, as in params/run.toml",
    }


def _why_rate(new: NewRun) -> str:
    """Return why a new run's learning rate has its value."""
    if new.options.get("learning_rate"):
        return "--learning-rate"
    params = f"{new.model.params / 1e6:,.4g} M"
    if new.model.is_trained:
        adamw = f"{FINE_TUNING:g} of AdamW, between 1e-5 of LLaMA-Factory and 5e-5 of transformers"
        if new.card.tag != "AdamW":
            adamw += f", times {new.card.tag}'s rate for fresh weights over AdamW's"
        return (
            f"for weights that are trained already: {adamw}; not tuned for these {params}: try "
            "half and twice"
        )
    rate = new.card.rate_for(new.model.params)
    return (
        f"for fresh weights: stated for {rate.params / 1e6:,.4g} M params by {rate.file}, not "
        f"tuned for these {params}: try half and twice"
    )


def _why_dtype(new: NewRun) -> str:
    if new.options.get("dtype"):
        return "--dtype"
    return "the model's own" if new.model.is_trained else "fresh weights are float32"


def _local_steps(card: Card) -> Reasons:
    of_card = {
        "inner_steps": f"local steps, of {card.file}, not tuned",
        "outer_momentum": f"of {card.file}, for few rounds; the papers have 0.9, for many",
    }
    settings = card.settings if "inner_steps" in card.settings else ()
    return {
        f"model.LLM.optimizer.{card.tag}.{key}": of_card[key] for key in of_card if key in settings
    }


def _why_devices(new: NewRun) -> Reasons:
    at_once, share = "tokens at once on", "a peer's share of a local step, at most"
    if not new.gpus:
        return {"peers.micro_batch": f"{share} {AT_ONCE:,} {at_once} a CPU"}
    not_measured = "not measured on a GPU"
    return {
        "peers.micro_batch": f"{share} {AT_ONCE_GPU:,} {at_once} each of its GPUs, {not_measured}",
        "peers.layout": "a program for each peer, which an audit replays bit for bit",
        "peers.precision": f"for {new.gpus} GPUs, {not_measured}",
        "peers.attention": f"cuDNN's fused kernel; without an NVIDIA GPU: matmul, {not_measured}",
        "peers.fsdp": f"GPUs of a peer, of {new.gpus} for {new.peers} peers, {not_measured}",
        "peers.remat": "the fastest on an H200 with 124M and 350M; nothing_saveable: least memory",
        "peers.head_tokens": f"{LOGITS_GPU:,} logits at most: with 124M 7 % faster on an H200",
    }
