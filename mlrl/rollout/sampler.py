"""In-process batched sampling: one call for all items, nodes and agents of a turn.

Each distinct prompt is run once, for all its responses, packed with the others without padding; its keys and values are
then laid out for every response in a store allocated once. All agents that share a base decode in the same batch, each
token through its own adapter. Rows leave as they finish. One uniform number a token decides it (inverse CDF), drawn
from the sequence's own stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from mlrl.errors import NonFiniteError
from mlrl.models.decode_attention import DecodeAttention
from mlrl.models.machine_memory import give_back_memory
from mlrl.models.prefix_tree import PrefixTree
from mlrl.rollout.carried import Carried
from mlrl.rollout.streams import StreamKey, uniforms
from mlrl.rollout.tree import Response

if TYPE_CHECKING:
    from mlrl.agents import Team
    from mlrl.models.base import Base

_BLOCK = 256  # tokens a block of the two-level inverse CDF


@dataclass(frozen=True)
class Request:
    """K responses of one agent to one prompt; `keys` name the random stream of each."""

    agent: int
    prompt: list[int]
    keys: Sequence[StreamKey]


@dataclass(frozen=True)
class SamplingParams:
    """How to draw: temperature 0 is greedy; top_k 0 and top_p 1.0 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 128


class Sampler:
    """Samples for a team in this process.

    Args:
        team: the agents whose models are sampled.
        max_rows: rows decoded at once; bounds the memory of the key-value store.
        min_new_tokens: the end token cannot be drawn before this many tokens; for benchmarks of equal work.
    """

    draws_on_first_rank = False
    """Whether one rank of each agent draws for all; else its sequences are spread over them."""

    def __init__(self, team: Team, max_rows: int = 256, min_new_tokens: int = 0):
        self.team, self.max_rows, self.min_new_tokens = team, max_rows, min_new_tokens
        self._carried: dict[int, Carried] | None = None

    def open(self, folder: Path) -> None:
        """Hears of the run's folder for files of samplers; needs none."""

    def close(self) -> None:
        """The run is over; there is nothing to end."""

    @contextmanager
    def steady_weights(self) -> Iterator[None]:
        """Inside no weight changes, and each call takes up what the one before it has laid out and read.

        Until its end packed weights stay, and of prompts as much as of one batch twice over.
        """
        if self._carried is not None:
            raise RuntimeError("steady_weights was entered already")
        self._carried = {}
        try:
            yield
        finally:
            self._carried = None
            give_back_memory()

    @torch.no_grad()
    def sample(
        self, requests: Sequence[Request], params: SamplingParams, on_tokens: Callable[[int], None] | None = None
    ) -> list[list[Response]]:
        """Responses of every request, in order. `on_tokens(n)` hears of every n tokens drawn.

        All agents asked live in this process. The ranks of a sharded network call together, with requests or without.
        """
        results: list[list[Response | None]] = [[None] * len(r.keys) for r in requests]
        for base in self.team.bases:
            mine = [i for i, r in enumerate(requests) if self.team.agents[r.agent].base is base]
            with base.whole():
                self._draw_from(base, mine, requests, params, on_tokens, results)
        if self._carried is None:
            give_back_memory()  # packed weights above all, before an update asks for pieces of other sizes
        return results  # type: ignore[return-value]

    def _draw_from(self, base: Base, mine: list[int], requests, params: SamplingParams, on_tokens, results) -> None:
        """Fills in the responses to the requests `mine`, whose agents are on this base."""
        if not mine:
            return
        carried = Carried(base)
        if self._carried is not None:
            carried = self._carried.setdefault(id(base), Carried(base, lasting=True))
        with carried:
            for chunk in self._chunks(mine, requests):
                work = [(requests[i], ks) for i, ks in chunk]
                decoded = _Decode(self, base, work, params, carried).run(on_tokens)
                places = [(i, k) for i, ks in chunk for k in ks]
                for (i, k), (ids, logprobs, stopped) in zip(places, decoded, strict=True):
                    agent = self.team.agents[requests[i].agent]
                    results[i][k] = Response(ids, logprobs, agent.decode(ids), truncated=not stopped)

    def _chunks(self, mine: list[int], requests: Sequence[Request]) -> list[list[tuple[int, list[int]]]]:
        """Requests in batches of at most `max_rows` responses, one that is too large split over several."""
        chunks: list[list[tuple[int, list[int]]]] = []
        room = 0
        for i in mine:
            ks = list(range(len(requests[i].keys)))
            while ks:
                if room == 0:
                    chunks.append([])
                    room = self.max_rows
                chunks[-1].append((i, ks[:room]))
                ks, room = ks[room:], room - len(ks[:room])
        return chunks


