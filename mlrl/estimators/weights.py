"""The fixed weight with which a response enters its agent's loss."""

from __future__ import annotations

TURN_WEIGHTINGS = ("objective", "undiscounted", "node")


def sample_weight(
    turn: int,
    *,
    num_items: int,
    num_joints: int,
    num_generations: int,
    discount: float = 1.0,
    turn_weighting: str = "objective",
    num_nodes: int | None = None,
) -> float:
    """Weight w of one response of one agent at 0-based `turn`, so that −Σ w·A·log π has the gradient of −J.

    `objective`     γ^t / (B · J^t · K): the γ-weighted sum over turns of per-turn means
    `undiscounted`  1 / (B · J^t · K)
    `node`          1 / (M · K): a flat mean over all nodes. Turn t then has a share J^t/ΣJ^s of the loss, so it is the
                    gradient of something else when H > 1; for comparison with runs published in that form.

    Args:
        turn: t, counted from 0.
        num_items: B, task items in the whole rollout batch, over all ranks.
        num_joints: J of a node. J^t counts the nodes of the *full* tree: branches that ended early count as zeros.
        num_generations: K.
        discount: γ in [0, 1].
        turn_weighting: one of the words above.
        num_nodes: M, nodes of all turns in the whole rollout batch; needed by `node` only.
    """
    if turn_weighting == "node":
        if num_nodes is None or num_nodes < 1:
            raise ValueError(f"num_nodes={num_nodes!r}: `node` weighting divides by it. Give the nodes of the batch.")
        return 1.0 / (num_nodes * num_generations)
    if turn_weighting not in TURN_WEIGHTINGS:
        raise ValueError(f"turn_weighting={turn_weighting!r}: unknown word. Use one of {', '.join(TURN_WEIGHTINGS)}.")
    scale = discount**turn if turn_weighting == "objective" else 1.0
    return scale / (num_items * num_joints**turn * num_generations)


def value_weight(turn: int, *, num_items: int, num_joints: int, num_targets: int, num_turns: int) -> float:
    """Weight 1 / (B · J^t · targets of a node · H) of one target of a critic at 0-based `turn`.

    The value loss is then the mean over turns of the mean squared error of that turn, ended branches counting as zeros.

    Args:
        num_items: B, task items in the whole rollout batch, over all ranks.
        num_joints: J of a node.
        num_targets: J, or K for a critic of one agent's own responses.
        num_turns: H.
    """
    return 1.0 / (num_items * num_joints**turn * num_targets * num_turns)
