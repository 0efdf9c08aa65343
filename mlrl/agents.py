"""The team: which network, adapter and tokenizer each agent has, how they are loaded, and how they are saved.

Agents whose model is the same share one frozen base and differ by their LoRA adapters; with full tuning every agent has
a network of its own. Loading goes in two steps, so that a wrong name or prompt is found before weights are read:
`mlrl.sources` first, `Team.load` then.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from mlrl.agent_loading import Loading, check_sources, find_stop_ids, load_frozen_adapter, load_policy, source_key
from mlrl.config import AgentArguments
from mlrl.errors import ConfigError
from mlrl.models.base import Base, Policy
from mlrl.parallel.mesh import Mesh
from mlrl.parallel.zero import count
from mlrl.quiet import quiet_models
from mlrl.rollout.streams import derive_seed
from mlrl.sources import Source, check_vocabulary, resolve_source
from mlrl.storage import whole_files


@dataclass
class Agent:
    """One member of the team.

    Attributes:
        policy: its network and adapter; None on ranks that do not hold it.
        parameters: what training changes; empty on those ranks.
        reference: the frozen initial policy where a reference KL is asked for, on the ranks that hold that.
    """

    index: int
    tokenizer: PreTrainedTokenizerBase
    source: Source
    policy: Policy | None = None
    stop_ids: frozenset[int] = frozenset()
    parameters: list[nn.Parameter] = field(default_factory=list)
    reference: Policy | None = None

    @property
    def is_here(self) -> bool:
        """Whether this process holds it."""
        return self.policy is not None

    @property
    def base(self) -> Base:
        return self.policy.base

    @property
    def adapter(self) -> str | None:
        return self.policy.adapter

    def decode(self, token_ids: list[int]) -> str:
        """Text of a response, without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        """Writes a PEFT adapter, or a full model, with its tokenizer."""
        with whole_files(folder) as place:
            self._save(place)

    def _save(self, folder: Path) -> None:
        self._save_weights(folder)
        self.tokenizer.save_pretrained(folder)

    def save_weights(self, folder: Path) -> None:
        """Writes a PEFT adapter, or a full model, alone."""
        with whole_files(folder) as place:
            self._save_weights(place)

    def _save_weights(self, folder: Path) -> None:
        if self.adapter is None:
            self.base.model.save_pretrained(folder)
            return
        peft_model = self.base.peft_model
        state = get_peft_model_state_dict(peft_model, adapter_name=self.adapter)
        state = {name: weight.detach().cpu().contiguous() for name, weight in state.items()}
        save_file(state, folder / "adapter_model.safetensors")
        lora = copy.copy(peft_model.peft_config[self.adapter])
        lora.inference_mode, lora.base_model_name_or_path = True, self.source.place
        lora.save_pretrained(folder)


