"""The answers of a user to `lockstep new`, checked: one method for each question."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lockstep.errors import LockstepError
from lockstep.methods import CARDS, card_of
from lockstep.methods.card import Card
from lockstep.tables.peers import MAX_CLIENTS

if TYPE_CHECKING:
    from parts.new.fresh import NewRun
    from pipeline.preflight.model import StartingModel

MOST_TOKENS, MOST_GPUS = 1e15, 2**16


def card_named(name: str) -> Card:
    """Return the card that --optimizer names.

    Raises:
      LockstepError: There is none.
    """
    if card := card_of(name):
        return card
    raise LockstepError(f"--optimizer {name}: expected one of {', '.join(CARDS)}")


class NewAnswers(NamedTuple):
    """A user's options for a new run, or for one like another; None where they gave none."""

    file: Path | None
    model: str | None = None
    data: str | None = None
    optimizer: str | None = None
    tokens: str | None = None
    peers: int | None = None
    gpus: int | None = None
    length: int | None = None
    batch: int | None = None
    uplink: float | None = None
    downlink: float | None = None
    learning_rate: float | None = None
    seed: int | None = None
    dtype: str | None = None


class Checks:
    """A method for each question: what an answer means; LockstepError where it cannot be.

    Args:
      root: Folder of `data/`.
      force: Whether a file may be overwritten.
    """

    def __init__(self, root: Path, force: bool):
        self.root, self.force = root, force
        self._models: dict[str, StartingModel] = {}

    def file(self, given: NewAnswers, answer: str | Path) -> Path:
        """A file that may be written."""
        del given
        if Path(answer).exists() and not self.force:
            raise LockstepError(f"{answer}: exists, expected a new file, or --force")
        return Path(answer)

    def model(self, given: NewAnswers, answer: str) -> str:
        """An existing model."""
        del given
        self.model_of(answer)
        return answer

    def data(self, given: NewAnswers, answer: str) -> str:
        """Data that fit the model."""
        from parts.new.data_tables import data_named

        data_named(answer, self.model_of(given.model))
        return answer

    def optimizer(self, given: NewAnswers, answer: str) -> str:
        """The name of an optimizer."""
        del given
        card_named(answer)
        return answer

    def tokens(self, given: NewAnswers, answer: str) -> str:
        """Enough tokens for one round of one peer."""
        self._check_round(given._replace(tokens=answer, peers=given.peers or 1))
        return answer

    def peers(self, given: NewAnswers, answer: str | int) -> int:
        """A number of peers that the tokens suffice for."""
        peers = _whole(answer, 1, MAX_CLIENTS)
        self._check_round(given._replace(peers=peers))
        return peers

    def gpus(self, given: NewAnswers, answer: str | int) -> int:
        """A number of GPUs."""
        del given
        return _whole(answer, 0, MOST_GPUS)

    def model_of(self, name: str) -> "StartingModel":
        """Return the model of a name, which is looked for once."""
        from parts.new.starting_model import model_named

        if name not in self._models:
            self._models[name] = model_named(name, self.root)
        return self._models[name]

    def _check_round(self, given: NewAnswers) -> None:
        new_run(given._replace(gpus=0), self.model_of(given.model)).check()


def _whole(answer: str | int, least: int, most: int) -> int:
    if not str(answer).isdecimal() or not least <= int(answer) <= most:
        raise LockstepError(f"{answer}: expected a whole number from {least} to {most}")
    return int(answer)


def new_run(given: NewAnswers, model: "StartingModel") -> "NewRun":
    """Return the new run that answers ask for.

    Raises:
      LockstepError: An answer cannot be.
    """
    from parts.new import fresh
    from parts.new.data_tables import data_named

    card, tokens = card_named(given.optimizer), _number(given.tokens)
    return fresh.NewRun(
        model,
        data_named(given.data, model),
        card.for_groups(model.groups),
        tokens,
        given.peers,
        given.gpus,
        given.length,
        given.batch,
        given.uplink,
        given.downlink,
        given.learning_rate,
        given.seed,
        given.dtype,
    )


def _number(tokens: str) -> int:
    try:
        number = float(tokens.replace("_", "").replace(",", ""))
    except ValueError:
        number = 0.0
    if not 1 <= number <= MOST_TOKENS:
        raise LockstepError(f"--tokens {tokens}: expected a number from 1 to 1e15, as 1e9")
    return int(number)
