"""Every setting of a run: flat dataclasses put together from groups, with the checks that need no model.

A field's docstring is its line in ``--help``; a group's docstring is the heading there. Types, words, ranges and
combinations are checked when a config is made, in Python and on the command line alike (`mlrl.config_checks`,
`mlrl.config_rules`).
Nothing here imports torch, so a wrong flag costs no time.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from mlrl import config_rules as rules
from mlrl.config_checks import check_field, check_fields, check_names
from mlrl.errors import ConfigError

Tracker = Literal["none", "wandb", "tensorboard", "trackio"]


@dataclass(kw_only=True)
class TaskArguments:
    """Task"""

    task: str = "length_ratio"
    """A task that comes with mlrl, or file.py[:ATTR] with a Task or a function that makes one"""
    task_args: dict[str, Any] = field(default_factory=dict)
    """key=value ...: arguments of the task's function; values are read as YAML"""


@dataclass(kw_only=True)
class ModelArguments:
    """Models"""

    agent_model: str | None = None
    """Model of every agent: hub id, local folder, or 'embedded' (no download)"""
    agents: list[str] | None = None
    """One model an agent (in place of agent_model): hub ids or local folders"""
    num_agents: int | None = None
    """Team size with agent_model; otherwise the number of agents given. None: 2"""
    dtype: Literal["float32", "bfloat16"] | None = None
    """float32 or bfloat16; None: mixed_precision of the launch, else bfloat16 on GPUs that have it"""
    attn_implementation: str | None = None
    """Attention of transformers, such as sdpa, eager, flash_attention_2; None: its choice"""


@dataclass(kw_only=True)
class TuningArguments:
    """Tuning"""

    tuning: Literal["lora", "full"] = "lora"
    """lora: an adapter an agent on one frozen base; full: every weight of every agent"""
    lora_rank: int = 16
    """Rank of the adapters"""
    lora_alpha: float = 32.0
    """Scale of the adapters: the update is multiplied by lora_alpha / lora_rank"""
    lora_dropout: float = 0.0
    """Dropout before the adapters; policy gradients need 0"""
    lora_target_modules: str | list[str] = "all-linear"
    """Modules with an adapter: all-linear, or names such as q_proj v_proj, or one regex"""
    share_parameters: bool = False
    """One set of weights and one optimizer for all agents"""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, more time"""
    reference_model: str | None = None
    """Model of the reference KL; None: the agents' own initial policy"""


@dataclass(kw_only=True)
class AgentArguments(ModelArguments, TuningArguments):
    """Agents"""


@dataclass(kw_only=True)
class SamplingArguments:
    """Episodes and sampling"""

    num_turns: int = 1
    """Turns of an episode (horizon); more than 1 needs the task's external_transition"""
    max_new_tokens: int = 128
    """Longest response, in tokens"""
    max_prompt_tokens: int | None = None
    """Longer prompts lose tokens on the left, counted; None: too long for the model is an error"""
    temperature: float = 1.0
    """Sampling temperature; the loss scores tokens at the same one"""
    top_p: float = 1.0
    """Nucleus sampling; 1 is off. Below 1 the loss is biased: it scores the full distribution"""
    top_k: int = 0
    """Sample from the k likeliest tokens; 0 is off. Biased like top_p"""
    early_termination_threshold: float | None = None
    """An episode ends early where the processed reward is above this; None: never"""
    external_prompt_passthrough: bool = False
    """The transition's prompts go to the agents as they are, not through the formatters"""
    discount: float = 1.0
    """Discount factor of later turns, between 0 and 1"""
    max_rollout_rows: int = 256
    """Sequences decoded at once: bounds the memory of sampling"""


@dataclass(kw_only=True)
class RolloutArguments(SamplingArguments):
    """Rollout trees"""

    num_generations: int = 4
    """Responses an agent draws at every node (K)"""
    joint_mode: Literal["aligned", "cross"] = "aligned"
    """aligned: K joint responses a node; cross: all K^N combinations"""
    early_termination_scope: Literal["node", "joint"] = "node"
    """node: mean reward of the node stops all of it; joint: each branch for itself (unbiased)"""
    rollout_batch_size: int = 4
    """Task items a step, over all processes"""


