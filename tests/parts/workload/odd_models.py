"""Models that have what makes trouble, for the tests of the worker."""

import sys

import torch
import torch.nn.functional as F
from lockstep_worker import TorchWorkload


class Odd(torch.nn.Module):
    """Tied weights, dropout, buffers, a frozen layer, a bfloat16 layer, a part without gradient."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = torch.nn.Linear(6, 6).requires_grad_(False)
        self.coarse = torch.nn.Linear(6, 6, dtype=torch.bfloat16)
        self.norm = torch.nn.BatchNorm1d(6)
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, tokens):
        hidden = self.norm(self.frozen(self.embed(tokens)).mean(1))
        hidden = hidden + self.coarse(hidden.bfloat16()).float() * self.scale
        return self.head(self.drop(hidden))


class OddWorkload(TorchWorkload):
    """Odd, and a loss that exits at rows of token 9."""

    def model(self):
        return Odd().eval()  # as `from_pretrained` leaves a model

    def loss(self, model, rows):
        print("what a user prints", file=sys.stderr)
        print("what a user prints", flush=True)
        if (rows == 9).all():
            sys.exit("enough")
        return F.cross_entropy(model(rows[:, :-1]), rows[:, -1])


class Small(TorchWorkload):
    """Linear, float32, no more."""

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))

    def loss(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"])


class OddLoop(OddWorkload):
    """Odd with an optimizer, and so with an inner loop."""

    def inner_optimizer(self, model):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, 0.1, momentum=0.9)


class Coupled(Small):
    """A loss of pairs in a batch, as of in-batch negatives; or of labels, of which rows differ."""

    def loss(self, model, rows):
        made, there = model(rows["x"]), rows["x"][:, :3] > 0
        if self.config["of"] == "labels":
            return (made.square() * there).sum() / there.sum()
        return F.cross_entropy(made @ made.T, torch.arange(len(made)))


class CoupledRows(Coupled):
    """The same, with each row's part."""

    def row_losses(self, model, rows):
        made = model(rows["x"])
        return F.cross_entropy(made @ made.T, torch.arange(len(made)), reduction="none")


class Noisy(Small):
    """A loss that draws numbers."""

    def loss(self, model, rows):
        return super().loss(model, {**rows, "x": rows["x"] + torch.randn_like(rows["x"])})
