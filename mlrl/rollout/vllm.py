"""Sampling on vLLM servers, behind the interface of the in-process `Sampler`.

A server holds the base once and every agent as an adapter, so that a turn of all agents is one continuous batch. Before
it draws for an agent, the sampler looks whether the agent's weights are those that the servers have. If not it writes
them as a PEFT adapter, and every server loads them under a name of their own: `agent_0@17.5be1a0c2` is the 17th version
in this process. A name stands for one version only, so that

- a request for weights that a server does not have is refused by it, and an answer of others is refused here;
- a server's prefix cache, which goes by names, never offers keys and values of earlier weights.

With full tuning a server holds one agent. Whole weights go the same way, by a folder that the server reads in place of
its own, and their version is asked for after every draw.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mlrl.daemon_threads import DaemonThreads
from mlrl.errors import RolloutError
from mlrl.parallel.group import spread
from mlrl.profiling import span
from mlrl.rollout.sampler import Request, SamplingParams
from mlrl.rollout.streams import StreamKey, derive_seed
from mlrl.rollout.tree import Response
from mlrl.rollout.vllm_client import Completion, Drawing, UnknownModelError, VLLMClient

if TYPE_CHECKING:
    from mlrl.agents import Agent, Team
    from mlrl.rollout.vllm_server import SpawnedServer


@dataclass
class Version:
    """The weights of one policy that the servers have.

    Attributes:
        name: on the servers, of the adapter or of the base's weights. model: what to ask for: the adapter, or the base.
        folder: the weights on disk. digest: of them.
    """

    name: str = ""
    model: str = ""
    folder: Path | None = None
    digest: bytes = b""


@dataclass(frozen=True)
class Servers:
    """Clients of the servers of each agent, [agent][server], and those servers that this process has started."""

    by_agent: Sequence[Sequence[VLLMClient]]
    spawned: Sequence[SpawnedServer] = ()


class VLLMSampler:
    """Samples for a team on servers.

    Args:
        team: the agents whose adapters are sampled.
        connect: gives the servers when they are first needed; all ranks call it together, with a folder for logs.
        max_rows: of samplers in this process that stand beside this one.
    """

    draws_on_first_rank = True
    """A server fills its batch from one rank of each agent as well as from all of them."""

    def __init__(
        self,
        team: Team,
        connect: Callable[[Path], Servers],
        max_rows: int = 256,
    ):
        self.team, self.max_rows = team, max_rows
        self._connect = connect
        self._servers: Servers | None = None
        self._folder: Path | None = None
        self._temporary: tempfile.TemporaryDirectory | None = None
        self._versions: dict[int, Version] = {}  # by the first agent with these weights
        self._sent: Counter[int] = Counter()  # versions by agent, failed ones too: no name ever comes twice
        self._token = secrets.token_hex(4)  # one server may serve several runs

    def open(self, folder: Path) -> None:
        """Connects, with a folder for adapters, which servers read, and for the logs of servers that are started."""
        self.close()
        self._folder = folder.absolute()
        self._servers = self._connect(self._folder)

    @property
    def folder(self) -> Path:
        """That folder; one that passes with this object where none was named."""
        if self._folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="mlrl-sampling-")
            self._folder = Path(self._temporary.name)
        return self._folder

    @property
    def servers(self) -> Sequence[Sequence[VLLMClient]]:
        """Clients of the servers of each agent; the first use connects, on all ranks together."""
        if self._servers is None:
            self._servers = self._connect(self.folder)
        return self._servers.by_agent

    @property
    def spawned(self) -> Sequence[SpawnedServer]:
        """The servers that this process has started."""
        return [] if self._servers is None else self._servers.spawned

    def sample(
        self, requests: Sequence[Request], params: SamplingParams, on_tokens: Callable[[int], None] | None = None
    ) -> list[list[Response]]:
        """Responses of every request, in order. `on_tokens(n)` hears of every n tokens drawn.

        All agents asked live in this process. Other ranks call it without requests, and give nothing to it.

        Raises:
            RolloutError: a server is gone or answers what cannot be used.
        """
        servers = self.servers  # on ranks without requests too, since connecting is a call of all
        if not requests:
            return []
        with span("weights to servers"):
            versions = {agent: self._current(self.team.agents[agent]) for agent in sorted({r.agent for r in requests})}
        return self._sample(requests, params, versions, servers, threading.Event(), on_tokens)

    def steady_weights(self) -> AbstractContextManager[None]:
        """Inside no weight changes. A server finds out by itself which prompts begin alike."""
        return nullcontext()

    def frozen(self) -> FrozenSampler:
        """Has the servers take the present weights, and gives what samples these from now on, in any thread.

        All ranks call it together. Nothing may be drawn meanwhile: servers forget the weights before.
        """
        servers = self.servers
        here = [agent for agent in self.team.agents if self.team.mesh.agents[agent.index].is_first]
        with span("weights to servers"):
            return FrozenSampler(self, {agent.index: self._current(agent) for agent in here}, servers)

    def _sample(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        versions: dict[int, Version],
        servers: Sequence[Sequence[VLLMClient]],
        stop: threading.Event,
        on_tokens: Callable[[int], None] | None,
    ) -> list[list[Response]]:
        """The responses of these versions; reads no weights."""
        work = self._work(requests, params, versions, servers)
        with span("servers"):
            drawn = self._draw(work, versions, stop, on_tokens)
        for agent in sorted({request.agent for request in requests}):
            if self.team.agents[agent].adapter is None:
                for client in servers[agent]:  # all that was drawn came from these weights
                    client.check_version(versions[agent].name)
        results: list[list[Response]] = [[] for _ in requests]
        for (place, _, drawing), completion in zip(work, drawn, strict=True):
            agent, ids = self.team.agents[requests[place].agent], completion.token_ids
            truncated = ids[-1] not in drawing.stop_ids
            results[place].append(Response(ids, completion.logprobs, agent.decode(ids), truncated))
        return results

    def close(self) -> None:
        """Takes the adapters of this run off the servers and off the disk, and ends the servers that it has started."""
        if self._servers is None:
            return
        for agent, version in self._versions.items():
            has_adapter = self.team.agents[agent].adapter is not None and not self._servers.spawned
            for client in self._servers.by_agent[agent] if has_adapter else ():
                client.unload_adapter(version.name)
            shutil.rmtree(version.folder, ignore_errors=True)
        for client in {id(client): client for own in self._servers.by_agent for client in own}.values():
            client.close()
        for server in self._servers.spawned:
            server.close()
        self._versions, self._servers = {}, None

    # Weights ----------------------------------------------------------------------------------------------------------

    def _current(self, agent: Agent) -> Version:
        """The agent's present weights, on all of its servers."""
        first = next(a for a in self.team.agents if a.is_here and a.policy is agent.policy)
        version = self._versions.get(first.index, Version())
        digest = weights_digest(agent.policy.parameters(), exact=agent.adapter is not None)
        if digest != version.digest:
            version = self._send(agent, first.index, version, digest)
            self._versions[first.index] = version
        return version

    def _send(self, agent: Agent, index: int, old: Version, digest: bytes) -> Version:
        """Writes the weights and has every server load them, and then forget those before."""
        self._sent[index] += 1
        name = f"agent_{index}@{self._sent[index]}.{self._token}"
        folder = self.folder / name
        agent.save_weights(folder)
        servers = self.servers[agent.index]
        for client in servers:
            if agent.adapter is None:
                client.load_weights(name, str(folder))
            else:
                client.load_adapter(name, str(folder))
        if old.folder is not None:
            for client in servers if agent.adapter is not None else ():
                client.unload_adapter(old.name)
            shutil.rmtree(old.folder, ignore_errors=True)
        model = name if agent.adapter is not None else servers[0].base_name()
        return Version(name, model, folder, digest)

    # Drawing ----------------------------------------------------------------------------------------------------------

    def _work(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        versions: dict[int, Version],
        clients: Sequence[Sequence[VLLMClient]],
    ) -> list[tuple[int, VLLMClient, Drawing]]:
        """(request, server, what to draw) of every sequence; siblings go to one server, which runs a prompt once."""
        servers: dict[int, VLLMClient] = {}
        for group in {id(own): own for own in clients}.values():
            mine = [i for i, request in enumerate(requests) if clients[request.agent] is group]
            costs = [len(requests[i].keys) * params.max_new_tokens + len(requests[i].prompt) for i in mine]
            servers |= {i: group[s] for i, s in zip(mine, spread(costs, len(group)), strict=True)}
        return [
            (
                i,
                servers[i],
                Drawing(
                    model=versions[request.agent].model,
                    prompt=request.prompt,
                    seed=sequence_seed(key),
                    stop_ids=self.team.agents[request.agent].stop_ids,
                    max_new_tokens=params.max_new_tokens,
                    temperature=params.temperature,
                    top_p=params.top_p,
                    top_k=params.top_k,
                ),
            )
            for i, request in enumerate(requests)
            for key in request.keys
        ]

    def _draw(
        self,
        work: list[tuple[int, VLLMClient, Drawing]],
        versions: dict[int, Version],
        stop: threading.Event,
        on_tokens: Callable[[int], None] | None,
    ) -> list[Completion]:
        """All sequences, as many at once as the servers take; the first failure ends them all, and so does `stop`."""
        reload = threading.Lock()
        folders = {version.name: version.folder for version in versions.values()}

        def draw(client: VLLMClient, drawing: Drawing) -> Completion:
            if stop.is_set():
                raise RolloutError(f"vllm_url={client.url!r}: given up, since the run ends")
            try:
                return client.complete(drawing, stop)
            except UnknownModelError:  # a server that was started anew has the base alone
                if drawing.model not in folders:
                    raise
                with reload:
                    if not client.has_adapter(drawing.model, str(folders[drawing.model])):
                        client.load_adapter(drawing.model, str(folders[drawing.model]))
            return client.complete(drawing, stop)

        clients = {id(client): client for _, client, _ in work}.values()
        count = min(len(work), sum(client.max_concurrency for client in clients))
        with DaemonThreads(count, "mlrl-drawing") as threads:
            futures = [threads.submit(draw, client, drawing) for _, client, drawing in work]
            try:
                for future in as_completed(futures):
                    completion = future.result()
                    if on_tokens is not None:
                        on_tokens(len(completion.token_ids))
            except BaseException:  # also where the user interrupts: nothing waits on a back-off or an answer
                stop.set()
                raise
        return [future.result() for future in futures]