@dataclass(kw_only=True)
class LearningArguments:
    """Learning"""

    agent_learning_rate: float | list[float] | None = None
    """Learning rate of AdamW, one or one an agent; None: 1e-4 with lora, 1e-5 with full"""
    num_train_epochs: int = 1
    """Passes over the train set"""
    max_steps: int | None = None
    """Stop after this many steps, even within an epoch; None: no limit"""
    train_batch_size: int | None = None
    """Nodes an update; None: all nodes of the rollout in one"""
    micro_batch_tokens: int = 4096
    """Tokens in one forward and backward pass: bounds the memory of learning, not its result"""
    num_updates_per_rollout: int = 1
    """Passes over the nodes of a rollout; more than 1 needs clip_range"""
    max_grad_norm: float | None = 1.0
    """Gradient norm of an agent is clipped to this; None: never"""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: constant, or linear or cosine down to 0"""
    warmup_steps: int = 0
    """Updates over which the learning rate rises from 0"""
    weight_decay: float = 0.0
    """Weight decay of AdamW"""
    max_nonfinite_steps: int = 3
    """Steps with a NaN or infinite loss are skipped; this many in a row stop the run"""


@dataclass(kw_only=True)
class PolicyLossArguments:
    """Policy loss"""

    advantage_mode: Literal["raw", "mean", "rloo", "max", "greedy"] = "raw"
    """Baseline: raw (none), mean, rloo (mean of the others), max, greedy (one extra response)"""
    advantage_normalization: Literal["none", "node", "batch"] | bool = "none"
    """Divide by the std of: none, node (K returns of a node), batch; True is node"""
    turn_weighting: Literal["objective", "undiscounted", "node"] = "objective"
    """objective (discounted sum of turn means), undiscounted, or node (flat mean of nodes)"""
    loss_aggregation: Literal["sequence_sum", "token_mean", "constant", "sequence_mean"] = "sequence_sum"
    """sequence_sum, token_mean (/ batch mean length), constant (/ max_new_tokens), sequence_mean"""
    clip_range: float | None = None
    """PPO clipping of the importance ratio (0.2 is usual); None: REINFORCE"""
    clip_range_high: float | None = None
    """Upper clip range; None: same as clip_range"""
    dual_clip: float | None = None
    """Bound of the ratio where the advantage is negative, above 1; None: off"""
    target_kl: float | None = None
    """Passes over a rollout stop where approx_kl exceeds this; None: never"""
    importance_level: Literal["token", "sequence"] = "token"
    """Importance ratio a token, or a sequence (mean log-ratio; clip_range about 3e-4)"""
    mask_truncated: bool = False
    """Leave responses cut at max_new_tokens out of the loss (they stay in the baselines)"""
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
    """Episodes an item (mean, standard error, best of n)"""
    eval_batch_size: int | None = None
    """Items evaluated at once; None: as many as max_rollout_rows allows"""
    eval_temperature: float | None = None
    """Temperature of evaluation; 0 is greedy, None: temperature"""


@dataclass(kw_only=True)
class RunArguments:
    """Logging and saving"""

    eval_interval: int = 16
    """Evaluate every so many train items, and at start and end; 0: only by hand"""
    logging_steps: int = 1
    """Least number of env steps (joint reward evaluations) between two logged lines"""
    report_to: Tracker | list[Tracker] = field(default_factory=lambda: ["none"])
    """Trackers beside metrics.jsonl: none, or any of wandb tensorboard trackio"""
    output_dir: str = "runs"
    """Folder of the run folders"""
    run_name: str | None = None
    """Name of the run folder, which must be new; None: <script>-<task>-<time>"""
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
    seed: int = 42
    """Seed of sampling, initial weights and order"""


class CheckedConfig:
    """Base of the configs: unknown names and wrong values raise `ConfigError` when one is made."""

    def __new__(cls, *args: Any, **kwargs: Any):
        check_names(kwargs, field_names(cls))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self.check()

    def check(self, num_agents: int | None = None) -> None:
        """Raise `ConfigError` for the first wrong type, word, range or combination; doubtful ones only warn.

        Args:
            num_agents: the team size, where only the caller knows it.
        """
        raise NotImplementedError


@dataclass(kw_only=True)
class TrainerConfig(
    AgentArguments,
    RolloutArguments,
    LearningArguments,
    PolicyLossArguments,
    EvaluationArguments,
    RunArguments,
    CheckedConfig,
):
    """Settings of a policy-gradient trainer; the algorithms' configs differ in their defaults."""

    sources: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Where each value came from, filled by the command line (`mlrl.cli.parse`)"""

    def check(self, num_agents: int | None = None) -> None:
        check_fields(self)
        rules.check_models(self)
        rules.check_tuning(self)
        rules.check_team(self, num_agents)
        rules.check_advantages(self)
        rules.check_updates(self, num_agents)
        rules.check_run(self)


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
class EvaluationConfig(ModelArguments, SamplingArguments, EvaluationArguments, CheckedConfig):
    """Evaluated team"""

    agents_dir: str | None = None
    """Folder with agent_0, agent_1 ... of a trained team (in place of agent_model or agents)"""
    eval_num_samples: int | None = None
    """Items evaluated: the first so many of the eval set; None: all"""
    output: str | None = None
    """JSON file for the metrics and the episodes; None: print only"""
    seed: int = 42
    """Seed of sampling"""
    sources: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Where each value came from, filled by the command line (`mlrl.cli.parse`)"""

    def check(self, num_agents: int | None = None) -> None:
        check_fields(self)
        rules.check_models(self)
        rules.check_agents_dir(self)
        rules.check_team(self, num_agents)


