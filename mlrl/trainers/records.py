"""What a run writes beside its metrics: the nodes of its rollout trees, and its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mlrl.profiling import span
from mlrl.rollout.tree import RolloutTree
from mlrl.tracking import Tracking


def write_nodes(
    tracking: Tracking, trees: Sequence[RolloutTree], step: int, env_step: int, split: str, discount: float
) -> None:
    """Appends every node of these trees to the run's completions, and passes them to trackers."""
    records = list(node_records(trees, step, env_step, split, discount))
    with span("files"):
        tracking.run_folder.write_completions(records, split, step)
        tracking.log_completions(records, split, env_step=env_step)


def node_records(
    trees: Sequence[RolloutTree], step: int, env_step: int, split: str, discount: float
) -> Iterator[dict[str, Any]]:
    """One record a node, with the fields of a completions file."""
    for tree in trees:
        for node in tree.nodes():
            yield {
                "step": step,
                "env_step": env_step,
                "split": split,
                "item": tree.ordinal,
                "path": list(node.path),
                "turn": node.turn,
                "prompts": [prompt.content for prompt in node.prompts],
                "responses": [[r.text for r in own] for own in node.responses],
                "token_counts": [[len(r.token_ids) for r in own] for own in node.responses],
                "truncated": [[r.truncated for r in own] for own in node.responses],
                "joints": [list(joint) for joint in node.joints],
                "rewards": node.rewards,
                "returns": node.returns(discount),
                "advantages": node.advantages,
            }
