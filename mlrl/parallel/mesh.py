"""Which ranks hold which model.

`shared`: every rank holds every agent. `split`: each agent has a block of ranks of its own and lives only there.
Models beside the agents (a reference, critics, a reward model) live with the agents they serve, or on extra ranks after
the agents' blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from mlrl.errors import ConfigError
from mlrl.parallel.group import Group
from mlrl.wording import counted


@dataclass(frozen=True)
class Mesh:
    """Groups of ranks.

    Attributes:
        world: all ranks; agents: those of each agent; extras: those of each model with ranks of its own, by name.
    """

    world: Group
    agents: tuple[Group, ...]
    extras: Mapping[str, Group] = field(default_factory=dict)

    @classmethod
    def create(cls, rank: int, world_size: int, agents: Sequence[range], extras: Mapping[str, range]) -> Mesh:
        """Makes the process groups, in the same order on all ranks."""
        made: dict[tuple[int, ...], Group] = {}

        def group(ranks: Sequence[int]) -> Group:
            key = tuple(ranks)
            if key not in made:
                made[key] = _new_group(key, rank, world_size)
            return made[key]

        world = group(range(world_size))
        return cls(world, tuple(map(group, agents)), {name: group(ranks) for name, ranks in extras.items()})

    @classmethod
    def alone(cls, num_agents: int) -> Mesh:
        """Everything in one process."""
        return cls(Group.alone(), (Group.alone(),) * num_agents)

    def holds(self, agent: int) -> bool:
        """Whether this process holds an agent."""
        return self.agents[agent].member

    def reference(self, agent: int) -> Group:
        """The ranks of an agent's reference policy."""
        return self.extras.get("reference", self.agents[agent])

    def critic(self, agent: int) -> Group:
        """The ranks of an agent's critic; those of a centralized one are agent 0's."""
        return self.extras.get("critic", self.agents[agent])

    @property
    def reward_model(self) -> Group:
        """The ranks of a joint reward model."""
        return self.extras.get("reward_model", self.agents[0])

    def comparator(self, agent: int) -> Group:
        """The ranks of another model that stands in for an agent."""
        return self.extras.get("comparator", self.agents[agent])


def _new_group(ranks: tuple[int, ...], rank: int, world_size: int) -> Group:
    if world_size == 1:
        return Group.alone()
    objects = dist.new_group(list(ranks), backend="gloo")
    tensors = objects if dist.get_backend() == "gloo" else dist.new_group(list(ranks))
    return Group(ranks, rank, objects, tensors)


def plan_ranks(
    world_size: int,
    num_agents: int,
    placement: str = "shared",
    ranks_per_agent: Sequence[int] | None = None,
    extras: Mapping[str, int] | None = None,
) -> tuple[list[range], dict[str, range]]:
    """Ranks of each agent, and of each model that has some of its own.

    Args:
        ranks_per_agent: sizes of the agents' blocks (`split`); None: even.
        extras: how many ranks follow the agents' for each named model.

    Raises:
        ConfigError: the ranks do not come out even.
    """
    extras = {name: count for name, count in (extras or {}).items() if count}
    for_agents = world_size - sum(extras.values())
    taken = "".join(f", {count} of them for {name}_ranks" for name, count in extras.items())
    if for_agents < 1:
        raise ConfigError(f"num_processes={world_size}{taken}: no rank is left for the agents. Start more processes")
    if placement == "shared":
        if ranks_per_agent is not None:
            raise ConfigError(
                f"ranks_per_agent={list(ranks_per_agent)!r}: placement 'shared' puts every agent on every rank. "
                "Set placement to split, or leave it out"
            )
        agents = [range(for_agents)] * num_agents
    else:
        agents = _blocks(for_agents, num_agents, ranks_per_agent, f"num_processes={world_size}{taken}")
    places, start = {}, for_agents
    for name, count in extras.items():
        places[name] = range(start, start + count)
        start += count
    return agents, places


def _blocks(ranks: int, num_agents: int, sizes: Sequence[int] | None, launched: str) -> list[range]:
    if sizes is None:
        if ranks % num_agents:
            raise ConfigError(
                f"placement='split', {launched}: {ranks} ranks do not divide among {num_agents} agents. Start a "
                f"multiple of {num_agents}, or say ranks_per_agent"
            )
        sizes = [ranks // num_agents] * num_agents
    if len(sizes) != num_agents:
        raise ConfigError(
            f"ranks_per_agent={list(sizes)!r}: has {counted(len(sizes), 'value')} for {num_agents} agents. Give one an "
            "agent"
        )
    if sum(sizes) != ranks:
        raise ConfigError(
            f"ranks_per_agent={list(sizes)!r}, {launched}: adds up to {sum(sizes)} of {ranks} ranks. Make them agree"
        )
    starts = [sum(sizes[:agent]) for agent in range(num_agents)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
