"""A run does not depend on how many ranks it has, which of them hold what, or how weights are sharded.

Every kind of run is trained in one process first; under each layout it must draw the same texts, have the same losses
to 1e-4, and change every agent's weights by the same amount to 1e-3 of that change.
"""

import json

import pytest
import torch

from tests.distributed.launching import ROOT, launch
from tests.distributed.layouts import train
from tests.tiny import save_tiny

SCRIPT = ROOT / "tests/distributed/layouts.py"

KINDS = {
    "lora": {},
    "full": {"args": {"tuning": "full", "micro_batch_tokens": 60}},
    "tree": {"args": {"num_turns": 2, "num_generations": 3, "micro_batch_tokens": 50}},
    "cross": {"args": {"joint_mode": "cross", "num_turns": 2, "num_generations": 2}},
    "clip": {
        "args": {
            **{"clip_range": 0.2, "num_updates_per_rollout": 2, "train_batch_size": 2},
            **{"reference_kl_coef": 0.1, "micro_batch_tokens": 60},
        }
    },
    "full_kl": {"args": {"tuning": "full", "reference_kl_coef": 0.1, "num_generations": 2, "micro_batch_tokens": 64}},
    "checkpointed": {"args": {"gradient_checkpointing": True, "micro_batch_tokens": 60}},
    "three": {"num_agents": 3, "args": {"num_generations": 3}},
    "mixed": {"agents": ["llama", "qwen2", "llama_bos"], "args": {"micro_batch_tokens": 60}},
    "iac": {
        **{"trainer": "IAC", "own_rewards": True},
        "args": {
            **{"num_turns": 2, "num_generations": 2, "critic_learning_rate": 1e-3, "micro_batch_tokens": 60},
            **{"lora_rank": 4},  # adapters are whole on every rank
        },
    },
    "iac_on_actor": {
        "trainer": "IAC",
        "args": {"use_separate_critic": False, "num_turns": 2, "num_generations": 2, "reference_kl_coef": 0.1},
    },
    "iac_on_actor_full": {
        "trainer": "IAC",
        "args": {
            **{"use_separate_critic": False, "tuning": "full", "num_generations": 2, "value_head_hidden_dim": 8},
            **{"critic_warmup_rollouts": 1, "max_grad_norm": 0.05, "warmup_steps": 2, "micro_batch_tokens": 60},
        },
    },
    "maac": {
        "trainer": "MAAC",
        "args": {
            **{"num_generations": 1, "critic_learning_rate": 1e-3, "tuning": "full", "clip_range": 0.2},
            **{"num_updates_per_rollout": 2, "train_batch_size": 2, "value_clip_range": 0.05},
        },
    },
    "maac_q": {
        "trainer": "MAAC",
        # AdamW makes up to a hundredth of its step of the rounding of one weight's gradient, which is 1e-8 here
        "rel": 5e-4,
        "args": {
            **{"critic_type": "q", "counterfactual_baseline": True, "critic_warmup_rollouts": 1},
            **{"critic_learning_rate": 1e-3, "num_generations": 3, "micro_batch_tokens": 100, "lora_rank": 4},
        },
    },
    "maac_other": {
        **{"trainer": "MAAC", "critic_model": "qwen2"},
        "args": {"num_generations": 2, "num_turns": 2, "critic_learning_rate": 1e-3, "micro_batch_tokens": 200},
    },
    "madpo": {
        "trainer": "MADPOIter",
        "args": {
            "comparator_policy": "history",
            "micro_batch_tokens": 60,
            "train_batch_size": 4,
            "max_grad_norm": None,
        },
    },
    "madpo_full": {
        "trainer": "MADPOIter",
        "args": {
            **{"tuning": "full", "comparator_policy": "history", "micro_batch_tokens": 60, "train_batch_size": 4},
            **{"agent_learning_rate": 1e-4},
        },
    },
    "madpo_model": {
        "trainer": "MADPOIter",
        "args": {
            **{"comparator_policy": "model", "comparator_model_name": "qwen2", "micro_batch_tokens": 60},
            **{"train_batch_size": 4, "num_turns": 2},
        },
    },
    "marlhf": {"trainer": "MARLHF", "args": {"micro_batch_tokens": 200, "num_generations": 2}},
    "marlhf_full": {
        "trainer": "MARLHFIter",
        "args": {
            **{"tuning": "full", "micro_batch_tokens": 200, "num_generations": 2, "agent_learning_rate": 1e-4},
            **{"reward_learning_rate": 1e-4, "num_train_epochs": 1},  # two steps a round
        },
    },
    "marlhf_maac": {
        "trainer": "MARLHFIter",
        # a new critic starts at the mean return, so its first gradient is rounding, which AdamW makes a step of
        "rel": 2e-2,
        "args": {
            **{"rl_algorithm": "maac", "comparator_policy": "current_copy", "critic_learning_rate": 1e-4},
            **{"micro_batch_tokens": 200, "num_generations": 2, "reward_learning_rate": 1e-3},
        },
    },
    "poisoned": {"poisoned": True},
    "poisoned_full": {"poisoned": True, "args": {"tuning": "full"}},
}
SPLIT = {"placement": "split"}


