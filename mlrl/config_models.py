"""Settings of the models that play and of what is trained of them."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class ModelArguments:
    """Models"""

    agent_model: str | None = None
    """Model of every agent: hub id, local folder, or embedded (no download)"""
    agents: list[str] | None = None
    """One model an agent (in place of agent_model): hub ids or local folders"""
    num_agents: int | None = None
    """Team size; None: 2, or the number of models that are given"""
    dtype: Literal["float32", "bfloat16"] | None = None
    """float32 or bfloat16; None: as launched, else bfloat16 on a GPU that has it"""
    attn_implementation: Literal["sdpa", "eager"] | None = None
    """Attention kernels: sdpa (fused) or eager (plain matrix products); None: sdpa"""


@dataclass(kw_only=True)
class TuningArguments:
    """Tuning"""

    tuning: Literal["lora", "full"] = "lora"
    """lora: an adapter an agent on one frozen base; full: all weights"""
    lora_rank: int = 16
    """Rank of the adapters"""
    lora_alpha: float = 32.0
    """Scale of the adapters: the update is multiplied by lora_alpha / lora_rank"""
    lora_dropout: float = 0.0
    """Dropout before the adapters; policy gradients need 0"""
    lora_target_modules: str | list[str] = "all-linear"
    """Modules with adapters: all-linear, names (q_proj v_proj), or one regex"""
    share_parameters: bool = False
    """One set of weights and one optimizer for all agents"""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, more time"""
    reference_model: str | None = None
    """Reference policy of the KL; None: the agents' initial policies"""


@dataclass(kw_only=True)
class AgentArguments(ModelArguments, TuningArguments):
    """Agents"""