class _Decode:
    """One batch of rows from prompt to last token."""

    def __init__(
        self,
        sampler: Sampler,
        base: Base,
        work: list[tuple[Request, list[int]]],
        params: SamplingParams,
        carried: Carried,
    ):
        self.base, self.params, self.carried = base, params, carried
        self.device = base.language_model.device
        self.min_new_tokens = sampler.min_new_tokens
        agents = [sampler.team.agents[request.agent] for request, ks in work for _ in ks]
        self.prompts = [request.prompt for request, _ in work]
        self.prompt_of_row = [i for i, (_, ks) in enumerate(work) for _ in ks]
        self.adapters = sorted({a.adapter for a in agents if a.adapter is not None})
        self.adapter_of_row = torch.tensor([self._number(a.adapter) for a in agents], device=self.device)
        self.stop_ids = sorted({t for a in agents for t in a.stop_ids})
        width = max(len(a.stop_ids) for a in agents)
        stops = [sorted(a.stop_ids) + [-1] * (width - len(a.stop_ids)) for a in agents]
        self.stops = torch.tensor(stops, dtype=torch.long).view(len(agents), width)  # -1: no token
        budget = params.max_new_tokens
        draws = [uniforms(request.keys[k], budget) for request, ks in work for k in ks]
        self.uniform_RL = torch.from_numpy(np.stack(draws)).to(self.device)

    def _number(self, adapter: str | None) -> int:
        return -1 if adapter is None else self.adapters.index(adapter)

    def run(self, on_tokens: Callable[[int], None] | None) -> list[tuple[list[int], list[float], bool]]:
        """(token ids, log-probs, whether an end token was drawn) of every row."""
        rows, budget = len(self.prompt_of_row), self.params.max_new_tokens
        order = torch.arange(rows)  # the sequence that each place of the batch holds
        tokens = torch.zeros(rows, budget, dtype=torch.long)
        logprobs = torch.zeros(rows, budget)
        lengths = torch.zeros(rows, dtype=torch.long)
        stopped = torch.zeros(rows, dtype=torch.bool)
        earlier = self.carried.route(self.adapters)
        with self.base.mixed_adapters(self.adapters, self.adapter_of_row, earlier) as route:
            cache, logits, positions = self._prefill(route)
            forward = self.carried.step(self.adapters, route, rows, budget)
            if route is not None:
                route.set_owner(self.adapter_of_row)
            for step in range(budget):
                chosen, chosen_logprobs = self._draw(logits, order, step)
                host = chosen.cpu()
                tokens[order, step], logprobs[order, step] = host, chosen_logprobs.cpu()
                lengths[order] = step + 1
                if on_tokens is not None:
                    on_tokens(len(order))
                ended = (host[:, None] == self.stops[order]).any(-1)
                stopped[order[ended]] = True
                if step + 1 == budget or bool(ended.all()):
                    break
                if bool(ended.any()):
                    kept = cache.keep(~ended)
                    order, chosen, positions = (x[kept.to(x.device)] for x in (order, chosen, positions))
                    if route is not None:
                        route.set_owner(self.adapter_of_row[order.to(self.device)])
                logits = forward(chosen, positions, cache)
                cache.advance()
                positions += 1
        return [
            (tokens[r, : lengths[r]].tolist(), logprobs[r, : lengths[r]].tolist(), bool(stopped[r]))
            for r in range(rows)
        ]

    def _prefill(self, route) -> tuple[DecodeAttention, torch.Tensor, torch.Tensor]:
        """Runs every distinct prompt once, and what several begin with once for all of them.

        Returns the filled store, the logits (R, V) of each row's first token, and the position (R,) that it will have.
        """
        tree = PrefixTree()
        # the same words under two adapters are two prompts
        adapters = [self.adapters[own] if own >= 0 else None for own in self.adapter_of_row.tolist()]
        segment_of_row = [tree.add(self.prompts[p], weights=adapters[row]) for row, p in enumerate(self.prompt_of_row)]
        packed = tree.pack(self.device, self.carried.prompts)
        packed.attention.captured = []
        run_paths = [[place - packed.num_known for place in path if place >= packed.num_known] for path in packed.paths]
        if route is not None:
            owner = torch.empty(packed.input_ids.shape[1], dtype=torch.long)
            for segment, path in zip(tree.segments, run_paths, strict=True):
                owner[path] = self._number(segment.weights)
            route.set_owner(owner.to(self.device))
        hidden = self.base.language_model.hidden_states(packed.input_ids, packed.position_ids, packed.attention)[0]
        lengths = torch.tensor([len(path) for path in packed.paths], device=self.device)
        longest = int(lengths.max())
        row = torch.tensor(segment_of_row)
        cache = DecodeAttention(row, lengths, self.params.max_new_tokens)
        index = torch.tensor([path + path[-1:] * (longest - len(path)) for path in packed.paths], device=self.device)
        captured = list(packed.attention.captured) if self.carried.lasting else []
        cache.prefill(index, packed.attention.captured)
        if self.carried.lasting:
            prompts = [(s.weights, s.token_ids, path) for s, path in zip(tree.segments, packed.paths, strict=True)]
            self.carried.read(captured, prompts, cache)
        last = torch.tensor([path[-1] for path in run_paths], device=self.device)
        logits = self.base.language_model.logits(hidden[last])
        row = row.to(self.device)
        return cache, logits[row], lengths[row]

    def _draw(self, logits: torch.Tensor, order: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens (R,) and their log-probabilities, from logits (R, V) and this step's uniform number of each row."""
        if step < self.min_new_tokens:
            logits[:, self.stop_ids] = float("-inf")
        if self.params.temperature == 0:
            chosen = logits.argmax(-1)
            logprob = logits.log_softmax(-1).gather(-1, chosen[:, None])[:, 0]
            if not logprob.isfinite().all():
                raise _diverged()
            return chosen, logprob
        if self.params.temperature != 1:
            logits = logits / self.params.temperature
        if self.params.top_k > 0 or self.params.top_p < 1:
            logits = truncate(logits, self.params.top_k, self.params.top_p)
        uniform = self.uniform_RL[order.to(self.device), step]
        return inverse_cdf(logits, uniform)


def inverse_cdf(logits: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws from softmax(logits): logits (R, V) float32, uniform (R,) in [0, 1) → tokens (R,), log-probs (R,).

    Token v is drawn where the uniform number falls into v's share of the cumulative distribution. Summed in blocks
    first, then inside the block that is hit, so that no cumulative sum over the vocabulary is formed.
    """
    rows, vocab = logits.shape
    blocks = -(-vocab // _BLOCK)
    peak = logits.amax(-1, keepdim=True)  # far faster than `max`, which finds the place too
    mass = (logits - peak).exp_()
    if vocab < blocks * _BLOCK:
        mass = F.pad(mass, (0, blocks * _BLOCK - vocab))
    mass = mass.view(rows, blocks, _BLOCK)
    cumulative = mass.sum(-1).double().cumsum(-1)
    total = cumulative[:, -1]
    if not total.isfinite().all():
        raise _diverged()
    # rounding must not carry the goal past the last token that has mass
    goal = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))[:, None]
    block = torch.searchsorted(cumulative, goal, right=True)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = mass.gather(1, block[..., None].expand(-1, 1, _BLOCK))[:, 0].double()
    place = torch.searchsorted(inside.cumsum(-1), goal - before, right=True)
    last = _BLOCK - 1 - (inside > 0).flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
    token = (block * _BLOCK + torch.minimum(place, last))[:, 0]
    logprob = logits.gather(1, token[:, None])[:, 0] - peak[:, 0] - total.log().float()
    return token, logprob


def _diverged() -> NonFiniteError:
    return NonFiniteError(
        "sampling: a model's next-token logits are not finite, so its weights have diverged. Lower the learning rate, "
        "set max_grad_norm, or use dtype float32"
    )


def truncate(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Keeps the `top_k` likeliest tokens, then the fewest whose probability reaches `top_p`; others get -inf."""
    ordered, index = logits.sort(-1, descending=True)
    if top_k > 0:
        ordered[:, top_k:] = float("-inf")
    if top_p < 1:
        probability = ordered.softmax(-1)
        before = probability.cumsum(-1) - probability
        ordered = ordered.masked_fill(before >= top_p, float("-inf"))
    return torch.empty_like(logits).scatter_(-1, index, ordered)
