"""Public kinds of model, tiny: each written as the source that its docstring names writes it."""

import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from lockstep_worker import TorchWorkload, jobs
from torch import nn


class Kind(TorchWorkload):
    """Saved as torch users save: a state dict of everything."""

    def inner_optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=5e-3)

    def save(self, model, folder):
        torch.save(model.state_dict(), f"{folder}/model.pt")


def drawn(split, count=256):
    """A generator of a split's data, and how many rows there are."""
    train = split == "train"
    return np.random.default_rng(1 if train else 2), count if train else 64


# ---- ResNet: torchvision.models.resnet, `BasicBlock` ----


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        shortcut = nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
        self.downsample = nn.Sequential(*shortcut) if stride > 1 else nn.Identity()

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(x), inplace=True)


class ResNet(Kind):
    """Four classes of 8 x 8 pictures; SGD with momentum and weight decay."""

    def model(self):
        stem = nn.Conv2d(1, 6, 3, 1, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True)
        blocks = BasicBlock(6, 6, 1), BasicBlock(6, 12, 2)
        return nn.Sequential(
            *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4)
        )

    def loss(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"])

    def row_losses(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="none")

    def inner_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    def dataset(self, split):
        draw, count = drawn(split)
        y = draw.integers(0, 4, count)
        patterns = np.random.default_rng(0).standard_normal((4, 1, 8, 8))
        x = 3 + patterns[y] + draw.standard_normal((count, 1, 8, 8))
        return {"x": x.astype(np.float32), "y": y}


# ---- nanoGPT: github.com/karpathy/nanoGPT, model.py ----


class CausalSelfAttention(nn.Module):
    def __init__(self, block_size, n_head, n_embd, dropout):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.n_head = n_head
        mask = torch.tril(torch.ones(block_size, block_size))
        self.register_buffer("bias", mask.view(1, 1, block_size, block_size))

    def forward(self, x):
        B, T, C = x.size()
        heads = (
            part.view(B, T, self.n_head, -1).transpose(1, 2) for part in self.c_attn(x).split(C, 2)
        )
        q, k, v = heads
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class GPTBlock(nn.Module):
    def __init__(self, block_size, n_head, n_embd, dropout):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(block_size, n_head, n_embd, dropout)
        layers = nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        self.mlp = nn.Sequential(*layers, nn.Dropout(dropout))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size=64, block_size=16, n_layer=2, n_head=2, n_embd=16, dropout=0.1):
        super().__init__()
        blocks = (GPTBlock(block_size, n_head, n_embd, dropout) for _ in range(n_layer))
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab_size, n_embd),
                "wpe": nn.Embedding(block_size, n_embd),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList(blocks),
                "ln_f": nn.LayerNorm(n_embd),
            }
        )
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(
            lambda one: (
                hasattr(one, "weight")
                and one.weight.dim() > 1
                and nn.init.normal_(one.weight, std=0.02)
            )
        )

    def forward(self, idx):
        parts = self.transformer
        x = parts.drop(parts.wte(idx) + parts.wpe(torch.arange(idx.size(1), device=idx.device)))
        for block in parts.h:
            x = block(x)
        return self.lm_head(parts.ln_f(x))


class NanoGPT(Kind):
    """A tied head, a mask, dropout, AdamW of two groups, and a step that clips the gradient."""

    def model(self):
        return GPT()

    def loss(self, model, rows):
        return self.row_losses(model, rows).mean()

    def row_losses(self, model, rows):
        logits = model(rows[:, :-1]).transpose(1, 2)
        return F.cross_entropy(logits, rows[:, 1:], reduction="none").mean(1)

    def inner_optimizer(self, model):
        decayed = [one for one in model.parameters() if one.dim() >= 2]
        others = [one for one in model.parameters() if one.dim() < 2]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)

    def inner_step(self, model, optimizer, rows):
        optimizer.zero_grad()
        loss = self.loss(model, rows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()


# ---- U-Net: github.com/lucidrains/denoising-diffusion-pytorch ----


class ResnetBlock(nn.Module):
    def __init__(self, dim, dim_out, time_dim):
        super().__init__()
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(time_dim, dim_out))
        self.norm1, self.norm2 = nn.GroupNorm(2, dim), nn.GroupNorm(2, dim_out)
        self.conv1 = nn.Conv2d(dim, dim_out, 3, padding=1)
        self.conv2 = nn.Conv2d(dim_out, dim_out, 3, padding=1)
        self.res_conv = nn.Conv2d(dim, dim_out, 1) if dim != dim_out else nn.Identity()

    def forward(self, x, time):
        hidden = self.conv1(F.silu(self.norm1(x))) + self.mlp(time)[:, :, None, None]
        return self.conv2(F.silu(self.norm2(hidden))) + self.res_conv(x)


class Unet(nn.Module):
    STEPS = 50

    def __init__(self, dim=4, time_dim=8):
        super().__init__()
        self.time = nn.Embedding(self.STEPS, time_dim)
        self.init_conv = nn.Conv2d(1, dim, 3, padding=1)
        self.down = ResnetBlock(dim, dim, time_dim)
        self.downsample = nn.Conv2d(dim, 2 * dim, 4, 2, 1)
        self.mid = ResnetBlock(2 * dim, 2 * dim, time_dim)
        self.upsample = nn.Sequential(
            nn.Upsample(scale_factor=2), nn.Conv2d(2 * dim, dim, 3, padding=1)
        )
        self.up = ResnetBlock(2 * dim, dim, time_dim)
        self.final_conv = nn.Conv2d(dim, 1, 1)
        betas = torch.linspace(1e-3, 0.2, self.STEPS)
        self.register_buffer("alphas_cumprod", torch.cumprod(1 - betas, 0))

    def forward(self, x, t):
        time, x = self.time(t), self.init_conv(x)
        skip = self.down(x, time)
        x = self.upsample(self.mid(self.downsample(skip), time))
        return self.final_conv(self.up(torch.cat([x, skip], 1), time))


