"""Every setting of a run: flat dataclasses put together from groups, with the checks that need no model.

A field's docstring is its line in ``--help``; a group's docstring is the heading there. Types, words, ranges and
combinations are checked when a config is made, in Python and on the command line alike (`mlrl.config_checks`,
`mlrl.config_rules`).
Nothing here imports torch, so a wrong flag costs no time.
"""

import warnings
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from mlrl import config_rules as rules
from mlrl.config_checkpoints import CheckpointArguments, check_checkpoints
from mlrl.config_checks import check_fields, check_names
from mlrl.config_critics import (
    CentralizedCriticArguments,
    IndependentCriticArguments,
    check_centralized,
    check_independent,
)
from mlrl.config_evaluation import check_output, check_protocol
from mlrl.config_models import AgentArguments, ModelArguments
from mlrl.config_preference import DPOArguments, PreferenceArguments, RewardModelArguments
from mlrl.config_rollout import RewardArguments, RolloutArguments, SamplingArguments, check_rewards
from mlrl.config_team import check_agents_dir
from mlrl.config_vllm import VLLMArguments, check_vllm

Tracker = Literal["none", "wandb", "tensorboard", "trackio"]


@dataclass(kw_only=True)
class TaskArguments:
    """Task"""

    task: str = "length_ratio"
    """A shipped task, or file.py[:ATTR] with a Task or a function for one"""
    task_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the task's function: key=value ..., read as YAML"""


@dataclass(kw_only=True)
class PlacementArguments:
    """Where models live"""

    placement: Literal["shared", "split"] = "shared"
    """shared: every agent on every rank; split: each agent on ranks of its own"""
    ranks_per_agent: list[int] | None = None
    """Ranks of each agent where they are split; None: even"""
    reference_ranks: Literal["agents"] | int = "agents"
    """Ranks of the reference policy: agents (its agent's), or a count of more"""


@dataclass(kw_only=True)
class LearningArguments:
    """Learning"""

    agent_learning_rate: float | list[float] | None = None
    """AdamW learning rate, one or one an agent; None: 1e-4 (lora), 1e-5 (full)"""
    num_train_epochs: int = 1
    """Passes over the train set"""
    max_steps: int | None = None
    """Stop after this many steps, even within an epoch; None: no limit"""
    train_batch_size: int | None = None
    """Nodes an update; None: all nodes of the rollout in one"""
    micro_batch_tokens: int = 4096
    """Tokens a forward and backward pass: bounds memory, changes no result"""
    max_grad_norm: float | None = 1.0
    """Gradient norm of an agent is clipped to this; None: never"""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: constant, or linear or cosine down to 0"""
    warmup_steps: int = 0
    """Updates over which the learning rate rises from 0"""
    weight_decay: float = 0.0
    """Weight decay of AdamW"""
    adam_beta1: float = 0.9
    """Decay of AdamW's mean of gradients; lower forgets old rounds sooner"""
    adam_beta2: float = 0.999
    """Decay of AdamW's mean of squared gradients"""
    max_nonfinite_steps: int = 3
    """NaN or infinite losses are skipped; so many steps in a row end the run"""


