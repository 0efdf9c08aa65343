"""Texts that a model could write when nothing goes well, for property tests; and a task asked as a trainer asks it."""

from itertools import product

from hypothesis import settings
from hypothesis import strategies as st

from mlrl.task import Environment

THOUSAND = settings(max_examples=63, deadline=None)
"""With `pairs` of four texts, 16 pairs each: a thousand and more"""

HOSTILE = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="\x00\ud800\u202e\U0001f600é\n\t{}[]()\"'`\\<>", max_size=60),
    st.sampled_from(["", "```", "```\n```", "<|im_end|>", "{'a': [", "\\", "%s %d {}", "\udfff"]),
    st.sampled_from(["x" * 9000, "{" * 3000, "(" * 3000, "-" * 9000, "a, " * 2000, "1" * 6000]),
)


def pairs(texts):
    """All ordered pairs of four texts that a strategy draws."""
    return st.lists(texts, min_size=4, max_size=4).map(lambda drawn: list(product(drawn, repeat=2)))


def pieces(*parts: str, most: int = 40):
    """Half-finished texts out of parts of right ones."""
    return st.lists(st.sampled_from(parts), max_size=most).map("".join)


def rewards(task, item, *completions, episode_seed=0, raw=True):
    """The rewards of one node, one list of completions an agent."""
    place = {"prompts": [], "turn": 0, "prompt_history": [], "response_history": [], "episode_seed": episode_seed}
    result = Environment(task, len(completions)).rewards(item=item, completions=completions, **place)
    return (result.raw if raw else result.processed).tolist()


def logged(task, item, *answers):
    """The eval logger's row of an item with one turn."""
    turns = [[[answer]] for answer in answers]
    return Environment(task, len(answers)).eval_rows(agent_completions_turns=turns, items=[item])[0]


def next_prompts(task, item, num_agents, *, answers, seed=0):
    """The prompts of turn 0 and those that follow one joint response."""
    environment = Environment(task, num_agents, 2)
    first = environment.initial_prompts(item)
    following = environment.next_prompts(
        item=item,
        turn=0,
        completions=answers,
        reward=0.0,
        prompt_history=[[prompt] for prompt in first],
        response_history=[[answer] for answer in answers],
        episode_seed=seed,
    )
    return first, following