class UNet(Kind):
    """A diffusion: noise and times are drawn in the loss, and are fixed where it is measured."""

    def model(self):
        return Unet()

    def loss(self, model, rows):
        return self.losses(model, rows["x"], None).mean()

    def row_losses(self, model, rows):
        x = rows["x"]
        one = self.losses(model, x[:1], torch.Generator().manual_seed(0))
        rest = [self.losses(model, row[None], torch.Generator().manual_seed(0)) for row in x[1:]]
        return torch.cat([one, *rest])

    def losses(self, model, x, generator):
        t = torch.randint(0, model.STEPS, (len(x),), generator=generator)
        noise = torch.randn(x.shape, generator=generator)
        alpha = model.alphas_cumprod[t][:, None, None, None]
        found = model(alpha.sqrt() * x + (1 - alpha).sqrt() * noise, t)
        return (found - noise).square().mean((1, 2, 3))

    def dataset(self, split):
        draw, count = drawn(split)
        at = draw.uniform(0, 6.3, (count, 2, 1))
        one, other = np.sin(at + np.arange(8)).swapaxes(0, 1)
        return {"x": (one[:, :, None] * other[:, None, :])[:, None].astype(np.float32)}


# ---- FNO: github.com/neuraloperator/neuraloperator, and Li et al. 2020, in one dimension ----


class SpectralConv1d(nn.Module):
    def __init__(self, width, modes):
        super().__init__()
        self.modes, shape = modes, (width, width, modes)
        self.weights = nn.Parameter(torch.rand(*shape, dtype=torch.cfloat) / width**2)

    def forward(self, x):
        found = torch.fft.rfft(x)
        out = torch.zeros_like(found)
        out[:, :, : self.modes] = torch.einsum(
            "bix,iox->box", found[:, :, : self.modes], self.weights
        )
        return torch.fft.irfft(out, n=x.size(-1))


class FNO1d(nn.Module):
    def __init__(self, width=6, modes=4):
        super().__init__()
        self.lift, self.project = nn.Linear(2, width), nn.Linear(width, 1)
        self.spectral = nn.ModuleList(SpectralConv1d(width, modes) for _ in range(2))
        self.pointwise = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(2))

    def forward(self, x):
        grid = torch.linspace(0, 1, x.size(1), device=x.device).expand_as(x)
        x = self.lift(torch.stack([x, grid], -1)).transpose(1, 2)
        for spectral, pointwise in zip(self.spectral, self.pointwise, strict=True):
            x = F.gelu(spectral(x) + pointwise(x))
        return self.project(x.transpose(1, 2))[..., 0]


class FNO(Kind):
    """Weights of complex numbers; the loss is a sum of relative errors, and their number."""

    def model(self):
        return FNO1d()

    def loss(self, model, rows):
        losses = self.row_losses(model, rows)
        return losses.sum(), len(losses)

    def row_losses(self, model, rows):
        x, y = rows["x"], rows["y"]
        return (model(x) - y).norm(dim=1) / y.norm(dim=1)

    def dataset(self, split):
        """What is heated at first, and how warm it is a while later."""
        draw, count = drawn(split)
        waves = draw.standard_normal((count, 9)) + 1j * draw.standard_normal((count, 9))
        later = waves * np.exp(-0.05 * np.arange(9) ** 2)
        x, y = (np.fft.irfft(one, 32, norm="forward") for one in (waves, later))
        return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


# ---- A regression in NumPy ----


class Regression:
    """Least squares by hand, without a base class: three functions, and a loop with momentum."""

    def __init__(self, config):
        self.rate = config["learning_rate"]

    def init(self, seed):
        return {"w": np.zeros(6, np.float32), "b": np.zeros(1, np.float32)}

    def gradient(self, params, rows):
        apart = rows["x"] @ params["w"] + params["b"] - rows["y"]
        weights = (2 * apart @ rows["x"] / len(apart)).astype(np.float32)
        return float((apart**2).mean()), {
            "w": weights,
            "b": np.array([2 * apart.mean()], np.float32),
        }

    def measure(self, params, rows):
        return (rows["x"] @ params["w"] + params["b"] - rows["y"]) ** 2

    def run_inner_loop(self, state, job):
        given, losses = jobs.given_state(job), []
        speed = {k: np.array(v, np.float32) for k, v in json.loads(given or b"{}").items()}
        for step in range(job["num_inner_steps"]):
            loss, gradients = self.gradient(state, jobs.step_rows(job, step))
            losses.append(loss)
            for name, found in gradients.items():
                speed[name] = np.float32(0.9) * speed.get(name, 0 * found) + found
                state[name] -= np.float32(self.rate) * speed[name]
        path = jobs.state_path(job)
        path.write_text(json.dumps({name: value.tolist() for name, value in speed.items()}))
        return {
            "steps_completed": len(losses),
            "metrics": {"loss": float(np.mean(losses))},
            "inner_optimizer_state_path": str(path),
            "inner_optimizer_state_encoding": "application/json",
        }

    def dataset(self, split):
        draw, count = drawn(split)
        x = draw.standard_normal((count, 6))
        y = x @ np.arange(-2.0, 4.0) + 1 + 0.1 * draw.standard_normal(count)
        return {"x": x.astype(np.float32), "y": y.astype(np.float32)}

    def save(self, params, folder):
        np.savez(Path(folder) / "model.npz", **params)
