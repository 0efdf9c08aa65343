"""The calls of one step of a conversation, shared by N agents; their order counts, agent 0's calls come first.

Nothing is executed: calls are compared with the gold calls (`mlrl.tasks.tool_use.reward`, at most 1.20). One turn:
every step of a conversation is a row, and what was asked and called before it is in its prompt. Rows as for bfcl.

    accelerate launch train/magrpo.py --task bfcl_multiturn --task_args categories=base --agent_model MODEL
"""

from mlrl import Task
from mlrl.tasks.tool_use.benchmark import MULTI_TURN, checked_categories, multi_turn_rows
from mlrl.tasks.tool_use.builder import tool_task
from mlrl.tasks.tool_use.samples import ORDERED_ROWS
from mlrl.tasks.tool_use.source import tool_rows


def task(
    data_path: str | None = None,
    dataset: str | None = None,
    categories: str = "base,miss_func,miss_param,long_context",
    role_mode: str = "self_select",
    train_split: str = "train",
    eval_split: str = "test",
    train_size: int | None = None,
    eval_size: int | None = None,
) -> Task:
    """The task over rows with user_prompt, function, ground_truth and turn_index.

    Args:
        dataset: a hub id such as OpenMLRL/BFCL-V4-Parallel-Multi-Turn, `bfcl-eval` for the package, or `sample`.
        categories: of the package: base, miss_func, miss_param, long_context.
        role_mode: self_select, split_by_order, odd_even or same_prompt.
        eval_size: rows held out; None: a fifth of the package's rows, the last tenth of a file.
    """
    words = checked_categories(categories, MULTI_TURN)
    train, held_out = tool_rows(
        data_path,
        dataset,
        splits=(train_split, eval_split),
        sizes=(train_size, eval_size),
        sample=ORDERED_ROWS,
        packaged=lambda folder: multi_turn_rows(folder, words),
    )
    return tool_task(train, held_out, role_mode=role_mode, ordered=True)
