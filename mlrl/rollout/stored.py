"""Rollout trees as what JSON can hold, number for number, for a checkpoint; the items stay in the data set."""

from __future__ import annotations

from typing import Any

from mlrl.rollout.tree import Node, Response, RolloutTree, TokenizedPrompt


def tree_record(tree: RolloutTree) -> dict[str, Any]:
    """A tree that was grown and not estimated yet, without its item."""
    return {"ordinal": tree.ordinal, "drawn_at": tree.drawn_at, "root": _node_record(tree.root)}


def stored_tree(record: dict[str, Any], item: dict) -> RolloutTree:
    """The tree that a record was made of, on the item of that ordinal."""
    return RolloutTree(item, record["ordinal"], _stored_node(record["root"], (), None), record["drawn_at"])


def _node_record(node: Node) -> dict[str, Any]:
    return {
        "prompts": [vars(prompt) for prompt in node.prompts],
        "responses": [[vars(response) for response in own] for own in node.responses],
        "joints": node.joints,
        "rewards": node.rewards,
        "raw_rewards": node.raw_rewards,
        "reward_failed": node.reward_failed,
        "greedy_return": node.greedy_return,
        "children": [[joint, _node_record(child)] for joint, child in node.children.items()],
    }


def _stored_node(record: dict[str, Any], path: tuple[int, ...], parent: Node | None) -> Node:
    node = Node(
        path,
        [TokenizedPrompt(**prompt) for prompt in record["prompts"]],
        parent,
        responses=[[Response(**response) for response in own] for own in record["responses"]],
        joints=[tuple(joint) for joint in record["joints"]],
        **{name: record[name] for name in ("rewards", "raw_rewards", "reward_failed", "greedy_return")},
    )
    node.children = {joint: _stored_node(child, (*path, joint), node) for joint, child in record["children"]}
    return node
