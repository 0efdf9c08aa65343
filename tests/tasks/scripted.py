"""A sampler that plays given texts: takes a task through a real trainer to places that no tiny model reaches."""

from mlrl.rollout.sampler import Sampler
from mlrl.rollout.tree import Response


def play(monkeypatch, script) -> None:
    """Makes every sampler answer with `script(agent, turn, k)`, a text, in place of sampling."""

    def sample(self, requests, params, on_tokens=None):
        answers = []
        for request in requests:
            agent = self.team.agents[request.agent]
            own = []
            for k, key in enumerate(request.keys):
                text = script(request.agent, len(key[3]), k)
                ids = [*agent.tokenizer.encode(text, add_special_tokens=False), agent.tokenizer.eos_token_id]
                own.append(Response(ids, [-1.0] * len(ids), text, truncated=False))
            answers.append(own)
        return answers

    monkeypatch.setattr(Sampler, "sample", sample)
