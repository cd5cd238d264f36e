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
        losses, counted = self.token_losses(model, rows)
        return losses.sum(), counted.sum()

    def row_losses(self, model, rows):
        """The same of each row."""
        losses, counted = self.token_losses(model, rows)
        return losses.sum(1), counted.sum(1)

    def token_losses(self, model, rows):
        """The cross-entropy of each next token [N, T - 1], and which have a label."""
        columns = rows if isinstance(rows, dict) else {"inputs": rows}
        labels = columns.get("labels", columns["inputs"])[:, 1:]
        positions = columns.get("position_ids")
        logits = model(columns["inputs"], position_ids=positions, use_cache=False).logits[:, :-1]
        losses = F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none")
        return losses, labels != -100

    def inner_optimizer(self, model):
        """AdamW over what is trained."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.config["learning_rate"])

    def save(self, model, folder):
        """A folder that transformers loads, or with LoRA the files of PEFT's adapters."""
        model.save_pretrained(folder)
