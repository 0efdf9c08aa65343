"""How an evaluation plays: as the team was trained, or by a protocol of the field's baselines, without training.

| protocol     | who answers                                                                                          |
|--------------|------------------------------------------------------------------------------------------------------|
| `team`       | all agents at once, for `num_turns` turns with the task's feedback                                   |
| `single`     | one agent alone does the whole task, for `num_turns` turns with the task's feedback                  |
| `parallel`   | all agents at once, one turn, nobody sees another's answer                                           |
| `sequential` | one agent after the other, one turn; each sees the answers of those before it                        |
| `discussion` | all at once; then each reads the others' answers and answers again, which is the second of two turns |

Everyone keeps the task's own prompt of its role. Rewards and metrics are the task's. What a protocol fixes (turns,
agents, feedback, early ends) it takes from no setting. The first answers of a discussion are drafts: their rewards are
reported as those of turn 1, and are part of no return and no best of n.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mlrl.calling import function_name
from mlrl.config import EvaluationConfig
from mlrl.errors import ConfigError
from mlrl.prompts import Prompt
from mlrl.rewards import bind_reward
from mlrl.rollout.collect import Collector, Growth
from mlrl.rollout.sampler import Request
from mlrl.rollout.tree import Node, RolloutTree
from mlrl.task import Task

TURNS = {"parallel": 1, "sequential": 1, "discussion": 2}
"""Turns of the protocols that fix them"""
DRAFTS = {"discussion": 1}
"""Turns before the answer that counts: what is written in them earns no return"""


def as_protocol(task: Task, args: EvaluationConfig) -> tuple[Task, EvaluationConfig]:
    """Task and settings as the protocol plays them.

    Raises:
        ConfigError: a flag asks for something else than the protocol fixes, or one agent cannot do the task.
    """
    fixed: dict[str, Any] = {}
    if args.protocol == "single":
        _check_alone(task)
        fixed = {"num_agents": 1, "agents": args.agents and args.agents[:1]}
    elif args.protocol in TURNS:
        # without the reward that training sees: nobody there to say that an answer is good enough
        fixed = {"num_turns": TURNS[args.protocol], "early_termination_threshold": None}
    for name, value in fixed.items():
        if name != "agents" and args.sources.get(name) == "flag" and getattr(args, name) != value:
            raise ConfigError(
                f"{name}={getattr(args, name)!r}: protocol {args.protocol} plays with {value}. Leave it out."
            )
    if args.protocol == "discussion":
        task = dataclasses.replace(task, external_transition=discuss)
        fixed["external_prompt_passthrough"] = True
    own = dataclasses.replace(args, **fixed)
    own.sources.update(args.sources)
    return task, own


def protocol_models(models: Sequence[Any], args: EvaluationConfig) -> list[Any]:
    """The models that play: all, or the one that does everything.

    Raises:
        ConfigError: several different ones for one agent, or one agent for a protocol of several.
    """
    if args.protocol == "single":
        if any(model is not models[0] and model != models[0] for model in models):
            given, remedy = f"{len(models)} models are given", "Give one agent_model."
            if args.agents_dir is not None:
                given = f"{args.agents_dir} holds {len(models)} agents"
                remedy = f"Choose one, such as --agents {models[0]}, in place of agents_dir."
            raise ConfigError(f"protocol='single': {given}, and one agent does the whole task. {remedy}")
        return list(models[:1])
    if args.protocol in TURNS and len(models) < 2:
        raise ConfigError(f"protocol={args.protocol!r}: num_agents is 1, and this is for several. Give 2 or more.")
    return list(models)


def _check_alone(task: Task) -> None:
    """Raises ConfigError where prompts or reward of a task are for several agents only."""
    formatters = task.formatters
    if isinstance(formatters, list | tuple) and len(formatters) > 1:
        names = ", ".join(map(function_name, formatters))
        problem = f"has {len(formatters)} formatters ({names}), one an agent"
    elif not _takes(task, 1) and any(_takes(task, number) for number in range(2, 9)):
        problem = f"has a reward_func ({function_name(task.reward_func)}) of the answers of several agents"
    else:
        return
    raise ConfigError(
        f"protocol='single': one agent cannot do task {task.name or 'task'}, which {problem}. Give the task one "
        "formatter, which asks a single agent for everything, and a reward_func that takes one list of answers too; or "
        "leave the protocol out and give --collaboration_mode centralized, where one model writes all agents' answers."
    )


def _takes(task: Task, num_agents: int) -> bool:
    try:
        bind_reward(task.reward_func, num_agents)
    except ConfigError:
        return False
    return True


def discuss(
    agent_completions: Sequence[str], prompt_history_per_agent: Sequence[Sequence[Prompt]], num_agents: int
) -> list[Prompt]:
    """The prompts of the second answers: what each agent saw and said, and what the others said."""
    prompts = []
    for agent in range(num_agents):
        others = {other: text for other, text in enumerate(agent_completions) if other != agent}
        text = f"The other agents of your team answered:\n\n{_listed(others)}\n\n{_AGAIN}"
        prompt, own = prompt_history_per_agent[agent][-1], agent_completions[agent]
        if isinstance(prompt, str):
            prompts.append(f"{prompt}{own}\n\n{text}\n\n")
        else:
            prompts.append([*prompt, {"role": "assistant", "content": own}, {"role": "user", "content": text}])
    return prompts


def after_others(prompt: Prompt, answers: Mapping[int, str]) -> Prompt:
    """An agent's prompt with the answers of the agents before it, by their number."""
    text = f"Agents of your team have answered before you:\n\n{_listed(answers)}\n\n{_NEXT}"
    if isinstance(prompt, str):
        return f"{prompt}\n\n{text}\n\n"
    if prompt[-1]["role"] != "user":
        return [*prompt, {"role": "user", "content": text}]
    return [*prompt[:-1], {**prompt[-1], "content": f"{prompt[-1]['content']}\n\n{text}"}]


