"""Any causal language model of transformers, whole or by LoRA: `hf_causal_lm:CausalLM`.

In its config:
- `model`: the absolute path of a Hugging Face folder, or what a config.json says: new weights.
- `lora`: arguments of PEFT's `LoraConfig`. Then adapters alone are trained, and travel.
- `learning_rate`: of AdamW, for an inner loop; the run's schedule scales it.
"""

import torch
import torch.nn.functional as F
from lockstep_worker import TorchWorkload
from transformers import AutoConfig, AutoModelForCausalLM


class CausalLM(TorchWorkload):
    """A model that `AutoModelForCausalLM` knows, in float32."""

    @property
    def suggests(self):
        """A rate of AdamW for `lockstep new`: of adapters as in QLoRA, or of trained weights."""
        if "lora" in self.config:
            return {"learning_rate": 2e-4}
        return {} if isinstance(self.config["model"], dict) else {"learning_rate": 2e-5}

    def model(self):
        """The model as it begins."""
        source = self.config["model"]
        if isinstance(source, dict):
            known = AutoConfig.for_model(**source)
            model = AutoModelForCausalLM.from_config(known, dtype=torch.float32)
        else:
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        if "lora" not in self.config:
            return model
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **self.config["lora"]))

    def loss(self, model, rows):
        """The cross-entropy of all tokens that have a label: its sum, and how many these are."""
        return tuple(sums.sum() for sums in self.row_losses(model, rows))

    def row_losses(self, model, rows):
        """The same of each row."""
        given = self.arguments(rows)
        labels = given.pop("labels")[:, 1:]
        logits = model(**given, use_cache=False).logits[:, :-1]
        losses = F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none")
        return losses.sum(1), (labels != -100).sum(1)

    def arguments(self, rows):
        """What the model takes of rows; it finds packed sequences by their positions, from 0."""
        named = rows.items() if isinstance(rows, dict) else [("inputs", rows)]
        columns = {name: torch.as_tensor(values) for name, values in named}
        given = {"input_ids": columns["inputs"], "labels": columns.get("labels", columns["inputs"])}
        if (ids := columns.get("sequence_ids")) is not None:
            places = (ids[:, :, None] == ids[:, None]).tril(-1).sum(2)
            if not columns.setdefault("position_ids", places).equal(places):
                raise ValueError("position_ids: expected those in each sequence, from 0")
        return given | {name: x for name, x in columns.items() if name == "position_ids"}

    def inner_optimizer(self, model):
        """AdamW over what is trained."""
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        return torch.optim.AdamW(trained, lr=self.config["learning_rate"])

    def save(self, model, folder):
        """A folder that transformers loads, or with LoRA the files of PEFT's adapters."""
        model.save_pretrained(folder)