class FrozenSampler:
    """Samples the weights of one moment, whatever the trainer makes of its own; see `VLLMSampler.frozen`.

    Attributes:
        stop: ends what is being drawn, with a RolloutError.
    """

    draws_on_first_rank = True

    def __init__(self, sampler: VLLMSampler, versions: dict[int, Version], servers: Sequence[Sequence[VLLMClient]]):
        self._sampler, self._versions, self._servers = sampler, versions, servers
        self.stop = threading.Event()

    def steady_weights(self) -> AbstractContextManager[None]:
        """As `VLLMSampler.steady_weights`."""
        return nullcontext()

    def sample(
        self, requests: Sequence[Request], params: SamplingParams, on_tokens: Callable[[int], None] | None = None
    ) -> list[list[Response]]:
        """As `VLLMSampler.sample`."""
        if not requests:
            return []
        return self._sampler._sample(requests, params, self._versions, self._servers, self.stop, on_tokens)


def sequence_seed(key: StreamKey) -> int:
    """The seed of one sequence, of 63 bits: what it draws on one server depends on no other sequence's."""
    return derive_seed(*key)


def weights_digest(parameters: Sequence[torch.Tensor], exact: bool = True) -> bytes:
    """Tells any change of weights; without `exact` from the sums of their bits, which changes of many all but never
    leave the same, and which are formed where the weights are."""
    digest = hashlib.blake2b(digest_size=16)
    for parameter in parameters:
        bits = parameter.detach().contiguous().view(torch.int16 if parameter.element_size() == 2 else torch.int32)
        bits = bits if exact else bits.sum(dtype=torch.int64)
        digest.update(bits.cpu().numpy())
    return digest.digest()
