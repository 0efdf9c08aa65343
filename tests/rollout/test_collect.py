"""Breadth-first trees equal trees grown depth-first, one node and one sequence at a time."""

import hashlib
import itertools
from dataclasses import replace

import pytest
import torch

from mlrl.agents import Agent, Source, Team
from mlrl.errors import TaskError
from mlrl.models.base import Base, Policy
from mlrl.parallel.mesh import Mesh
from mlrl.rollout import carried
from mlrl.rollout.collect import Collector
from mlrl.rollout.sampler import Sampler, SamplingParams
from mlrl.rollout.streams import derive_seed
from mlrl.rollout.tree import Node, RolloutTree
from mlrl.task import Environment, Task
from tests.models.test_lora import team as two_adapters
from tests.rollout.fakes import HashedSampler, fake_team, growth, hashed_response, respond, scripted
from tests.rollout.test_sampler import STOPS, looped
from tests.tiny import tiny_model, tiny_tokenizer

ITEMS = [(3, {"prompt": "the sea"}), (4, {"prompt": "a"}), (9, {"prompt": "one short story"})]


def number(*texts: str) -> float:
    """A reward in [0, 1) that depends on every text."""
    return hashlib.blake2b(repr(texts).encode()).digest()[0] / 256


def reward(*completions, batch_items, prompts, turn):
    return [number(*joint, batch_items[0]["prompt"], *prompts, str(turn)) for joint in zip(*completions, strict=True)]


def transition(prompt, agent_completions, prompt_history_per_agent, response_history_per_agent, turn, reward):
    told = f"{prompt} {turn} {reward:.3f} {response_history_per_agent} {prompt_history_per_agent}"
    digest = hashlib.blake2b(told.encode()).hexdigest()[:6]
    return [f"{digest} {agent} {said}" for agent, said in enumerate(agent_completions)]


def collector(num_agents: int, num_turns: int) -> Collector:
    team = fake_team(num_agents)
    task = Task(train_dataset=[ITEMS[0][1]], reward_func=reward, external_transition=transition)
    return Collector(team, HashedSampler(team), Environment(task, num_agents, num_turns))


def reference(agents, draw, item, ordinal, how, path=(), prompts=None, asked=(), said=()):
    """A tree as nested dicts, depth first: one node, one sequence, one joint at a time."""
    prompts = prompts or [item["prompt"]] * len(agents)
    ids = [a.tokenizer(p)["input_ids"] for a, p in zip(agents, prompts, strict=True)]
    K, turn = how.generations[len(path)], len(path)
    responses = [
        [draw(a, ids[a.index], (how.seed, how.stream, ordinal, path, a.index, k)) for k in range(K)] for a in agents
    ]
    own = [range(K)] * len(agents)
    joints = list(itertools.product(*own)) if how.joint_mode == "cross" else [(k,) * len(agents) for k in range(K)]
    texts = [[responses[i][k].text for i, k in enumerate(joint)] for joint in joints]
    rewards = [number(*t, item["prompt"], *prompts, str(turn)) for t in texts]
    stop = how.threshold is not None and how.scope == "node" and sum(rewards) / len(rewards) > how.threshold
    children = {}
    for g, text in enumerate(texts):
        if stop or turn + 1 == len(how.generations) or (how.scope == "joint" and rewards[g] > (how.threshold or 9)):
            continue
        asked_now, said_now = (*asked, prompts), (*said, text)
        histories = [[list(column) for column in zip(*rows, strict=True)] for rows in (asked_now, said_now)]
        following = transition(item["prompt"], text, *histories, turn, rewards[g])
        children[g] = reference(agents, draw, item, ordinal, how, (*path, g), following, asked_now, said_now)
    return {"path": path, "prompts": prompts, "ids": ids, "responses": responses, "joints": joints, "rewards": rewards,
            "children": children}  # fmt: skip


