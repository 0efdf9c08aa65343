"""The checks of several settings together and of local paths.

What cannot work raises `ConfigError`; what is only doubtful is returned as texts for a warning.
"""

import os
from pathlib import Path
from typing import Any

from mlrl.config_team import check_rates
from mlrl.errors import ConfigError

# Beyond this a sequence-level ratio, a mean over tokens, is in practice never clipped.
WIDE_SEQUENCE_CLIP = 0.05
# Above this the full trees of one step are rarely meant.
MANY_RESPONSES = 100_000
# The same for the nodes of one tree where every combination branches.
MANY_BRANCHES = 32


def check_models(config: Any) -> None:
    """One answer to "which models", and local folders that exist."""
    if config.agents is not None and config.agent_model is not None:
        raise ConfigError(
            f"agent_model={config.agent_model!r}: agents={config.agents!r} is given too. "
            "Give agent_model (one model for all) or agents (one each)."
        )
    for name in ("agent_model", "agents", "reference_model", "critic_model", "critics"):
        value = getattr(config, name, None)
        for model in value if isinstance(value, list) else [value]:
            if model is not None and is_local_path(model) and not Path(model).is_dir():
                raise ConfigError(f"{name}={value!r}: there is no folder {model}. Give a model's folder or a hub id.")


def is_local_path(model: str) -> bool:
    """Whether a model's name can only be a folder: by its beginning, by more parts than a hub id has, or because it
    goes on below a folder that is here."""
    first, *more = model.split("/")
    return model.startswith((".", "/", "~")) or len(more) > 1 or (bool(more) and Path(first).is_dir())


def check_team(config: Any, num_agents: int | None) -> None:
    """The counts of agents agree."""
    stated = {"num_agents": config.num_agents, "agents": config.agents and len(config.agents), "team": num_agents}
    counts = {name: count for name, count in stated.items() if count is not None}
    if len(set(counts.values())) > 1:
        right = counts.get("agents", counts.get("team"))
        raise ConfigError(f"num_agents={config.num_agents!r}: there are {right} agents. Give {right}, or leave it out.")


def check_tuning(config: Any, policy_gradients: bool = True) -> list[str]:
    """What cannot be trained with policy gradients, or cannot be shared."""
    doubts = []
    if policy_gradients and config.lora_dropout > 0:
        raise ConfigError(
            f"lora_dropout={config.lora_dropout!r}: policy gradients need the same policy in sampling and in scoring, "
            "and dropout changes it. Set lora_dropout to 0."
        )
    if config.share_parameters and config.agents is not None and len(set(config.agents)) > 1:
        raise ConfigError(
            f"share_parameters=True: agents={config.agents!r} are different models, which cannot share weights. "
            "Give one agent_model, or leave share_parameters out."
        )
    if config.reference_model is not None and config.no_reference:
        doubts.append(f"reference_model={config.reference_model!r} is not used while {config.no_reference}")
    if isinstance(config.agent_learning_rate, list):
        count = len(config.agents) if config.agents else config.num_agents
        check_rates(config.agent_learning_rate, count, config.share_parameters)
    return doubts


def check_placement(config: Any, num_agents: int | None) -> list[str]:
    """Blocks of ranks go with split; shared weights and a reference that nobody asks for do not."""
    if config.placement == "split" and config.share_parameters:
        raise ConfigError(
            "placement='split': share_parameters=True gives all agents one set of weights, which cannot live apart. "
            "Leave one of them out."
        )
    if config.ranks_per_agent is not None:
        count = num_agents or config.num_agents or len(config.agents or config.ranks_per_agent)
        if config.placement != "split":
            raise ConfigError(
                f"ranks_per_agent={config.ranks_per_agent!r}: placement={config.placement!r} puts every agent on every "
                "rank. Set placement to split, or leave it out."
            )
        if len(config.ranks_per_agent) != count:
            raise ConfigError(
                f"ranks_per_agent={config.ranks_per_agent!r}: has {len(config.ranks_per_agent)} values for {count} "
                "agents. Give one an agent."
            )
    if config.reference_ranks != "agents" and config.no_reference:
        raise ConfigError(
            f"reference_ranks={config.reference_ranks!r}: these ranks would have nothing to do while "
            f"{config.no_reference}. Set it, or leave reference_ranks out."
        )
    return []


def check_collaboration(config: Any) -> list[str]:
    """One actor for all roles plays one turn."""
    if config.collaboration_mode != "centralized":
        return []
    if config.num_turns > 1:
        raise ConfigError(
            f"collaboration_mode='centralized': num_turns={config.num_turns!r}, and one text holds one turn. "
            "Set num_turns to 1, or use decentralized."
        )
    if config.agents is not None and len(set(config.agents)) > 1:
        raise ConfigError(
            f"collaboration_mode='centralized': agents={config.agents!r} are several models, and one actor writes all "
            "roles. Give one agent_model, and num_agents for the number of roles."
        )
    return []


# Models that may have ranks of their own where their settings say so.
_OWN_RANKS = ("reference", "reward_model", "comparator")


def extra_ranks(config: Any) -> dict[str, int]:
    """Ranks that follow the agents', by what lives there."""
    counts = {name: getattr(config, f"{name}_ranks", "agents") for name in _OWN_RANKS}
    return {name: count for name, count in counts.items() if count != "agents"}


