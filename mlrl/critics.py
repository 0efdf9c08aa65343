"""Critics: a network with a value head, on a backbone of its own, through an adapter of its own, or on an actor.

Values come from the final hidden state at the last token of an input; no logits are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mlrl.agents import Agent
from mlrl.critic_inputs import CriticInput, CriticReader, critic_batches
from mlrl.models.base import Policy
from mlrl.models.language_model import LanguageModel
from mlrl.models.prefix_tree import PackedTree, PrefixTree
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


class ValueScorer(nn.Module):
    """A network and its value head as one module: packed inputs → the value at each mark. Every forward of a critic
    is a call of this."""

    def __init__(self, language_model: LanguageModel, head: ValueHead):
        super().__init__()
        self.network, self.head = language_model.model, head
        self._language_model = language_model

    def forward(self, packed: PackedTree) -> Tensor:
        hidden = self._language_model.hidden_states(packed.input_ids, packed.position_ids, packed.attention)[0]
        return self.head(hidden[packed.predecessors])


@dataclass
class Critic:
    """One critic.

    Attributes:
        index: its number; that of its agent where it serves one.
        policy: its network, through its own adapter, through its actor's, or as it is.
        reader: makes its inputs.
        critic_type: `v` or `q`.
        on_actor: whether the network is its actor's, so that the actor's optimizer trains both.
    """

    index: int
    policy: Policy
    head: ValueHead
    reader: CriticReader
    source: Source
    critic_type: str
    on_actor: bool

    def __post_init__(self) -> None:
        self.scorer = ValueScorer(self.policy.base.language_model, self.head)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What training adds or changes: the head, and the backbone where that is not an actor's."""
        head = list(self.head.parameters())
        if self.on_actor:
            return head
        if self.policy.adapter is None:  # without the output layer, which is not run
            return [*self.policy.base.language_model.backbone.parameters(), *head]
        return [*self.policy.parameters(), *head]

    def forward(self, tree: PrefixTree) -> Tensor:
        """Values (S,) of the marks of a `CriticBatch`, with gradient. This and its backward belong inside
        `policy.use()`."""
        return self.scorer(tree.pack(self.policy.base.language_model.device))

    @torch.no_grad()
    def values(self, inputs: Sequence[CriticInput], max_tokens: int) -> Tensor:
        """Values of inputs, float64 on the CPU, in forwards of at most `max_tokens` tokens."""
        values = torch.empty(len(inputs), dtype=torch.float64)
        with self.policy.use():
            for batch in critic_batches(inputs, max_tokens):
                values[batch.numbers] = self.forward(batch.tree).double().cpu()
        return values

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


def save_critics(critics: Sequence[Critic], directory: str | Path) -> None:
    """Writes directory/critic_0, critic_1 …; each loads again, head included, where its folder is given as model."""
    with quiet_models():
        for critic in critics:
            critic.save(Path(directory) / f"critic_{critic.index}")


def head_kind(critic_type: str, agent: int | None, on_actor: bool) -> dict[str, str]:
    """What a head was trained for, in words for its file."""
    return {
        "critic_type": critic_type,
        "reads": "joint history" if agent is None else "one agent's history",
        "backbone": "actor" if on_actor else "own",
    }
