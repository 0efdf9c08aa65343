"""What tasks with fixed roles say to a team of another size."""

from mlrl import ConfigError


def checked_team(num_agents: int, task: str, roles: int = 2) -> int:
    """The team size itself.

    Raises:
        ConfigError: neither one agent, who does all, nor one a role.
    """
    if num_agents not in (1, roles):
        raise ConfigError(
            f"num_agents={num_agents!r}: {task} has {roles} roles. Give {roles} agents, or 1 that plays all of them."
        )
    return num_agents
