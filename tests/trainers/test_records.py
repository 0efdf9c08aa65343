"""What a run keeps of its trees: one JSON object a node, with the fields of the run folder's contract."""

import json

from mlrl.run_folder import RunFolder
from mlrl.tracking import Tracking
from mlrl.trainers.records import node_records, write_nodes
from tests.rollout.fakes import growth, scripted

FIELDS = ["step", "env_step", "split", "item", "path", "turn", "prompts", "responses", "token_counts", "truncated",
          "joints", "rewards", "returns", "advantages"]  # fmt: skip


def trees():
    def script(ordinal, path, agent, k):
        return ["1", "0.5…"][k] if not path else str(agent)

    def reward(a, b):
        return [float(x) for x in a]

    grower = scripted(2, 2, script, reward)
    how = growth(2, 2, joint_mode="cross", threshold=0.9, scope="joint", discount=0.5)
    return grower.collect([(3, {"prompt": "go"}), (7, {"prompt": "go"})], how)


def test_a_record_a_node():
    records = list(node_records(trees(), step=4, env_step=90, split="train", discount=0.5))
    assert [(r["item"], r["path"], r["turn"]) for r in records] == [
        (3, [], 0), (3, [2], 1), (3, [3], 1), (7, [], 0), (7, [2], 1), (7, [3], 1),
    ]  # fmt: skip
    assert all(list(r) == FIELDS for r in records)
    root, child = records[0], records[1]
    assert (root["step"], root["env_step"], root["split"]) == (4, 90, "train")
    assert root["prompts"] == ["go", "go"] and child["prompts"] == ["turn 1", "turn 1"]
    assert root["responses"] == [["1", "0.5"]] * 2
    assert root["token_counts"] == [[2, 3]] * 2  # "1" and an end token; "0", "." and "5" without one
    assert root["truncated"] == [[False, True]] * 2
    assert root["joints"] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert root["rewards"] == [1.0, 1.0, 0.5, 0.5]
    # the child's rewards are 0, the number of agent 0; joints 0 and 1 ended
    assert root["returns"] == [1.0, 1.0, 0.5, 0.5] and child["rewards"] == [0.0] * 4
    assert root["advantages"] is None


def test_nodes_are_appended_as_json(tmp_path):
    made = trees()
    made[0].root.advantages = [[0.5, -0.5], [0.25, -0.25]]
    made[0].root.rewards[0] = float("nan")
    folder = RunFolder(tmp_path)
    write_nodes(Tracking(folder), made[:1], 4, 90, "train", 0.5)
    write_nodes(Tracking(folder), made[1:], 4, 90, "train", 0.5)
    write_nodes(Tracking(folder), made[1:], 4, 90, "eval", 0.5)
    files = {path.name: path for path in folder.completions.iterdir()}
    assert sorted(files) == ["eval-000004.jsonl", "train-000004.jsonl"]
    lines = [json.loads(line) for line in files["train-000004.jsonl"].read_text().splitlines()]
    assert len(lines) == 6 and [line["item"] for line in lines] == [3, 3, 3, 7, 7, 7]
    assert lines[0]["advantages"] == [[0.5, -0.5], [0.25, -0.25]]
    assert lines[0]["rewards"][0] is None  # JSON has no NaN