def layout(kind: str, zero: int = 0, offload: bool = False, **args) -> dict:
    base = KINDS[kind]
    where = "_".join(f"{v}" for v in args.values()) or "shared"
    name = f"{kind}-zero{zero}{'_offload' * offload}-{where}".replace("[", "").replace("]", "").replace(", ", "")
    return {
        **base,
        "name": name,
        "kind": kind,
        "zero": zero,
        "offload": offload,
        "args": {**base.get("args", {}), **args},
    }


FAST = {
    2: [
        *(layout("lora", zero) for zero in (0, 3)),
        layout("lora", 3, **SPLIT),
        layout("full", 3),
        layout("cross", 0, **SPLIT),
        layout("madpo", 2, **SPLIT),
        layout("poisoned_full", 2, offload=True),
        layout("iac", 2, **SPLIT),
        layout("maac", 3, critic_ranks=1),
        layout("iac_on_actor_full", 3),
    ],
    4: [
        layout("lora", 3, **SPLIT),
        layout("tree", 0) | {"lag": 0.5},  # three items over four ranks
        layout("tree", 3, **SPLIT, ranks_per_agent=[3, 1]),
        layout("mixed", 3, **SPLIT, ranks_per_agent=[1, 2, 1]),
        layout("full_kl", 3, **SPLIT, reference_ranks=2),
    ],
}


def resumed(kind: str, source: str, zero: int = 0, **args) -> dict:
    """A layout that goes on after the first step of another one: `source` is processes/name."""
    one = layout(kind, zero, **args)
    origin = source.replace("/", "_")
    return {
        **one,
        "name": f"{one['name']}-from-{origin}",
        "resume": f"{source.replace('/', '/runs/')}/checkpoints/checkpoint-1",
    }


RESUMED = {
    2: [
        resumed("lora", "2/lora-zero3-split", 2),
        resumed("lora", "1/lora", 3, **SPLIT),
        resumed("full", "1/full", 3),
        resumed("full", "2/full-zero3-shared", 1),
        resumed("maac", "1/maac", 2),
        resumed("iac", "2/iac-zero2-split", 0),
    ],
    1: [resumed("full", "2/full-zero3-shared"), resumed("lora", "4/lora-zero3-split")],
    4: [resumed("full_kl", "1/full_kl", 3, **SPLIT, reference_ranks=2)],
}
BLOCKS = {"three": {4: [2, 1, 1]}, "mixed": {4: [2, 1, 1]}}


