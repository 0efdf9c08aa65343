"""Several function calls for one request, shared by N agents; the order of the calls is of no account.

Nothing is executed: calls are compared with the gold calls (`mlrl.tasks.tool_use.reward`, at most 1.10). One turn.
Rows of the Berkeley Function-Calling Leaderboard come from the package `bfcl-eval` where it is installed (Apache 2.0;
`pip install bfcl-eval --no-deps` is enough), else from a file, the hub, or a sample of our own.

    accelerate launch train/magrpo.py --task bfcl --task_args role_mode=odd_even --agent_model MODEL
"""

from mlrl import Task
from mlrl.tasks.tool_use.benchmark import PARALLEL, checked_categories, parallel_rows
from mlrl.tasks.tool_use.builder import tool_task
from mlrl.tasks.tool_use.samples import PARALLEL_ROWS
from mlrl.tasks.tool_use.source import tool_rows


def task(
    data_path: str | None = None,
    dataset: str | None = None,
    categories: str = "parallel,parallel_multiple",
    role_mode: str = "self_select",
    train_split: str = "train",
    eval_split: str = "test",
    train_size: int | None = None,
    eval_size: int | None = None,
) -> Task:
    """The task over rows with user_prompt, function and ground_truth.

    Args:
        dataset: a hub id such as OpenMLRL/BFCL-V4-Parallel-Native, `bfcl-eval` for the installed package, or `sample`.
        categories: of the package: parallel, parallel_multiple, live_parallel, live_parallel_multiple.
        role_mode: self_select, split_by_order, odd_even or same_prompt.
        eval_size: rows held out; None: a fifth of the package's rows, the last tenth of a file.
    """
    words = checked_categories(categories, PARALLEL)
    train, held_out = tool_rows(
        data_path,
        dataset,
        splits=(train_split, eval_split),
        sizes=(train_size, eval_size),
        sample=PARALLEL_ROWS,
        packaged=lambda folder: parallel_rows(folder, words),
    )
    return tool_task(train, held_out, role_mode=role_mode, ordered=False)