_AGAIN = "With these in mind, answer your own task again, whole and in the form that was asked for."
_NEXT = "With these in mind, answer your own task, in the form that was asked for."


def _listed(answers: Mapping[int, str]) -> str:
    return "\n\n".join(f"Agent {agent + 1}:\n{text.strip() or '(nothing)'}" for agent, text in answers.items())


class SequentialCollector(Collector):
    """One agent after the other. Later agents' prompts differ from episode to episode, so each episode is a tree."""

    def collect(self, items: Sequence[tuple[int, dict]], growth: Growth) -> list[RolloutTree]:
        """`growth.generations[0]` trees of one episode of every (ordinal, item), those of one item together."""
        episodes = growth.generations[0]
        one = dataclasses.replace(growth, generations=(1,))
        return super().collect([numbered for numbered in items for _ in range(episodes)], one)

    def _draw_all(self, frontier: list[tuple[RolloutTree, Node]], growth: Growth) -> None:
        seen: Counter[int] = Counter()
        episodes = []
        for tree, node in frontier:
            episodes.append(seen[tree.ordinal])
            seen[tree.ordinal] += 1
            node.responses = []
        for agent in range(len(self.team.agents)):
            requests = []
            for (tree, node), episode in zip(frontier, episodes, strict=True):
                if agent > 0:
                    answers = {before: own[0].text for before, own in enumerate(node.responses)}
                    content = after_others(node.prompts[agent].content, answers)
                    where = f"item {tree.ordinal}, turn 0"
                    node.prompts[agent] = self._tokenize(agent, content, growth, where)
                key = (growth.seed, growth.stream, tree.ordinal, node.path, agent, episode)
                requests.append(Request(agent, node.prompts[agent].token_ids, [key]))
            for (_, node), drawn in zip(frontier, self.draw(requests, growth.sampling), strict=True):
                node.responses.append(drawn)