@dataclass(kw_only=True)
class PolicyLossArguments:
    """Policy loss"""

    num_updates_per_rollout: int = 1
    """Passes over the nodes of a rollout; more than 1 needs clip_range"""
    advantage_mode: Literal["raw", "mean", "rloo", "max", "greedy"] = "raw"
    """Baseline: raw (none), mean, rloo (the others' mean), max, greedy (one extra)"""
    advantage_normalization: Literal["none", "node", "batch"] | bool = "none"
    """Advantages divided by the std of: none, node, batch; True is node"""
    turn_weighting: Literal["objective", "undiscounted", "node"] = "objective"
    """objective (discounted turn means), undiscounted, node (flat mean)"""
    loss_aggregation: Literal["sequence_sum", "token_mean", "constant", "sequence_mean"] = "sequence_sum"
    """sequence_sum, token_mean, constant (/ max_new_tokens) or sequence_mean"""
    clip_range: float | None = None
    """PPO clipping of the importance ratio, often 0.2; None: REINFORCE"""
    clip_range_high: float | None = None
    """Upper clip range; None: same as clip_range"""
    dual_clip: float | None = None
    """Bound of the ratio where the advantage is negative, above 1; None: off"""
    target_kl: float | None = None
    """Passes over a rollout stop where approx_kl passes this; None: never"""
    importance_level: Literal["token", "sequence"] = "token"
    """Importance ratio a token or a sequence (then clip_range is about 3e-4)"""
    mask_truncated: bool = False
    """Responses cut at max_new_tokens do not enter the loss, only the baselines"""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus"""
    reference_kl_coef: float = 0.0
    """Weight of the KL to the reference policy; 0 is off and loads nothing"""


@dataclass(kw_only=True)
class EvaluationArguments:
    """Evaluation"""

    eval_num_samples: int | None = 4
    """Items evaluated: the first so many of the eval set; 0: none, None: all"""
    eval_num_generations: int = 1
    """Episodes an item (mean, standard error, best of n, pass@k)"""
    eval_batch_size: int | None = None
    """Items evaluated at once; None: as many as max_rollout_rows allows"""
    eval_temperature: float | None = None
    """Temperature of evaluation; 0 is greedy, None: temperature"""


@dataclass(kw_only=True)
class RunArguments:
    """Logging and saving"""

    eval_interval: int = 16
    """Train items between evaluations; also at epoch starts and the end; 0: by hand"""
    logging_steps: int = 1
    """Least env steps (joint reward evaluations) between two logged lines"""
    report_to: Tracker | list[Tracker] = field(default_factory=lambda: ["none"])
    """Trackers beside metrics.jsonl: none, or any of wandb tensorboard trackio"""
    output_dir: str = "runs"
    """Folder of the run folders"""
    run_name: str | None = None
    """Name of the run folder, new unless resumed; None: <script>-<task>-<time>"""
    wandb_project: str | None = None
    """Weights & Biases project"""
    wandb_entity: str | None = None
    """Weights & Biases user or team"""
    wandb_tags: list[str] | None = None
    """Weights & Biases tags"""
    wandb_dir: str | None = None
    """Folder for Weights & Biases files; None: the run folder"""
    completions_steps: int = 10
    """Write prompts, responses and rewards every so many steps; 0: never"""
    profile: bool = False
    """Write where each step's time goes into profile/ of the run folder"""
    seed: int = 42
    """Seed of sampling, initial weights and order"""


class CheckedConfig:
    """Base of the configs: unknown names and wrong values raise `ConfigError` when one is made."""

    def __new__(cls, *args: Any, **kwargs: Any):
        check_names(kwargs, field_names(cls))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for doubt in self.check():
            warnings.warn(doubt, stacklevel=3)  # the line that makes the config

    def check(self, num_agents: int | None = None) -> list[str]:
        """Raise `ConfigError` for the first wrong type, word, range or combination; return what is only doubtful.

        A trainer checks again, since fields may have been set, and knows the team size.

        Args:
            num_agents: the team size, where only the caller knows it.
        """
        raise NotImplementedError


@dataclass(kw_only=True)
class TrainingConfig(CheckedConfig):
    """What the configs of all trainers are; each is put together from the groups of settings that it uses."""

    sources: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Where each value came from, filled by the command line (`mlrl.cli.parse`)"""

    @property
    def no_reference(self) -> str | None:
        """The setting by which there is no reference policy; None where there is one."""
        raise NotImplementedError


@dataclass(kw_only=True)
class TrainerConfig(
    AgentArguments,
    PlacementArguments,
    RolloutArguments,
    VLLMArguments,
    RewardArguments,
    LearningArguments,
    PolicyLossArguments,
    EvaluationArguments,
    RunArguments,
    CheckpointArguments,
    TrainingConfig,
):
    """Settings of a policy-gradient trainer; the algorithms' configs differ in their defaults."""

    @property
    def no_reference(self) -> str | None:
        return None if self.reference_kl_coef > 0 else "reference_kl_coef is 0"

    def check(self, num_agents: int | None = None) -> list[str]:
        check_fields(self)
        rules.check_models(self)
        rules.check_team(self, num_agents)
        check_rewards(self)
        return [
            *rules.check_tuning(self),
            *rules.check_placement(self, num_agents),
            *rules.check_collaboration(self),
            *self.check_baseline(num_agents),
            *rules.check_updates(self, num_agents),
            *rules.check_run(self),
            *check_checkpoints(self),
            *check_vllm(self),
        ]

    def check_baseline(self, num_agents: int | None) -> list[str]:
        """The checks of what is subtracted from returns, called by `check`."""
        return rules.check_advantages(self)


