"""Who samples for a team: this process, or vLLM servers, which are looked at before any weights are read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mlrl.agent_loading import source_key
from mlrl.agents import Agent, Team
from mlrl.config import TrainerConfig
from mlrl.errors import ConfigError, RolloutError
from mlrl.parallel.launch import Launch
from mlrl.rollout.sampler import Sampler
from mlrl.rollout.vllm import Servers, VLLMSampler
from mlrl.rollout.vllm_client import GO_ON, VLLMClient
from mlrl.rollout.vllm_server import ServerSettings, SpawnedServer, check_interpreter, start_servers
from mlrl.sources import Source
from mlrl.wording import counted

_PROBE = "The sea is 12 km wide, isn't it?"


def uses_vllm(args: Any) -> bool:
    """Whether a run samples on vLLM servers."""
    return isinstance(args, TrainerConfig) and args.rollout_backend == "vllm"


def check_servers(args: TrainerConfig, launch: Launch, sources: Sequence[Source], tokenizers: Sequence[Any]) -> None:
    """What can be known of servers before weights are read; the first rank looks.

    Raises:
        ConfigError: a server that does not answer, serves another model, or cannot do what is asked of it.
    """
    bases = base_numbers(args, sources)
    count = max(bases) + 1
    if args.tuning == "full" and launch.zero_stage == 3:
        raise ConfigError(
            "rollout_backend='vllm': tuning='full' under ZeRO-3 would gather all weights for the server in every step. "
            "Use lora, a lower ZeRO stage, or in_process"
        )
    if args.vllm_spawn:
        devices = args.vllm_devices or ["cpu"] * count
        if launch.device.type == "cuda" and args.vllm_devices is None:
            raise ConfigError("vllm_devices=None: this run trains on GPUs. Say which GPUs the servers have")
        if len(devices) % count:
            raise ConfigError(
                f"vllm_devices={args.vllm_devices!r}: {counted(len(devices), 'server')} for {count} bases (a server "
                f"holds one). Give {count} or a multiple"
            )
        if args.placement == "split" and launch.several_machines:
            raise ConfigError(
                "vllm_spawn=True: placement='split' over several machines, and the servers would be on one. Start "
                "servers and give vllm_url"
            )
        for source in sources:
            if source.place is None:
                raise ConfigError(
                    f"vllm_spawn=True: {source.name} lies in no folder that a server could read. Save it and name that"
                )
            if "cpu" in devices:
                _check_tied(f"vllm_devices={args.vllm_devices!r}", args, source)
        if launch.is_main:
            check_interpreter(args.vllm_python or sys.executable)
        return
    if count > 1 and len(args.vllm_url) != count:
        raise ConfigError(
            f"vllm_url={args.vllm_url!r}: {counted(len(args.vllm_url), 'server')} for {count} bases. Give one a base, "
            "in the order in which the agents name them"
        )
    if not launch.is_main:
        return
    for number, url in enumerate(args.vllm_url):
        agent = bases.index(number % count)
        client = make_client(args, url)
        try:
            _check_server(client, args, tokenizers[agent], sources[agent], agent)
        except RolloutError as error:
            what = str(error).removesuffix(f". {GO_ON}")
            raise ConfigError(f"{what}. Start a vLLM server there, or correct the address") from None
        finally:
            client.close()


def make_sampler(args: Any, launch: Launch, team: Team, dtype: torch.dtype) -> Sampler | VLLMSampler:
    """The sampler of a team; servers that it has to start are started when it is first used."""
    if not uses_vllm(args):
        return Sampler(team, args.max_rollout_rows)
    bases = base_numbers(args, [agent.source for agent in team.agents])

    def connect(folder: Path) -> Servers:
        spawned: list[SpawnedServer] = []
        if args.vllm_spawn and team.mesh.world.is_first:
            spawned = start_servers(_settings(args, team, bases, dtype), folder, args.vllm_start_timeout)
        urls = team.mesh.world.from_first(lambda: [server.url for server in spawned] or args.vllm_url)
        clients = [make_client(args, url) for url in urls]
        for client, server in zip(clients, spawned, strict=False):
            client.ended = server.ended
        count = max(bases) + 1
        groups = [clients[base::count] for base in range(count)]
        return Servers([groups[base] for base in bases], spawned)

    return VLLMSampler(team, connect, args.max_rollout_rows)


def base_numbers(args: Any, sources: Sequence[Source]) -> list[int]:
    """Which base each agent runs on, numbered as they come; with full tuning each has its own."""
    keys = [
        0 if args.share_parameters else n if args.tuning == "full" else source_key(source.base)
        for n, source in enumerate(sources)
    ]
    order = list(dict.fromkeys(keys))
    return [order.index(key) for key in keys]


def make_client(args: TrainerConfig, url: str) -> VLLMClient:
    """A client with the settings of the run."""
    return VLLMClient(
        url,
        timeout_s=args.vllm_timeout,
        max_retries=args.vllm_max_retries,
        max_concurrency=args.vllm_max_concurrency,
    )


def _settings(args: TrainerConfig, team: Team, bases: Sequence[int], dtype: torch.dtype) -> list[ServerSettings]:
    """A server a device; devices go round the bases."""
    count = max(bases) + 1
    settings = []
    for number, device in enumerate(args.vllm_devices or ["cpu"] * count):
        agents = [agent for agent, base in zip(team.agents, bases, strict=True) if base == number % count]
        is_full = args.tuning == "full"
        settings.append(
            ServerSettings(
                model=agents[0].source.place,
                dtype=str(dtype).removeprefix("torch."),
                device=device,
                adapters=0 if is_full else 1 if team.shared_parameters else len(agents),
                rank=0 if is_full else max(_rank(agent, args) for agent in agents),
                arguments=args.vllm_args,
                python=args.vllm_python or sys.executable,
            )
        )
    return settings


def _rank(agent: Agent, args: TrainerConfig) -> int:
    """Rank of an agent's adapter; of one that lives elsewhere as the settings say."""
    if not agent.is_here:
        return args.lora_rank
    return agent.base.peft_model.peft_config[agent.adapter].r


