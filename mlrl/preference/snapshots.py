"""Frozen copies of a team's policies: as they are now, or as they were some rounds ago.

A snapshot is the weights that training changes (of an adapter, or all of them), kept in main memory; where they are
sharded every rank keeps its part. They are put into a frozen twin of every policy to sample from: a second adapter on
the same base, or with full tuning a second network, made once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from mlrl.agents import Agent, Team
from mlrl.checkpoint import Kept
from mlrl.models.base import Policy
from mlrl.parallel.zero import own_part, part_of_whole, set_own_part, whole_of_parts
from mlrl.preference.dropout import quiet_adapter

Weights = list[list[Tensor]]  # of every distinct policy of a team, in agent order


def team_weights(team: Team) -> Weights:
    """A copy in main memory of what training changes, shared parameters once."""
    return [[own_part(p).detach().to("cpu", copy=True) for p in policy.parameters()] for policy in _policies(team)]


class PolicyHistory:
    """Weights of a team at the start of its last k + 1 rounds.

    Args:
        k: how many rounds back `before` can look.
    """

    def __init__(self, k: int):
        if k < 1:
            raise ValueError(f"comparator_history_k={k!r}: 0 rounds back is the current policy. Use 1 or more.")
        self.k = k
        self._starts: dict[int, Weights] = {}

    def record(self, round: int, weights: Weights) -> None:
        """Keeps the weights with which a round (counted from 1) starts, and forgets what is too old to be asked for."""
        self._starts[round] = weights
        self._starts = {r: w for r, w in self._starts.items() if r >= round - self.k}

    def before(self, round: int) -> tuple[int, Weights]:
        """(round, weights with which it started), k rounds before this one; the first round's until that exists."""
        earlier = max(1, round - self.k)
        return earlier, self._starts[earlier]

    def state_dict(self) -> dict[int, Weights]:
        """What a checkpoint has to hold."""
        return dict(self._starts)

    def load_state_dict(self, state: dict[int, Weights]) -> None:
        """Continues from a checkpoint."""
        self._starts = dict(state)


def history_kept(history: PolicyHistory, team: Team) -> list[Kept]:
    """A history as checkpoints hold it: whole weights, a file for each of the policies that live here."""
    owners = list({id(agent.policy): agent for agent in reversed(team.agents) if agent.is_here}.values())[::-1]
    kept = []
    for place, agent in enumerate(owners):
        group, parameters = team.mesh.agents[agent.index], agent.policy.parameters()

        def get(place=place, group=group, parameters=parameters) -> dict[str, Tensor]:
            return {
                f"{round}.{number:04d}": whole_of_parts(parameter, weights[place][number], group)
                for round, weights in history.state_dict().items()
                for number, parameter in enumerate(parameters)
            }

        def put(tensors: dict[str, Tensor], place=place, group=group, parameters=parameters) -> None:
            starts = history.state_dict()
            for name, whole in sorted(tensors.items()):
                round, _, number = name.partition(".")
                weights = starts.setdefault(int(round), [[] for _ in owners])
                if int(number) == 0:
                    weights[place] = []
                weights[place].append(part_of_whole(parameters[int(number)], whole, group))
            history.load_state_dict(starts)

        kept.append(Kept(f"agent_{agent.index}/history", group, get, put))
    return kept


class FrozenTwin:
    """A team that samples with weights of its own and is never trained; it starts with the team's present ones.

    It is made before the team's optimizers, which may shard what is to be copied.

    Attributes:
        team: what to sample from.
    """

    def __init__(self, team: Team):
        twins: dict[int, Policy] = {}
        for agent in team.agents:
            if agent.is_here and id(agent.policy) not in twins:
                twins[id(agent.policy)] = _twin(agent, team)
        agents = [dataclasses.replace(a, policy=twins.get(id(a.policy)), parameters=[]) for a in team.agents]
        bases = list({id(policy.base): policy.base for policy in twins.values()}.values())
        self.team = dataclasses.replace(team, agents=agents, bases=bases)

    def set(self, weights: Weights) -> None:
        """Samples from these weights from now on."""
        for policy, values in zip(_policies(self.team), weights, strict=True):
            for parameter, value in zip(policy.parameters(), values, strict=True):
                set_own_part(parameter, value)


def _policies(team: Team) -> Sequence[Policy]:
    """Every distinct policy that this process holds, in agent order."""
    return list({id(agent.policy): agent.policy for agent in team.agents if agent.policy is not None}.values())


def _twin(agent: Agent, team: Team) -> Policy:
    if agent.adapter is None:
        return Policy(team.loading.frozen(agent.base.copy(), team.mesh.agents[agent.index]), None)
    name = f"comparator_{agent.adapter}"
    agent.base.copy_adapter(agent.adapter, name)
    twin = Policy(agent.base, name)
    quiet_adapter(twin)
    return twin
