"""Critics: a network with a value head, on a backbone of its own, through an adapter of its own, or on an actor.

| use_separate_critic | model of the critic | tuning | backbone                                                            |
|---------------------|---------------------|--------|---------------------------------------------------------------------|
| True                | the agents'         | lora   | the agents' frozen base through a further adapter: no second copy   |
| True                | the agents'         | full   | a copy                                                              |
| True                | another             | either | loaded once, with adapters or (full) one a critic                   |
| False               |                     | either | the actor's own, as it is trained                                   |

Values come from the final hidden state at the last token of an input; no logits are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from mlrl.agents import Agent, Team
from mlrl.config import AgentArguments
from mlrl.config_critics import ActorCriticArguments
from mlrl.critic_inputs import CriticInput, CriticReader, critic_batches
from mlrl.errors import ConfigError
from mlrl.models.base import Base, Policy
from mlrl.models.language_model import LanguageModel
from mlrl.models.prefix_tree import PackedTree, PrefixTree
from mlrl.quiet import quiet_models
from mlrl.rollout.streams import derive_seed
from mlrl.sources import Source, check_vocabulary, load_tokenizers, resolve_source

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
        folder.mkdir(parents=True, exist_ok=True)
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
        save_file(state, folder / HEAD_FILE, metadata=self._kind())

    def _kind(self) -> dict[str, str]:
        return _kind(self.critic_type, self.reader.agent, self.on_actor)


def save_critics(critics: Sequence[Critic], directory: str | Path) -> None:
    """Writes directory/critic_0, critic_1 …; each loads again, head included, where its folder is given as model."""
    with quiet_models():
        for critic in critics:
            critic.save(Path(directory) / f"critic_{critic.index}")


@quiet_models()
def load_critics(
    team: Team,
    config: ActorCriticArguments,
    arguments: AgentArguments,
    *,
    agents: Sequence[int | None],
    models: Sequence[Any],
    separate: bool = True,
    tokenizer: Any = None,
    seed: int = 0,
) -> list[Critic]:
    """Loads or makes critics. Call after `Team.add_references` and before the first update.

    Args:
        arguments: how adapters are made, as for the agents.
        agents: the agent that each critic serves, or [None] for one centralized critic.
        models: one a critic: None for its agent's (the centralized one: agent 0's), a hub id, a folder, a saved critic,
            or a loaded model.
        separate: False puts the head on the actor; a model is then a folder with a saved head, or None.
        tokenizer: of the critics; default: what lies with their model.

    Raises:
        ConfigError: a model, adapter or head that cannot be loaded, or a head that was saved for something else.
    """
    owners = [team.agents[agent or 0] for agent in agents]
    bases: dict[object, Base] = {}
    if arguments.tuning == "lora" and separate:
        bases = {_key(agent.source.base): agent.base for agent in owners}
    critics = []
    for index, (agent, owner, model) in enumerate(zip(agents, owners, models, strict=True)):
        number = index if agent is None else agent
        saved = _head_file(model)
        if saved is not None:
            _check_kind(model, saved, _kind(config.critic_type, agent, not separate))
        if separate:
            source = Source(owner.source.base) if model is None else _source(model)
            own = _tokenizer(owner, source, model, tokenizer)
            policy = _policy(team, owner, source, arguments, bases, f"critic_{number}", seed, number, model is None)
        else:
            if model is not None and saved is None:
                raise ConfigError(
                    f"critic_model={model!r}: with use_separate_critic=False the critic is a head on the actor, and "
                    f"this folder holds none ({HEAD_FILE}). Leave it out, or set use_separate_critic"
                )
            source, own, policy = owner.source, owner.tokenizer, owner.policy
        language_model = policy.base.language_model
        head = _head(saved, language_model.config.hidden_size, config, derive_seed(seed, "value_head", number))
        limits = [limit for limit in (config.critic_max_length, language_model.max_length) if limit is not None]
        tokenizers = [member.tokenizer for member in team.agents]
        reader = CriticReader(own, tokenizers, agent, min(limits) if limits else None)
        critics.append(
            Critic(number, policy, head.to(language_model.device), reader, source, config.critic_type, not separate)
        )
    _mark_trained(team, critics, arguments)
    return critics


def _policy(
    team: Team,
    owner: Agent,
    source: Source,
    arguments: AgentArguments,
    bases: dict[object, Base],
    name: str,
    seed: int,
    number: int,
    is_agents: bool,
) -> Policy:
    """The network that a separate critic runs through."""
    if arguments.tuning == "full":
        if source.adapter is not None or isinstance(source.base, PeftModel):
            raise ConfigError(
                f"tuning='full': the critic {source.adapter or source.name!r} is a LoRA adapter. Use tuning='lora'"
            )
        if is_agents:
            return Policy(owner.base.copy(), None)
        if not isinstance(source.base, str) and any(base.model is source.base for base in bases.values()):
            raise ConfigError("critics: one loaded model was given to several critics. Give each its own copy")
        bases[name] = team.loading.base(source)
        return Policy(bases[name], None)
    if isinstance(source.base, PeftModel) and _key(source.base) not in bases:
        raise ConfigError("critic_model: a loaded PeftModel cannot be shared by critics. Give its folder")
    if _key(source.base) not in bases:
        bases[_key(source.base)] = base = team.loading.base(source)
        base.model.requires_grad_(False)
    base = bases[_key(source.base)]
    if source.adapter is not None:
        base.load_adapter(name, source.adapter)
    else:
        base.add_adapter(name, _lora(arguments), derive_seed(seed, "critic", number))
    return Policy(base, name)


def _lora(arguments: AgentArguments) -> LoraConfig:
    targets = arguments.lora_target_modules
    return LoraConfig(
        r=arguments.lora_rank,
        lora_alpha=arguments.lora_alpha,
        target_modules=targets[0] if isinstance(targets, list) and targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
    )


def _mark_trained(team: Team, critics: Sequence[Critic], arguments: AgentArguments) -> None:
    """Adding an adapter freezes others and turns checkpointing off: both are put right here."""
    for owner in (*team.agents, *critics):
        for parameter in owner.parameters:
            parameter.requires_grad_(True)
    if arguments.gradient_checkpointing:
        for base in {id(critic.policy.base): critic.policy.base for critic in critics}.values():
            base.enable_gradient_checkpointing()


def _source(model: Any) -> Source:
    """Where a critic's network comes from; messages name the critic's field."""
    try:
        return resolve_source(model)
    except ConfigError as error:
        shown = repr(model) if isinstance(model, str) else type(model).__name__
        raise ConfigError(f"critic_model={shown}: {str(error).partition(': ')[2]}") from error


def _tokenizer(owner: Agent, source: Source, model: Any, given: Any) -> Any:
    own = owner.tokenizer
    if given is not None or model is not None:
        [own] = load_tokenizers([source], given)
    rows = source.config.get_text_config().vocab_size
    check_vocabulary("tokenizer of the critic", own, rows, source.name)
    return own


def _key(base: str | nn.Module) -> object:
    return base if isinstance(base, str) else id(base)


def _kind(critic_type: str, agent: int | None, on_actor: bool) -> dict[str, str]:
    """What a head was trained for, in words for its file."""
    return {
        "critic_type": critic_type,
        "reads": "joint history" if agent is None else "one agent's history",
        "backbone": "actor" if on_actor else "own",
    }


def _head_file(model: Any) -> Path | None:
    """The saved head in a folder; None where there is none."""
    path = Path(model) / HEAD_FILE if isinstance(model, str | Path) else None
    return path if path is not None and path.is_file() else None


def _check_kind(model: Any, path: Path, wanted: dict[str, str]) -> None:
    try:
        with safe_open(path, "pt") as file:
            found = file.metadata() or {}
    except SafetensorError as error:
        raise ConfigError(f"critic_model={str(model)!r}: {HEAD_FILE} cannot be read ({error})") from error
    for name, value in wanted.items():
        if found.get(name) != value:
            raise ConfigError(
                f"critic_model={str(model)!r}: its head was trained for {name}={found.get(name)!r}, and here it is "
                f"{value!r}. Give a critic of this kind, or a model without head"
            )


def _head(saved: Path | None, hidden_size: int, config: ActorCriticArguments, seed: int) -> ValueHead:
    """A fresh head, or the saved one."""
    if saved is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return ValueHead(hidden_size, config.value_head_hidden_dim)
    with safe_open(saved, "pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    hidden_dim = state["hidden.weight"].shape[0] if "hidden.weight" in state else None
    if config.value_head_hidden_dim not in (None, hidden_dim):
        raise ConfigError(
            f"value_head_hidden_dim={config.value_head_hidden_dim!r}: the saved head {saved} has {hidden_dim}. "
            "Leave it out"
        )
    head = ValueHead(hidden_size, hidden_dim)
    try:
        head.load_state_dict(state)
    except RuntimeError as error:
        raise ConfigError(f"critic_model={str(saved.parent)!r}: its head does not fit the model ({error})") from error
    return head
