"""Critics learn the values of a game that can be enumerated, and teams with them come to its optimum."""

import itertools
import statistics

import pytest

from tests.trainers.pattern_game import OPTIMUM, WORDS, Enumerated, make_team, right, run


def test_enumerated_values_equal_a_loop_over_all_episodes(tmp_path):
    trainer = make_team("MAAC", tmp_path, rollout_batch_size=1)
    exact = Enumerated.of(trainer)
    [tree] = trainer.collector.collect([(0, {"prompt": "start"})], trainer.growth())
    node = tree.root.children[1].children[2]
    said = [[WORDS[token] for token in prompt.token_ids[1:]] for prompt in node.prompts]
    expected, joint, own, reached = 0.0, 0.0, 0.0, 0.0
    for words in itertools.product(itertools.product(WORDS, repeat=3), repeat=2):
        probability, before = 1.0, 1.0
        for agent, sequence in enumerate(words):
            for turn, word in enumerate(sequence):
                place = 0
                for earlier in sequence[:turn]:
                    place = place * len(WORDS) + WORDS.index(earlier)
                chance = float(exact.words[agent][turn][place, WORDS.index(word)])
                probability *= chance
                before *= chance if turn < 2 else 1.0
        earned = probability * right(*words)
        expected += earned
        if list(words[0][:2]) == said[0]:
            own, reached = own + earned, reached + probability
            if list(words[1][:2]) == said[1]:
                joint += earned / before
    assert 0.001 < expected == pytest.approx(exact.expected, rel=1e-6)
    assert exact.value(node, None) == pytest.approx(joint, rel=1e-6)
    assert exact.value(node, 0) == pytest.approx(own / reached, rel=1e-6)


def test_maac_learns(tmp_path):
    record = run(make_team("MAAC", tmp_path, seed=3, max_steps=6, lr_scheduler="constant"), every=6)
    assert record.expected[-1] > record.expected[0] + 0.2


@pytest.mark.slow
def test_maac_comes_to_the_optimum_and_its_critic_to_the_values(tmp_path):
    records = [run(make_team("MAAC", tmp_path / str(seed), seed)) for seed in range(5)]
    assert sum(record.expected[-1] >= 0.95 * OPTIMUM for record in records) >= 4
    late = slice(len(records[0].errors) // 2, None)
    for record in records:
        assert statistics.fmean(error**2 for error in record.errors[late]) ** 0.5 < 0.1