def assert_equal(node: Node, expected: dict) -> int:
    """Compares node by node; returns how many there are."""
    assert node.path == expected["path"] and node.turn == len(node.path)
    assert [p.content for p in node.prompts] == expected["prompts"]
    assert [p.token_ids for p in node.prompts] == expected["ids"]
    for ours, theirs in zip(itertools.chain(*node.responses), itertools.chain(*expected["responses"]), strict=True):
        assert (ours.token_ids, ours.text, ours.truncated) == (theirs.token_ids, theirs.text, theirs.truncated)
    assert [len(own) for own in node.responses] == [len(own) for own in expected["responses"]]
    assert node.joints == expected["joints"]
    assert node.rewards == expected["rewards"] == node.raw_rewards
    assert list(node.children) == list(expected["children"])
    assert all(child.parent is node for child in node.children.values())
    return 1 + sum(assert_equal(node.children[g], expected["children"][g]) for g in node.children)


SHAPES = [
    (N, H, K, mode)
    for N, H, K, mode in itertools.product((1, 2, 4), (1, 2, 3), (1, 2, 3), ("aligned", "cross"))
    if (K if mode == "aligned" else K**N) ** (H - 1) <= 81
]


@pytest.mark.parametrize("num_agents, num_turns, num_generations, joint_mode", SHAPES)
def test_equals_the_recursion(num_agents, num_turns, num_generations, joint_mode):
    how = growth(num_turns, num_generations, joint_mode=joint_mode)
    grower = collector(num_agents, num_turns)
    trees = grower.collect(ITEMS, how)

    def draw(agent, ids, key):
        return hashed_response(agent, ids, key, how.sampling)

    joints = num_generations if joint_mode == "aligned" else num_generations**num_agents
    assert len(grower.sampler.calls) == num_turns  # one call a turn, whatever the number of items and nodes
    assert [(tree.ordinal, tree.item) for tree in trees] == ITEMS
    for tree in trees:
        count = assert_equal(tree.root, reference(grower.team.agents, draw, tree.item, tree.ordinal, how))
        nodes = list(tree.nodes())
        assert count == len(nodes) == sum(joints**turn for turn in range(num_turns))
        assert sum(len(n.joints) for n in nodes if not n.children) == joints**num_turns  # K^H, or K^(N·H)
        assert [n.path for n in nodes] == sorted((n.path for n in nodes), key=lambda p: (len(p), p))
    assert grower.cost.joint_evaluations == sum(joints ** (turn + 1) for turn in range(num_turns)) * len(ITEMS)
    every = [r for tree in trees for node in tree.nodes() for own in node.responses for r in own]
    assert grower.cost.generated_tokens == sum(len(r.token_ids) for r in every)


@pytest.mark.parametrize("scope", ["node", "joint"])
@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
@pytest.mark.parametrize("threshold", [0.5, 0.7])
def test_early_termination_equals_the_recursion(scope, joint_mode, threshold):
    how = growth(3, 2, joint_mode=joint_mode, threshold=threshold, scope=scope)
    grower = collector(2, 3)

    def draw(agent, ids, key):
        return hashed_response(agent, ids, key, how.sampling)

    trees = grower.collect(ITEMS, how)
    counts = [
        assert_equal(tree.root, reference(grower.team.agents, draw, tree.item, tree.ordinal, how)) for tree in trees
    ]
    joints = 2 if joint_mode == "aligned" else 4
    assert sum(counts) < 3 * (1 + joints + joints**2)  # something ended early
    if scope == "joint":
        assert any(0 < len(n.children) < joints for tree in trees for n in tree.nodes())  # … branch by branch
    assert grower.cost.joint_evaluations == joints * sum(counts)


@pytest.mark.parametrize("joint_mode, num_agents", [("aligned", 2), ("cross", 2), ("cross", 1)])
def test_a_real_model_equals_the_recursion(joint_mode, num_agents):
    team = real_team(num_agents)
    task = Task(train_dataset=[ITEMS[0][1]], reward_func=reward, external_transition=transition)
    grower = Collector(team, Sampler(team), Environment(task, num_agents, 2))
    how = growth(2, 2, joint_mode=joint_mode, sampling=SamplingParams(0.9, max_new_tokens=6))
    model = tiny_model()

    def draw(agent, ids, key):
        with torch.no_grad():
            tokens, _ = looped(model, ids, key, how.sampling)
        stopped = tokens[-1] in STOPS
        return replace(respond(agent, agent.decode(tokens), not stopped), token_ids=tokens)

    for tree in grower.collect(ITEMS[:2], how):
        assert_equal(tree.root, reference(team.agents, draw, tree.item, tree.ordinal, how))


