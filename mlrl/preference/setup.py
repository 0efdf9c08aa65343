"""From settings to the comparator of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mlrl.agents import Team
from mlrl.config_preference import ComparatorArguments, history_k
from mlrl.errors import ConfigError
from mlrl.parallel.mesh import Mesh
from mlrl.preference.comparators import SNAPSHOTS, PolicyComparator, WrittenComparator
from mlrl.preference.writers import CentralizedWriter, ModelWriter, RemoteWriter, Writer
from mlrl.remote import RemoteModel, RemoteSettings
from mlrl.rollout.collect import Collector
from mlrl.rollout.sampler import Sampler, SamplingParams
from mlrl.sources import Source, check_source, load_tokenizers, resolve_source

_TAG_TOKENS = 24  # an agent: what the tags of its section take, generously


def make_comparator(
    args: ComparatorArguments,
    live: Collector,
    sampling: SamplingParams,
    cache: str | Path | None = None,
    spent: int = 0,
) -> PolicyComparator | WrittenComparator:
    """The comparator that the settings name.

    Args:
        live: collector of the team that learns.
        sampling: of a response; whoever writes all roles in one text may write so much for each.
        cache: JSONL file for the answers of an API, so that a resumed round asks for nothing twice.
        spent: requests to an API that the run has sent before it was resumed.

    Raises:
        ConfigError: a model cannot be loaded, or the key's variable is not set.
    """
    if args.comparator_policy in SNAPSHOTS:
        return PolicyComparator(args.comparator_policy, live, history_k(args))
    num_agents = len(live.team.agents)
    centralized = args.comparator_generation_mode == "centralized" and num_agents > 1
    if centralized:
        longest = num_agents * (sampling.max_new_tokens + _TAG_TOKENS)
        sampling = dataclasses.replace(sampling, max_new_tokens=longest)
    writer: Writer
    if args.comparator_policy == "api":
        name = args.comparator_api_model or args.comparator_api_url
        writer = RemoteWriter(_remote_model(args, sampling, cache, spent), live.world)
    else:
        sources = _sources(args, 1 if centralized else num_agents)
        name = ", ".join(dict.fromkeys(args.comparator_agents or [args.comparator_model_name]))
        team = load_writers(live.team, sources)
        collector = Collector(team, Sampler(team, live.sampler.max_rows), live.environment)
        writer = ModelWriter(collector, sampling, live.team.agents)
    return WrittenComparator(args.comparator_policy, name, live, CentralizedWriter(writer) if centralized else writer)


def check_comparator(args: ComparatorArguments) -> None:
    """Raises ConfigError where the comparator's models or key cannot be found; reads no weights."""
    if args.comparator_policy == "api":
        _remote_model(args, SamplingParams(max_new_tokens=1), None).close()
    if args.comparator_policy == "model":
        for source in dict.fromkeys(_sources(args, num_models=1)):
            check_source(source)


def _sources(args: ComparatorArguments, num_models: int) -> list[Source]:
    """Where the comparator's models come from: those that are named, or one as often as asked."""
    if args.comparator_agents:
        return [resolve_source(name, "comparator_agents") for name in args.comparator_agents]
    return [resolve_source(args.comparator_model_name, "comparator_model_name")] * num_models


def load_writers(team: Team, sources: list[Source]) -> Team:
    """Models as a team that is not trained, equal ones loaded once, on the device and in the type of another team.

    The n-th lives where agent n does, or on ranks of its own; sharded where that team is.
    """
    loading, mesh = team.loading, team.mesh
    places = tuple(mesh.comparator(agent) for agent in range(len(sources)))
    return Team.load(
        dataclasses.replace(loading.arguments, share_parameters=False),
        sources,
        load_tokenizers(sources),
        device=loading.device,
        dtype=loading.dtype,
        seed=0,
        mesh=Mesh(mesh.world, places),
        zero=loading.zero,
        attn_implementation=loading.attn_implementation,
        trainable=False,
    )


def remote_settings(args: ComparatorArguments, sampling: SamplingParams, cache: str | Path | None) -> RemoteSettings:
    """The settings `comparator_api_*` as those of a client."""
    return RemoteSettings(
        url=args.comparator_api_url,
        format=args.comparator_api_format,
        model=args.comparator_api_model,
        key_env=args.comparator_api_key_env,
        key_header=args.comparator_api_key_header,
        key_prefix=args.comparator_api_key_prefix,
        headers=args.comparator_api_headers,
        response_field=args.comparator_api_response_field,
        extra_body=args.comparator_api_extra_body,
        max_answers_per_request=args.comparator_api_max_n_per_request,
        timeout_s=args.comparator_api_timeout,
        max_retries=args.comparator_api_max_retries,
        max_concurrency=args.comparator_api_max_concurrency,
        max_requests=args.comparator_api_max_requests,
        cache=cache,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
    )


def _remote_model(
    args: ComparatorArguments, sampling: SamplingParams, cache: str | Path | None, spent: int = 0
) -> RemoteModel:
    try:
        return RemoteModel(remote_settings(args, sampling, cache), spent)
    except ConfigError as error:
        raise ConfigError(f"comparator_api_{error}") from None  # its fields have the same names, less the prefix
