"""Who the agents are: the models, their number and their learning rates, from settings and a trainer's arguments."""

from pathlib import Path
from typing import Any

from mlrl.config_checks import check_field
from mlrl.errors import ConfigError

DEFAULT_NUM_AGENTS = 2
DEFAULT_LEARNING_RATE = {"lora": 1e-4, "full": 1e-5}


def team_models(
    config: Any, *, agent_model: Any = None, agents: list[Any] | None = None, num_agents: int | None = None
) -> list[Any]:
    """The N models of a team, from a trainer's arguments and its config, which must agree where both speak.

    Args:
        config: holds `agent_model`, `agents`, `num_agents`, any of them None.
        agent_model: one model of all agents, a name or a loaded object.
        agents: one model an agent.
        num_agents: team size.

    Returns:
        N names or objects, in agent order.

    Raises:
        ConfigError: no model, two answers to one question, or counts that differ.
    """
    agent_model = agreed("agent_model", agent_model, config.agent_model)
    agents = agreed("agents", agents, config.agents)
    num_agents = agreed("num_agents", num_agents, config.num_agents)
    if agents is None and agent_model is None:
        raise ConfigError("agent_model=None: there is no model. Give agent_model (one for all) or agents (one each).")
    if agents is not None and agent_model is not None:
        raise ConfigError(f"agent_model={agent_model!r}: agents is given too. Give one of the two.")
    if agents is None:
        num_agents = DEFAULT_NUM_AGENTS if num_agents is None else num_agents
        check_field("num_agents", num_agents, int)
        return [agent_model] * num_agents
    if not isinstance(agents, list | tuple) or not agents:
        given = agents if isinstance(agents, str | list | tuple) else type(agents).__name__  # a model prints as pages
        raise ConfigError(f"agents={given!r}: is not a list of models. Give one model an agent.")
    if num_agents is not None and num_agents != len(agents):
        raise ConfigError(f"num_agents={num_agents!r}: agents has {len(agents)}. Leave it out, or let it agree.")
    return list(agents)


def models_setting(config: Any, agents: Any = None) -> str:
    """Which setting names the models of a team, for errors."""
    if getattr(config, "agents_dir", None) is not None:
        return "agents_dir"
    return "agents" if agents is not None or config.agents is not None else "agent_model"


def agent_learning_rates(config: Any, num_agents: int) -> list[float]:
    """The learning rate of each of `num_agents` agents, defaults filled in."""
    rate = config.agent_learning_rate
    if rate is None:
        rate = DEFAULT_LEARNING_RATE[config.tuning]
    rates = rate if isinstance(rate, list) else [rate] * num_agents
    check_rates(rates, num_agents, config.share_parameters)
    return rates


def check_rates(rates: list[float], num_agents: int | None, share_parameters: bool) -> None:
    """One learning rate an agent, or one for all."""
    if num_agents is not None and len(rates) != num_agents:
        raise ConfigError(
            f"agent_learning_rate={rates!r}: has {len(rates)} values for {num_agents} agents. "
            "Give one value, or one an agent."
        )
    if share_parameters and len(set(rates)) > 1:
        raise ConfigError(
            f"agent_learning_rate={rates!r}: with share_parameters there is one optimizer. Give one value."
        )


def agreed(name: str, given: Any, configured: Any) -> Any:
    """The value that was given, or else the configured one; two different values are an error."""
    if given is None or configured is None:
        return configured if given is None else given
    if given is not configured and given != configured:
        raise ConfigError(f"{name}={given!r}: the config says {name}={configured!r}. Give it in one of the two places.")
    return given


def check_agents_dir(config: Any) -> None:
    """The folder of a trained team holds agent_0, agent_1 … without a gap, and is the only answer."""
    if config.agents_dir is None:
        return
    for name in ("agent_model", "agents"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"agents_dir={config.agents_dir!r}: {name}={getattr(config, name)!r} is given too. Give one of the two."
            )
    count = count_agents(config.agents_dir)
    if config.collaboration_mode == "centralized":  # num_agents then counts roles
        if count > 1:
            raise ConfigError(
                f"collaboration_mode='centralized': {config.agents_dir} holds {count} agents, and one actor writes all "
                "roles. Use decentralized."
            )
        return
    if config.num_agents is not None and config.num_agents != count:
        raise ConfigError(f"num_agents={config.num_agents!r}: {config.agents_dir} holds {count} agents. Leave it out.")


def count_agents(agents_dir: str) -> int:
    """Number of agents saved in a folder as agent_0, agent_1 …"""
    folder = Path(agents_dir)
    if not (folder / "agent_0").is_dir():
        inner = folder / "agents"
        problem, remedy = "there is no folder agent_0 in it", "Give the folder that holds agent_0, agent_1 …"
        if not folder.is_dir():
            problem = "there is no such folder"
        elif (inner / "agent_0").is_dir():
            remedy = f"Give {inner}."
        elif any((folder / name).is_file() for name in ("adapter_config.json", "config.json")):
            problem = "it is one agent and no folder of agents"
            remedy = f"Give --agents {agents_dir}, or the folder that it is in"
        raise ConfigError(f"agents_dir={agents_dir!r}: {problem}. {remedy}")
    found = len([path for path in folder.glob("agent_*") if path.name[len("agent_") :].isdigit()])
    for i in range(found):
        if not (folder / f"agent_{i}").is_dir():
            raise ConfigError(f"agents_dir={agents_dir!r}: agent_{i} is missing. Agents are numbered without a gap.")
    return found
