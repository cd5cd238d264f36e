"""A small language model, in torch: `factory = "torch_language_model:GRU"`.

Rows are tokens, int64 [N, T]; each token is predicted from those before it.
"""

import torch
import torch.nn.functional as F
from lockstep_worker import TorchWorkload


class Layers(torch.nn.Module):
    """An embedding, a GRU and a head: tokens [N, T] -> logits [N, T, vocab_size]."""

    def __init__(self, vocab_size, hidden_size, dropout):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, hidden_size)
        self.gru = torch.nn.GRU(hidden_size, hidden_size, batch_first=True)
        self.dropout = torch.nn.Dropout(dropout)
        self.head = torch.nn.Linear(hidden_size, vocab_size)

    def forward(self, tokens):
        """The logits of what follows each token."""
        return self.head(self.dropout(self.gru(self.embed(tokens))[0]))


class GRU(TorchWorkload):
    """In its config: `vocab_size`, `hidden_size` and `dropout`."""

    def model(self):
        """A new model."""
        config = self.config
        return Layers(config["vocab_size"], config["hidden_size"], config["dropout"])

    def loss(self, model, rows):
        """The mean cross-entropy of all predictions."""
        return self.row_losses(model, rows).mean()

    def inner_optimizer(self, model):
        """AdamW, for an inner loop; the run's schedule scales its learning rate."""
        return torch.optim.AdamW(model.parameters())

    def row_losses(self, model, rows):
        """The mean cross-entropy of each row's predictions."""
        logits = model(rows[:, :-1]).transpose(1, 2)  # [N, vocab_size, T - 1]
        return F.cross_entropy(logits, rows[:, 1:], reduction="none").mean(1)
