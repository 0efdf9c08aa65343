"""What critics read: the joint history under tags, an agent's own tokens, cuts on the left, shared beginnings."""

import pytest

from mlrl.critic_inputs import (
    CriticInput,
    CriticReader,
    action_inputs,
    counterfactual_inputs,
    critic_batches,
    state_inputs,
)
from mlrl.errors import ConfigError
from mlrl.rollout.tree import Node, Response, RolloutTree, TokenizedPrompt
from tests.tiny import tiny_tokenizer

LLAMA, BOS = tiny_tokenizer("llama"), tiny_tokenizer("llama_bos")
END = 2


def ids(text, tokenizer=LLAMA):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def respond(text, tokenizer=LLAMA):
    return Response([*ids(text, tokenizer), END], [0.0] * (len(ids(text, tokenizer)) + 1), text, False)


def two_turns(tokenizer=LLAMA):
    """A root with joints (0, 0) and (1, 1), and the child of the second, whose first prompt continues the root's."""
    prompts = [TokenizedPrompt(text, ids(text, tokenizer)) for text in ("sea", "city")]
    root = Node((), prompts, None, [[respond(t, tokenizer) for t in own] for own in (("a", "b"), ("c", "d"))])
    root.joints, root.rewards = [(0, 0), (1, 1)], [0.0, 1.0]
    before = prompts[0].token_ids + root.responses[0][1].token_ids
    first = TokenizedPrompt("…", before + ids(" more", tokenizer), reused=len(before))
    second = TokenizedPrompt("town", ids("town", tokenizer))
    child = Node(
        (1,), [first, second], root, [[respond(t, tokenizer) for t in own] for own in (("e", "f"), ("g", "h"))]
    )
    child.joints, child.rewards = [(0, 0), (1, 1)], [0.0, 1.0]
    root.children[1] = child
    return root, child


def text_of(given, tokenizer=LLAMA):
    return tokenizer.decode(given.token_ids)


def test_the_centralized_critic_reads_the_joint_history_under_tags():
    root, child = two_turns()
    reader = CriticReader(LLAMA, [LLAMA, LLAMA])
    start = "\n[turn 1, agent_0, prompt]\nsea\n[turn 1, agent_1, prompt]\ncity"
    assert text_of(reader.state(root)) == start + "\n[value]"
    history = (
        start + "\n[turn 1, agent_0, response]\nb<|im_end|>\n[turn 1, agent_1, response]\nd<|im_end|>"
        "\n[turn 2, agent_0, prompt]\n more\n[turn 2, agent_1, prompt]\ntown"  # only what is new of a continued prompt
    )
    assert text_of(reader.state(child)) == history + "\n[value]"
    answers = "\n[turn 2, agent_0, response]\ne<|im_end|>\n[turn 2, agent_1, response]\nh<|im_end|>"
    assert text_of(reader.action(child, (0, 1))) == history + answers + "\n[value]"
    assert reader.take_counts() == (0, 3) and reader.take_counts() == (0, 0)


def test_the_critic_of_an_agent_reads_what_the_agent_read_id_for_id():
    root, child = two_turns()
    for agent in (0, 1):
        reader = CriticReader(LLAMA, [LLAMA, LLAMA], agent)
        assert reader.state(root).token_ids == root.prompts[agent].token_ids
        assert reader.state(child).token_ids == child.prompts[agent].token_ids
        said = child.responses[agent][1].token_ids
        assert reader.action(child, (1, 1)).token_ids == child.prompts[agent].token_ids + said
    # agent 0's second prompt begins with its first and its answer: those are segments of their own
    assert [list(s) for s in CriticReader(LLAMA, [LLAMA] * 2, 0).state(child).segments] == [
        ids("sea"),
        [*ids("b"), END],
        ids(" more"),
    ]


def test_another_tokenizer_encodes_the_texts_anew():
    own = tiny_tokenizer("gpt2")
    own.add_tokens(["town"])  # an id that the critic does not have
    root, _ = two_turns(own)
    for node_agent in (None, 1):
        reader = CriticReader(BOS, [own, own], node_agent)
        given = reader.action(root, (1, 1))
        assert given.token_ids[0] == 0 and given.token_ids.count(0) == 1  # its own start token, once
    assert BOS.decode(given.token_ids, skip_special_tokens=True) == "cityd"
    # the same vocabulary under another end token is the same tokenizer: ids stay
    assert CriticReader(LLAMA, [tiny_tokenizer("qwen2")] * 2, 0).state(root).token_ids == root.prompts[0].token_ids


def test_one_start_token_where_prompts_bring_theirs():
    prompts = [TokenizedPrompt(text, [0, *ids(text, BOS)]) for text in ("sea", "city")]
    node = Node((), prompts, None, [[respond("a", BOS)], [respond("b", BOS)]], [(0, 0)])
    joint = CriticReader(BOS, [BOS, BOS]).state(node)
    assert joint.token_ids[0] == 0 and joint.token_ids.count(0) == 1
    assert CriticReader(BOS, [BOS, BOS], 1).state(node).token_ids == [0, *ids("city", BOS)]


