"""Sampling in this process and on a vLLM server, side by side: the same prompts, adapters and lengths, in one run.

    python -m tests.benchmarks.vllm --vllm_python /path/to/vllm-env/bin/python

No response ends before its full length, so that work is equal. Beside tokens a second it tells tokens a second of CPU
time, of all processes that take part, which says more where other programs run.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch

from mlrl.rollout.prompts import tokenize_prompt
from mlrl.rollout.sampler import Request, SamplingParams
from mlrl.trainers import MAGRPOConfig, MAGRPOTrainer
from mlrl.trainers.rollout_setup import make_sampler
from tests.benchmarks.ours import STORIES, chat, reward


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--agents", type=int, default=2)
    parser.add_argument("--items", type=int, default=4)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vllm_python", default=sys.executable)
    parser.add_argument("--vllm_devices", nargs="+")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        trainer = MAGRPOTrainer(
            agent_model=args.model,
            num_agents=args.agents,
            formatters=chat,
            reward_func=reward,
            train_dataset=[{"prompt": story} for story in STORIES[: args.items]],
            args=MAGRPOConfig(output_dir=folder, max_new_tokens=args.tokens),
        )
        for agent in trainer.team.agents:
            agent.stop_ids = frozenset()
            for parameter in agent.parameters:  # adapters that do something
                parameter.data += 0.01 * torch.randn_like(parameter)
        settings = MAGRPOConfig(
            rollout_backend="vllm",
            vllm_spawn=True,
            vllm_python=args.vllm_python,
            vllm_devices=args.vllm_devices,
            vllm_args={"max_model_len": 128 + args.tokens},
            vllm_start_timeout=1800.0,
            max_new_tokens=args.tokens,
        )
        requests = _requests(trainer, args)
        on_server = make_sampler(settings, trainer.launch, trainer.team, trainer.dtype)
        try:
            started = time.perf_counter()
            on_server.open(Path(folder))
            ready_s = time.perf_counter() - started
            server = on_server.spawned[0].process.pid
            warm_up = [Request(r.agent, r.prompt, r.keys[:1]) for r in requests[: args.agents]]
            on_server.sample(warm_up, SamplingParams(max_new_tokens=4))
            rows = [
                _measured("in process", trainer.sampler, requests, args.tokens, None),
                _measured("vLLM, weights in place", on_server, requests, args.tokens, server),
            ]
            for agent in trainer.team.agents:
                agent.parameters[0].data += 1e-3
            rows.append(_measured("vLLM, after an update", on_server, requests, args.tokens, server))
        finally:
            on_server.close()
    print(f"server ready after {ready_s:.0f} s; {args.threads} threads, {trainer.launch.device.type}")
    for row in rows:
        print(json.dumps(row))


def _requests(trainer: MAGRPOTrainer, args: argparse.Namespace) -> list[Request]:
    """Every agent's K responses to every story."""
    rows = trainer.task.train_dataset
    prompts = [tokenize_prompt(agent.tokenizer, chat(row)).token_ids for row in rows for agent in trainer.team.agents]
    return [
        Request(n % args.agents, prompt, [(1, "train", n, (), n % args.agents, k) for k in range(args.generations)])
        for n, prompt in enumerate(prompts)
    ]


def _measured(name: str, sampler, requests: list[Request], tokens: int, server: int | None) -> dict:
    before, wall = _cpu_s(server), time.perf_counter()
    drawn = sampler.sample(requests, SamplingParams(max_new_tokens=tokens))
    wall, cpu = time.perf_counter() - wall, _cpu_s(server) - before
    count = sum(len(response.token_ids) for responses in drawn for response in responses)
    assert count == tokens * sum(len(request.keys) for request in requests), "every response must be of full length"
    return {
        **{"sampler": name, "tokens": count, "wall_s": round(wall, 1), "tokens_per_s": round(count / wall, 1)},
        **{"cpu_s": round(cpu, 1), "tokens_per_cpu_s": round(count / cpu, 1)},
    }


def _cpu_s(watchdog: int | None) -> float:
    """CPU time of this process and, where there is one, of the server under this watchdog, with all its processes."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    total = used.ru_utime + used.ru_stime
    if watchdog is None:
        return total
    [session] = Path(f"/proc/{watchdog}/task/{watchdog}/children").read_text().split()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # gone meanwhile
            continue
        if fields[3] == session:
            total += (int(fields[11]) + int(fields[12])) / 100
    return total


if __name__ == "__main__":
    main()
