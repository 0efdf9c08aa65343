"""What the tasks humaneval, mbpp and coophumaneval share: roles, feedback for later turns, metrics.

Two agents write one program for a problem: agent 0 a helper function `aux`, agent 1 the function that was asked for,
which may call the helper. Neither sees what the other wrote. One agent alone writes both functions.
"""

from collections.abc import Sequence
from typing import Any

from mlrl import ConfigError, Task
from mlrl.rewards import RewardProcessors
from mlrl.tasks.coding_reward import MAXIMUM, Score, judge
from mlrl.tasks.feedback import checked_mode, next_prompt
from mlrl.tasks.pass_at_k import mean_pass_at_k, turn_means
from mlrl.tasks.sandbox import Limits, Sandbox
from mlrl.tasks.task_data import Row

HELPER = "aux"
FEEDBACK = ("plain", "passed", "level_passed", "level_feedback")

RECOMMENDED = {
    "num_turns": 2,
    "num_generations": 4,
    "joint_mode": "aligned",
    "max_new_tokens": 256,
    "temperature": 0.6,
    "early_termination_threshold": -0.2,  # a raw reward of 3.8
    "discount": 1.0,
    "eval_num_samples": 4,
    "eval_interval": 16,
}


def coding_task(
    train: Sequence[Row],
    held_out: Sequence[Row],
    *,
    feedback: str = "level_feedback",
    sandbox_slice: int | None = 1,
    include_original_prompt: bool = True,
    include_previous_response: bool = True,
    reward_workers: int | None = None,
    test_seconds: float = 10.0,
    total_seconds: float = 60.0,
) -> Task:
    """A Task over rows of `mlrl.tasks.coding_data.function_row`.

    Args:
        feedback: what later turns are told, a word of `FEEDBACK`.
        sandbox_slice: tests that level_feedback tells of: the first so many, the last so many where negative, all where
            0 or None.
        include_original_prompt, include_previous_response: what a later prompt repeats; with both the chat goes on.
        reward_workers: programs that run at once; None: one a core.
        test_seconds, total_seconds: limits of one test and of all of a program, in processor seconds.

    Raises:
        ConfigError: an unknown word or a limit that is none.
    """
    mode = checked_mode(feedback, FEEDBACK)
    sandbox = Sandbox(Limits(test_s=test_seconds, total_s=total_seconds), reward_workers)

    def scores(item: Row, answers: Sequence[Sequence[str]]) -> list[Score]:
        """One score a joint response; `answers` are the joints, each with one text an agent."""
        return judge(sandbox, item, [(texts[0], texts[-1]) for texts in answers], HELPER)

    def reward(*completions: list[str], batch_items: list[Row]) -> list[float]:
        joints = list(zip(*completions, strict=True))
        return [score.total for score in scores(batch_items[0], joints)]

    def transition(
        item: Row, agent_completions: list[str], num_agents: int, prompt_history_per_agent: list[list[Any]]
    ) -> list[Any]:
        score = scores(item, [agent_completions])[0]
        return [
            next_prompt(
                history,
                agent_completions[agent],
                f"{verdict_text(score, item, mode, sandbox_slice)}\n\n{_request(item, agent, num_agents)}",
                include_original_prompt,
                include_previous_response,
            )
            for agent, history in enumerate(prompt_history_per_agent)
        ]

    def log(agent_completions_turns: list[list[list[str]]], batch_items: list[Row]) -> list[dict[str, Any]]:
        rows = []
        for item, *turns_by_agent in zip(batch_items, *agent_completions_turns, strict=True):
            judged = scores(item, list(zip(*turns_by_agent, strict=True)))
            turns = [score.metrics() for score in judged]
            rows.append({"task_id": item["task_id"], "solved": judged[-1].solved, "turns": turns})
        return rows

    def aggregate(rows: list[dict[str, Any]], num_turns: int) -> dict[str, float]:
        return turn_means(rows, num_turns, ("pass_rate", "solved")) | mean_pass_at_k(
            (row["task_id"], row["solved"]) for row in rows
        )

    return Task(
        train_dataset=list(train),
        eval_dataset=list(held_out),
        formatters=role_prompt,
        reward_func=reward,
        reward_processor=RewardProcessors.shift(value=-MAXIMUM),
        external_transition=transition,
        eval_logger=log,
        eval_aggregator=aggregate,
        recommended=dict(RECOMMENDED),
    )


def role_prompt(item: Row, agent_idx: int, num_agents: int) -> list[dict[str, str]]:
    """The problem and an agent's part of it as one user message; a chat of an earlier turn is passed on.

    Raises:
        ConfigError: more than two agents.
    """
    if num_agents > 2:
        raise ConfigError(f"num_agents={num_agents}: a helper and a main function are for 2 agents, or for 1 alone.")
    if not isinstance(item["prompt"], str):
        return item["prompt"]
    name = item["entry_point"]
    helper = f"a helper function `{HELPER}` that takes the same arguments as `{name}`"
    if num_agents == 1:
        role = (
            f"Write {helper} and does part of the work, and the function `{name}`, which calls `{HELPER}` and does "
            f"more than return its result."
        )
    elif agent_idx == 0:
        role = (
            f"You work with a partner. Write {helper}, does part of the work and returns it. Your partner writes "
            f"`{name}`, which may call `{HELPER}`. Write `{HELPER}` only."
        )
    else:
        role = (
            f"You work with a partner, who writes {helper}. You do not see it. Write the function `{name}`: call "
            f"`{HELPER}` where it helps, do more than return its result, and do not define it yourself."
        )
    return [{"role": "user", "content": f"{item['prompt'].rstrip()}\n\n{role} {_FORM}"}]


_FORM = "Answer with Python code only: the imports you need, then the function, with everything else inside it."


def _request(item: Row, agent: int, num_agents: int) -> str:
    if num_agents == 1:
        return f"Write `{HELPER}` and `{item['entry_point']}` again, better. {_FORM}"
    return f"Write `{HELPER if agent == 0 else item['entry_point']}` again, better. {_FORM}"


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
