"""Optimizers of one process, tensor by tensor as the papers have them, for comparison with those of the executor."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import torch
from torch import Tensor, nn

from executor.train.tensor_optimizers import of_package
from simplan.optimizers import OPTIMIZERS
from simplan.training import TrainingSpec

RATE = 1e-3


class Lars:
    """You et al. 2017, algorithm 1: momentum 0.9, trust coefficient 0.001, weight decay 1e-4."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.weights = weights
        self.moving: list[Tensor | float] = [0.0 for _ in weights]

    @torch.no_grad()
    def step(self) -> None:
        for number, w in enumerate(self.weights):
            assert w.grad is not None
            size, slope = float(w.norm()), float(w.grad.norm())
            local = 0.001 * size / (slope + 1e-4 * size) if size and slope else 1.0
            self.moving[number] = 0.9 * self.moving[number] + RATE * local * (w.grad + 1e-4 * w)
            w.sub_(self.moving[number])


class Lamb:
    """You et al. 2020, algorithm 2: betas 0.9 and 0.999, epsilon 1e-6, weight decay 0.01."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.weights, self.steps = weights, 0
        self.m: list[Tensor | float] = [0.0 for _ in weights]
        self.v: list[Tensor | float] = [0.0 for _ in weights]

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for number, w in enumerate(self.weights):
            assert w.grad is not None
            m = self.m[number] = 0.9 * self.m[number] + 0.1 * w.grad
            v = self.v[number] = 0.999 * self.v[number] + 0.001 * w.grad**2
            u = m / (1 - 0.9**self.steps) / ((v / (1 - 0.999**self.steps)) ** 0.5 + 1e-6) + 0.01 * w
            ratio = float(w.norm() / u.norm()) if w.norm() and u.norm() else 1.0
            w.sub_(RATE * ratio * u)


class Muon:
    """torch's Muon for some matrices, and AdamW for all other weights."""

    def __init__(self, weights: list[nn.Parameter], matrices: Sequence[nn.Parameter]) -> None:
        ids = {id(matrix) for matrix in matrices}
        others = [weight for weight in weights if id(weight) not in ids]
        self.parts: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=RATE),
            torch.optim.AdamW(others, lr=RATE),
        )

    def step(self) -> None:
        for part in self.parts:
            part.step()


class Eager:
    """An optimizer of torchao, whose step is not compiled."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        with mock.patch("torch.compile", lambda function, **_: function):
            self.optimizer.step()


def reference_optimizer(
    training: TrainingSpec, weights: list[nn.Parameter], matrices: Sequence[nn.Parameter] = ()
) -> torch.optim.Optimizer | Lars | Lamb | Muon | Eager:
    """The optimizer of a training; it updates weights that need gradients.

    Args:
        matrices: Matrices of blocks, for Muon.
    """
    weights = [w for w in weights if w.requires_grad]
    match training.optimizer:
        case "adam":
            return torch.optim.Adam(weights, lr=RATE)
        case "adamw":
            return torch.optim.AdamW(weights, lr=RATE)
        case "sgd":
            return torch.optim.SGD(weights, lr=RATE)
        case "sgd_momentum":
            return torch.optim.SGD(weights, lr=RATE, momentum=0.9)
        case "lars":
            return Lars(weights)
        case "lamb":
            return Lamb(weights)
        case "muon":
            return Muon(weights, matrices)
        case "adafactor_torch":
            return torch.optim.Adafactor(weights, foreach=False)
        case _:
            made = of_package(training.optimizer, weights, RATE)
            return Eager(made) if OPTIMIZERS[training.optimizer].package == "torchao" else made