def test_too_long_inputs_are_cut_on_the_left_a_role_at_a_time():
    _, child = two_turns()
    whole = CriticReader(LLAMA, [LLAMA, LLAMA]).state(child).token_ids
    tag, sea = ids("\n[turn 1, agent_0, prompt]\n"), ids("sea")
    second = ids("\n[turn 1, agent_1, prompt]\n")
    # one token short: the oldest role loses one token of its text, not of its tag
    reader = CriticReader(LLAMA, [LLAMA, LLAMA], max_length=len(whole) - 1)
    given = reader.state(child)
    assert given.token_ids == tag + sea[1:] + whole[len(tag + sea) :] and given.cut == 1
    assert reader.take_counts() == (1, 1)
    # its whole text: the tag goes too
    given = CriticReader(LLAMA, [LLAMA, LLAMA], max_length=len(whole) - len(sea)).state(child)
    assert given.token_ids == whole[len(tag + sea) :] and given.cut == len(tag + sea)
    # one more than both: the next role gives
    reader = CriticReader(LLAMA, [LLAMA, LLAMA], max_length=len(whole) - len(tag + sea) - 1)
    given = reader.state(child)
    assert given.token_ids == second + whole[len(tag + sea + second) + 1 :]
    for limit in range(20, len(whole) + 2):
        reader = CriticReader(LLAMA, [LLAMA, LLAMA], max_length=limit)
        given = reader.state(child)
        assert len(given.token_ids) <= limit and len(given.token_ids) + given.cut == len(whole)
        assert given.token_ids[-len(ids("\n[value]")) :] == ids("\n[value]")
        assert reader.inputs_cut == (limit < len(whole))


def test_a_start_token_survives_the_cut_and_an_agents_text_keeps_its_end():
    _, child = two_turns(BOS)
    reader = CriticReader(BOS, [BOS, BOS], max_length=30)
    assert reader.state(child).token_ids[0] == 0 and len(reader.state(child).token_ids) == 30
    alone = CriticReader(BOS, [BOS, BOS], 0, max_length=3)
    assert alone.state(child).token_ids == child.prompts[0].token_ids[-3:]
    with pytest.raises(ConfigError, match="critic_max_length=1"):
        CriticReader(BOS, [BOS, BOS], max_length=1)


def test_inputs_of_a_batch_are_in_node_order():
    root, child = two_turns()
    trees = [RolloutTree({}, 0, root)]
    reader = CriticReader(LLAMA, [LLAMA, LLAMA])
    assert state_inputs(reader, trees) == [reader.state(root), reader.state(child)]
    assert action_inputs(reader, trees) == [reader.action(n, (k, k)) for n in (root, child) for k in (0, 1)]
    own = CriticReader(LLAMA, [LLAMA, LLAMA], 1)
    assert action_inputs(own, trees) == [own.action(n, (k, k)) for n in (root, child) for k in (0, 1)]
    # partners' k-th with the own k'-th
    assert counterfactual_inputs(reader, trees, 0)[:4] == [
        reader.action(root, choice) for choice in ((0, 0), (1, 0), (0, 1), (1, 1))
    ]
    assert counterfactual_inputs(reader, trees, 1)[1] == reader.action(root, (0, 1))


def test_common_beginnings_are_run_once():
    root, _ = two_turns()
    reader = CriticReader(LLAMA, [LLAMA, LLAMA])
    inputs = state_inputs(reader, [RolloutTree({}, 0, root)])
    [batch] = critic_batches(inputs, 10_000)
    # the child's input holds the root's, but for the closing words of each
    assert batch.tree.num_tokens == len(inputs[1].token_ids) + len(ids("\n[value]"))
    assert batch.numbers == [0, 1]
    packed = batch.tree.pack()
    assert packed.input_ids.shape[1] == batch.tree.num_tokens
    assert packed.input_ids[0, packed.predecessors].tolist() == [given.token_ids[-1] for given in inputs]


def test_batches_hold_every_input_once_within_their_budget():
    inputs = [CriticInput(((1, 2, 3), tuple(range(4, 4 + n)))) for n in (2, 1, 5, 2, 7, 2)]
    for budget in (1, 7, 9, 12, 100):
        batches = list(critic_batches(inputs, budget))
        assert [n for batch in batches for n in batch.numbers] == list(range(6))
        for batch in batches:
            assert batch.tree.num_tokens <= budget or len(batch.numbers) == 1
            packed = batch.tree.pack()
            ends = [inputs[n].token_ids[-1] for n in batch.numbers]
            assert packed.input_ids[0, packed.predecessors].tolist() == ends
    # equal inputs are one stretch of tokens with a mark each
    assert len(batches) == 1 and batches[0].tree.num_tokens == 3 + 2 + 1 + 5 + 7
