"""ClassEval: agents who each complete some methods of one class (reward: `mlrl.tasks.class_reward`).

Methods are shared out evenly, with few calls between agents; see `class_data.share_methods`. Any number of agents.
Data: `dataset=FudanSELab/ClassEval` on the hub, or `data_path=` with its file; without either, classes of our own.
Du et al. 2023, MIT licence. Its tests need numpy<2, python-docx, nltk, gensim, pandas, openpyxl, beautifulsoup4,
pillow, PyPDF2<3 and reportlab; where one is missing, the classes that import it earn nothing for tests.

    accelerate launch train/magrpo.py --task classeval --task_args data_path=ClassEval_data.json --agent_model MODEL
"""

import ast
from collections.abc import Sequence

from mlrl import Task
from mlrl.tasks.class_data import class_row, share_methods
from mlrl.tasks.class_reward import MAXIMUM, ClassScore, judge, own_methods
from mlrl.tasks.class_samples import CLASSES
from mlrl.tasks.code_task import code_task
from mlrl.tasks.code_text import code_of
from mlrl.tasks.feedback import checked_mode
from mlrl.tasks.sandbox import Limits, Sandbox
from mlrl.tasks.task_data import Row, load_rows, split_rows

FEEDBACK = ("plain", "passed", "level_passed", "code_feedback", "level_feedback")
_FAILURES_TOLD = 5

RECOMMENDED = {
    "num_turns": 2,
    "num_generations": 2,
    "max_new_tokens": 600,
    "temperature": 0.6,
    "early_termination_threshold": -0.2,  # a raw reward of 5.8
    "discount": 0.9,
    "rollout_batch_size": 1,
    "eval_num_samples": 4,
}


def task(
    data_path: str | None = None,
    dataset: str | None = None,
    split: str = "test",
    train_size: int | None = None,
    eval_size: int | None = None,
    feedback: str = "code_feedback",
    include_original_prompt: bool = True,
    include_previous_response: bool = True,
    reward_workers: int | None = None,
    test_seconds: float = 40.0,
    total_seconds: float = 125.0,
) -> Task:
    """The task: the first `train_size` rows (66) to train on, the next `eval_size` (16) to evaluate on; ours: 6 and 2.

    Args:
        feedback: what later turns are told, a word of `FEEDBACK`.
        include_original_prompt, include_previous_response: what a later prompt repeats; with both the chat goes on.
        reward_workers: programs that run at once; None: one a core.
        test_seconds, total_seconds: limits of one test and of all of a class, in processor seconds.

    Raises:
        ConfigError: an unknown word, or rows that cannot be had.
    """
    mode = checked_mode(feedback, FEEDBACK)
    sandbox = Sandbox(Limits(test_s=test_seconds, total_s=total_seconds, memory_mb=4096, processes=16), reward_workers)
    own = data_path is None and dataset is None
    rows = load_rows(data_path, dataset, split, lambda: CLASSES)
    rows = [class_row(row, number) for number, row in enumerate(rows)]
    train, held_out = split_rows(
        rows, train_size or (None if own else 66), eval_size or (2 if own else 16), train_first=True
    )

    def scores(item: Row, joints: Sequence[Sequence[str]]) -> list[ClassScore]:
        return judge(sandbox, item, joints, shares_of(item, len(joints[0])))

    def told(score: ClassScore, item: Row, answers: Sequence[str]) -> list[str]:
        return [f"{verdict_text(score, mode)}\n\n{_request(share)}" for share in shares_of(item, len(answers))]

    def kept(item: Row, answers: Sequence[str]) -> list[str]:
        return [_kept(answer, share) for answer, share in zip(answers, shares_of(item, len(answers)), strict=True)]

    return code_task(
        train,
        held_out,
        formatter=role_prompt,
        scores=scores,
        told=told,
        maximum=MAXIMUM,
        recommended=RECOMMENDED,
        include_original_prompt=include_original_prompt,
        include_previous_response=include_previous_response,
        kept=kept,
    )


def shares_of(item: Row, num_agents: int) -> list[list[str]]:
    """The methods that each agent writes."""
    return share_methods(item["methods"], item["depends"], num_agents)


def role_prompt(item: Row, agent_idx: int, num_agents: int) -> list[dict[str, str]]:
    """The skeleton and an agent's methods as one user message; a chat of an earlier turn is passed on."""
    if not isinstance(item["prompt"], str):
        return item["prompt"]
    own = shares_of(item, num_agents)[agent_idx]
    others = [name for name in item["methods"] if name not in own]
    partners = f" Others write {_listed(others)}; leave these to them, you may call them." if others else ""
    text = f"Complete this class.\n\n{item['prompt']}\n{_request(own, again=False)}{partners}"
    return [{"role": "user", "content": text}]


def _request(own: Sequence[str], again: bool = True) -> str:
    if not own:
        return "There is nothing for you to write. Answer with an empty line."
    verb = "Write again, better:" if again else "Write"
    return f"{verb} {_listed(own)}. Answer with these method definitions only, no class line and no fences."


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _kept(answer: str, share: Sequence[str]) -> str:
    """An answer as its agent is shown it again: the methods that are its own; the answer as it is without any."""
    methods = own_methods(code_of(answer))
    kept = [ast.unparse(f.node) if f.node is not None else f.source for f in methods.values() if f.name in share]
    return "\n\n".join(kept) or answer


def verdict_text(score: ClassScore, mode: str) -> str:
    """What all agents are told about a joint response, in one of the modes of `FEEDBACK`."""
    if mode == "plain":
        return "Look at your methods once more."
    if mode == "passed":
        return f"All tests passed: {'yes' if score.solved else 'no'}."
    if mode == "level_passed":
        signals = {
            "syntax": score.problem is None and score.valid == score.methods,
            "tests": score.solved,
            "no method written twice": score.overlapping == 0,
        }
        return "\n".join(f"{signal}: {'passed' if passed else 'not passed'}" for signal, passed in signals.items())
    if score.problem is not None:
        return f"The class does not compile: {score.problem}."
    lines = [f"The class compiles. Tests passed: {score.passed} of {len(score.tests)}."]
    lines += [f"It cannot be run: {score.load_problem}"] if score.load_problem else []
    failed = [(name, o) for name, o in zip(score.tests, score.outcomes, strict=True) if o.status != "passed"]
    if mode == "code_feedback" and failed:
        lines.append(f"Failing: {', '.join(name for name, _ in failed[:_FAILURES_TOLD])}.")
    if mode == "level_feedback":
        lines += [f"{score.methods - score.valid} methods are missing or broken."] * (score.valid < score.methods)
        lines += [f"{score.overlapping} methods were written by several agents."] * (score.overlapping > 0)
        lines += [f"{name}: {o.message or o.status}" for name, o in failed[:_FAILURES_TOLD]]
    return "\n".join(lines)