def check_advantages(config: Any) -> list[str]:
    """Baselines that need siblings, and what the plain policy gradient does not allow."""
    doubts = []
    mode, normalization, num_generations = config.advantage_mode, config.advantage_normalization, config.num_generations
    if num_generations < 2 and mode in ("mean", "rloo", "max"):
        raise ConfigError(
            f"num_generations={num_generations!r}: advantage_mode={mode!r} compares the responses of one node. "
            "Give num_generations of 2 or more, or advantage_mode raw or greedy."
        )
    if num_generations < 2 and normalization != "none":
        raise ConfigError(
            f"num_generations={num_generations!r}: advantage_normalization={normalization!r} needs several returns. "
            "Give num_generations of 2 or more, or advantage_normalization none."
        )
    truncated = "top_p" if config.top_p < 1 else "top_k" if config.top_k > 0 else None
    if truncated and mode == "raw":
        raise ConfigError(
            f"{truncated}={getattr(config, truncated)!r}: advantage_mode='raw' scores the full distribution, so its "
            "gradient would be far from the true one. Set top_p to 1 and top_k to 0, or use another advantage_mode."
        )
    if truncated:
        doubts.append(
            f"{truncated}={getattr(config, truncated)!r}: tokens are drawn from a cut distribution but scored under "
            "the full one, so the gradient is biased; top_p=1 and top_k=0 avoid that"
        )
    if mode == "raw" and config.loss_aggregation == "sequence_mean":
        raise ConfigError(
            "loss_aggregation='sequence_mean': with advantage_mode='raw' it would learn the reward per length. "
            "Use sequence_sum, token_mean or constant."
        )
    return doubts


def check_updates(config: Any, num_agents: int | None = None) -> list[str]:
    """Several updates on one rollout need clipping; settings of clipping need it too."""
    doubts = []
    nodes = nodes_per_step(config, num_agents)
    several_passes = config.num_updates_per_rollout > 1
    minibatches = config.train_batch_size is not None and config.train_batch_size < nodes
    if config.clip_range is None:
        if several_passes:
            raise ConfigError(
                f"num_updates_per_rollout={config.num_updates_per_rollout!r}: from the second update on the samples "
                "are off-policy. Set clip_range (0.2 is usual), or num_updates_per_rollout to 1."
            )
        if minibatches:
            raise ConfigError(
                f"train_batch_size={config.train_batch_size!r}: a step's trees have up to {nodes} nodes, so several "
                "updates would use one rollout. Set clip_range (0.2 is usual), or leave train_batch_size out."
            )
        for name, off in (("clip_range_high", None), ("dual_clip", None), ("importance_level", "token")):
            if getattr(config, name) != off:
                raise ConfigError(
                    f"{name}={getattr(config, name)!r}: has no effect without clipping. Set clip_range too, "
                    f"or leave {name} out."
                )
    elif config.importance_level == "sequence" and config.clip_range > WIDE_SEQUENCE_CLIP:
        doubts.append(
            f"clip_range={config.clip_range!r}: with importance_level='sequence' the ratio is a mean over tokens and "
            "stays near 1, so this never clips; about 3e-4 is usual"
        )
    if config.target_kl is not None and not (several_passes or minibatches):
        doubts.append(f"target_kl={config.target_kl!r} has no effect while a step makes one update")
    a_tree = nodes // config.rollout_batch_size
    if config.joint_mode == "cross" and a_tree > MANY_BRANCHES:
        joints = a_tree * config.num_generations ** _team_size(config, num_agents)
        doubts.append(
            f"joint_mode='cross': num_turns={config.num_turns} and num_generations={config.num_generations} make trees "
            f"of up to {a_tree:,} nodes, with {joints:,} joint responses to judge; joint_mode aligned or "
            "fewer generations keep them small"
        )
    responses = nodes * config.num_generations * _team_size(config, num_agents)
    if responses > MANY_RESPONSES:
        doubts.append(
            f"num_turns={config.num_turns!r}: full trees have {responses} responses a step; lower num_generations, "
            "num_turns or rollout_batch_size if that was not meant"
        )
    return doubts


def _team_size(config: Any, num_agents: int | None) -> int:
    """The number of agents as far as known: at least 1."""
    return num_agents or config.num_agents or len(config.agents or [None])


def nodes_per_step(config: Any, num_agents: int | None = None) -> int:
    """Nodes of a step's full trees: B items times the sum of J^t over the turns t."""
    num_joints = config.num_generations
    if config.joint_mode == "cross":
        num_joints = config.num_generations ** _team_size(config, num_agents)
    return config.rollout_batch_size * sum(num_joints**turn for turn in range(config.num_turns))


def check_run(config: Any) -> list[str]:
    """Trackers that contradict each other or that nothing is sent to."""
    doubts = []
    if "none" in config.report_to and len(config.report_to) > 1:
        raise ConfigError(f"report_to={config.report_to!r}: none excludes the others. Drop none, or the others.")
    if "wandb" not in config.report_to:
        for name in ("wandb_project", "wandb_entity", "wandb_tags", "wandb_dir"):
            if getattr(config, name) is not None:
                doubts.append(f"{name}={getattr(config, name)!r} has no effect; add wandb to report_to")
    return doubts


def check_run_folder(output_dir: str, run_name: str | None) -> None:
    """The run folder is new, where a user named it, and can be made."""
    if run_name is not None and (folder := Path(output_dir) / run_name).exists():
        resumable = any((folder / "checkpoints").glob("checkpoint-*"))
        other = "--resume_from_checkpoint latest to go on with it" if resumable else "delete it: it has no checkpoint"
        raise ConfigError(
            f"run_name={run_name!r}: {folder} exists already. Give another run_name or output_dir, or {other}."
        )
    check_writable("output_dir", output_dir, Path(output_dir))


def check_writable(name: str, value: str, folder: Path) -> None:
    """The folder can be written in, or made in the nearest one that exists."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{name}={value!r}: nothing can be written in {folder}. Give another folder.")
