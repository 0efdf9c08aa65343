"""Trains the same small run under several layouts in one launch, and writes what each did.

    accelerate launch --num_processes 2 … tests/distributed/layouts.py SPEC.json OUT

SPEC: {"model": FOLDER, "layouts": [{"name": …, "zero": 0 to 3, "offload": …, "num_agents": …, "agents": [FOLDER …],
"poisoned": …, "lag": seconds that a rank is behind the one before it, "trainer": "IAC", "own_rewards": …,
"critic_model": FOLDER, "resume": CHECKPOINT, "args": {setting: value}}]}.
OUT/<name>.json holds texts, metrics and how many parameters each rank held of each agent; OUT/<name>-agent_i.pt the
change of agent i's trained weights, OUT/<name>-critic_i.pt that of a critic's, OUT/<name>-reward_model.pt that of a
reward model's.
"""

import json
import os
import sys
import time
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from mlrl import trainers
from mlrl.config import field_names
from mlrl.models import packing
from mlrl.task import Task

STEPS = 3
MEASURED = ("time/", "memory", "throughput")
ROWS = [
    {"prompt": p} for p in ("The sea is", "Tell me about the old town and the river.", "A city", "Why", "ships go", "x")
]


def reward(*completions: list[str]) -> list[float]:
    """Smooth in every agent's letters, so that no two responses of a node earn the same."""
    return [
        sum(len(set(text)) * (i + 1) for i, text in enumerate(joint)) / 50 for joint in zip(*completions, strict=True)
    ]


def own_reward(*completions: list[str]) -> list[list[float]]:
    """The same, a number an agent."""
    return [[len(set(text)) * (i + 1) / 50 for i, text in enumerate(joint)] for joint in zip(*completions, strict=True)]


def transition(prompt: str, agent_completions: list[str]) -> list[str]:
    return [f"{prompt} again: {text[:8]}" for text in agent_completions]


def set_zero(stage: int, offload: bool) -> None:
    """What `accelerate launch` sets for a DeepSpeed configuration."""
    values = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu" if offload else "none",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu" if offload and stage == 3 else "none",
    }
    for name, value in values.items():
        os.environ[name] = value
        if not stage:
            del os.environ[name]


# responses here are short and few, and shall be drawn as longer ones are
@patch.multiple(packing, _LEAST_ROWS=1, _LEAST_STEPS=1)
def train(spec: dict, layout: dict, out: Path) -> None:
    set_zero(layout.get("zero", 0), layout.get("offload", False))
    agents = layout.get("agents")
    kind = layout.get("trainer", "MAGRPO")
    config = getattr(trainers, f"{kind}Config")
    args = {"agent_learning_rate": 1e-3, "max_new_tokens": 8, "rollout_batch_size": 3, "num_train_epochs": STEPS}
    args = {name: value for name, value in args.items() if name in field_names(config)} | layout.get("args", {})
    judge = own_reward if layout.get("own_rewards") else reward
    # the first rank may have made the run folder when the others come to where it is looked for
    lag = int(os.environ.get("RANK", "0")) * layout.get("lag", 0.0)
    with patch.object(trainers.base, "check_report_to", lambda _: time.sleep(lag)):
        trainer = getattr(trainers, f"{kind}Trainer")(
            agent_model=None if agents else spec["model"],
            agents=agents,
            num_agents=layout.get("num_agents", 2) if not agents else None,
            **({"critic_model": layout["critic_model"]} if "critic_model" in layout else {}),
            task=Task(reward_func=judge, external_transition=transition, train_dataset=ROWS, eval_dataset=ROWS[:3]),
            wandb_config={"config_sections": {"output": {"verbose": False}}},
            args=config(
                output_dir=str(out / "runs"),
                run_name=layout["name"],
                eval_interval=2,
                completions_steps=1,
                max_steps=STEPS,
                save_steps=1,
                save_total_limit=None,
                resume_from_checkpoint=layout.get("resume") and str(out.parent / layout["resume"]),
                **args,
            ),
        )
    if layout.get("poisoned"):
        poison(trainer)
    before = weights(trainer)
    here = [agent for agent in trainer.team.agents if agent.is_here]
    held = {agent.index: sum(count(agent.base.model)) for agent in here}
    critics = getattr(trainer, "critics", [])
    values_before = [critic_weights(critic) for critic in critics]
    rewarder = getattr(trainer, "reward_model", None)
    rewarder_before = rewarder and whole(rewarder)
    trainer.train()
    if rewarder is not None:
        moved = [b - a for a, b in zip(rewarder_before, whole(rewarder), strict=True)]
        if rewarder.group.is_first:
            torch.save(moved, out / f"{layout['name']}-reward_model.pt")
    for critic, old in zip(critics, values_before, strict=True):
        moved = [b - a for a, b in zip(old, critic_weights(critic), strict=True)]
        if trainer.mesh.critic(critic.index).is_first:
            torch.save(moved, out / f"{layout['name']}-critic_{critic.index}.pt")
    for index, (old, new) in enumerate(zip(before, weights(trainer), strict=True)):
        if new is not None and trainer.mesh.agents[index].is_first:
            torch.save([b - a for a, b in zip(old, new, strict=True)], out / f"{layout['name']}-agent_{index}.pt")
    held, parameters = trainer.world.gather(held), trainer.team.num_parameters()
    if trainer.launch.is_main:
        run = trainer.run_folder
        metrics = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        files = sorted(run.completions.glob("*.jsonl"))
        nodes = {file.stem: [json.loads(line) for line in file.read_text().split("\n") if line] for file in files}
        content = {
            "texts": {name: [node["responses"] for node in own] for name, own in nodes.items()},
            "rewards": {name: [node["rewards"] for node in own] for name, own in nodes.items()},
            "metrics": [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in metrics],
            "held": held,
            "parameters": parameters,
        }
        (out / f"{layout['name']}.json").write_text(json.dumps(content))
        print("done", layout["name"], flush=True)
    trainer.world.barrier()


def count(model: torch.nn.Module) -> list[int]:
    """Sizes of a network's weights and its agents' adapters, without further adapters, which are whole everywhere."""
    others = (".reward_model.", ".comparator_", ".critic_")
    return [p.numel() for name, p in model.named_parameters() if not any(other in name for other in others)]


def poison(trainer) -> None:
    """In the second step one sample of agent 0 has no advantage that is a number."""
    estimate = trainer.estimate

    def poisoned(trees):
        samples = estimate(trees)
        if trainer.step_number == 1:
            samples[0][-1].advantage = float("nan")
        return samples

    trainer.estimate = poisoned


def weights(trainer) -> list[list[torch.Tensor] | None]:
    """Copies of every agent's trained weights that live here, whole."""
    copies = []
    for agent in trainer.team.agents:
        if not agent.is_here:
            copies.append(None)
            continue
        with agent.base.whole():
            copies.append([p.detach().clone() for p in agent.parameters])
    return copies


def critic_weights(critic) -> list[torch.Tensor]:
    """Copies of what a critic trains, whole."""
    with critic.policy.base.whole():
        return [p.detach().clone() for p in critic.parameters]


def whole(rewarder) -> list[torch.Tensor]:
    """Copies of what a reward model trains, whole."""
    return [value.clone() for value in rewarder.whole_state()]


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[2])
    for layout in spec["layouts"]:
        train(spec, layout, out)


if __name__ == "__main__":
    main()
