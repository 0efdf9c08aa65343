"""Playing a team without training it: any models, or the agents that a run saved."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from mlrl.centralized import actors, make_environment
from mlrl.config import EvaluationConfig
from mlrl.config_team import DEFAULT_NUM_AGENTS, count_agents, models_setting, team_models
from mlrl.errors import ConfigError
from mlrl.parallel.launch import Launch
from mlrl.rollout.tree import Node, RolloutTree
from mlrl.run_folder import to_jsonable
from mlrl.storage import write_whole
from mlrl.task import Task
from mlrl.trainers.data import first_items
from mlrl.trainers.evaluation import by_item, episodes, evaluate_with_intervals, evaluation_growth
from mlrl.trainers.protocols import DRAFTS, SequentialCollector, as_protocol, protocol_models
from mlrl.trainers.setup import make_mesh, prepare_team
from mlrl.wording import counted


@dataclass(frozen=True)
class Evaluation:
    """What a team did on a task.

    Attributes:
        metrics: by name, as a trainer's evaluation gives them.
        intervals: 95 % confidence intervals over items of those that have one, see `jackknife_intervals`.
        trees: one an item, whose paths are its episodes; one an episode in protocol sequential.
        is_main: whether this process is the one that writes and prints.
    """

    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    trees: list[RolloutTree]
    task: Task
    args: EvaluationConfig
    is_main: bool = True

    def describe(self) -> dict[str, str]:
        """What was played, for a header."""
        args, items = self.args, len(by_item(self.trees))
        team = args.agents_dir or ", ".join(args.agents or [args.agent_model or "loaded models"])
        temperature = args.temperature if args.eval_temperature is None else args.eval_temperature
        episodes_each, turns = counted(args.eval_num_generations, "episode"), counted(args.num_turns, "turn")
        return {
            "task": f"{self.task.name or 'task'}, {counted(items, 'item')} × {episodes_each}",
            "team": team,
            "protocol": args.protocol,
            "sampling": f"{turns} of up to {counted(args.max_new_tokens, 'token')}, temperature {temperature:g}",
        }

    def write(self, path: str | Path) -> None:
        """Writes metrics, settings and all episodes as one JSON object, on the main process."""
        if not self.is_main:
            return
        content = {
            "task": self.task.name,
            "settings": asdict(self.args),
            "metrics": self.metrics,
            "intervals": self.intervals,
            "episodes": [
                _episode(tree, number, played, self.args.discount, DRAFTS.get(self.args.protocol, 0))
                for own in by_item(self.trees)
                for number, (tree, played) in enumerate((tree, path) for tree in own for path in episodes(tree))
            ],
        }
        write_whole(path, json.dumps(to_jsonable(content), ensure_ascii=False, indent=1) + "\n")


def evaluate_team(
    task: Task, args: EvaluationConfig, *, agents: Sequence[Any] | None = None, tokenizer: Any = None
) -> Evaluation:
    """Plays `eval_num_generations` episodes of each of the first `eval_num_samples` items of the evaluation set.

    Args:
        args: names the team by `agents_dir`, `agents` or `agent_model`.
        agents: loaded models, one an agent, in place of those.
        tokenizer: one for all agents, or a list of one each; default: what lies with the models.

    Raises:
        ConfigError: for whatever is wrong, before any weights are read where it can be known by then.
    """
    if not isinstance(args, EvaluationConfig):
        raise ConfigError(f"args={type(args).__name__}: not a config of evaluation. Give an EvaluationConfig")
    launch = Launch.detect()
    if args.agents_dir is not None:
        models = [str(Path(args.agents_dir) / f"agent_{i}") for i in range(count_agents(args.agents_dir))]
    else:
        models = team_models(args, agents=agents)
    one_for_all = args.agents_dir is not None and args.collaboration_mode == "centralized"
    models = protocol_models(models, args)
    trained_as, (task, args) = args, as_protocol(task, args)
    num_roles = (args.num_agents or DEFAULT_NUM_AGENTS) if one_for_all else len(models)
    args.check(num_roles)
    models = actors(models, args)
    if task.eval_dataset is None:
        raise ConfigError("eval_dataset=None: the task has nothing to evaluate on. Give it an eval_dataset")
    if args.eval_num_samples == 0:
        raise ConfigError("eval_num_samples=0: leaves nothing to evaluate. Give 1 or more, or None for all items")
    if launch.is_main:
        for doubt in _other_than_trained(task, trained_as):
            warnings.warn(doubt, stacklevel=2)
    mesh = make_mesh(args, launch, len(models))
    environment = make_environment(task, num_roles, args, per_agent_rewards=True)
    prepared = prepare_team(
        args, launch, environment, models, setting=models_setting(args, agents), tokenizer=tokenizer
    )
    collector = prepared.load(trainable=False, mesh=mesh)
    if args.protocol == "sequential":
        collector = SequentialCollector(collector.team, collector.sampler, collector.environment)
    items = mesh.world.from_first(lambda: first_items(task.eval_dataset, args.eval_num_samples))
    growth = evaluation_growth(args, prepared.prompt_limits)
    metrics, intervals, trees = evaluate_with_intervals(
        collector, items, growth, args.eval_batch_size, drafts=DRAFTS.get(args.protocol, 0)
    )
    return Evaluation(metrics, intervals, trees, task, args, launch.is_main)


def _other_than_trained(task: Task, args: EvaluationConfig) -> list[str]:
    """Where a run's agents are played in another way than that run trained them, as its config.yaml tells."""
    file = Path(args.agents_dir).resolve().parent / "config.yaml" if args.agents_dir is not None else None
    if file is None or not file.is_file():
        return []
    record = yaml.safe_load(file.read_text(encoding="utf-8"))
    trained = record.get("record", {}).get("task"), task.name
    differing = [f"task={trained[1]!r} (trained on {trained[0]!r})"] if trained[0] not in (None, trained[1]) else []
    for name in ("num_turns", "max_new_tokens", "max_prompt_tokens", "temperature", "top_p", "top_k"):
        if name in record and record[name] != getattr(args, name):
            differing.append(f"{name}={getattr(args, name)!r} (trained with {record[name]!r})")
    if not differing:
        return []
    return [f"agents_dir={args.agents_dir!r}: {', '.join(differing)}. --config {file} takes the settings of training"]


def _episode(
    tree: RolloutTree, number: int, played: list[tuple[Node, int]], discount: float, drafts: int
) -> dict[str, Any]:
    """One path from the first turn to the last, with the return of what comes after its drafts."""
    counted, joint = played[drafts]
    return {
        "item": tree.ordinal,
        "row": tree.item,
        "episode": number,
        "return": counted.returns(discount)[joint],
        "turns": [_turn(node, joint) for node, joint in played],
    }


def _turn(node: Node, joint: int) -> dict[str, Any]:
    responses = [node.responses[agent][k] for agent, k in enumerate(node.joints[joint])]
    return {
        "prompts": [prompt.content for prompt in node.prompts],
        "responses": [response.text for response in responses],
        "token_counts": [len(response.token_ids) for response in responses],
        "truncated": [response.truncated for response in responses],
        "reward": node.rewards[joint],
    }
