"""Loading critics: which network, adapter, head and tokenizer each has.

| use_separate_critic | model       | tuning | backbone                                                            |
|---------------------|-------------|--------|---------------------------------------------------------------------|
| True                | the agents' | lora   | the agents' frozen base through a further adapter: no second copy   |
| True                | the agents' | full   | a copy                                                              |
| True                | another     | lora   | loaded once for all critics of that model, an adapter each          |
| True                | another     | full   | loaded for each critic                                              |
| False               |             | any    | the actor's own, as it is trained                                   |

On ranks of their own (`critic_ranks`) critics share a base among themselves, and a copy is one that is loaded there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError, safe_open

from mlrl.agent_loading import lora_config, source_key
from mlrl.agents import Agent, Team
from mlrl.config import AgentArguments
from mlrl.config_critics import ActorCriticArguments
from mlrl.critic_inputs import CriticReader
from mlrl.critics import HEAD_FILE, Critic, ValueHead, head_kind
from mlrl.errors import ConfigError
from mlrl.models.base import Base, Policy
from mlrl.quiet import quiet_models
from mlrl.rollout.streams import derive_seed
from mlrl.sources import Source, check_vocabulary, load_tokenizers, max_model_length, resolve_source


def check_critic_models(
    models: Sequence[Any], config: ActorCriticArguments, agents: Sequence[int | None], separate: bool
) -> None:
    """Raises ConfigError for models of critics that cannot be found or used, before any weights are read."""
    for agent, model in zip(agents, models, strict=True):
        saved = _head_file(model)
        if saved is not None:
            _check_kind(model, saved, head_kind(config.critic_type, agent, not separate))
        if model is None:
            continue
        if separate:
            max_model_length(resolve_source(model, "critic_model"))  # the first to read its config
        elif saved is None:
            raise ConfigError(
                f"critic_model={model!r}: with use_separate_critic=False the critic is a head on the actor, and "
                f"this folder holds none ({HEAD_FILE}). Leave it out, or set use_separate_critic"
            )


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
    check_critic_models(models, config, agents, separate)
    owners = [team.agents[agent or 0] for agent in agents]
    bases: dict[object, Base] = {}
    if arguments.tuning == "lora" and separate:
        bases = {source_key(agent.source.base): agent.base for agent in owners if agent.is_here}
    critics = []
    for index, (agent, owner, model) in enumerate(zip(agents, owners, models, strict=True)):
        number = index if agent is None else agent
        saved = _head_file(model)
        if separate:
            source = Source(owner.source.base) if model is None else resolve_source(model, "critic_model")
            own = _tokenizer(owner, source, model, tokenizer)
            policy = _policy(team, owner, source, arguments, bases, f"critic_{number}", seed, number, model is None)
        else:
            source, own, policy = owner.source, owner.tokenizer, owner.policy
        language_model = policy.base.language_model
        head = _head(saved, language_model.config.hidden_size, config, derive_seed(seed, "value_head", number))
        limits = [limit for limit in (config.critic_max_length, language_model.max_length) if limit is not None]
        tokenizers = [member.tokenizer for member in team.agents]
        reader = CriticReader(own, tokenizers, agent, min(limits) if limits else None)
        critics.append(
            Critic(
                number,
                policy,
                head.to(team.loading.device),  # where a network that is to be sharded is not yet
                reader,
                source,
                config.critic_type,
                not separate,
                is_new=saved is None,
            )
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
    group = team.mesh.critic(number)
    if arguments.tuning == "full":
        if source.adapter is not None or isinstance(source.base, PeftModel):
            raise ConfigError(
                f"tuning='full': the critic {source.adapter or source.name!r} is a LoRA adapter. Use tuning='lora'"
            )
        if is_agents and owner.is_here:
            base = owner.base.copy()
        elif is_agents:  # which may be loaded models that agents elsewhere have too
            base = team.loading.base(source)
            base = base if isinstance(source.base, str) else base.copy()
        elif not isinstance(source.base, str) and any(base.model is source.base for base in bases.values()):
            raise ConfigError("critics: one loaded model was given to several critics. Give each its own copy")
        else:
            base = team.loading.base(source)
        base.model.requires_grad_(False)  # as the output layer stays, which no critic runs
        bases[name] = base
        return Policy(base, None)
    if isinstance(source.base, PeftModel) and source_key(source.base) not in bases:
        raise ConfigError("critic_model: a loaded PeftModel cannot be shared by critics. Give its folder")
    if source_key(source.base) not in bases:
        bases[source_key(source.base)] = team.loading.frozen(team.loading.base(source), group)
    base = bases[source_key(source.base)]
    if source.adapter is not None:
        base.load_adapter(name, source.adapter)
    else:
        base.add_adapter(name, lora_config(arguments), derive_seed(seed, "critic", number))
    return Policy(base, name)


def _mark_trained(team: Team, critics: Sequence[Critic], arguments: AgentArguments) -> None:
    """A fresh adapter comes frozen, and a loaded one turns checkpointing off: both are put right here."""
    for owner in (*team.agents, *critics):
        for parameter in owner.parameters:
            parameter.requires_grad_(True)
    if arguments.gradient_checkpointing:
        for base in {id(critic.policy.base): critic.policy.base for critic in critics}.values():
            base.enable_gradient_checkpointing()


def _tokenizer(owner: Agent, source: Source, model: Any, given: Any) -> Any:
    own = owner.tokenizer
    if given is not None or model is not None:
        [own] = load_tokenizers([source], given)
    rows = source.config.get_text_config().vocab_size
    check_vocabulary("tokenizer of the critic", own, rows, source.name)
    return own


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
