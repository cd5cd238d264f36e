"""The run file's table [evaluate]: what is measured of the exported model."""

from typing import Annotated

from pydantic import Field

from pipeline.runfile.table import U32, AsTuple, Count, Distinct, NotNegative, Table

TaskNames = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Distinct, AsTuple]


class Evaluate(Table):
    """The tasks that the exported model is given, and its text sample."""

    tasks: TaskNames = ("next_line",)
    """Tasks to score the model on. next_line asks which of four lines follows some lines of the
    held-out text. The others need `pip install -c constraints.txt -e '.[eval]'`: tasks and groups
    of lm_eval by their names, Psyche's ten by Psyche's names, and YAML files of tasks in lm_eval's
    form (docs/reference/tasks.md)."""
    trust_task_code: bool = False
    """Whether tasks may run code that is not lm_eval's own: functions that YAML files name
    (`!function`), and metrics that are fetched from the hub as code. Such code runs with
    all your rights."""
    questions: Count = 500
    """Number of questions of next_line, at most."""
    few_shot: Annotated[int, Field(ge=0, le=100)] | None = None
    """Number of solved examples before each document; by default, as each task defines it. As in
    lm_eval, a task whose definition has none stays without."""
    few_shot_seed: U32 = 1234
    """Seed of the choice of these examples; lm_eval's own is 1234."""
    limit: Count | None = None
    """Number of documents of each task, its first ones; by default all."""
    batch_size: Count = 32
    """Requests that are computed at once; changes the last bits of scores."""
    every: Annotated[int, Field(ge=0)] = 0
    """Rounds between scores while training, which are written to metrics/tasks.tsv; 0 scores
    nothing."""
    sample_tasks: TaskNames = ("next_line",)
    """Tasks that are scored while training, as in `tasks`; each as it is defined."""
    sample: Count = 100
    """Number of questions or documents of each task that are asked while training, its first
    ones."""
    prompt: str = "def "
    """Text that the model continues."""
    max_new_tokens: Count = 64
    """Number of tokens to generate, at most."""
    temperature: NotNegative = 0.8
    """Temperature of the sampler, a divisor of the logits; 0 always takes the most likely token."""
    seed: U32 = 0
    """Seed of the sampler."""
