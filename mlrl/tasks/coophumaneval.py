"""CoopHumanEval, functions that suit a helper and a main agent (reward: `mlrl.tasks.coding_reward`).

Data: `dataset=OpenMLRL/CoopHumanEval` on the hub, or `data_path=` with a file of HumanEval's form; without either,
problems of our own.

    accelerate launch train/magrpo.py --task coophumaneval --task_args dataset=OpenMLRL/CoopHumanEval …
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
    train_size: int | None = None,
    eval_size: int | None = None,
    feedback: str = "level_feedback",
    sandbox_slice: int | None = 1,
    include_original_prompt: bool = True,
    include_previous_response: bool = True,
    reward_workers: int | None = None,
    test_seconds: float = 10.0,
    total_seconds: float = 60.0,
) -> Task:
    """The task: the first `eval_size` rows (16; 2 of our own) to evaluate on, the next `train_size` (all) to train on.

    The other arguments are those of `mlrl.tasks.coding.coding_task`.
    """
    own = data_path is None and dataset is None
    rows = load_rows(data_path, dataset, split, lambda: PROBLEMS)
    rows = [function_row(row, number) for number, row in enumerate(rows)]
    train, held_out = split_rows(rows, train_size, eval_size or (2 if own else 16))
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