def real_team(num_agents: int) -> Team:
    base, tokenizer = Base(tiny_model(), "tiny"), tiny_tokenizer()
    agents = [Agent(i, tokenizer, Source(base.model), Policy(base, None), STOPS) for i in range(num_agents)]
    return Team(agents, [base], False, None, Mesh.alone(num_agents))


@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
def test_the_same_trees_whatever_the_batch(joint_mode):
    base, tokenizer = two_adapters(), tiny_tokenizer()
    agents = [Agent(i, tokenizer, Source("tiny"), Policy(base, f"agent_{i}"), STOPS) for i in range(2)]
    team = Team(agents, [base], False, None, Mesh.alone(2))
    task = Task(train_dataset=[ITEMS[0][1]], reward_func=reward, external_transition=transition)
    how = growth(2, 2, joint_mode=joint_mode, sampling=SamplingParams(max_new_tokens=10))

    def grown(batches, max_rows=256):
        grower = Collector(team, Sampler(team, max_rows), Environment(task, 2, 2))
        trees = sorted((t for batch in batches for t in grower.collect(batch, how)), key=lambda t: t.ordinal)
        return [
            (t.ordinal, n.path, n.rewards, [[(r.token_ids, r.truncated) for r in own] for own in n.responses])
            for t in trees
            for n in t.nodes()
        ]

    whole = grown([ITEMS])
    assert len({str(node[3]) for node in whole}) == len(whole)
    assert grown([[item] for item in ITEMS]) == whole
    assert grown([ITEMS[1:], ITEMS[:1]]) == whole
    assert grown([ITEMS[::-1]], max_rows=3) == whole


@pytest.mark.parametrize(
    ("turns", "greedy"),
    [(1, False), (2, False), (1, True), (3, True)],
)
def test_the_calls_of_a_collection_share_what_they_lay_out(turns, greedy, monkeypatch):
    made, entered = [], []

    class Noted(carried.DecodeStep):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    class NotedSampler(Sampler):
        def steady_weights(self):
            entered.append(True)
            return super().steady_weights()

    monkeypatch.setattr(carried, "DecodeStep", Noted)
    task = Task(train_dataset=[ITEMS[0][1]], reward_func=reward, external_transition=transition)
    team = real_team(2)
    how = growth(turns, 2, sampling=SamplingParams(max_new_tokens=10), greedy_baseline=greedy)
    for _ in range(2):
        Collector(team, NotedSampler(team), Environment(task, 2, turns)).collect(ITEMS, how)
    assert len(made) == 2  # anew for each collection: weights may have changed
    assert len(entered) == (2 if turns > 1 or greedy else 0)


def test_streams_tell_runs_and_evaluations_apart():
    def texts(**changes):
        trees = collector(1, 1).collect(ITEMS, growth(1, 2, **changes))
        return [r.text for tree in trees for r in tree.root.responses[0]]

    assert texts() == texts(reseed=7)  # the seed of the user's callables moves no stream of the sampler
    assert texts() != texts(seed=6) and texts() != texts(stream="eval")


# Early termination, by hand ------------------------------------------------------------------------------------------


def by_text(*completions):
    """The reward is the number that the first agent wrote."""
    return [float(text) for text in completions[0]]


@pytest.mark.parametrize(
    "scope, threshold, children",
    [
        ("node", None, [0, 1]),
        ("node", 0.5, [0, 1]),  # mean (0.25 + 0.75) / 2 = 0.5, met exactly: it has to be exceeded
        ("node", 0.49, []),
        ("joint", None, [0, 1]),
        ("joint", 0.75, [0, 1]),  # met exactly by joint 1
        ("joint", 0.5, [0]),
        ("joint", 0.2, []),
        ("joint", -1.0, []),
    ],
)
def test_threshold(scope, threshold, children):
    def script(ordinal, path, agent, k):
        return ["0.25", "0.75"][k]

    trees = scripted(2, 2, script, by_text).collect(
        [(0, {"prompt": "go"})], growth(2, 2, scope=scope, threshold=threshold)
    )
    assert list(trees[0].root.children) == children


