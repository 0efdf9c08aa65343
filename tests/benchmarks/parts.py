"""The halves of a step beside what they replace: sampling beside `generate`, a tree's update beside one row a sample.

    python -m tests.benchmarks.parts

Everything runs in one process, on the same model, weights and tokens; times are the best of `--repeats`. Gradients of
the two updates are compared, so that the time saved is not work left out; where ours multiplies by another library than
PyTorch (`mlrl.models.products`), a second time with that library on both sides.
"""

import argparse
import tempfile
import time
from collections.abc import Callable

import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from mlrl.embedded import embedded_model_path
from mlrl.models.linear import quicken_linears
from mlrl.models.products import onednn_pays
from mlrl.rollout.sampler import Request, SamplingParams
from mlrl.trainers import MAGRPOConfig, MAGRPOTrainer
from mlrl.trainers.samples import Sample, micro_batches
from tests.benchmarks.ours import gemm_peak, useful_flops

SUBJECTS = ("a lighthouse", "the tide", "an old clock", "a lost letter", "the first snow", "a night train", "two moons")
PLACES = ("in the north", "by the river", "after the war", "in a dream", "on a small island", "at noon", "in 1900")


def make_trainer(model: str, tuning: str, folder: str, **settings) -> MAGRPOTrainer:
    """One agent whose adapter, where it has one, is not at zero."""
    args = MAGRPOConfig(
        **{"tuning": tuning, "num_agents": 1, "dtype": "float32", "output_dir": folder, "eval_interval": 0} | settings
    )
    rows = [{"prompt": "word " * (args.max_prompt_tokens or 1)}]
    trainer = MAGRPOTrainer(
        agent_model=model,
        reward_func=lambda first: [float(len(set(text))) for text in first],
        external_transition=lambda prompt, agent_completions: [prompt + agent_completions[0] + " Once more."],
        train_dataset=rows,
        args=args,
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.team.agents[0].parameters if tuning == "lora" else []:
            parameter.add_(0.01 * torch.randn_like(parameter))
    return trainer


def best_of(repeats: int, run: Callable[[], None]) -> float:
    """Seconds of the fastest of several runs."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def compare_sampling(model: str, tuning: str, rows: int, tokens: int, repeats: int) -> None:
    """Different prompts, one response each, all of full length."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [f"Tell me about {SUBJECTS[i % 7]} {PLACES[i // 7 % 7]}, part {i}." for i in range(rows)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(model, tuning, folder)
        trainer.save_model(folder)
        loader = AutoPeftModelForCausalLM if tuning == "lora" else AutoModelForCausalLM
        plain = loader.from_pretrained(f"{folder}/agent_0", dtype=torch.float32).eval()
    trainer.sampler.min_new_tokens = tokens
    requests = [Request(0, prompt, [(0, "benchmark", i)]) for i, prompt in enumerate(prompts)]
    params = SamplingParams(max_new_tokens=tokens)
    ours = best_of(repeats, lambda: trainer.sampler.sample(requests, params))
    tokenizer.padding_side = "left"
    padded = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
    settings = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "repetition_penalty": 1.0}
    lengths = {"min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": tokenizer.eos_token_id}

    def generate() -> None:
        with torch.no_grad():
            plain.generate(**padded, **settings, **lengths)

    theirs = best_of(repeats, generate)
    report(f"sampling, {rows} rows × {tokens} tokens, {tuning}", ours, "transformers generate", theirs, rows * tokens)
    work = useful_flops(trainer, sum(map(len, prompts)) + rows * tokens, rows * tokens)
    report_share("sampling", work, ours)


def compare_update(model: str, prompt_tokens: int, tokens: int, generations: int, repeats: int) -> None:
    """Forward and backward of a two-turn tree, and of its samples as padded rows of a plain PEFT model."""
    with tempfile.TemporaryDirectory() as folder:
        tree_settings = {"num_turns": 2, "num_generations": generations, "max_new_tokens": tokens}
        # prompts are cut to this length, and so is what the second turn adds to the first
        trainer = make_trainer(model, "lora", folder, max_prompt_tokens=prompt_tokens, **tree_settings)
        trainer.save_model(folder)
        plain = AutoPeftModelForCausalLM.from_pretrained(f"{folder}/agent_0", dtype=torch.float32, is_trainable=True)
    trainer.sampler.min_new_tokens = tokens
    growth = trainer.growth(max_prompt_tokens=None, generations=(generations,) * 2)
    item = {"prompt": "word " * prompt_tokens}
    trees = trainer.collector.collect([(0, item)], growth)
    samples = trainer.estimate(trees)[0]
    policy = trainer.team.agents[0].policy
    shared, rows = trainer.team.agents[0].parameters, [p for p in plain.parameters() if p.requires_grad]

    def update_tree() -> None:
        clear(shared)
        with policy.use():
            for micro in micro_batches(samples, 2048):
                scored, _ = policy.logprobs(micro.tree, 1.0)
                weights = torch.cat([torch.full((s.length,), s.weight * s.advantage) for s in micro.samples])
                (-(weights * scored.logprobs_L).sum()).backward()

    def update_rows() -> None:
        clear(rows)
        for start in range(0, len(samples), 4):
            row_loss(plain, samples[start : start + 4]).backward()

    count = sum(sample.length for sample in samples)
    unique = count + sum(len(n.prompts[0].token_ids) - n.prompts[0].reused for n in trees[0].nodes())
    ours = best_of(repeats, update_tree)
    name = f"update of a 2-turn {generations}×{generations} tree, prompt {prompt_tokens}, responses {tokens}"
    report(name, ours, "one row a sample", best_of(repeats, update_rows), count)
    report_share("update", 2 * useful_flops(trainer, unique, count), ours)  # forward and input gradients
    report_gradients(trainer, plain)
    if onednn_pays():
        quicken_linears(plain)  # what the tree alone brings, without the library of the products
        report("  the same products on both sides", ours, "one row a sample", best_of(repeats, update_rows), count)
        report_gradients(trainer, plain)


def report_gradients(trainer: MAGRPOTrainer, plain: torch.nn.Module) -> None:
    """How far the gradients of the two updates lie apart."""
    by_name = dict(plain.named_parameters())
    distances, square, whole = [], 0.0, 0.0
    for name, parameter in trainer.team.bases[0].model.named_parameters():
        if parameter.grad is not None:
            other = next(p for n, p in by_name.items() if n.endswith(name.replace("agent_0", "default")))
            distance, norm = float((parameter.grad - other.grad).norm()), float(other.grad.norm())
            distances.append(distance / norm)
            square, whole = square + distance**2, whole + norm**2
    relative, worst = (square / whole) ** 0.5, max(distances)
    print(f"  relative difference of the gradient: {relative:.1e}, of a weight's at most {worst:.1e}", flush=True)


def row_loss(model, samples: list[Sample]) -> torch.Tensor:
    """Policy-gradient loss of some samples, each a padded row of prompt and response."""
    rows = [[*s.node.prompts[0].token_ids, *s.response.token_ids] for s in samples]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        ids[place, : len(row)], mask[place, : len(row)] = torch.tensor(row), 1
    network = model.get_base_model()
    hidden = network.model(input_ids=ids, attention_mask=mask)[0]
    loss = 0.0
    for place, (row, sample) in enumerate(zip(rows, samples, strict=True)):
        logits = network.lm_head(hidden[place, len(row) - sample.length - 1 : len(row) - 1])
        targets = torch.tensor(sample.response.token_ids)
        loss = loss - sample.weight * sample.advantage * logits.log_softmax(-1).gather(1, targets[:, None]).sum()
    return loss


def clear(parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def report(name: str, ours: float, other: str, theirs: float, tokens: int) -> None:
    print(
        f"{name}: mlrl {ours:.1f} s ({tokens / ours:.0f} tokens/s), {other} {theirs:.1f} s: "
        f"{ours / theirs:.2f} (1/{theirs / ours:.1f})",
        flush=True,
    )


def report_share(name: str, flops: float, seconds: float) -> None:
    """Useful work beside the best matrix product of the machine, measured now."""
    peak = gemm_peak()
    print(
        f"  {name}: {flops / seconds / 1e9:.0f} GFLOP/s, {flops / seconds / peak / 1e7:.0f} % of {peak:.0f}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="model folder; default: the embedded one")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--prompt_tokens", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    model = args.model or str(embedded_model_path())
    for tuning in ("lora", "full"):
        compare_sampling(model, tuning, args.rows, args.tokens, args.repeats)
    compare_update(model, args.prompt_tokens, args.tokens, args.generations, args.repeats)


if __name__ == "__main__":
    main()