def _check_tied(field: str, args: TrainerConfig, source: Source) -> None:
    """On a CPU vLLM packs the output layer once, so that an embedding which it shares changes without it."""
    if args.tuning == "full" and source.config.get_text_config().tie_word_embeddings:
        raise ConfigError(
            f"{field}: a vLLM server on a CPU does not take a new output layer that is tied to the embedding, as that "
            f"of {source.name}. Use tuning lora, a GPU, or in_process"
        )


def _check_server(client: VLLMClient, args: TrainerConfig, tokenizer: Any, source: Source, agent: int) -> None:
    """One server: it is there, holds what is asked for, and reads texts as the agent does."""
    base = next((card for card in client.models(attempts=1) if not card.get("parent")), None)
    if base is None:
        raise ConfigError(f"vllm_url={client.url!r}: serves no base model. Start a vLLM server with one there")
    length, needed = base.get("max_model_len"), args.max_new_tokens + (args.max_prompt_tokens or 1)
    if isinstance(length, int) and length < needed:
        raise ConfigError(
            f"vllm_url={client.url!r}: holds {length} tokens, prompt and response together, and {needed} are asked for "
            "(max_new_tokens, max_prompt_tokens). Start it with a larger --max-model-len"
        )
    asked = {"model": base["id"], "prompt": _PROBE, "add_special_tokens": False}
    said = client.call("POST", "/tokenize", asked, attempts=1).get("tokens")
    if said != tokenizer(_PROBE, add_special_tokens=False)["input_ids"]:
        raise ConfigError(
            f"vllm_url={client.url!r}: has other tokens than agent {agent}, {source.name}. Start it with the base "
            "model of the agents (with several bases one server each, in the order in which the agents name them)"
        )
    if args.tuning == "full" and client.weight_version() is None:
        raise ConfigError(
            f"vllm_url={client.url!r}: takes no weights while it runs, which tuning='full' needs. Start a vLLM that "
            "has /weight_info and /collective_rpc (0.32 has) with VLLM_SERVER_DEV_MODE=1 in its environment, or use "
            "lora"
        )
    if args.tuning == "full" and client.is_on_cpu():
        _check_tied(f"vllm_url={client.url!r}", args, source)
    if args.tuning == "lora" and not client.takes_adapters():
        raise ConfigError(
            f"vllm_url={client.url!r}: takes no adapters while it runs. Start it with --enable-lora and "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment"
        )
    if args.temperature != 1:
        _check_logprobs(client, base["id"], args.temperature)


def _check_logprobs(client: VLLMClient, model: str, temperature: float) -> None:
    """Log-probabilities are those at the sampling temperature: the gap of two tokens shrinks as it rises."""

    def gap(temperature: float) -> float:
        body = {"model": model, "prompt": _PROBE, "max_tokens": 1, "temperature": temperature, "logprobs": 2, "seed": 1}
        [choice] = client.call("POST", "/v1/completions", body, attempts=1)["choices"]
        first, second, *_ = sorted(choice["logprobs"]["top_logprobs"][0].values(), reverse=True)
        return first - second

    if abs(gap(2.0) - gap(1.0) / 2) > 0.25 * gap(1.0):
        raise ConfigError(
            f"vllm_url={client.url!r}: gives log-probabilities without the temperature, and "
            f"temperature={temperature!r}. Start it with --logprobs-mode processed_logprobs"
        )