def field_names(config_class: type) -> list[str]:
    """Names of the settings of a config class, in order."""
    return [f.name for f in fields(config_class) if f.init]


def known_fields() -> set[str]:
    """Names of the settings of any config: what a task may recommend."""
    classes = [TrainerConfig, EvaluationConfig]
    return {name for config_class in classes for name in field_names(config_class)}


def team_models(
    config: ModelArguments, *, agent_model: Any = None, agents: list[Any] | None = None, num_agents: int | None = None
) -> list[Any]:
    """The N models of a team, from a trainer's arguments and its config, which must agree where both speak.

    Args:
        config: holds `agent_model`, `agents`, `num_agents`, any of them None.
        agent_model: one model of all agents, a name or a loaded object.
        agents: one model an agent.
        num_agents: team size.

    Returns:
        N names or objects, in agent order.

    Raises:
        ConfigError: no model, two answers to one question, or counts that differ.
    """
    agent_model = _agreed("agent_model", agent_model, config.agent_model)
    agents = _agreed("agents", agents, config.agents)
    num_agents = _agreed("num_agents", num_agents, config.num_agents)
    if agents is None and agent_model is None:
        raise ConfigError("agent_model=None: there is no model. Give agent_model (one for all) or agents (one each).")
    if agents is not None and agent_model is not None:
        raise ConfigError(f"agent_model={agent_model!r}: agents is given too. Give one of the two.")
    if agents is None:
        num_agents = rules.DEFAULT_NUM_AGENTS if num_agents is None else num_agents
        check_field("num_agents", num_agents, int)
        return [agent_model] * num_agents
    if not isinstance(agents, list | tuple) or not agents:
        raise ConfigError(f"agents={agents!r}: is not a list of models. Give one model an agent.")
    if num_agents is not None and num_agents != len(agents):
        raise ConfigError(f"num_agents={num_agents!r}: agents has {len(agents)}. Leave num_agents out, or let it agree.")
    return list(agents)


def agent_learning_rates(config: TrainerConfig, num_agents: int) -> list[float]:
    """The learning rate of each of `num_agents` agents, defaults filled in."""
    rate = config.agent_learning_rate
    if rate is None:
        rate = rules.DEFAULT_LEARNING_RATE[config.tuning]
    rates = rate if isinstance(rate, list) else [rate] * num_agents
    rules.check_rates(rates, num_agents, config.share_parameters)
    return rates


def _agreed(name: str, given: Any, configured: Any) -> Any:
    """The value that was given, or else the configured one; two different values are an error."""
    if given is None or configured is None:
        return configured if given is None else given
    if given is not configured and given != configured:
        raise ConfigError(f"{name}={given!r}: the config says {name}={configured!r}. Give it in one of the two places.")
    return given