@dataclass
class Team:
    """All agents, and the bases that this process holds for them.

    Attributes:
        mesh: which ranks hold which agent.
    """

    agents: list[Agent]
    bases: list[Base]
    shared_parameters: bool
    loading: Loading
    mesh: Mesh

    @classmethod
    @quiet_models()
    def load(
        cls,
        arguments: AgentArguments,
        sources: Sequence[Source],
        tokenizers: Sequence[PreTrainedTokenizerBase],
        *,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        mesh: Mesh | None = None,
        zero: dict | None = None,
        attn_implementation: str | None = None,
        model_kwargs: dict | None = None,
        trainable: bool = True,
    ) -> Team:
        """Loads networks and adapters. Raises ConfigError where a model, an adapter or a target module is missing.

        Args:
            mesh: which ranks hold which agent; default: one process holds all.
            zero: settings of ZeRO-3, where networks are to be sharded over their agents' ranks.
            trainable: False takes every model as it is, without a fresh adapter, and shares what is the same.
        """
        check_sources(sources, tokenizers, arguments)
        mesh = mesh or Mesh.alone(len(sources))
        attention = attn_implementation or arguments.attn_implementation
        loading = Loading(arguments, dtype, device, attention, model_kwargs or {}, zero)
        agents = [
            Agent(index, tokenizer, source)
            for index, (source, tokenizer) in enumerate(zip(sources, tokenizers, strict=True))
        ]
        team = cls(agents, [], arguments.share_parameters, loading, mesh)
        team._load_policies(arguments, seed, trainable)
        team._mark_trained(trainable)
        if arguments.gradient_checkpointing and trainable:
            for base in team.bases:  # last, since loading an adapter turns it off
                base.enable_gradient_checkpointing()
        return team

    def _load_policies(self, arguments: AgentArguments, seed: int, trainable: bool) -> None:
        """The policy of every agent that lives here."""
        bases: dict[object, Base] = {}
        adapters: dict[object, str] = {}
        for agent in self.agents:
            source, first = agent.source, self.agents[0]
            if not self.mesh.holds(agent.index):
                continue
            if arguments.share_parameters and agent is not first:
                agent.policy = first.policy
            else:
                own_copy = trainable and arguments.tuning == "full"
                key = (source_key(source.base), agent.index if own_copy else None)
                if own_copy and not isinstance(source.base, str) and any(k[0] == key[0] for k in bases):
                    raise ConfigError(
                        "agents: one loaded model was given to several agents with tuning='full'. "
                        "Give each its own copy, or set share_parameters"
                    )
                if key not in bases:
                    bases[key] = self.loading.base(source)
                    if not own_copy:
                        self.loading.frozen(bases[key], self.mesh.agents[agent.index])
                if trainable or source.adapter is not None or isinstance(source.base, PeftModel):
                    adapter_seed = derive_seed(seed, "lora", agent.index)
                    name = f"agent_{agent.index}"
                    agent.policy = load_policy(bases[key], source, arguments, name, adapters, adapter_seed)
                else:
                    agent.policy = Policy(bases[key], None)
            agent.parameters = agent.policy.parameters()
            if not agent.parameters:
                name = source.adapter or source.name
                raise ConfigError(f"agents={name}: its adapter is not LoRA. Use a LoRA adapter")
            agent.stop_ids = find_stop_ids(agent.tokenizer, agent.policy.base.model)
        self.bases = list(bases.values())

    def _mark_trained(self, trainable: bool = True) -> None:
        """Only what agents train has gradients: PEFT leaves all adapters but one frozen, a loaded model anything."""
        trained = {id(p) for agent in self.agents for p in agent.parameters} if trainable else set()
        for base in self.bases:
            for parameter in base.model.parameters():
                parameter.requires_grad_(id(parameter) in trained)

    @property
    def trainable(self) -> list[list[Agent]]:
        """Agents that live here by the weights they train: one group an agent, or all where parameters are shared."""
        here = [agent for agent in self.agents if agent.is_here]
        return [here] if self.shared_parameters and here else [[agent] for agent in here]

    @quiet_models()
    def add_references(self, reference_model: str | None = None) -> None:
        """Gives every agent its frozen reference, on the ranks that hold it. Call before the first update.

        With LoRA it is the base without adapter where the adapter started at zero, else a frozen copy of the starting
        adapter; with full tuning a frozen copy, one for all agents that started from the same weights. On ranks of
        its own a reference is loaded from where its agent started.
        """
        frozen: dict[object, Policy] = {}
        for agent in self.agents:
            if not self.mesh.reference(agent.index).member:
                continue
            if reference_model is not None:
                key = reference_model
                source = resolve_source(reference_model, "reference_model")
                if source.adapter is not None:
                    raise ConfigError(f"reference_model={reference_model!r}: is an adapter. Name a full model")
                rows, where = source.config.get_text_config().vocab_size, f"reference_model={reference_model!r}"
                check_vocabulary(f"{where} with the tokenizer of agent {agent.index}", agent.tokenizer, rows, "it")
            elif agent.is_here and agent.adapter is not None:
                agent.reference = self._adapter_reference(agent, frozen)
                continue
            else:
                key, source = (source_key(agent.source.base), agent.source.adapter), agent.source
            if key not in frozen:
                copied = reference_model is None and agent.is_here
                base = agent.base.copy() if copied else self.loading.base(source)
                self.loading.frozen(base, self.mesh.reference(agent.index))
                frozen[key] = Policy(base, load_frozen_adapter(base, source))
            agent.reference = frozen[key]

    def _adapter_reference(self, agent: Agent, frozen: dict[object, Policy]) -> Policy:
        """What an adapter that lives here started from."""
        if agent.source.adapter is None and not isinstance(agent.source.base, PeftModel):
            return Policy(agent.base, None)
        key, adapter = (id(agent.base), agent.adapter), f"reference_{agent.adapter}"
        if key not in frozen:
            agent.base.copy_adapter(agent.adapter, adapter)
            frozen[key] = Policy(agent.base, adapter)
        return frozen[key]

    def save(self, directory: str | Path) -> None:
        """Writes directory/agent_0, agent_1 …; shared parameters are written under every agent.

        Called on all ranks; the first of an agent's writes it.
        """
        with quiet_models():
            for agent in self.agents:
                if not agent.is_here:
                    continue
                with agent.base.whole() if agent.adapter is None else nullcontext():
                    if self.mesh.agents[agent.index].is_first:
                        agent.save(Path(directory) / f"agent_{agent.index}")
        self.mesh.world.barrier()

    def num_parameters(self) -> tuple[int, int]:
        """(trained, all) parameters; what data-parallel ranks hold alike counts once, a base in two blocks twice."""
        groups: dict[tuple[int, ...], set[int]] = {}
        for agent in self.agents:
            groups.setdefault(self.mesh.agents[agent.index].ranks, set()).add(agent.index)
        counted = (0, 0)
        for ranks, members in groups.items():
            if self.mesh.world.rank == ranks[0]:
                here = [self.agents[index] for index in members]
                trained = {id(p): count(p) for agent in here for p in agent.parameters}
                every = {id(p): count(p) for agent in here for p in agent.base.model.parameters()}
                counted = (counted[0] + sum(trained.values()), counted[1] + sum(every.values()))
        counts = self.mesh.world.gather(counted)
        return sum(trained for trained, _ in counts), sum(every for _, every in counts)
