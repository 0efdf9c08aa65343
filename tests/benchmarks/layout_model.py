"""How much memory a GPU needs and how much it sends a step, in every layout: the table of accelerate_configs/README.md.

    python -m tests.benchmarks.layout_model            # all GPU counts
    python -m tests.benchmarks.layout_model 4 24       # these

A model, not a measurement: its constants say where each comes from. GB are 1e9 bytes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

# Bytes a weight. "counted": the bytes of all tensors alive, divided by the number of weights, on CPUs.
WEIGHT = 2  # bfloat16
MASTER = 12  # float32 master and two AdamW moments (counted); sharded by every stage of ZeRO
GRADIENT = 4  # float32, the sum over micro-batches (counted); sharded from ZeRO-2 on
MICRO_GRADIENT = 2  # bfloat16, of one micro-batch, before it is added to that sum (counted)
ADAPTER, ADAPTER_GRADIENT = 12, 4  # PEFT makes adapters float32: they are their own masters (counted)
SENT_GRADIENT, SENT_ADAPTER = 2, 4  # DeepSpeed sends gradients in the type of the weights
# Bytes of activations a token and layer that autograd keeps, a Llama-like layer in bfloat16 (fitted to counted bytes),
# times hidden size, MLP size, key and value width.
KEPT = {"lora": (18.3, 4.0, 4.0), "full": (22.1, 6.0, 4.0)}
KEPT_CHECKPOINT = 2.0  # times hidden size, with gradient checkpointing (counted)
# Assumptions, in bytes.
LOGITS = 3 * 0.5e9  # a chunk of 512 MB of logits, its softmax and its gradient
BUCKET = 5e8 * WEIGHT  # DeepSpeed's reduce_bucket_size
LIVE = 1e9 * WEIGHT  # DeepSpeed's stage3_max_live_parameters: what ZeRO-3 holds gathered at most
OVERHEAD = 2e9  # CUDA context, NCCL's buffers, fragments
GATHERS = 3  # of a layer a micro-batch under ZeRO-3: forward, recomputation, backward


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder with rotary positions, gated MLP and biases on queries, keys and values."""

    name: str
    layers: int
    hidden: int
    kv: int  # width of keys, and of values
    mlp: int
    vocabulary: int
    tied: bool

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(in, out) of a layer's matrices."""
        h, kv, mlp = self.hidden, self.kv, self.mlp
        return [(h, h), (h, kv), (h, kv), (h, h), (h, mlp), (h, mlp), (mlp, h)]

    @property
    def parameters(self) -> int:
        layer = sum(i * o for i, o in self.linears) + self.hidden + 2 * self.kv + 2 * self.hidden
        return self.layers * layer + self.hidden * (1 + self.vocabulary * (1 if self.tied else 2))

    def adapter_parameters(self, rank: int) -> int:
        """Of LoRA on all linear layers but the head."""
        return self.layers * sum(rank * (i + o) for i, o in self.linears)


MODELS = (
    Model("1.5B", 28, 1536, 256, 8960, 151_936, True),  # Qwen2.5-1.5B
    Model("7B", 28, 3584, 512, 18_944, 152_064, False),  # Qwen2.5-7B
    Model("32B", 64, 5120, 1024, 27_648, 152_064, False),  # Qwen2.5-32B
    Model("70B", 80, 8192, 1024, 29_568, 152_064, False),  # Qwen2.5-72B
)


@dataclass(frozen=True)
class Layout:
    """`backing`: ddp, zero1, zero2 or zero3."""

    placement: str
    tuning: str
    backing: str
    ranks: int
    agents: int = 2

    @property
    def held(self) -> int:
        """Agents on a rank."""
        return self.agents if self.placement == "shared" else 1

    @property
    def group(self) -> int:
        """Ranks that hold an agent."""
        return self.ranks * self.held // self.agents

    @property
    def stage(self) -> int:
        return 0 if self.backing == "ddp" else int(self.backing[-1])

    def part(self, from_stage: int) -> float:
        """Share that a rank holds of what is sharded from a stage on."""
        return 1 / self.group if self.stage >= from_stage else 1.0


@dataclass(frozen=True)
class Work:
    """One rollout step as a rank sees it: one turn, one update an agent."""

    sequences: int = 32  # that it samples and trains on, over all of its agents
    tokens: int = 1024  # of a sequence, prompt and response
    micro_batch_tokens: int = 4096
    lora_rank: int = 16
    gradient_checkpointing: bool = True

    @property
    def micro_batches(self) -> float:
        return self.sequences * self.tokens / self.micro_batch_tokens


