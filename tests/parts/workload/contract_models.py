"""Small models with what public ones have; the config says what one of them does wrong."""

import os

import numpy as np
import torch
import torch.nn.functional as F
from lockstep_worker import TorchWorkload
from torch.nn.utils.parametrizations import spectral_norm

WIDTH, CLASSES = 12, 4


class Net(torch.nn.Module):
    """Batch and spectral norm, a tied and a frozen layer, a mask, complex numbers, dropout."""

    def __init__(self, wrong):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.hidden, self.again = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.again.weight = self.hidden.weight
        self.bound = spectral_norm(torch.nn.Linear(WIDTH, WIDTH))
        self.frozen = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.phase = torch.nn.Parameter(torch.randn(WIDTH, CLASSES, dtype=torch.complex64) / 3)
        self.register_buffer("mask", torch.ones(WIDTH))
        self.dropout = torch.nn.Dropout(0.1)
        if wrong == "teacher":
            self.register_buffer("teacher", self.hidden.weight.detach().clone())
        if wrong == "counter":
            self.register_buffer("steps", torch.tensor(0))
        self.wrong, self.calls = wrong, 0

    def forward(self, x):
        scale = 1.0
        if self.training:
            self.calls += 1
        if self.wrong == "calls":  # an annealed weight
            scale = min(1.0, 0.1 + self.calls / 40)
        elif self.wrong == "teacher" and self.training:
            self.teacher.lerp_(self.hidden.weight.detach(), 0.5)
        elif self.wrong == "counter" and self.training:
            self.steps += 1
        hidden = self.bound(torch.relu(self.hidden(self.norm(x))))
        hidden = self.dropout(self.frozen(hidden) * self.mask)
        return scale * (self.again(hidden).to(torch.complex64) @ self.phase).abs()


class Mixed(TorchWorkload):
    """Classes of points far from 0."""

    def model(self):
        return Net(self.config.get("wrong"))

    def loss(self, model, rows):
        weights = 1.0 + rows["y"]  # rows do not count alike, and the first class least
        loss = weights * F.cross_entropy(model(rows["x"]), rows["y"], reduction="none")
        if self.config.get("wrong") == "noise":
            loss = loss * (1 + int.from_bytes(os.urandom(2), "big") / 2**15)
        return loss.sum(), weights.sum()

    def inner_optimizer(self, model):
        head = [model.phase]
        body = [model.hidden.weight, model.hidden.bias, model.again.bias, *model.norm.parameters()]
        body += model.bound.parameters()
        groups = [{"params": body}, {"params": head, "lr": 0.02}]
        return torch.optim.AdamW(groups, lr=0.01)

    def dataset(self, split):
        draw = np.random.default_rng({"train": 1, "held_out": 2}[split])
        z = draw.standard_normal((512 if split == "train" else 64, WIDTH)).astype(np.float32)
        y = (z @ np.random.default_rng(0).standard_normal((WIDTH, CLASSES))).argmax(1)
        return {"x": 5 + 3 * z, "y": y}

    def save(self, model, folder):
        torch.save(model.state_dict(), f"{folder}/model.pt")
