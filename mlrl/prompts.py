"""What an agent is shown: formatters make the prompts, the external transition makes the next ones.

A prompt is a str, tokenized as it is, or a list of chat messages ``{"role": str, "content": str}``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from mlrl.call_limits import CallFailed
from mlrl.calling import add_context, bind_call, copied, function_name, shown
from mlrl.errors import ConfigError, TaskError
from mlrl.wording import counted

Message: TypeAlias = dict[str, Any]
Prompt: TypeAlias = str | list[Message]

_PROMPT_FORM = 'a str or a list of {"role": str, "content": str} messages'
_TRANSITION_NAMES = (
    "prompt",
    "agent_completions",
    "num_agents",
    "prompt_history_per_agent",
    "response_history_per_agent",
)


def located(item: Mapping[str, Any], item_index: int | None, turn: int) -> str:
    """Names a place in a run for messages: the item by its index, where known, and its fields; the 0-based turn."""
    index = "" if item_index is None else f"{item_index} "
    return f"item {index}{shown(dict(item))}, turn {turn}"


def checked_prompt(value: Any, *, field: str, where: str) -> Prompt:
    """A copy of `value` as a prompt.

    Raises:
        TaskError: not a str and not a non-empty list of messages with a role and a content.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and value and all(_is_message(entry) for entry in value):
        return [copied(message) for message in value]
    problem = f"a value of type {type(value).__name__} is no prompt"
    if isinstance(value, list | tuple):
        bad = next((i for i, entry in enumerate(value) if not _is_message(entry)), None)
        problem = "an empty list is no prompt" if bad is None else f"entry {bad} is no message: {shown(value[bad])}"
    raise TaskError(f"{field}={shown(value)}: {problem} ({where}). Right is {_PROMPT_FORM}.")


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


class Formatters:
    """The formatters of N agents: item → prompt.

    Each is called with a copy of the item, and with `external_prompts` (what the transition returned for this agent,
    None at turn 0) where it names it or takes ``**kwargs``; `agent_idx` and `num_agents` are passed where named, which
    lets one shared formatter serve any team.

    Args:
        formatters: None for the item's own `prompt` field, one shared callable, or a list of one an agent.

    Raises:
        ConfigError: wrong number of formatters, or one that cannot be called with an item.
    """

    def __init__(self, formatters: Callable | Sequence[Callable] | None, num_agents: int):
        self.num_agents = num_agents
        if isinstance(formatters, list | tuple):
            if len(formatters) != num_agents:
                raise ConfigError(
                    f"formatters=[{', '.join(map(function_name, formatters))}]: "
                    f"{counted(len(formatters), 'formatter')} for num_agents={num_agents}. "
                    f"Give one shared formatter or a list of {num_agents}."
                )
            each = {f"formatters[{agent}]": formatter for agent, formatter in enumerate(formatters)}
        else:
            each = {} if formatters is None else dict.fromkeys(["formatters"] * num_agents, formatters)
        bound = [
            bind_call(
                formatter,
                field=field,
                num_values=1,
                values_are="the item",
                named=("external_prompts",),
                named_only=("agent_idx", "num_agents"),
            )
            for field, formatter in each.items()
        ]
        self.bound = bound * num_agents if len(bound) == 1 else bound

    def __call__(
        self, agent: int, item: Mapping[str, Any], *, external_prompts: Prompt | None, turn: int, item_index: int | None
    ) -> Prompt:
        """The prompt of one agent. The item is copied before a formatter sees it.

        Raises:
            TaskError: no formatter and no `prompt` field, or something else than a prompt.
        """
        where = f"agent {agent}, {located(item, item_index, turn)}"
        if not self.bound:
            if "prompt" not in item:
                raise TaskError(missing_prompt(list(item), where))
            return checked_prompt(item["prompt"], field="item['prompt']", where=where)
        named = {"external_prompts": copied(external_prompts), "agent_idx": agent, "num_agents": self.num_agents}
        try:
            value = self.bound[agent]([copied(item)], named)
        except Exception as error:
            add_context(error, f"raised by the formatter of {where}")
            raise
        return checked_prompt(value, field=f"formatters[{agent}] returned", where=where)


def missing_prompt(fields: Sequence[str], where: str) -> str:
    """The message for rows without a `prompt` field where nothing else makes the prompts."""
    return (
        f"formatters=None: prompts come from the field 'prompt', which is absent ({where}); the fields are "
        f"{', '.join(map(repr, fields)) or 'none'}. Rename the field or give formatters."
    )


class Transition:
    """An external transition for N agents: the turn just played → N next prompts.

    The function is called by keyword, with those of the five standard names that it names (all through ``**kwargs``),
    and with `item`, `turn`, `reward`, `episode_seed` where it names them.

    Raises:
        ConfigError: it has a parameter without default under any other name.
    """

    def __init__(self, func: Callable, num_agents: int):
        self.num_agents = num_agents
        self.bound = bind_call(
            func,
            field="external_transition",
            num_values=0,
            values_are="everything is passed by name",
            named=_TRANSITION_NAMES,
            named_only=("item", "turn", "reward", "episode_seed"),
        )

    def __call__(
        self,
        *,
        item: Mapping[str, Any],
        turn: int,
        completions: Sequence[str],
        reward: float,
        prompt_history: Sequence[Sequence[Prompt]],
        response_history: Sequence[Sequence[str]],
        episode_seed: int,
        item_index: int | None,
    ) -> list[Prompt]:
        """The N prompts as returned, before any formatter.

        Raises:
            TaskError: not N prompts.
        """
        where = located(item, item_index, turn)
        named = {
            "prompt": copied(item.get("prompt")),
            "agent_completions": list(completions),
            "num_agents": self.num_agents,
            "prompt_history_per_agent": copied([list(prompts) for prompts in prompt_history]),
            "response_history_per_agent": [list(responses) for responses in response_history],
            "item": copied(item),
            "turn": turn,
            "reward": reward,
            "episode_seed": episode_seed,
        }
        try:
            returned = self.bound([], named)
        except CallFailed as failure:
            raise TaskError(f"{failure.setting}: external_transition {failure} ({where}). {failure.remedy}.") from None
        except Exception as error:
            add_context(error, f"raised by external_transition for {where}")
            raise
        if self.num_agents == 1 and (
            isinstance(returned, str) or (isinstance(returned, list | tuple) and returned and _is_message(returned[0]))
        ):
            returned = [returned]
        if not isinstance(returned, list | tuple) or len(returned) != self.num_agents:
            is_list = isinstance(returned, list | tuple)
            count = counted(len(returned), "prompt") if is_list else type(returned).__name__
            raise TaskError(
                f"external_transition returned={shown(returned)}: {count} for num_agents={self.num_agents} ({where}). "
                f"Right is a list of {counted(self.num_agents, 'prompt')}, one an agent."
            )
        return [
            checked_prompt(prompt, field=f"external_transition returned[{agent}]", where=f"agent {agent}, {where}")
            for agent, prompt in enumerate(returned)
        ]
