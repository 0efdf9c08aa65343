"""MBPP, short programs from a description, written by a helper and a main agent (reward: `mlrl.tasks.coding_reward`).

Data: `dataset=OpenMLRL/MBPP` on the hub, or `data_path=` with a file of MBPP (sanitized or full) or of HumanEval's
form; without either, problems of our own. Austin et al. 2021, CC BY 4.0.

    accelerate launch train/magrpo.py --task mbpp --task_args data_path=sanitized-mbpp.json --agent_model MODEL
"""

from mlrl.tasks.coding import coding_task_function

task = coding_task_function(eval_rows=15, train_rows=50)