def test_a_threshold_sees_processed_rewards():
    def script(ordinal, path, agent, k):
        return ["0.25", "0.75"][k]

    grower = scripted(1, 2, script, by_text, reward_processor=lambda r: r - 1)
    root = grower.collect([(0, {"prompt": "go"})], growth(2, 2, scope="joint", threshold=-0.5))[0].root
    assert (root.rewards, root.raw_rewards) == ([-0.75, -0.25], [0.25, 0.75])
    assert list(root.children) == [0]


def test_an_item_that_ends_leaves_the_others():
    def script(ordinal, path, agent, k):
        return "1" if ordinal == 0 or path == (1,) else "0"

    grower = scripted(1, 3, script, by_text)
    trees = grower.collect([(i, {"prompt": "go"}) for i in range(2)], growth(3, 2, threshold=0.5))
    assert [n.path for n in trees[0].nodes()] == [()]
    assert [n.path for n in trees[1].nodes()] == [(), (0,), (1,), (0, 0), (0, 1)]
    assert [[r.agent for r in call] for call, _ in grower.sampler.calls] == [[0, 0], [0, 0], [0, 0]]
    assert grower.cost.joint_evaluations == 2 + 10


# Returns, by hand ----------------------------------------------------------------------------------------------------


def test_returns_and_greedy_baseline_by_hand():
    rewards = {(): "1 2", (0,): "3 5", (1,): "0 9", (0, 0): "1 1", (0, 1): "4 0"}  # nodes below (1,) end: 0, 9 > 8
    rewards |= {(1, 0): "2 4"}

    def script(ordinal, path, agent, k):
        return rewards[path].split()[k]

    def greedy(ordinal, path, agent, k):
        return str(10 ** len(path))  # 1 at turn 0, 10 at turn 1, 100 at turn 2

    grower = scripted(2, 3, script, by_text, greedy)
    how = growth(3, 2, scope="joint", threshold=8.0, greedy_baseline=True, discount=0.9)
    tree = grower.collect([(0, {"prompt": "go"})], how)[0]
    nodes = {n.path: n for n in tree.nodes()}
    assert list(nodes) == [(), (0,), (1,), (0, 0), (0, 1), (1, 0)]
    approx = pytest.approx
    assert nodes[0, 0].returns(0.9) == [1, 1]
    assert nodes[0,].returns(0.9) == approx([3 + 0.9 * 1, 5 + 0.9 * 2])  # 3.9, 6.8
    assert nodes[1,].returns(0.9) == approx([0 + 0.9 * 3, 9])  # 2.7, and 9 without a child
    # 1 + 0.9 · (3.9 + 6.8) / 2 = 5.815;   2 + 0.9 · (2.7 + 9) / 2 = 7.265
    assert nodes[()].returns(0.9) == approx([5.815, 7.265])
    # playing greedily: turn 0 gives 1, then 10 > 8 ends it
    assert nodes[()].greedy_return == approx(1 + 0.9 * 10)
    assert nodes[0,].greedy_return == nodes[1,].greedy_return == 10
    assert nodes[0, 0].greedy_return == 100
    # 12 sampled joints; greedily 2 at turn 0 (with what follows), 1 at each of the other five nodes
    assert grower.cost.joint_evaluations == 12 + 2 + 5
    greedy_calls = [(call, params) for call, params in grower.sampler.calls if params.temperature == 0]
    assert all(len(request.keys) == 1 for call, _ in greedy_calls for request in call)
    # the baseline adds no node, and samples what it would without
    plain = scripted(2, 3, script, by_text).collect([(0, {"prompt": "go"})], replace(how, greedy_baseline=False))[0]
    assert [(n.path, n.rewards) for n in plain.nodes()] == [(n.path, n.rewards) for n in tree.nodes()]
    assert all(n.greedy_return is None for n in plain.nodes())


