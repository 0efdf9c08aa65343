"""What later turns of the code tasks are told: the verdict on a program, in one of several kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlrl.tasks.code_text import code_of
from mlrl.tasks.coding_reward import Score
from mlrl.tasks.task_data import Row

if TYPE_CHECKING:
    from mlrl.tasks.expert import Expert

HELPER = "aux"
FEEDBACK = ("plain", "passed", "level_passed", "level_feedback", "expert_edits")


def verdict_text(score: Score, item: Row, mode: str, sandbox_slice: int | None = None) -> str:
    """What all agents are told about a joint response, in one of the modes of `FEEDBACK`."""
    name, total = item["entry_point"], len(score.outcomes)
    if mode == "plain":
        return "Look at your answer once more."
    if mode == "passed":
        return f"All tests passed: {'yes' if score.solved else 'no'}."
    if mode == "level_passed":
        signals = {
            "implementation": score.helper and score.main,
            "syntax": bool(score.syntax),
            "tests": score.solved,
            "helper use": score.uses_helper and not score.thin_wrapper and not score.ignores_helper,
        }
        return "\n".join(f"{signal}: {'passed' if passed else 'not passed'}" for signal, passed in signals.items())
    lines = [f"`{HELPER}` is not defined with a return value."] * (not score.helper)
    lines += [f"`{name}` is not defined with a return value."] * (not score.main)
    lines += [f"The code does not parse: {score.problem}."] if score.problem else []
    if score.syntax:
        lines.append(f"Tests passed: {score.passed} of {total}.")
        lines += (
            [f"The code cannot be run: {score.load_problem}"]
            if score.load_problem
            else _failures(score, item, sandbox_slice)
        )
        lines += _helper_use(score, name)
    return "\n".join(lines)


def _failures(score: Score, item: Row, sandbox_slice: int | None) -> list[str]:
    told = list(zip(item["tests"], score.outcomes, strict=True))
    if sandbox_slice:
        told = told[:sandbox_slice] if sandbox_slice > 0 else told[sandbox_slice:]
    words = {"failed": "failed", "timeout": "ran out of time", "skipped": "was not run"}
    return [
        f"This test {words[outcome.status]}: {test[-400:]}" + (f"\n  {outcome.message}" if outcome.message else "")
        for test, outcome in told
        if outcome.status != "passed"
    ]


def _helper_use(score: Score, name: str) -> list[str]:
    if not score.uses_helper:
        return [f"`{name}` does not call `{HELPER}`."] if score.helper else []
    if score.thin_wrapper:
        return [f"`{name}` only returns what `{HELPER}` returns."]
    return [f"`{name}` ignores what `{HELPER}` returns."] if score.ignores_helper else [f"`{name}` uses `{HELPER}`."]


def expert_texts(
    expert: Expert, score: Score, item: Row, answers: Sequence[str], sandbox_slice: int | None
) -> list[str]:
    """What each agent is told where an expert, who sees the whole program and the verdict, suggests edits."""
    suggested = expert.edits(expert_prompt(score, item, answers, sandbox_slice), ("aux", "main"))
    parts = [
        f"An expert read the whole program. Suggested for `{name}`:\n{edits}"
        for name, edits in zip((HELPER, item["entry_point"]), suggested, strict=True)
    ]
    return parts if len(answers) > 1 else ["\n\n".join(parts)]


def expert_prompt(score: Score, item: Row, answers: Sequence[str], sandbox_slice: int | None) -> str:
    """The program, what the tests say of it, and the form in which edits are wanted."""
    name = item["entry_point"]
    written = dict(zip((HELPER, name) if len(answers) > 1 else (f"{HELPER} and {name}",), answers, strict=True))
    parts = [f"Written for {part}:\n```python\n{code_of(text).strip()}\n```" for part, text in written.items()]
    code = "\n\n".join(parts)
    return (
        f"A Python function `{name}` is wanted:\n\n{item['prompt'].rstrip()}\n\nIt has two parts, written by "
        f"people who do not see each other's: a helper `{HELPER}` with the same arguments, and `{name}`, which should "
        f"make good use of `{HELPER}`.\n\n{code}\n\nWhat is known of the program:\n"
        f"{verdict_text(score, item, 'level_feedback', sandbox_slice)}\n\nSuggest edits to each part, short and "
        'concrete. Answer with one JSON object only:\n{"aux": "edits of the helper", "main": "edits of '
        f'{name}"}}\nwith an empty text where nothing is to be changed.'
    )