def states(model: Model, layout: Layout, work: Work) -> tuple[float, float]:
    """Bytes of weights, masters and moments, held at all times, and those of gradients, added while training.

    DeepSpeed keeps the gradients of stages 1 and 3 allocated between updates: they count as held.
    """
    P, A = model.parameters, model.adapter_parameters(work.lora_rank)
    if layout.tuning == "lora":
        base = WEIGHT * P * layout.part(3)  # one for all agents
        if layout.stage in (0, 3):  # at stage 3 only the base is sharded
            return base + layout.held * ADAPTER * A, layout.held * ADAPTER_GRADIENT * A
        shard = 4 * A + MASTER * A * layout.part(1)  # the float32 weights whole, masters and moments sharded
        return base + layout.held * shard, layout.held * ADAPTER_GRADIENT * A * layout.part(2)
    rest = WEIGHT * layout.part(3) + MASTER * layout.part(1)
    gradient, passing = GRADIENT * layout.part(2), MICRO_GRADIENT if layout.stage < 2 else 0
    if layout.stage in (1, 3):
        return layout.held * P * (rest + gradient), P * passing
    return layout.held * P * rest, P * (layout.held * gradient + passing)


def kv_cache(model: Model, work: Work) -> float:
    """Bytes of keys and values of all sequences, at their end."""
    return 2 * model.layers * model.kv * WEIGHT * work.sequences * work.tokens


def activations(model: Model, tuning: str, work: Work) -> float:
    """Bytes that one micro-batch keeps for its backward pass, and a chunk of logits."""
    layer = sum(bytes * width for bytes, width in zip(KEPT[tuning], (model.hidden, model.mlp, model.kv), strict=True))
    kept = model.layers * layer
    if work.gradient_checkpointing:
        kept = model.layers * KEPT_CHECKPOINT * model.hidden + layer
    return work.micro_batch_tokens * kept + LOGITS


def memory(model: Model, layout: Layout, work: Work) -> float:
    """Peak bytes of a rank: what is always there, and the larger of sampling and training."""
    rest, gradients = states(model, layout, work)
    whole = WEIGHT * model.parameters  # what sampling gathers, one network at a time
    sampling = kv_cache(model, work) + (whole if layout.stage == 3 else 0)
    training = gradients + activations(model, layout.tuning, work)
    if layout.stage and layout.tuning == "full":
        training += BUCKET
    if layout.stage == 3:
        training += min(LIVE, whole)
    return OVERHEAD + rest + max(sampling, training)


def traffic(model: Model, layout: Layout, work: Work) -> float:
    """Bytes that a rank sends in a step; it receives as many."""
    P, A = model.parameters, model.adapter_parameters(work.lora_rank)
    ring = (layout.group - 1) / layout.group
    an_agent = work.micro_batches / layout.held  # micro-batches of one agent
    adapters = layout.held * 2 * SENT_ADAPTER * A  # an all-reduce
    if layout.stage == 3 and layout.tuning == "lora":
        gathers = GATHERS * work.micro_batches + 1  # and one for sampling
        return ring * (WEIGHT * P * gathers + adapters)
    if layout.stage == 3:
        gathers = GATHERS * an_agent + 1
        return ring * layout.held * P * (WEIGHT * gathers + SENT_GRADIENT * an_agent)
    reductions = an_agent if layout.stage == 2 else 1  # ZeRO-2 reduces after every micro-batch
    if layout.tuning == "lora":
        return ring * (adapters if layout.stage == 0 else layout.held * A * SENT_ADAPTER * (reductions + 1))
    if layout.stage == 0:
        return ring * layout.held * 2 * GRADIENT * P
    return ring * layout.held * P * (SENT_GRADIENT * reductions + WEIGHT)


def table(ranks: tuple[int, ...] = (2, 4, 8, 16, 32, 64), fits: float = 80e9) -> str:
    """Markdown: a row a layout, a column a number of GPUs, `memory / sent` in GB; what `fits` is bold."""
    work = Work()
    head = ["model", "tuning", "placement", "sharding", *(f"{count} GPUs" for count in ranks)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for model in MODELS:
        for tuning in ("lora", "full"):
            for placement in ("shared", "split"):
                for backing in ("ddp", "zero1", "zero2", "zero3"):
                    cells = [model.name, tuning, placement, backing]
                    for count in ranks:
                        layout = Layout(placement, tuning, backing, count)
                        peak, sent = memory(model, layout, work), traffic(model, layout, work)
                        mark = "**" if peak <= fits else ""
                        cells.append(f"{mark}{_gb(peak)}{mark} / {_gb(sent)}")
                    lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _gb(value: float) -> str:
    return f"{value / 1e9:.1f}" if value < 10e9 else f"{value / 1e9:.0f}"


if __name__ == "__main__":
    counts = tuple(map(int, sys.argv[1:]))
    print(table(counts) if counts else table())
