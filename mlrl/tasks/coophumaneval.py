"""CoopHumanEval, functions that suit a helper and a main agent (reward: `mlrl.tasks.coding_reward`).

Data: `dataset=OpenMLRL/CoopHumanEval` on the hub, or `data_path=` with a file of HumanEval's form; without either,
problems of our own.

    accelerate launch train/magrpo.py --task coophumaneval --task_args dataset=OpenMLRL/CoopHumanEval …
"""

from mlrl.tasks.coding import coding_task_function

task = coding_task_function(eval_rows=16)
