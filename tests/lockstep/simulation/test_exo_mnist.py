"""The shape of EXO Gym's example/mnist.py on drawn digits: `simulate` against torch alone."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import simulate

SIDE, WIDTH, BATCH, STEPS, RATE = 16, 8, 64, 160, 1e-2
LINES = [(0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 1, 1), (1, 0, 1, 1), (1, 0, 2, 0), (1, 1, 2, 1)]
LINES += [(2, 0, 2, 1)]  # of a seven-segment digit: from row, column to row, column
LIT = [119, 36, 93, 109, 46, 107, 123, 37, 127, 111]  # which of them, a bit each
ADAMW = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 1e-2, "clip_grad_norm": 0.0}  # torch's


def digits(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Digits of any place and size, with noise: float32 [N, 1, 16, 16], int64 [N]."""
    draw = np.random.default_rng(seed)
    y, x = draw.integers(0, 10, count), np.zeros((count, 1, SIDE, SIDE), np.float32)
    for picture, digit in zip(x[:, 0], y, strict=True):
        top, left, tall, wide = draw.integers(0, [3, 3, 2, 2]) + [1, 4, 5, 5]
        for bit, (a, b, c, d) in enumerate(LINES):
            if LIT[digit] >> bit & 1:
                rows = slice(top + a * tall, top + c * tall + 1)
                picture[rows, left + b * wide : left + d * wide + 1] = 1
    x += 0.15 * draw.standard_normal(x.shape)
    return x - np.float32(0.2), y


class CNN(nn.Module):
    """Two blocks of two convolutions with batch norms, and two layers."""

    def __init__(self):
        super().__init__()
        blocks: list[nn.Module] = []
        for given, width in ((1, WIDTH), (WIDTH, 2 * WIDTH)):
            for size in (given, width):
                conv = nn.Conv2d(size, width, 3, padding=1)
                blocks += [conv, nn.BatchNorm2d(width), nn.ReLU()]
            blocks += [nn.MaxPool2d(2), nn.Dropout2d(0.25)]
        hidden = nn.Linear(2 * WIDTH * (SIDE // 4) ** 2, 64)
        last = nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10)
        self.net = nn.Sequential(*blocks, nn.Flatten(), hidden, *last)

    def forward(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)


def made() -> CNN:
    torch.manual_seed(0)
    return CNN()


@pytest.mark.soak
def test_one_peer_reaches_what_torch_alone_reaches():
    (x, y), test = digits(2560, 1), digits(512, 2)
    module = made()
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
    for step in range(STEPS):
        at = np.arange(step * BATCH, (step + 1) * BATCH) % len(y)
        optimizer.zero_grad()
        module((torch.from_numpy(x[at]), torch.from_numpy(y[at]))).backward()
        optimizer.step()
    with torch.no_grad():
        alone = module.eval()(tuple(map(torch.from_numpy, test))).item()
    given = {"learning_rate": RATE, "batch_size": BATCH, "shuffle": False, "show_progress": False}
    loss, optimizer = (lambda module, batch: module(batch)), {"AdamW": ADAMW}
    found = simulate(
        loss, made(), (x, y), test, optimizer=optimizer, peers=1, steps=STEPS, **given
    ).validation["loss"]
    assert alone < 0.1
    assert found[-1] == pytest.approx(alone, abs=0.02)
