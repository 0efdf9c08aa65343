"""Settings of rollouts on vLLM servers, and the checks that need no server."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlrl.errors import ConfigError
from mlrl.remote_formats import check_url


@dataclass(kw_only=True)
class VLLMArguments:
    """Rollouts on vLLM"""

    rollout_backend: Literal["in_process", "vllm"] = "in_process"
    """Who samples: in_process (the trained models themselves), or vllm (servers)"""
    vllm_url: list[str] | None = None
    """Servers that share the disk of output_dir with this run: http://host:port ..."""
    vllm_spawn: bool = False
    """Start the servers on this machine, and end them with the run"""
    vllm_devices: list[str] | None = None
    """vllm_spawn: a server each: GPU 0, or 2,3 as one, or cpu; None: cpu"""
    vllm_python: str | None = None
    """vllm_spawn: Python interpreter that has vLLM; None: this one"""
    vllm_args: dict[str, Any] = field(default_factory=dict)
    """vllm_spawn: further arguments of the server: gpu_memory_utilization=0.5 ..."""
    vllm_start_timeout: float = 600.0
    """vllm_spawn: seconds until a server must be ready"""
    vllm_timeout: float = 600.0
    """Seconds until one answer is given up"""
    vllm_max_retries: int = 5
    """Further attempts after broken connections, time-outs, 429, 5xx and broken answers"""
    vllm_max_concurrency: int = 128
    """Responses under way at once, a server"""
    async_rollouts: int = 0
    """vllm: 1 draws the next batch while a step learns; 0: each in its turn"""
    rollout_is_cap: float | None = 2.0
    """vllm: cap of the importance weight (trainer / server) of a token; None: no weights"""
    rollout_kl_limit: float | None = 0.1
    """vllm: mismatch KL a token (server to trainer) at which a run ends; None: never"""


_OF_SERVERS = ("vllm_url", "vllm_spawn", "vllm_devices", "vllm_python", "vllm_args")
_OF_SPAWNED = ("vllm_devices", "vllm_python", "vllm_args")


def check_vllm(config: Any) -> list[str]:
    """Raise `ConfigError` for servers that are not named, named twice or not used; return what is only doubtful."""
    given = [name for name in _OF_SERVERS if getattr(config, name)]
    if config.rollout_backend != "vllm":
        if given:
            raise ConfigError(
                f"{given[0]}={getattr(config, given[0])!r}: rollout_backend={config.rollout_backend!r} asks no server. "
                f"Set rollout_backend to vllm, or leave {given[0]} out."
            )
        if config.async_rollouts:
            raise ConfigError(
                f"async_rollouts={config.async_rollouts!r}: rollout_backend={config.rollout_backend!r} samples with "
                "the networks that a step trains. Set rollout_backend to vllm, or async_rollouts to 0."
            )
        return []
    if config.async_rollouts and config.rollout_is_cap is None:
        raise ConfigError(
            f"rollout_is_cap=None: async_rollouts={config.async_rollouts!r} learns from responses of earlier weights, "
            "which need importance weights. Set rollout_is_cap, 2.0 as a rule, or async_rollouts to 0."
        )
    if config.vllm_url is None and not config.vllm_spawn:
        raise ConfigError(
            "vllm_url=None: rollout_backend='vllm' needs servers. Give their addresses, such as http://localhost:8000, "
            "or set vllm_spawn."
        )
    if config.vllm_url is not None and config.vllm_spawn:
        raise ConfigError(f"vllm_url={config.vllm_url!r}: vllm_spawn starts servers of its own. Give one of the two.")
    for name in () if config.vllm_spawn else _OF_SPAWNED:
        if getattr(config, name):
            raise ConfigError(
                f"{name}={getattr(config, name)!r}: is for servers that this run starts. Set vllm_spawn, "
                f"or leave {name} out."
            )
    for url in config.vllm_url or []:
        if "@" in url or "?" in url:
            check_url("vllm_url", url)  # which does not repeat a secret
        if not re.fullmatch(r"https?://[\w.:\[\]-]+/?", url):
            raise ConfigError(
                f"vllm_url={config.vllm_url!r}: {url!r} is no server's address. Give one such as http://localhost:8000."
            )
    if len(set(config.vllm_url or [])) < len(config.vllm_url or []):
        raise ConfigError(f"vllm_url={config.vllm_url!r}: names a server twice. Give each once.")
    check_devices(config.vllm_devices)
    if config.vllm_python is not None and shutil.which(config.vllm_python) is None:
        raise ConfigError(
            f"vllm_python={config.vllm_python!r}: there is no such program. Give the python of the environment that "
            "has vLLM."
        )
    doubts = []
    if config.top_p < 1 or config.top_k > 0:
        doubts.append(
            "rollout_backend='vllm': with top_p or top_k the importance weights also hold the probability that was "
            "cut off, and rollout_kl_limit is not applied"
        )
    return doubts


def check_devices(devices: Sequence[str] | None) -> None:
    """Every entry is `cpu`, or GPU numbers with commas between."""
    for entry in devices or []:
        if entry != "cpu" and not all(number.isdecimal() for number in entry.split(",")):
            raise ConfigError(
                f"vllm_devices={list(devices)!r}: {entry!r} is no device. Give numbers of GPUs, 0,1 for two as one "
                "server, or cpu."
            )
