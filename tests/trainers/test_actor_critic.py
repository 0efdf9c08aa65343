"""A step of IAC and MAAC against the functions it is made of, and a run that is saved and taken up again."""

import pytest
import torch

from mlrl.config import IACConfig, MAACConfig
from mlrl.critic_inputs import state_inputs
from mlrl.rollout.tree import Node, TokenizedPrompt
from mlrl.trainers import IACTrainer, MAACTrainer
from mlrl.trainers.data import batches
from tests.trainers.loops import ITEMS, restart, reward


def make(model, trainer, folder, reward_func=reward, critic_model=None, critics=None, agents=None, **settings):
    config = IACConfig if trainer is IACTrainer else MAACConfig
    defaults = {"num_turns": 2, "num_generations": 2, "max_new_tokens": 4, "rollout_batch_size": 2, "max_steps": 2}
    return trainer(
        agent_model=None if agents else model,
        agents=agents,
        critics=critics,
        reward_func=reward_func,
        external_transition=restart,
        train_dataset=ITEMS,
        args=config(output_dir=str(folder), eval_interval=0, num_train_epochs=2, **defaults | settings),
    )


def test_returns_of_an_agents_own_rewards():
    root = Node((), [TokenizedPrompt("", [1])] * 2, rewards=[1.0, 2.0])
    root.children[0] = Node((0,), root.prompts, root, rewards=[[2.0, 4.0], [6.0, 0.0]])
    # joint 0: 1 + 0.5 · (2 + 6)/2 = 3 and 1 + 0.5 · (4 + 0)/2 = 2; joint 1 ended with a reward of all
    assert root.returns(0.5) == [[3.0, 2.0], [2.0, 2.0]]


@pytest.mark.parametrize("trainer, own", [(MAACTrainer, False), (IACTrainer, True)])
def test_values_start_at_the_mean_return_of_the_first_batch(tiny_llama, tmp_path, trainer, own):
    def own_rewards(first, second):
        return [[len(a) / 10, -len(b) / 10] for a, b in zip(first, second, strict=True)]

    made = make(
        *(tiny_llama, trainer, tmp_path, own_rewards if own else reward),
        **{"gae_lambda": 1.0, "advantage_normalization": "none", "discount": 0.5},
    )
    [batch] = list(batches(ITEMS, 2, 1, 1))
    trees = made.collect(batch)
    made.estimate(trees)
    nodes = [node for tree in trees for node in tree.nodes()]

    def returns(node, agent):
        return [r[agent] if own else r for r in node.returns(0.5)]

    for agent in range(2):
        by_turn = [[sum(returns(n, agent)) / 2 for n in nodes if n.turn == turn] for turn in range(2)]
        start = sum(sum(means) / len(means) for means in by_turn) / 2
        for node in nodes:  # aligned: response k is in joint k
            assert node.advantages[agent] == pytest.approx([r - start for r in returns(node, agent)], abs=1e-6)


@pytest.mark.parametrize("settings", [{}, {"use_separate_critic": False}])
def test_a_run_is_saved_and_taken_up_with_its_heads(tiny_llama, tmp_path, settings):
    def own(first, second):
        return [[len(a) / 10, -len(b) / 10] for a, b in zip(first, second, strict=True)]

    trainer = make(tiny_llama, IACTrainer, tmp_path, own, agent_learning_rate=1e-2, **settings)
    trainer.train()
    agents = [str(trainer.run_folder.agents / f"agent_{i}") for i in range(2)]
    critics = [str(trainer.run_folder.critics / f"critic_{i}") for i in range(2)]
    again = make(None, IACTrainer, tmp_path, own, agents=agents, critics=critics, **settings)
    [batch] = list(batches(ITEMS, 2, 1, 1))
    trees = again.collect(batch)
    for before, after in zip(trainer.critics, again.critics, strict=True):
        expected = before.values(state_inputs(before.reader, trees), 1000)
        assert expected.abs().max() > 1e-4
        torch.testing.assert_close(after.values(state_inputs(after.reader, trees), 1000), expected)


@pytest.mark.parametrize("trainer, settings", [(MAACTrainer, {}), (IACTrainer, {"use_separate_critic": False})])
def test_warming_up_trains_critics_alone(tiny_llama, tmp_path, trainer, settings):
    made = make(tiny_llama, trainer, tmp_path, critic_warmup_rollouts=1, **settings)
    [batch] = list(batches(ITEMS, 2, 1, 1))
    actors = [p for agent in made.team.agents for p in agent.policy.parameters()]
    before = [p.detach().clone() for p in actors]
    heads = [critic.head.value.weight for critic in made.critics]
    samples = made.estimate(made.collect(batch))
    made.update(samples)
    assert all(torch.equal(a, b) for a, b in zip(before, actors, strict=True))
    assert all(p.requires_grad for p in actors) and all(head.abs().sum() > 0 for head in heads)
    made.step_number = 1
    made.update(samples)
    assert not all(torch.equal(a, b) for a, b in zip(before, actors, strict=True))


def test_one_critic_update_a_minibatch(tiny_llama, tmp_path):
    made = make(tiny_llama, MAACTrainer, tmp_path, train_batch_size=3, clip_range=0.2, num_updates_per_rollout=2)
    [batch] = list(batches(ITEMS, 2, 1, 1))
    made.update(made.estimate(made.collect(batch)))
    # two items of 1 + 2 nodes, 3 an update, 2 passes: 4, whatever the number of agents
    assert [engine.updates for engine in [*made.critic_engines, *made.engines]] == [4, 4, 4]
