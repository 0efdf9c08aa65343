"""Runs our MAGRPO on a fixed workload and prints its cost as one JSON line; the counterpart of the peers' drivers.

Every response is exactly `--tokens` long (its end token is suppressed), so that work is equal. Run as a process of its
own, so that peak memory is this workload's alone.
"""

import argparse
import contextlib
import json
import math
import os
import resource
import tempfile
import time

import torch

from mlrl.models.products import matmul
from mlrl.parallel.group import Group
from mlrl.trainers import MAGRPOConfig, MAGRPOTrainer

STORIES = [
    "Describe a city in the clouds.",
    "Invent a new holiday.",
    "Write a bedtime story for a dragon.",
    "Explain how teleportation might work.",
    "Tell a story about dinosaurs.",
    "Describe a world without electricity.",
    "Create a superhero with a unique power.",
    "Write a scene where the moon talks.",
]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--agents", type=int, default=2)
    parser.add_argument("--items", type=int, default=4)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--prompt_words", type=int, default=0, help="words of filler in front of each task")
    parser.add_argument("--tuning", default="lora", choices=["lora", "full"])
    parser.add_argument("--items_per_update", type=int, default=2)
    parser.add_argument("--micro_batch_tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def reward(*answers: list[str]) -> list[float]:
    ratios = [len(own[-1]) / max(len(own[0]), 1) for own in zip(*answers, strict=True)]
    return [math.exp(-max(2 - r, r - 3, 0)) for r in ratios]


def feedback(prompt: str, agent_completions: list[str]) -> list[str]:
    return [f"{prompt}\nYour last answer had {len(c)} characters. Improve it." for c in agent_completions]


def chat(item: dict) -> list[dict]:
    return [{"role": "user", "content": item["prompt"]}]


def gemm_peak() -> float:
    """Best float32 matrix product of this machine now, by PyTorch's own way or by ours, in GFLOP/s."""
    best = 0.0
    for size in (1024, 2048, 4096):
        a, b = torch.randn(size, size), torch.randn(size, size)
        for multiply in (torch.mm, matmul) * 3:
            start = time.perf_counter()
            multiply(a, b)
            best = max(best, 2 * size**3 / (time.perf_counter() - start) / 1e9)
    return best


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    phrase = "some background that makes the prompt longer"
    filler = " ".join([phrase] * (args.prompt_words // 7 + 1)) if args.prompt_words else ""
    rows = [{"prompt": f"{filler}\n{STORIES[i % len(STORIES)]}".strip()} for i in range(args.items)]
    with contextlib.ExitStack() as stack:
        folder = os.environ.get("BENCHMARK_FOLDER") or stack.enter_context(tempfile.TemporaryDirectory())
        trainer = MAGRPOTrainer(
            agent_model=args.model,
            num_agents=args.agents,
            formatters=chat,
            reward_func=reward,
            external_transition=feedback if args.turns > 1 else None,
            train_dataset=rows,
            wandb_config={"config_sections": {"output": {"verbose": False}}},
            args=MAGRPOConfig(
                num_turns=args.turns,
                num_generations=args.generations,
                max_new_tokens=args.tokens,
                rollout_batch_size=args.items_per_update,
                agent_learning_rate=1e-6,
                micro_batch_tokens=args.micro_batch_tokens,
                tuning=args.tuning,
                eval_interval=0,
                completions_steps=0,
                output_dir=folder,
                dtype="float32",
                save_steps=0,  # as the peers, which write no checkpoints
            ),
        )
        trainer.sampler.min_new_tokens = args.tokens
        cost, communication = _counted(trainer), _timed_communication()
        start = time.perf_counter()
        trainer.train()
        wall = time.perf_counter() - start
        lines = [json.loads(line) for line in trainer.run_folder.metrics.read_text().splitlines()]
    if not trainer.launch.is_main:
        return
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    nodes = sum(args.generations**turn for turn in range(args.turns))
    completion = args.items * args.agents * args.generations * nodes * args.tokens
    assert trainer.generated_tokens == completion, "every response must be of full length"
    assert cost["trained"] == completion, "every sampled token must be trained, once"
    sampling, update = (sum(line[f"time/{name}_s"] for line in lines) for name in ("rollout", "update"))
    peak = gemm_peak()
    passes = 2 if args.tuning == "lora" else 3  # forward, input gradient, and with full tuning the weight gradient
    print(
        json.dumps(
            {
                "system": f"mlrl ({args.tuning})",
                "sequences": completion // args.tokens,
                "wall_s": round(wall, 1),
                "sampling_s": round(sampling, 1),
                "update_s": round(update, 1),
                "sampling_tokens_per_s": round(completion / sampling, 1),
                "update_tokens_per_s": round(completion / update, 1),
                "sampling_share_of_peak": round(
                    useful_flops(trainer, cost["sampled_unique"], completion) / sampling / peak / 1e9, 3
                ),
                "update_share_of_peak": round(
                    passes * useful_flops(trainer, cost["unique"], completion) / update / peak / 1e9, 3
                ),
                "gemm_gflops": round(peak, 1),
                "peak_gb": round(peak_gb, 2),
                "updates": len(lines),
                "processes": trainer.world.size,
                "communication_share": round(communication["seconds"] / wall, 3),
            }
        )
    )


def _timed_communication() -> dict[str, float]:
    """Seconds that this rank spends exchanging with others, or waiting for them to come to it."""
    spent = {"seconds": 0.0}

    def timed(method):
        def call(self, *args, **kwargs):
            start = time.perf_counter()
            try:
                return method(self, *args, **kwargs)
            finally:
                spent["seconds"] += time.perf_counter() - start

        return call

    for name in ("gather", "sum_", "barrier"):
        setattr(Group, name, timed(getattr(Group, name)))
    return spent


def _counted(trainer: MAGRPOTrainer) -> dict[str, int]:
    """Counts the distinct tokens that sampling and learning need, and the completion tokens that are trained."""
    cost = {"unique": 0, "sampled_unique": 0, "trained": 0}
    update = trainer.update

    def counting(samples):
        nodes = {id(s.node): s.node for own in samples for s in own}.values()
        prompts = sum(len(p.token_ids) - p.reused for node in nodes for p in node.prompts)
        cost["trained"] += sum(s.length for own in samples for s in own)
        cost["unique"] += prompts + sum(s.length for own in samples for s in own)
        cost["sampled_unique"] += sum(len(p.token_ids) for node in nodes for p in node.prompts)
        cost["sampled_unique"] += sum(s.length for own in samples for s in own)
        return update(samples)

    trainer.update = counting
    return cost


def useful_flops(trainer: MAGRPOTrainer, tokens: int, completion_tokens: int) -> float:
    """Useful work of one pass: the blocks on each distinct token, the head on each completion token."""
    base = trainer.team.bases[0]
    embedding = base.model.get_input_embeddings().weight.numel()
    block = sum(p.numel() for n, p in base.model.named_parameters() if "lora_" not in n) - embedding
    return 2.0 * block * tokens + 2.0 * embedding * completion_tokens


if __name__ == "__main__":
    main()
