"""What the tasks humaneval, mbpp and coophumaneval share: roles, feedback for later turns, metrics.

Two agents write one program for a problem: agent 0 a helper function `aux`, agent 1 the function that was asked for,
which may call the helper. Neither sees what the other wrote. One agent alone writes both functions.
"""

from collections.abc import Callable, Sequence

from mlrl import ConfigError, Task
from mlrl.tasks.code_task import code_task
from mlrl.tasks.coding_data import function_row
from mlrl.tasks.coding_feedback import FEEDBACK, HELPER, expert_texts, verdict_text
from mlrl.tasks.coding_reward import MAXIMUM, Score, judge
from mlrl.tasks.coding_samples import PROBLEMS
from mlrl.tasks.feedback import checked_mode
from mlrl.tasks.sandbox import Limits, Sandbox
from mlrl.tasks.task_data import Row, load_rows, split_rows

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


def coding_task_function(
    eval_rows: int, train_rows: int | None = None, packaged: Callable[[], str | None] = lambda: None
) -> Callable[..., Task]:
    """The `task` function of a data set.

    Args:
        eval_rows: rows at the start of the data that are held out by default; train_rows: rows after these that are
            trained on by default, None for all.
        packaged: the file of an installed package, which is the default data; None where there is none.
    """

    def task(
        data_path: str | None = None,
        dataset: str | None = None,
        split: str = "test",
        train_size: int | None = train_rows,
        eval_size: int | None = None,
        feedback: str = "level_feedback",
        sandbox_slice: int | None = 1,
        include_original_prompt: bool = True,
        include_previous_response: bool = True,
        reward_workers: int | None = None,
        test_seconds: float = 10.0,
        total_seconds: float = 60.0,
        expert_url: str | None = None,
        expert_model: str | None = None,
        expert_key_env: str | None = None,
        expert_format: str = "openai",
        expert_max_requests: int | None = None,
        expert_cache: str | None = None,
    ) -> Task:
        """The task: the first `eval_size` rows to evaluate on, the next `train_size` to train on; 2 and 8 of our own.

        Args:
            feedback: what later turns are told, a word of `FEEDBACK`.
            sandbox_slice: tests that level_feedback tells of: the first so many, the last so many where negative, all
                where 0 or None.
            include_original_prompt, include_previous_response: what a later prompt repeats; with both the chat goes on.
            reward_workers: programs that run at once; None: one a core.
            test_seconds, total_seconds: limits of one test and of all of a program, in processor seconds.
            expert_url, expert_model, expert_key_env, expert_format, expert_max_requests, expert_cache: the model that
                expert_edits asks, see `mlrl.remote.RemoteSettings`; the key is in the environment variable key_env.

        Raises:
            ConfigError: an unknown word, a limit that is none, or rows that cannot be had.
        """
        mode = checked_mode(feedback, FEEDBACK)
        expert = None
        if mode == "expert_edits":
            from mlrl.tasks.expert import Expert  # its HTTP client takes a while to load

            expert = Expert(
                url=expert_url,
                model=expert_model,
                key_env=expert_key_env,
                format=expert_format,
                max_requests=expert_max_requests,
                cache=expert_cache,
            )
        elif expert_url is not None:
            raise ConfigError(f"task_args.expert_url={expert_url!r}: feedback={mode} asks nobody. Leave it out.")
        sandbox = Sandbox(Limits(test_s=test_seconds, total_s=total_seconds), reward_workers)
        if data_path is None and dataset is None:
            data_path = packaged()
        own = data_path is None and dataset is None
        rows = load_rows(data_path, dataset, split, lambda: PROBLEMS)
        rows = [function_row(row, number) for number, row in enumerate(rows)]
        train, held_out = split_rows(rows, train_size, eval_size or (2 if own else eval_rows))

        def scores(item: Row, joints: Sequence[Sequence[str]]) -> list[Score]:
            return judge(sandbox, item, [(texts[0], texts[-1]) for texts in joints], HELPER)

        def told(score: Score, item: Row, answers: Sequence[str]) -> list[str]:
            if expert is not None:
                verdicts = expert_texts(expert, score, item, answers, sandbox_slice)
            else:
                verdicts = [verdict_text(score, item, mode, sandbox_slice)] * len(answers)
            return [f"{text}\n\n{_request(item, agent, len(answers))}" for agent, text in enumerate(verdicts)]

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
        )

    return task


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
