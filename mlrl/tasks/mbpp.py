"""MBPP, short programs from a description, written by a helper and a main agent (reward: `mlrl.tasks.coding_reward`).

Data: `dataset=OpenMLRL/MBPP` on the hub, or `data_path=` with a file of MBPP (sanitized or full) or of HumanEval's
form; without either, problems of our own. Austin et al. 2021, CC BY 4.0.

    accelerate launch train/magrpo.py --task mbpp --task_args data_path=sanitized-mbpp.json --agent_model MODEL
"""

from mlrl import Task
from mlrl.tasks.coding import coding_task
from mlrl.tasks.coding_data import function_row
from mlrl.tasks.coding_samples import PROBLEMS
from mlrl.tasks.task_data import load_rows, split_rows


def task(
    data_path: str | None = None,
    dataset: str | None = None,
    split: str = "test",
    train_size: int | None = 50,
    eval_size: int | None = None,
    feedback: str = "level_feedback",
    sandbox_slice: int | None = 1,
    include_original_prompt: bool = True,
    include_previous_response: bool = True,
    reward_workers: int | None = None,
    test_seconds: float = 10.0,
    total_seconds: float = 60.0,
) -> Task:
    """The task: the first `eval_size` rows (15; 2 of our own) to evaluate on, the next `train_size` to train on.

    The other arguments are those of `mlrl.tasks.coding.coding_task`.
    """
    own = data_path is None and dataset is None
    rows = load_rows(data_path, dataset, split, lambda: PROBLEMS)
    rows = [function_row(row, number) for number, row in enumerate(rows)]
    train, held_out = split_rows(rows, train_size, eval_size or (2 if own else 15))
    return coding_task(
        train,
        held_out,
        feedback=feedback,
        sandbox_slice=sandbox_slice,
        include_original_prompt=include_original_prompt,
        include_previous_response=include_previous_response,
        reward_workers=reward_workers,
        test_seconds=test_seconds,
        total_seconds=total_seconds,
    )
