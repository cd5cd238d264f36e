"""A `transformers.Trainer` as it stands, as inner loop: `factory = "hf_trainer:WithTrainer"`.

Its config is that of hf_causal_lm.py, and beside it `arguments`: those of `TrainingArguments` in
`TUNES`. The run says which rows a step takes and how the rate changes; others write, push or
report, and an auditor gives this class the config of a stranger.
"""

from pathlib import Path

from hf_causal_lm import CausalLM
from lockstep_worker import jobs, state_blob
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainingArguments, default_data_collator

TUNES = """learning_rate optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
    max_grad_norm gradient_checkpointing bf16 fp16 tf32 label_smoothing_factor full_determinism
""".split()  # noqa: SIM905 - one name a word
SILENT = dict(report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True)


class WithTrainer(CausalLM):
    """A causal language model that is trained by transformers' own Trainer."""

    @property
    def suggests(self):
        """That of hf_causal_lm.py, with the Trainer's steps."""
        return super().suggests | {"inner": "worker"}

    def __init__(self, config):
        super().__init__(config)
        if others := sorted(config["arguments"].keys() - set(TUNES)):
            raise ValueError(f"arguments has {others[0]}, expected some of {' '.join(TUNES)}")

    def collated(self, rows):
        """A batch; with a cache, transformers would look over the borders of packed rows."""
        return default_data_collator(rows) | {"use_cache": False}

    def run_inner_loop(self, model, job):
        """As many steps as the job says, over the rows it lists, in their order."""
        loop = range(job["num_inner_steps"])
        steps = [self.arguments(jobs.step_rows(job, step)) for step in loop]
        arguments = TrainingArguments(
            str(Path(job["output_parameter_pack_path"]).with_name("trainer")),
            max_steps=len(steps),
            per_device_train_batch_size=len(steps[0]["labels"]),
            train_sampling_strategy="sequential",
            seed=job["seed"] % 2**32,
            use_cpu=self.runtime_device() == "cpu",
            **SILENT,
            **self.config["arguments"],
        )
        cut = [(step, row) for step in steps for row in range(len(step["labels"]))]
        rows = [{name: values[row] for name, values in step.items()} for step, row in cut]
        trainer = Trainer(model, arguments, train_dataset=rows, data_collator=self.collated)
        trainer.create_optimizer()
        rates = jobs.Rates(trainer.optimizer, job)
        if (given := jobs.given_state(job)) is not None:
            trainer.optimizer.load_state_dict(state_blob.decoded(given))
        rates.scale(1.0)
        trainer.lr_scheduler = LambdaLR(trainer.optimizer, rates.factor)
        trained = trainer.train()
        path = jobs.state_path(job)
        path.write_bytes(state_blob.encoded(trainer.optimizer.state_dict()))
        return {
            "steps_completed": trainer.state.global_step,
            "metrics": {"loss": trained.training_loss},
            "inner_optimizer_state_path": str(path),
            "inner_optimizer_state_encoding": state_blob.ENCODING,
        }