@dataclass(kw_only=True)
class MAREINFORCEConfig(TrainerConfig):
    """Settings of MAREINFORCE: returns as they are, no baseline."""

    advantage_mode: Literal["raw", "mean", "rloo", "max", "greedy"] = "raw"


@dataclass(kw_only=True)
class MAGRPOConfig(TrainerConfig):
    """Settings of MAGRPO: mean of the node as baseline, divided by the node's standard deviation."""

    advantage_mode: Literal["raw", "mean", "rloo", "max", "greedy"] = "mean"
    advantage_normalization: Literal["none", "node", "batch"] | bool = "node"


@dataclass(kw_only=True)
class MARLOOConfig(TrainerConfig):
    """Settings of MARLOO: mean of the other responses as baseline."""

    advantage_mode: Literal["raw", "mean", "rloo", "max", "greedy"] = "rloo"


@dataclass(kw_only=True)
class MAReMaxConfig(TrainerConfig):
    """Settings of MAReMax: best response of the node as baseline."""

    advantage_mode: Literal["raw", "mean", "rloo", "max", "greedy"] = "max"


@dataclass(kw_only=True)
class ActorCriticConfig(TrainerConfig):
    """Settings that IAC and MAAC share."""

    advantage_normalization: Literal["none", "node", "batch"] | bool = "batch"

    def check(self, num_agents: int | None = None) -> list[str]:
        if self.advantage_normalization is True:  # on: here that is the std of the whole batch
            self.advantage_normalization = "batch"
        return super().check(num_agents)


@dataclass(kw_only=True)
class IACConfig(IndependentCriticArguments, ActorCriticConfig):
    """Settings of IAC: a critic an agent, on what that agent sees."""

    def check_baseline(self, num_agents: int | None) -> list[str]:
        return check_independent(self, num_agents)


@dataclass(kw_only=True)
class MAACConfig(CentralizedCriticArguments, ActorCriticConfig):
    """Settings of MAAC: one critic on the joint history of all agents."""

    def check_baseline(self, num_agents: int | None) -> list[str]:
        return check_centralized(self, num_agents)


@dataclass(kw_only=True)
class EvaluationConfig(ModelArguments, SamplingArguments, RewardArguments, EvaluationArguments, CheckedConfig):
    """Evaluated team"""

    agents_dir: str | None = None
    """Folder with agent_0, agent_1, ... of a trained team (in place of a model)"""
    protocol: Literal["team", "single", "parallel", "sequential", "discussion"] = "team"
    """team, or a baseline without training: single, parallel, sequential, discussion"""
    eval_num_samples: int | None = None
    """Items evaluated: the first so many of the eval set; None: all"""
    output: str | None = None
    """JSON file for metrics and episodes; None: print only"""
    seed: int = 42
    """Seed of sampling"""
    sources: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Where each value came from, filled by the command line (`mlrl.cli.parse`)"""

    def check(self, num_agents: int | None = None) -> list[str]:
        check_fields(self)
        rules.check_models(self)
        check_agents_dir(self)
        rules.check_team(self, num_agents)
        check_rewards(self)
        check_output(self.output)
        check_protocol(self)
        return rules.check_collaboration(self)


def field_names(config_class: type) -> list[str]:
    """Names of the settings of a config class, in order."""
    return [f.name for f in fields(config_class) if f.init]


def known_fields() -> set[str]:
    """Names of the settings of any config: what a task may recommend."""
    classes = [TrainerConfig, IACConfig, MAACConfig, EvaluationConfig]
    classes += [PreferenceArguments, DPOArguments, RewardModelArguments]
    return {name for config_class in classes for name in field_names(config_class)}
