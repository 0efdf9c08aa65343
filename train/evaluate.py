"""Evaluation: plays a team on the evaluation set of a task and trains nothing.

The team is what a run saved (--agents_dir), one model an agent (--agents), or one model for all (--agent_model). Every
item is played eval_num_generations times, each an independent episode of num_turns turns. Give the task and the
settings of sampling that the team was trained with; --config takes them from a run. --protocol plays a baseline in
place of the trained team's way: one agent alone, all in parallel, one after the other, or one round of discussion.

    ./launch.sh train/evaluate.py                                           # the untrained demo team
    ./launch.sh train/evaluate.py --config runs/RUN/config.yaml --agents_dir runs/RUN/agents --output results.json
    ./launch.sh train/evaluate.py --task my_task.py --agents gpt2 Qwen/Qwen2.5-0.5B-Instruct --eval_temperature 0
    ./launch.sh train/evaluate.py --task humaneval --agent_model MODEL --protocol discussion --eval_num_generations 10
"""

from dataclasses import dataclass
from typing import Literal

from mlrl.cli import config_errors, parse
from mlrl.config import EvaluationConfig, TaskArguments


@dataclass(kw_only=True)
class Arguments(TaskArguments, EvaluationConfig):
    """What people edit; every other setting is in --help."""

    task: str = "length_ratio"
    """A shipped task, or file.py[:ATTR] with a Task or a function for one"""
    agent_model: str | None = "embedded"
    """Model of every agent: hub id, local folder, or embedded (no download)"""
    agents_dir: str | None = None
    """Folder with agent_0, agent_1, ... of a trained team (in place of a model)"""
    protocol: Literal["team", "single", "parallel", "sequential", "discussion"] = "team"
    """team, or a baseline without training: single, parallel, sequential, discussion"""
    eval_num_generations: int = 4
    """Episodes an item (mean, standard error, best of n, pass@k)"""
    output: str | None = None
    """JSON file for metrics and episodes; None: print only"""


def main() -> None:
    """Reads the command line, plays, prints a table of metrics, and writes the JSON file where one is asked for."""
    run = parse(Arguments, __doc__)
    with config_errors():
        from mlrl.console import Console
        from mlrl.trainers import evaluate_team  # torch loads only now

        evaluation = evaluate_team(run.task, run.config)
        console = Console(enabled=evaluation.is_main)
        console.header(evaluation.describe())
        console.evaluation(evaluation.metrics, intervals=evaluation.intervals)
        if run.config.output is not None:
            evaluation.write(run.config.output)
            console.note(f"written to {run.config.output}")


if __name__ == "__main__":
    main()
