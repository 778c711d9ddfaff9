"""Muon in float32: torch's computes its products in bfloat16, a hundred times slower on processors that only emulate it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# Coefficients of the quintic Newton-Schulz iteration of Keller Jordan (https://kellerjordan.github.io/posts/muon).
_A, _B, _C, _NUM_ITERATIONS = 3.4445, -4.7750, 2.0315, 5


def orthogonalized(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix, roughly: singular values between 0.7 and 1.2. `matrix`: `[rows, columns]`."""
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised, for matrices; an update has the size of AdamW's, so one learning rate suits both."""

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalized(torch.lerp(parameter.grad, average, group["momentum"]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-0.2 * max(parameter.shape) ** 0.5 * group["lr"])
