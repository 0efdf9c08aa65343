"""What makes a score of the states that a reward model reads."""

from __future__ import annotations

import torch
from torch import nn

from mlrl.rollout.streams import derive_seed

_UNITS = 32


def reward_head(width: int, *, mixes: bool, seed: int) -> nn.Module:
    """A float32 head (…, width) → (…, 1). Its last weights are 0: nothing is preferred before there is a reason.

    Hidden states have a large common part, and a random head makes margins of it that a few dozen pairs do not undo.

    Args:
        mixes: with 32 tanh units between. A linear head on the states of several agents, side by side, is a sum of one
            score an agent; the units can also say that one text fits the other, such as that it is twice as long.
        seed: of the units' first weights.
    """
    last = nn.Linear(_UNITS if mixes else width, 1, dtype=torch.float32)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    if not mixes:
        return last
    units = nn.Linear(width, _UNITS, dtype=torch.float32)
    generator = torch.Generator().manual_seed(derive_seed(seed, "reward_head"))
    nn.init.uniform_(units.weight, -(width**-0.5), width**-0.5, generator=generator)
    nn.init.zeros_(units.bias)
    return nn.Sequential(units, nn.Tanh(), last)