def every_layout(processes: int) -> list[dict]:
    """The whole product of kinds, stages and placements that this many processes allow."""
    found = []
    for kind, base in KINDS.items():
        team = len(base.get("agents", ())) or base.get("num_agents", 2)
        for zero in (0, 1, 2, 3):
            found.append(layout(kind, zero))
            if processes % team == 0:
                found.append(layout(kind, zero, **SPLIT))
            elif processes in BLOCKS.get(kind, {}):
                found.append(layout(kind, zero, **SPLIT, ranks_per_agent=BLOCKS[kind][processes]))
    found += [layout(kind, zero, offload=True) for kind in ("lora", "full", "poisoned_full") for zero in (2, 3)]
    found += [layout(kind, zero, reference_ranks=1) for kind in ("clip", "full_kl", "madpo_full") for zero in (0, 1, 3)]
    found += [layout(kind, zero, critic_ranks=1) for kind in ("iac", "maac", "maac_q") for zero in (0, 1, 3)]
    found += [layout("marlhf", zero, reward_model_ranks=1) for zero in (0, 2, 3)]
    found += [layout("madpo_model", zero, comparator_ranks=1) for zero in (0, 2, 3)]
    if processes == 4:
        found += [layout("iac", zero, **SPLIT, critic_ranks=2) for zero in (0, 2, 3)]
        found += [layout("maac", zero, critic_ranks=2) for zero in (0, 2, 3)]
        found += [layout("madpo_full", 0, **SPLIT, reference_ranks=2)]
        found += [layout("marlhf_maac", 0, **SPLIT, reward_model_ranks=2)]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, and what the kinds of runs of the fast suite did in one process."""
    folder = tmp_path_factory.mktemp("layouts")
    for seed, kind in enumerate(("llama", "qwen2", "llama_bos")):
        save_tiny(folder / kind, kind, seed)
    run_alone(folder, [one["kind"] for layouts in (*FAST.values(), RESUMED[2]) for one in layouts])
    return folder


def run_alone(folder, kinds: list[str]) -> None:
    """These kinds of runs in one process, as far as that was not done before."""
    absent = [kind for kind in KINDS if kind in kinds and not (folder / "1" / f"{kind}.json").exists()]
    (folder / "1").mkdir(exist_ok=True)
    for kind in absent:
        train({"model": str(folder / "llama")}, with_folders(folder, {**KINDS[kind], "name": kind}), folder / "1")
        for change in changes(folder / "1", kind, kind):
            assert change.norm() > 1e-3, "weights that hardly move would hide a wrong update"


def run(folder, layouts: list[dict], processes: int) -> None:
    names = [with_folders(folder, one) for one in layouts]
    spec, out = folder / f"spec-{processes}.json", folder / str(processes)
    out.mkdir(exist_ok=True)
    spec.write_text(json.dumps({"model": str(folder / "llama"), "layouts": names}))
    options = ["--cpu"] if processes == 1 else []
    done = launch(SCRIPT, [str(spec), str(out)], processes, timeout=60 + 30 * len(layouts), options=options)
    assert done.returncode == 0, str(done)


def with_folders(folder, one: dict) -> dict:
    """A layout with the folders of its models."""
    args = dict(one.get("args", {}))
    if "comparator_model_name" in args:
        args["comparator_model_name"] = str(folder / args["comparator_model_name"])
    models = {"agents": [str(folder / a) for a in one["agents"]]} if "agents" in one else {}
    models |= {"critic_model": str(folder / one["critic_model"])} if "critic_model" in one else {}
    return {**one, **models, "args": args}


def changes(folder, name: str, kind: str) -> list[torch.Tensor]:
    """How much each agent's trained weights moved, as one vector, then those of each critic and of a reward model."""
    team = len(KINDS[kind].get("agents", ())) or KINDS[kind].get("num_agents", 2)
    files = [folder / f"{name}-agent_{agent}.pt" for agent in range(team)]
    trainer = KINDS[kind].get("trainer", "MAGRPO")
    critics = {"IAC": team, "MAAC": 1}.get(trainer, int(kind == "marlhf_maac"))
    files += [folder / f"{name}-critic_{critic}.pt" for critic in range(critics)]
    files += [folder / f"{name}-reward_model.pt"] if trainer.startswith("MARLHF") else []
    return [torch.cat([part.flatten() for part in torch.load(file)]) for file in files]