# Edges of responses --------------------------------------------------------------------------------------------------


def test_an_empty_response_and_one_that_fills_the_budget():
    seen = []

    def watch(texts):
        seen.append(list(texts))
        return [float(len(text)) for text in texts]

    grower = scripted(1, 2, lambda ordinal, path, agent, k: ["", "the sea…"][k], watch)
    root = grower.collect([(0, {"prompt": "go"})], growth(2, 2))[0].root
    empty, full = root.responses[0]
    assert (empty.token_ids, empty.text, empty.truncated) == ([2], "", False)
    assert full.truncated and 2 not in full.token_ids
    assert seen[0] == ["", "the sea"] and root.rewards == [0.0, 7.0]
    assert list(root.children) == [0, 1]  # an empty response is a response: its branch goes on


# What the task is handed ---------------------------------------------------------------------------------------------


def test_callables_get_what_agents_saw_and_only_copies():
    handed = []

    def formatter(item, agent_idx, external_prompts):
        told = external_prompts or item["prompt"]
        return [{"role": "user", "content": f"agent {agent_idx}: {told}"}]

    def meddling_reward(a, b, *, batch_items, prompts, prompt_history, response_history, turn, episode_seed):
        handed.append((turn, [*a], [*b], *map(_frozen, (prompts, prompt_history, response_history)), episode_seed))
        for value in (a, b, prompts, prompt_history, response_history, batch_items):
            value.clear()
        return [0.0, 1.0]

    def meddling_transition(
        item, agent_completions, prompt_history_per_agent, response_history_per_agent, episode_seed
    ):
        histories = map(_frozen, (prompt_history_per_agent, response_history_per_agent))
        handed.append(("next", agent_completions.copy(), *histories, episode_seed))
        for history in (*prompt_history_per_agent, *response_history_per_agent):
            history.clear()
        item["prompt"] = "changed"
        return [f"after {said}" for said in agent_completions]

    def script(ordinal, path, agent, k):
        return f"{'xy'[agent]}{k}{''.join(map(str, path))}"

    grower = scripted(2, 2, script, meddling_reward, external_transition=meddling_transition, formatters=formatter)
    item = {"prompt": "go", "facts": ["a"]}
    tree = grower.collect([(6, item)], growth(2, 2, reseed=4))[0]
    seed = derive_seed(5, "train", 4, 6)

    def shown(agent, told):
        return [{"role": "user", "content": f"agent {agent}: {told}"}]

    first = [shown(0, "go"), shown(1, "go")]
    assert handed[0] == (0, ["x0", "x1"], ["y0", "y1"], _frozen(first), _frozen([[], []]), _frozen([[], []]), seed)
    for g in (0, 1):
        said = [f"x{g}", f"y{g}"]
        history = (_frozen([[first[0]], [first[1]]]), _frozen([[said[0]], [said[1]]]))
        assert handed[1 + g] == ("next", said, *history, seed)
        second = [shown(0, f"after x{g}"), shown(1, f"after y{g}")]
        completions = ([f"x0{g}", f"x1{g}"], [f"y0{g}", f"y1{g}"])
        assert handed[3 + g] == (1, *completions, _frozen(second), *history, seed)
    assert tree.item == item == {"prompt": "go", "facts": ["a"]}
    assert [p.content for p in tree.root.prompts] == first
    assert tree.root.completions(1) == ["x1", "y1"]


def _frozen(value):
    return repr(value)


def test_a_reward_is_called_once_a_node_with_its_joints():
    calls = []

    def counting(a, b):
        calls.append(list(zip(a, b, strict=True)))
        return [0.0] * len(a)

    grower = scripted(2, 1, lambda ordinal, path, agent, k: f"{agent}{k}", counting)
    grower.collect([(0, {"prompt": "go"})], growth(1, 2, joint_mode="cross"))
    assert calls == [[("00", "10"), ("00", "11"), ("01", "10"), ("01", "11")]]  # the last agent runs fastest


