"""Critics: a network with a value head, on a backbone of its own, through an adapter of its own, or on an actor.

Values come from the final hidden state at the last token of an input; no logits are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mlrl.agents import Agent
from mlrl.critic_inputs import CriticInput, CriticReader, rank_critic_batches
from mlrl.models.base import Policy
from mlrl.models.prefix_tree import PrefixTree
from mlrl.parallel.group import Group
from mlrl.parallel.mesh import Mesh
from mlrl.quiet import quiet_models
from mlrl.sources import Source
from mlrl.storage import whole_files

HEAD_FILE = "value_head.safetensors"


class ValueHead(nn.Module):
    """Hidden states (S, D) → values (S,), in float32 whatever the backbone's type.

    One linear layer, or linear → tanh → linear. The last layer starts at 0, so that every value starts at 0.
    """

    def __init__(self, hidden_size: int, hidden_dim: int | None = None):
        super().__init__()
        self.hidden = None if hidden_dim is None else nn.Linear(hidden_size, hidden_dim, dtype=torch.float32)
        self.value = nn.Linear(hidden_dim or hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, hidden_SD: Tensor) -> Tensor:
        hidden_SD = hidden_SD.float()
        if self.hidden is not None:
            hidden_SD = torch.tanh(self.hidden(hidden_SD))
        return self.value(hidden_SD).squeeze(-1)


@dataclass
class Critic:
    """One critic.

    Attributes:
        index: its number; that of its agent where it serves one.
        policy: its network, through its own adapter, through its actor's, or as it is.
        reader: makes its inputs.
        critic_type: `v` or `q`.
        on_actor: whether the network is its actor's, so that the actor's optimizer trains both.
        is_new: whether its head has never been trained.
    """

    index: int
    policy: Policy
    head: ValueHead
    reader: CriticReader
    source: Source
    critic_type: str
    on_actor: bool
    is_new: bool = True

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What training adds or changes: the backbone where that is not an actor's, and the head."""
        return [*self.backbone, *self.head.parameters()]

    @property
    def backbone(self) -> list[nn.Parameter]:
        """Without the head."""
        if self.on_actor:
            return []
        if self.policy.adapter is None:  # without the output layer, which is not run
            return list(self.policy.base.language_model.backbone.parameters())
        return self.policy.parameters()

    def forward(self, tree: PrefixTree, head_only: bool = False) -> Tensor:
        """Values (S,) of the marks of a `CriticBatch`, with gradient, or with that of the head alone. This and its
        backward belong inside `policy.use()`."""
        base = self.policy.base
        packed = tree.pack(base.language_model.device)
        if not head_only:
            return base.score(packed, value_head=self.head)[0]
        with torch.no_grad():
            hidden = base.score(packed, value_head=nn.Identity())[0]
        return self.head(hidden)

    @torch.no_grad()
    def start_at(self, value: float) -> None:
        """Makes all values of a new head this one."""
        self.head.value.bias.fill_(value)

    @torch.no_grad()
    def values(self, inputs: Sequence[CriticInput], max_tokens: int, group: Group | None = None) -> Tensor:
        """Values of inputs, float64 on the CPU, in forwards of at most `max_tokens` tokens.

        Args:
            group: the ranks that hold this critic, which share the inputs and all learn the values.
        """
        group = group or Group.alone()
        values: dict[int, float] = {}
        with self.policy.use():
            for batch in rank_critic_batches(inputs, group, max_tokens, lockstep=self.policy.base.shard is not None):
                values.update(
                    zip(batch.numbers, self.forward(batch.tree).tolist(), strict=False)
                )  # a stand-in has none
        return torch.tensor(group.collect(values, len(inputs)), dtype=torch.float64)

    def save(self, folder: Path) -> None:
        """Writes the head, and beside it the adapter or model with its tokenizer unless the actor has them."""
        with whole_files(folder) as place:
            self._save(place)

    def _save(self, folder: Path) -> None:
        if not self.on_actor:
            kept = Agent(
                index=self.index,
                policy=self.policy,
                tokenizer=self.reader.tokenizer,
                source=self.source,
                stop_ids=frozenset(),
                parameters=[],
            )
            kept.save(folder)
        state = {name: weight.detach().cpu().contiguous() for name, weight in self.head.state_dict().items()}
        save_file(state, folder / HEAD_FILE, metadata=head_kind(self.critic_type, self.reader.agent, self.on_actor))


def save_critics(critics: Sequence[Critic], directory: str | Path, mesh: Mesh | None = None) -> None:
    """Writes directory/critic_0, critic_1 …; each loads again, head included, where its folder is given as model.

    Called on all ranks that hold critics; the first of a critic's writes it.
    """
    with quiet_models():
        for critic in critics:
            whole = critic.policy.adapter is None and not critic.on_actor
            with critic.policy.base.whole() if whole else nullcontext():
                if mesh is None or mesh.critic(critic.index).is_first:
                    critic.save(Path(directory) / f"critic_{critic.index}")


def head_kind(critic_type: str, agent: int | None, on_actor: bool) -> dict[str, str]:
    """What a head was trained for, in words for its file."""
    return {
        "critic_type": critic_type,
        "reads": "joint history" if agent is None else "one agent's history",
        "backbone": "actor" if on_actor else "own",
    }
