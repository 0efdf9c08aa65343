"""A round from settings: comparators made by name, items played, pairs on disk and drawn again."""

import dataclasses
import json
import shutil
import warnings

import pytest

from mlrl.config import CheckedConfig
from mlrl.config_preference import PreferenceArguments
from mlrl.errors import ConfigError
from mlrl.preference.collection import CollectionSettings, collect_pairs
from mlrl.preference.drift import pair_digest
from mlrl.preference.replay import replay
from mlrl.preference.rounds import check_pairs, find_rounds, write_round
from mlrl.preference.setup import make_comparator
from tests.http_server import FakeServer, Reply
from tests.trainers.loops import ITEMS, make_trainer

NUMBERED = list(enumerate(ITEMS))
KEY = "sk-planted-5f2c9e"


@dataclasses.dataclass(kw_only=True)
class Arguments(PreferenceArguments, CheckedConfig):
    def check(self, num_agents=None):
        return []


def comparator_of(trainer, cache=None, **settings):
    return make_comparator(Arguments(**settings), trainer.collector, trainer.growth().sampling, cache)


SETTINGS = CollectionSettings(4, 4, "reward_gap", 3, batch_size=1)


def test_without_a_comparator_pairs_are_among_the_policys_candidates(tiny_llama):
    trainer = make_trainer(tiny_llama)
    collected = collect_pairs(trainer.collector, NUMBERED, trainer.growth(), SETTINGS)
    assert (collected.num_items, len(collected.policy_rewards), collected.comparator_rewards) == (2, 8, [])
    assert collected.cost.joint_evaluations == 8
    assert [pair.item for pair in collected.pairs] == [0, 0, 0, 1, 1, 1]
    together = dataclasses.replace(SETTINGS, batch_size=9)
    again = collect_pairs(trainer.collector, NUMBERED, trainer.growth(), together)
    assert [pair_digest(pair) for pair in again.pairs] == [pair_digest(pair) for pair in collected.pairs]


@pytest.mark.parametrize(
    ("settings", "writer"),
    [
        ({"comparator_policy": "history", "comparator_history_k": 2}, "history"),
        ({"comparator_policy": "model", "comparator_agents": ["OTHER", "OTHER"]}, "model"),
    ],
)
def test_rounds_from_settings_to_disk_and_back(tiny_llama, tiny_llama_other, tmp_path, settings, writer):
    trainer = make_trainer(tiny_llama, ends=frozenset())
    named = json.loads(json.dumps(settings).replace("OTHER", tiny_llama_other))
    comparator = comparator_of(trainer, **named)
    for round in (1, 2):
        comparator.begin_round(round)
        collected = collect_pairs(
            trainer.collector, NUMBERED, trainer.growth(), SETTINGS, comparator=comparator, round=round
        )
        assert len(collected.comparator_rewards) == 8
        assert all(
            {pair.winner.writer, pair.loser.writer} <= {"current", writer} and pair.gap > 0 for pair in collected.pairs
        )
        write_round(tmp_path, round, collected.pairs)
    drawn = replay(find_rounds(tmp_path), mode="all_history", seed=0, sample_size=10)
    assert len(drawn) == 10 and {pair.round for pair in drawn} == {1, 2}
    check_pairs(drawn, [agent.decode for agent in trainer.team.agents], "runs")


def test_an_api_from_settings_and_its_key_nowhere(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("SOME_KEY", KEY)

    def answer(number, body):
        text = f"<agent_1>{KEY} one {number}</agent_1><agent_2>two</agent_2>"
        return Reply({"choices": [{"message": {"content": text}} for _ in range(body["n"])]})

    server = FakeServer(answer)
    trainer = make_trainer(tiny_llama, max_new_tokens=30)
    comparator = comparator_of(
        trainer, tmp_path / "answers.jsonl", comparator_policy="api", comparator_generation_mode="centralized",
        comparator_api_url=server.url, comparator_api_format="openai", comparator_api_model="m",
        comparator_api_key_env="SOME_KEY",
    )  # fmt: skip
    collected = collect_pairs(trainer.collector, NUMBERED, trainer.growth(), SETTINGS, comparator=comparator, round=1)
    server.close()
    assert server.asked[0].headers["Authorization"] == f"Bearer {KEY}"
    assert server.asked[0].body["max_tokens"] == 2 * (30 + 24)
    assert collected.pairs and collected.num_lost == 0
    write_round(tmp_path, 1, collected.pairs)
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "[key] one" in written
    assert KEY not in written


def test_a_missing_key_is_named_as_the_setting_is(tiny_llama, monkeypatch):
    monkeypatch.delenv("SOME_KEY", raising=False)
    trainer = make_trainer(tiny_llama)
    with pytest.raises(ConfigError, match="^comparator_api_key_env='SOME_KEY': no such environment variable"):
        comparator_of(
            trainer,
            comparator_policy="api",
            comparator_api_url="http://127.0.0.1:9/x",
            comparator_api_key_env="SOME_KEY",
        )


def test_one_local_model_may_write_all_roles(tiny_llama, tiny_llama_other, tmp_path):
    longer = shutil.copytree(tiny_llama_other, tmp_path / "longer")
    config = json.loads((longer / "config.json").read_text())
    (longer / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    trainer = make_trainer(tiny_llama, max_new_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        comparator = comparator_of(
            trainer, comparator_policy="model", comparator_model_name=str(longer),
            comparator_generation_mode="centralized",
        )  # fmt: skip
    # its random text holds no sections: every candidate is lost and counted, and the run goes on
    few = CollectionSettings(2, 2, "all", None, batch_size=1)
    collected = collect_pairs(trainer.collector, NUMBERED[:1], trainer.growth(), few, comparator=comparator, round=1)
    assert collected.pairs == []
    assert collected.lost == {"unparseable": 2}
    assert collected.num_lost == 2