@pytest.mark.parametrize("num_agents", [1, 2])
def test_faults_name_item_and_turn(num_agents):
    def script(ordinal, path, agent, k):
        return "1"

    def wrong_at_turn_1(*completions, turn):
        return [0.0] * len(completions[0]) if turn == 0 else [float("nan")] * len(completions[0])

    grower = scripted(num_agents, 2, script, wrong_at_turn_1)
    with pytest.raises(TaskError, match=r"nan.*item 17 .*turn 1"):
        grower.collect([(17, {"prompt": "go"})], growth(2, 2))

    grower = scripted(
        num_agents, 2, script, by_text, external_transition=lambda num_agents: ["again"] * (num_agents + 1)
    )
    with pytest.raises(TaskError, match=rf"{num_agents + 1} prompts for num_agents={num_agents}.*item 17 .*turn 0"):
        grower.collect([(17, {"prompt": "go"})], growth(2, 2))

    grower = scripted(num_agents, 2, script, by_text, external_transition=lambda num_agents: [""] * num_agents)
    with pytest.raises(TaskError, match=r"item 17, turn 1, agent 0: the prompt is empty"):
        grower.collect([(17, {"prompt": "go"})], growth(2, 2))


def test_prompts_are_cut_counted_or_refused():
    def script(ordinal, path, agent, k):
        return "1"

    tokenizer = tiny_tokenizer()
    prompt = "the sea is deep and blue"
    length = len(tokenizer(prompt)["input_ids"])
    items = [(0, {"prompt": prompt}), (1, {"prompt": "a"})]
    grower = scripted(2, 1, script, by_text)
    trees = grower.collect(items, growth(1, 1, max_prompt_tokens=3))
    assert [p.token_ids for p in trees[0].root.prompts] == [tokenizer(prompt)["input_ids"][-3:]] * 2
    assert [p.truncated for p in trees[0].root.prompts] == [length - 3] * 2
    assert grower.cost.truncated_prompts == 2
    with pytest.raises(TaskError, match=rf"item 0, turn 0, agent 1: {length} tokens, more than the 4 that"):
        grower.collect(items, growth(1, 1, prompt_limits=(None, 4)))


def test_messages_that_continue_share_their_tokens_on_every_branch():
    def formatter(item):
        return item["prompt"] if isinstance(item["prompt"], list) else [{"role": "user", "content": item["prompt"]}]

    def go_on(prompt_history_per_agent, response_history_per_agent):
        return [
            [*asked[-1], {"role": "assistant", "content": said[-1]}, {"role": "user", "content": "again"}]
            for asked, said in zip(prompt_history_per_agent, response_history_per_agent, strict=True)
        ]

    team = fake_team(2)
    task = Task(
        train_dataset=[{"prompt": "go"}],
        formatters=formatter,
        external_transition=go_on,
        reward_func=lambda a, b: [0.0] * len(a),
    )
    grower = Collector(team, HashedSampler(team), Environment(task, 2, 3))
    tree: RolloutTree = grower.collect([(0, {"prompt": "go"})], growth(3, 2, joint_mode="cross"))[0]
    for node in tree.nodes():
        for agent, prompt in enumerate(node.prompts):
            if node.parent is None:
                assert prompt.reused == 0
                continue
            response = node.parent.responses[agent][node.parent.joints[node.path[-1]][agent]]
            head = node.parent.prompts[agent].token_ids + response.token_ids
            assert prompt.token_ids[: prompt.reused] == head and prompt.reused == len(head)


def test_each_agent_has_its_own_tokenizer():
    team = fake_team(2)
    team.agents[1].tokenizer = tiny_tokenizer("llama_bos")
    task = Task(train_dataset=[{"prompt": "go"}], reward_func=lambda a, b: [0.0] * len(a))
    tree = Collector(team, HashedSampler(team), Environment(task, 2)).collect([(0, {"prompt": "go"})], growth(1, 2))[0]
    plain, with_start = (prompt.token_ids for prompt in tree.root.prompts)
    assert with_start == [0, *plain]
