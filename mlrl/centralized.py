"""One model that writes all roles: their prompts as one prompt, and its one text split into the roles' answers.

The form is `<agent_1> … </agent_1> <agent_2> … </agent_2>`, in any order, each exactly once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mlrl.prompts import Prompt

_SECTION = re.compile(r"<agent_(\d+)>(.*?)</agent_\1>", re.DOTALL)


def centralized_prompt(prompts: Sequence[Prompt]) -> list[dict]:
    """One chat prompt that asks for the answers of all N agents in tagged sections.

    Args:
        prompts: what each agent would see by itself, a text or chat messages.
    """
    tasks = "\n\n".join(
        f"Task of agent {agent}:\n<task_{agent}>\n{prompt_text(prompt)}\n</task_{agent}>"
        for agent, prompt in enumerate(prompts, start=1)
    )
    form = "\n".join(
        f"<agent_{agent}>\nthe answer of agent {agent}\n</agent_{agent}>" for agent in range(1, len(prompts) + 1)
    )
    text = (
        f"You write for a team of {len(prompts)}. Every agent of the team has a task of its own and answers only that "
        f"task.\n\n{tasks}\n\nWrite the answer of every agent, and nothing else, in this form:\n\n{form}"
    )
    return [{"role": "user", "content": text}]


def split_roles(text: str, num_agents: int) -> list[str] | None:
    """The N answers in a tagged text, without surrounding blanks; None where a section is absent or comes twice."""
    found = [(int(number), answer.strip()) for number, answer in _SECTION.findall(text)]
    if sorted(number for number, _ in found) != list(range(1, num_agents + 1)):
        return None
    return [answer for _, answer in sorted(found)]


def prompt_text(prompt: Prompt) -> str:
    """A prompt as plain text: of a single message its content, of a chat every message under its role."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return prompt[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
