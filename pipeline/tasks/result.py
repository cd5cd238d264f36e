"""What a task found, whoever ran it."""

from typing import NamedTuple


class Metric(NamedTuple):
    """One number of a task.

    Attributes:
      value: The number.
      stderr: Its standard error over documents, or None where there is none.
    """

    value: float
    stderr: float | None


class TaskResult(NamedTuple):
    """The result of one task.

    Attributes:
      name: Name of the task as the run file has it; of a YAML file, the task's own.
      metrics: Numbers by name, such as acc; the first is the task's main one.
      chance: Accuracy of a guess, the mean of 1 / (number of choices); None if it is no choice.
      documents: Number of documents.
      few_shot: Number of solved examples before each document.
      sha256: Hash of the task's definition and documents.
      source: Where the task comes from.
    """

    name: str
    metrics: dict[str, Metric]
    chance: float | None
    documents: int
    few_shot: int
    sha256: str
    source: str
