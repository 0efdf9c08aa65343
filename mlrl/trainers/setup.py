"""From settings to a team that can play, in two steps: everything is checked first, weights are read last."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from mlrl.agents import Team
from mlrl.calling import shown
from mlrl.config import AgentArguments, EvaluationConfig, TrainingConfig
from mlrl.config_checks import check_field, setting_types
from mlrl.config_critics import ActorCriticArguments, critic_extra_ranks
from mlrl.config_rules import extra_ranks
from mlrl.errors import ConfigError
from mlrl.parallel.launch import Launch
from mlrl.parallel.lifeline import Lifeline
from mlrl.parallel.mesh import Mesh, plan_ranks
from mlrl.rollout.collect import Collector
from mlrl.rollout.prompts import tokenize_prompt
from mlrl.sources import Source, load_tokenizers, max_model_length, resolve_source
from mlrl.task import Environment, Task
from mlrl.trainers.rollout_setup import check_servers, make_sampler, uses_vllm


@dataclass(frozen=True)
class PreparedTeam:
    """A team whose settings, task, tokenizers and first prompts are known to fit; no weights have been read yet.

    Attributes:
        prompt_limits: longest prompt of each agent that leaves room for a response; None where the model does not say.
        options: further arguments of `Team.load`.
    """

    args: TrainingConfig | EvaluationConfig
    launch: Launch
    environment: Environment
    sources: list[Source]
    tokenizers: list[Any]
    prompt_limits: tuple[int | None, ...]
    dtype: torch.dtype
    options: dict[str, Any]

    def load(self, trainable: bool = True, mesh: Mesh | None = None) -> Collector:
        """Reads the weights; the collector holds the team, its sampler and its environment.

        Args:
            trainable: False adds no adapter that a model does not have, and nothing can be trained.
            mesh: which ranks hold which agent; default: all in this process.
        """
        team = Team.load(
            agent_arguments(self.args),
            self.sources,
            self.tokenizers,
            device=self.launch.device,
            dtype=self.dtype,
            seed=self.args.seed,
            mesh=mesh,
            zero=self.launch.zero if self.launch.zero_stage == 3 and trainable else None,
            trainable=trainable,
            **self.options,
        )
        return Collector(team, make_sampler(self.args, self.launch, team, self.dtype), self.environment)


def prepare_team(
    args: TrainingConfig | EvaluationConfig,
    launch: Launch,
    environment: Environment,
    models: Sequence[Any],
    *,
    setting: str,
    tokenizer: Any = None,
    model_config: dict[str, Any] | None = None,
) -> PreparedTeam:
    """Finds every agent's model and tokenizer, and makes the first prompts of each data set.

    Args:
        models: one an agent: ids, folders or loaded models.
        setting: what names them, for errors.
        tokenizer: one for all agents, or a list of one each; default: what lies with the models.
        model_config: `dtype` and `attn_implementation`, and `model_kwargs` for `from_pretrained`.

    Raises:
        ConfigError: a model, tokenizer or option that cannot be.
        TaskError: a formatter that makes no prompt, or a prompt too long for its model.
    """
    options = _model_options(model_config)
    dtype = launch.dtype(options.pop("dtype", None) or args.dtype)
    sources = [resolve_source(model, setting) for model in models]
    lengths = [max_model_length(source) for source in sources]  # the first to find that there is no such model
    tokenizers = load_tokenizers(sources, tokenizer)
    limits = tuple(None if n is None else n - args.max_new_tokens for n in lengths)
    for length, limit in zip(lengths, limits, strict=True):
        if limit is not None and limit < 1:
            raise ConfigError(
                f"max_new_tokens={args.max_new_tokens!r}: the model holds {length} tokens, prompt and response "
                f"together. Give less than {length}."
            )
    if isinstance(args, TrainingConfig):
        _check_targets(args, sources)
        _check_reference(args, sources)
    _check_first_prompts(args, environment, tokenizers, limits)
    if uses_vllm(args):
        check_servers(args, launch, sources, tokenizers)
    environment.limit_calls(args.reward_timeout, args.reward_fallback, args.reward_processes)
    return PreparedTeam(args, launch, environment, sources, tokenizers, limits, dtype, options)


def make_mesh(args: TrainingConfig | EvaluationConfig, launch: Launch, num_agents: int) -> Mesh:
    """The groups of ranks that hold each agent and what has ranks of its own, with the lifeline between all ranks.

    Raises:
        ConfigError: the ranks do not come out even.
    """
    placed = isinstance(args, TrainingConfig)
    agents, extras = plan_ranks(
        launch.world_size,
        num_agents,
        args.placement if placed else "shared",
        args.ranks_per_agent if placed else None,
        _extra_ranks(args) if placed else None,
    )
    mesh = Mesh.create(launch.rank, launch.world_size, agents, extras)
    Lifeline.start(mesh.world)
    return mesh


def _extra_ranks(args: TrainingConfig) -> dict[str, int]:
    return extra_ranks(args) | (critic_extra_ranks(args) if isinstance(args, ActorCriticArguments) else {})


def whole_task(task: Task | None, pieces: dict[str, Any]) -> Task:
    """The task, or the one that its pieces make up.

    Raises:
        ConfigError: both are given, or no reward.
    """
    given = [name for name, piece in pieces.items() if piece is not None]
    if task is None:
        if pieces["reward_func"] is None:
            raise ConfigError("reward_func=None: there is no reward to learn from. Give one, or task=")
        return Task(**pieces)
    if not isinstance(task, Task):
        raise ConfigError(f"task={shown(task)}: not a mlrl.Task. Give one; mlrl.task.load_task(name or file) finds one")
    if given:
        raise ConfigError(f"{given[0]}: given beside task=. Give a whole task or its pieces, not both")
    return task


def agent_arguments(args: TrainingConfig | EvaluationConfig) -> AgentArguments:
    """What a team is loaded with; evaluation has no settings of tuning, so those are the defaults there."""
    own = {field.name for field in fields(args)}
    return AgentArguments(**{f.name: getattr(args, f.name) for f in fields(AgentArguments) if f.name in own})


def _model_options(model_config: dict[str, Any] | None) -> dict[str, Any]:
    if not isinstance(model_config, dict | None):
        raise ConfigError(
            f"model_config={model_config!r}: not a dict. Its keys: dtype, attn_implementation, model_kwargs"
        )
    options = dict(model_config or {})
    if "torch_dtype" in options:
        options["dtype"] = options.pop("torch_dtype")
    unknown = sorted(set(options) - {"dtype", "attn_implementation", "model_kwargs"})
    if unknown:
        raise ConfigError(f"model_config={unknown[0]!r}: unknown key. Known: dtype, attn_implementation, model_kwargs")
    if isinstance(options.get("dtype"), torch.dtype):
        options["dtype"] = str(options["dtype"]).removeprefix("torch.")
    types = setting_types(AgentArguments)
    for name in ("dtype", "attn_implementation"):
        if name in options:
            check_field(name, options[name], types[name])
    return options


def _check_targets(args: TrainingConfig, sources: Sequence[Source]) -> None:
    """Every target of fresh adapters is found among the linear layers of its model, the output layer excepted."""
    targets = args.lora_target_modules
    if args.tuning == "full" or targets in ("all-linear", ["all-linear"]):
        return
    for source in {source.name: source for source in sources if source.adapter is None}.values():
        if isinstance(source.base, PeftModel):
            continue
        layers, head = _linear_layers(source)
        for target in targets if isinstance(targets, list) else [targets]:
            found = _targeted(target, layers, is_regex=not isinstance(targets, list))
            if not found or head in found:
                wrong = "the output layer, which has no adapter here" if found else "no linear layer"
                own = sorted({name.split(".")[-1] for name in layers if name != head})
                raise ConfigError(
                    f"lora_target_modules={targets!r}: {target!r} finds {wrong}, in {source.name}. "
                    f"Name some of {', '.join(own)}, or all-linear"
                )


def _linear_layers(source: Source) -> tuple[list[str], str | None]:
    """Paths of a model's linear layers, and of its output layer; a named model is built without weights for that."""
    with torch.device("meta"):
        named = isinstance(source.base, str)
        model = AutoModelForCausalLM.from_config(source.config) if named else source.base
    modules = list(model.named_modules())
    layers = [name for name, module in modules if isinstance(module, nn.Linear | Conv1D)]
    return layers, next((name for name, module in modules if module is model.get_output_embeddings()), None)


