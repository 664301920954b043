"""A few tokens whose numbers are easily worked out by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_core.algorithm.objectives import Tokens


def of(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def logs(*probabilities: float) -> Tensor:
    return of(*probabilities).log()


# token              0          1          2          3, not a loss token
# pi_prox/pi_behav   2          1          1/2        NaN
# u                  1.1        1.5        1/2        NaN
# A                  1          1          -2         NaN
TOKENS = Tokens(
    current=logs(0.55, 0.6, 0.05, float("nan")),
    proximal=logs(0.5, 0.4, 0.1, float("nan")),
    behaviour=logs(0.25, 0.4, 0.2, float("nan")),
    advantages=of(1, 1, -2, float("nan")),
    mask=torch.tensor([True, True, True, False]),
    weights=of(1, 1, 1, float("nan")),
    staleness=torch.tensor([1, 0, 3, 2]),
    sequence=torch.tensor([0, 0, 1, 1]),
    sequences=2,
)
