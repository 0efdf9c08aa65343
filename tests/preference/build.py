"""Small trajectories and pairs with given rewards, for tests."""

from mlrl.preference.pairs import PreferencePair, Sampling, Trajectory, Turn, item_key
from mlrl.rollout.tree import Response, TokenizedPrompt

SAMPLING = Sampling(temperature=0.7, top_p=1.0, top_k=0, max_new_tokens=8, policy="agents of round 1")


def trajectory(reward, candidate=0, writer="current", num_agents=2, num_turns=1, text="answer", tokens=(5, 6, 2)):
    """A trajectory whose agents all write `text`, at every turn."""
    prompt = TokenizedPrompt([{"role": "user", "content": "say"}], [1, 3, 4])
    response = Response(list(tokens), [-0.5] * len(tokens), text, truncated=False)
    turn = Turn((prompt,) * num_agents, (response,) * num_agents)
    return Trajectory((turn,) * num_turns, reward, 10 * reward, writer, candidate, SAMPLING)


def pair(winner=1.0, loser=0.0, item=0, round=1, **kwargs):
    """A pair of two such trajectories."""
    return PreferencePair(
        round, item, item_key({"item": item}), trajectory(winner, 0, **kwargs), trajectory(loser, 1, **kwargs)
    )