def _targeted(target: str, layers: Sequence[str], is_regex: bool) -> list[str]:
    """The layers that a target finds, as peft reads it: the last parts of a path, or a regex of all of it."""
    if not is_regex:
        return [name for name in layers if name == target or name.endswith(f".{target}")]
    try:
        return [name for name in layers if re.fullmatch(target, name)]
    except re.error as error:
        raise ConfigError(f"lora_target_modules={target!r}: is no regex ({error}). Correct it, or give names") from None


def _check_reference(args: TrainingConfig, sources: Sequence[Source]) -> None:
    """A reference model of its own can be found and speaks the agents' tokens."""
    if args.reference_model is None or args.no_reference:
        return
    reference = resolve_source(args.reference_model, "reference_model")
    tokens = _vocabulary(reference)
    if reference.adapter is not None:
        raise ConfigError(f"reference_model={args.reference_model!r}: is an adapter. Name a full model")
    for agent, source in enumerate(sources):
        if _vocabulary(source) != tokens:
            raise ConfigError(
                f"reference_model={args.reference_model!r}: has {tokens} tokens, and agent {agent}, {source.name}, "
                f"{_vocabulary(source)}. Name a model with the agents' vocabulary"
            )


def _vocabulary(source: Source) -> int:
    return source.config.get_text_config().vocab_size


def _check_first_prompts(
    args: TrainingConfig | EvaluationConfig,
    environment: Environment,
    tokenizers: Sequence[Any],
    limits: Sequence[int | None],
) -> None:
    """Formats and tokenizes the first rows, so that a wrong formatter or template shows before models load."""
    for name in ("eval_dataset",) if isinstance(args, EvaluationConfig) else ("train_dataset", "eval_dataset"):
        dataset = getattr(environment.task, name)
        if dataset is None or not hasattr(dataset, "__len__"):
            continue
        contents = environment.initial_prompts(dict(dataset[0]), item_index=0)
        for agent, content in enumerate(contents):
            tokenize_prompt(
                tokenizers[agent],
                content,
                max_prompt_tokens=args.max_prompt_tokens,
                limit=limits[agent],
                where=f"{name} item 0, turn 0, agent {agent}",
            )