def assert_same(folder, processes: int, one: dict) -> None:
    """A layout did what one process did; one that went on from a checkpoint, what that did from there on."""
    name, kind = one["name"], one["kind"]
    here, alone = folder / str(processes), folder / "1"
    found, expected = (json.loads(file.read_text()) for file in (here / f"{name}.json", alone / f"{kind}.json"))
    if "resume" in one:
        assert 0 < len(found["metrics"]) < len(expected["metrics"]), name
        expected["metrics"] = expected["metrics"][-len(found["metrics"]) :]
        for part in ("texts", "rewards"):  # by file: the first step has none here
            assert "train-000003" in found[part] and "train-000001" not in found[part], name
            expected[part] = {file: expected[part][file] for file in found[part]}
    assert found["texts"] == expected["texts"], name
    assert found["rewards"].keys() == expected["rewards"].keys(), name
    for file, nodes in found["rewards"].items():
        for rewards, right in zip(nodes, expected["rewards"][file], strict=True):  # learned ones are a network's
            torch.testing.assert_close(torch.tensor(rewards), torch.tensor(right), rtol=1e-4, atol=1e-4, msg=name)
    assert len(found["metrics"]) == len(expected["metrics"])
    for row, right in zip(found["metrics"], expected["metrics"], strict=True):
        assert row.keys() == right.keys(), name
        for metric, value in right.items():
            rel = one.get("rel", 5e-4 if metric.endswith("grad_norm") else 1e-4)  # norms are the roughest of sums
            rel, least = (rel / 10, 1e-5) if "resume" in one else (rel, 1e-4)
            near = None if value is None else pytest.approx(value, rel=rel, abs=least)  # None: NaN
            assert row[metric] == near, f"{name}: {metric}"
    assert found["parameters"][0] == expected["parameters"][0], name  # those trained; a split base is there twice
    for agent, (change, right) in enumerate(zip(changes(here, name, kind), changes(alone, kind, kind), strict=True)):
        difference = float((change - right).norm() / right.norm())
        near = difference < max(1e-3, one.get("rel", 0))
        assert "resume" not in one or float((change - right).abs().max()) < 1e-5, f"{name}: weights {agent}"
        assert near, f"{name}: weights {agent} moved otherwise by {difference:.1e} of its change"
    assert_held(found["held"], expected["held"], one, name, found["parameters"][0])


def assert_held(held: list[dict], alone: list[dict], one: dict, name: str, trained: int) -> None:
    """No rank holds a parameter of an agent that does not live there, nor more than its share under ZeRO-3.

    The adapters, `trained` parameters of a base, are whole on every rank.
    """
    args, team = one["args"], len(alone[0])
    if args.get("placement") == "split":
        kinds = ("reference_ranks", "reward_model_ranks", "comparator_ranks", "critic_ranks")
        extra = sum(args.get(name, 0) for name in kinds)
        ranks = len(held) - extra
        sizes = args.get("ranks_per_agent") or [ranks // team] * team
        expected = [{str(agent)} for agent, size in enumerate(sizes) for _ in range(size)] + [set()] * extra
        assert [set(here) for here in held] == expected, name
    if one["zero"] == 3:
        for here in held:
            for agent, count in here.items():
                whole = alone[0][agent]
                right = count < (whole - trained) / 2 + trained if args.get("tuning") != "full" else count == 0
                assert right, f"{name}: {count} of {whole}"


@pytest.mark.parametrize("processes", [2, 4])
def test_layouts_agree_with_one_process(folder, processes):
    """On 2 processes also runs that go on from checkpoints of one process, and of the layouts before them."""
    layouts = FAST[processes] + (RESUMED[2] if processes == 2 else [])
    run(folder, layouts, processes)
    for one in layouts:
        assert_same(folder, processes, one)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 4])
def test_a_run_goes_on_under_another_layout(folder, processes):
    """From checkpoints of `test_layouts_agree_with_one_process`, made here where that did not run."""
    wanted = {one["resume"].split("/checkpoints")[0] for one in RESUMED[processes]}
    for others, layouts in FAST.items():
        sources = [one for one in layouts if f"{others}/runs/{one['name']}" in wanted]
        absent = [one for one in sources if not (folder / f"{others}/runs/{one['name']}").exists()]
        if absent:
            run(folder, absent, others)
    run(folder, RESUMED[processes], processes)
    for one in RESUMED[processes]:
        assert_same(folder, processes, one)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processes", [2, 4])
def test_every_layout_agrees_with_one_process(folder, processes, kind):
    layouts = [one for one in every_layout(processes) if one["kind"] == kind and one not in FAST[processes]]
    run_alone(folder, [kind])
    run(folder, layouts, processes)
    for one in layouts:
        assert_same(folder, processes, one)
