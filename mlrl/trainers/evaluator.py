"""Playing a team without training it: any models, or the agents that a run saved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlrl.centralized import actors, make_environment
from mlrl.config import EvaluationConfig
from mlrl.config_rules import DEFAULT_NUM_AGENTS, count_agents, team_models
from mlrl.errors import ConfigError
from mlrl.parallel.launch import Launch
from mlrl.rollout.tree import Node, RolloutTree
from mlrl.run_folder import to_jsonable
from mlrl.task import Task
from mlrl.trainers.data import first_items
from mlrl.trainers.evaluation import episodes, evaluate, evaluation_growth
from mlrl.trainers.setup import make_mesh, prepare_team


@dataclass(frozen=True)
class Evaluation:
    """What a team did on a task.

    Attributes:
        metrics: by name, as a trainer's evaluation gives them.
        trees: one an item, whose paths are its episodes.
        is_main: whether this process is the one that writes and prints.
    """

    metrics: dict[str, float]
    trees: list[RolloutTree]
    task: Task
    args: EvaluationConfig
    is_main: bool = True

    def write(self, path: str | Path) -> None:
        """Writes metrics, settings and all episodes as one JSON object, on the main process."""
        if not self.is_main:
            return
        content = {
            "task": self.task.name,
            "settings": asdict(self.args),
            "metrics": self.metrics,
            "episodes": [
                _episode(tree, number, played, self.args.discount)
                for tree in self.trees
                for number, played in enumerate(episodes(tree))
            ],
        }
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(to_jsonable(content), ensure_ascii=False, indent=1)
        path.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")


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
    num_roles = (args.num_agents or DEFAULT_NUM_AGENTS) if one_for_all else len(models)
    args.check(num_roles)
    models = actors(models, args)
    if task.eval_dataset is None:
        raise ConfigError("eval_dataset=None: the task has nothing to evaluate on. Give it an eval_dataset")
    if args.eval_num_samples == 0:
        raise ConfigError("eval_num_samples=0: leaves nothing to evaluate. Give 1 or more, or None for all items")
    mesh = make_mesh(args, launch, len(models))
    environment = make_environment(task, num_roles, args, per_agent_rewards=True)
    prepared = prepare_team(args, launch, environment, models, tokenizer=tokenizer)
    collector = prepared.load(trainable=False, mesh=mesh)
    items = mesh.world.from_first(lambda: first_items(task.eval_dataset, args.eval_num_samples))
    growth = evaluation_growth(args, prepared.prompt_limits)
    metrics, trees = evaluate(collector, items, growth, args.eval_batch_size)
    return Evaluation(metrics, trees, task, args, launch.is_main)


def _episode(tree: RolloutTree, number: int, played: list[tuple[Node, int]], discount: float) -> dict[str, Any]:
    """One path from the first turn to the last."""
    first, joint = played[0]
    return {
        "item": tree.ordinal,
        "row": tree.item,
        "episode": number,
        "return": first.returns(discount)[joint],
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
