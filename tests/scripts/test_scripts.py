"""The scripts as a user runs them, on tiny models.

Most run inside this process, as `python train/X.py …` would, since importing torch anew takes longer than they do. What
concerns the process itself (noise, exit codes, tracebacks, the time of --help) runs in a process of its own.
"""

import json
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from mlrl.config import TaskArguments
from mlrl.config_help import field_docs

ROOT = Path(__file__).parents[2]
TRAINING = ("mareinforce", "magrpo", "marloo", "maremax", "iac", "maac")
PREFERENCES = ("madpo", "marlhf")
SHORT = "--max_new_tokens 8 --eval_num_samples 2"
SMALL = f"--max_steps 1 --num_generations 2 --rollout_batch_size 2 {SHORT}"
# one step a round: all pairs in one update, all rows in one policy step
ONE_STEP = {
    "madpo": "--train_batch_size none",
    "marlhf": "--num_generations 2 --rollout_batch_size 40 --num_train_epochs 1 --reward_num_train_epochs 1 "
    "--reward_train_batch_size 40",
}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(monkeypatch, capfd):
    """Runs a script in this process; returns what it printed to stdout."""

    def run_script(script: str, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(ROOT / "train" / f"{script}.py"), *words])
        capfd.readouterr()
        runpy.run_path(sys.argv[0], run_name="__main__")
        return capfd.readouterr().out

    return run_script


def start(*words: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs a command in a process of its own, without what the tests set for tokenizers."""
    variables = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    variables |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, env=variables)


def read_metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def agents_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "agents").iterdir())


# ---------------------------------------------------------------------------------------------------------- they train
@pytest.mark.parametrize("script", TRAINING)
def test_every_script_trains_and_says_where_things_are(run, tiny_llama, script):
    printed = run(script, "--agent_model", tiny_llama, "--run_name", "mine", *SMALL.split())
    folder = Path("runs/mine")
    assert agents_in(folder) == ["agent_0", "agent_1"]
    first, step, last = read_metrics(folder)  # evaluation, the step, evaluation
    assert (first["step"], step["step"], last["step"]) == (0, 1, 1)
    assert step["env_step"] == 2 * 2**2  # B items x J joints, all combinations
    assert step["agent_0/grad_norm"] > 0
    for place in (folder / "agents", folder / "metrics.jsonl"):
        assert str(place) in printed
    assert re.search(r"adapters +one an agent, rank 16, alpha 32, on all-linear\n", printed)
    assert printed.endswith("-m mlrl.report runs/mine\n" + printed.splitlines()[-1] + "\n")
    assert printed.endswith("train/evaluate.py --config runs/mine/config.yaml --agents_dir runs/mine/agents\n")
    before, after = (f"{line['eval/turn_1/reward_mean']:.3f}" for line in (first, last))
    assert f"evaluation reward  {before} -> {after}" in printed
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["record"]["algorithm"].lower() == script and config["agent_model"] == tiny_llama
    assert "num_turns" in config["record"]["sources"]["script"]


@pytest.mark.parametrize("script", PREFERENCES)
@pytest.mark.parametrize("rounds", [0, 2])
def test_preference_scripts_train_once_or_in_rounds(run, tiny_llama, script, rounds):
    words = f"--num_iterations {rounds} --run_name mine --preference_num_candidates 2 {SHORT} {ONE_STEP[script]}"
    words += f" --max_steps {max(rounds, 1)}"
    if rounds:
        words += " --comparator_policy current_copy --preference_replay_mode all_history"
    printed = run(script, "--agent_model", tiny_llama, *words.split())
    folder = Path("runs/mine")
    assert agents_in(folder) == ["agent_0", "agent_1"] and "evaluation reward" in printed
    written = sorted(path.name for path in (folder / "preferences").glob("iteration_*"))
    assert written == [f"iteration_{number:04d}.jsonl" for number in range(1, max(rounds, 1) + 1)]
    rows = read_metrics(folder)
    assert sum("agent_0/grad_norm" in row for row in rows) == max(rounds, 1)
    assert (rows[0]["step"], rows[-1]["step"]) == (0, max(rounds, 1))
    algorithm = yaml.safe_load((folder / "config.yaml").read_text())["record"]["algorithm"]
    assert algorithm.lower() == script + "iter" * bool(rounds)
    assert (folder / "reward_model").is_dir() == (script == "marlhf")


def test_another_model_writes_the_comparator(run, tiny_llama, tiny_llama_other):
    words = f"--num_iterations 1 --run_name mine --comparator_policy model --preference_num_candidates 2 {SHORT}"
    words += " --max_steps 1"
    run("madpo", "--agent_model", tiny_llama, "--comparator_model_name", tiny_llama_other, *words.split())
    lines = Path("runs/mine/preferences/iteration_0001.jsonl").read_text().splitlines()
    writers = {tuple(sorted(json.loads(line)[side]["writer"] for side in ("winner", "loser"))) for line in lines}
    assert writers == {("current", "model")}


def test_a_tree_of_two_turns_that_may_end_early(run, tiny_llama):
    words = "--num_turns 2 --num_generations 3 --early_termination_threshold 0.9 --max_steps 2 --completions_steps 1"
    words += " --joint_mode aligned"
    run("magrpo", "--agent_model", tiny_llama, "--run_name", "mine", *f"{SMALL} {words}".split())
    step = read_metrics(Path("runs/mine"))[1]
    nodes = [json.loads(line) for line in Path("runs/mine/completions/train-000001.jsonl").read_text().splitlines()]
    early = [sum(n["rewards"]) / 3 > 0.9 for n in nodes if n["turn"] == 0]
    assert len(early) == 2
    below = [n for n in nodes if n["turn"] == 1]
    assert len(below) == 3 * early.count(False)  # a child for every joint of the roots that go on
    assert step["turn_2/reached_fraction"] == pytest.approx(len(below) / 6)
    assert step["env_step"] == 3 * len(nodes)


def test_cross_joints_of_three_agents(run, tiny_llama):
    words = "--joint_mode cross --num_agents 3 --num_generations 2 --max_steps 2"
    run("magrpo", "--agent_model", tiny_llama, "--run_name", "mine", *f"{SMALL} {words}".split())
    assert read_metrics(Path("runs/mine"))[1]["env_step"] == 2 * 2**3
    assert agents_in(Path("runs/mine")) == ["agent_0", "agent_1", "agent_2"]


def test_different_models_a_team(run, tiny_llama, tiny_qwen2):
    run("marloo", "--agents", tiny_llama, tiny_qwen2, "--run_name", "mine", *SMALL.split())
    bases = [
        json.loads(Path(f"runs/mine/agents/agent_{i}/adapter_config.json").read_text())["base_model_name_or_path"]
        for i in range(2)
    ]
    assert bases == [tiny_llama, tiny_qwen2]


# ------------------------------------------------------------------------------------------------------ they are quiet
def test_full_tuning_as_launched_says_nothing_but_its_own_lines(tiny_llama):
    launch = ["-m", "accelerate.commands.launch", "--quiet", "--config_file", f"{ROOT}/accelerate_configs/cpu.yaml"]
    words = ["--agent_model", tiny_llama, "--tuning", "full", "--run_name", "mine", *SMALL.split()]
    done = start(*launch, "--cpu", "--num_processes", "1", str(ROOT / "train/magrpo.py"), *words)
    assert (done.returncode, done.stderr) == (0, "")
    own = "algorithm|task|agents|trained|device|rollouts|steps|run folder|peak memory|metrics|evaluation reward"
    own += "|report|evaluate"
    lines = r"magrpo\.py: loading libraries and models|"
    lines += rf"({own}) +\S.*|evaluation at step \d|  eval/\S+ +\S.*|step \d/\d \|.*|finished"
    strangers = [line for line in done.stdout.splitlines() if not re.fullmatch(lines, line)]
    assert strangers == []
    assert Path("runs/mine/agents/agent_1/model.safetensors").is_file()
    sources = yaml.safe_load(Path("runs/mine/config.yaml").read_text())
    assert sources["agent_learning_rate"] == 1e-5  # the task's rate is for adapters
    assert "agent_learning_rate" in sources["record"]["sources"]["derived"]


# ---------------------------------------------------------------------------------------------------------- the README
def readme_block(name: str) -> str:
    """The Python block of the README that opens with this file name."""
    blocks = re.findall(r"```python\n(# .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return next(block for block in blocks if block.startswith(f"# {name}\n"))


def test_the_task_and_the_python_program_of_the_readme(run, tiny_llama, tmp_path, monkeypatch, capfd):
    for name in ("my_task.py", "my_run.py", "use_agents.py"):
        block = readme_block(name)
        assert len(block.splitlines()) <= 36
        Path(name).write_text(
            block.replace('"embedded"', repr(tiny_llama)).replace("max_new_tokens=48", "max_new_tokens=8")
        )
    command = "./launch.sh train/magrpo.py --task my_task.py --num_train_epochs 5 --max_new_tokens 48"
    assert command in (ROOT / "README.md").read_text()
    words = ["--num_train_epochs", "5", "--max_new_tokens", "8", "--agent_model", tiny_llama, "--run_name", "mine"]
    run("magrpo", "--task", "my_task.py", *words)
    by_script = read_metrics(Path("runs/mine"))
    assert by_script[-1]["step"] == 5

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_task", raising=False)
    runpy.run_path("my_run.py")
    (folder,) = (path for path in Path("runs").iterdir() if path.name != "mine")
    measured = ("reward", "grad_norm", "loss")  # the same numbers, as far as they hold no time or memory
    for mine, theirs in zip(by_script, read_metrics(folder), strict=True):
        names = [name for name in mine if any(word in name for word in measured) and not name.startswith("time/")]
        assert names
        assert {name: theirs[name] for name in names} == {name: mine[name] for name in names}
    used = runpy.run_path("use_agents.py")
    text = used["tokenizer"]("What is rain?", return_tensors="pt")
    assert used["agent"](**text).logits.shape[:2] == text["input_ids"].shape


# ---------------------------------------------------------------------------------------------------------- evaluation
def test_a_trained_team_is_evaluated_from_its_folder(run, tiny_llama):
    words = [*SMALL.split(), "--agent_learning_rate", "0.01", "--eval_num_generations", "2", "--num_turns", "2"]
    run("magrpo", "--agent_model", tiny_llama, "--run_name", "mine", *words)
    last = read_metrics(Path("runs/mine"))[-1]
    words = ["--config", "runs/mine/config.yaml", "--agents_dir", "runs/mine/agents", "--output", "out/results.json"]
    printed = run("evaluate", *words)
    results = json.loads(Path("out/results.json").read_text())
    # the saved agents do exactly what the trained ones did at the end
    assert results["metrics"] == {name: value for name, value in last.items() if name.startswith("eval/")}
    for name, value in results["metrics"].items():
        assert re.search(rf"  {re.escape(name)} +{re.escape(f'{value:.3f}')}", printed) or abs(value) < 1e-3
    low, high = results["intervals"]["eval/turn_2/reward_mean"]
    assert low <= results["metrics"]["eval/turn_2/reward_mean"] <= high
    assert f"  {low:.3f} .. {high:.3f}\n" in printed
    episodes = results["episodes"]
    assert [(e["item"], e["episode"]) for e in episodes] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    rewards = [e["turns"][1]["reward"] for e in episodes]
    assert sum(rewards) / 4 == pytest.approx(results["metrics"]["eval/turn_2/reward_mean"])
    assert episodes[0]["return"] == pytest.approx(sum(turn["reward"] for turn in episodes[0]["turns"]))
    assert len(episodes[0]["turns"][0]["prompts"]) == len(episodes[0]["turns"][0]["responses"]) == 2
    assert results["settings"]["agents_dir"] == "runs/mine/agents"


def test_models_that_nobody_trained_are_evaluated_without_adapters(run, tiny_llama, tiny_qwen2):
    few = ["--eval_num_samples", "2", "--max_new_tokens", "8", "--eval_num_generations", "1"]
    printed = run("evaluate", "--agents", tiny_llama, tiny_qwen2, *few)
    assert "eval/turn_1/reward_mean" in printed and "return_best" not in printed
    run("evaluate", "--agent_model", tiny_llama, *few, "--output", "base.json")
    zero = [*SMALL.split(), "--eval_num_generations", "1", "--agent_learning_rate", "0"]
    run("magrpo", "--agent_model", tiny_llama, "--run_name", "mine", *zero)
    base = json.loads(Path("base.json").read_text())["metrics"]
    assert {name: read_metrics(Path("runs/mine"))[0][name] for name in base} == base


def test_a_discussion_from_the_command_line(run, tiny_llama):
    few = ["--eval_num_samples", "2", "--max_new_tokens", "8", "--eval_num_generations", "1"]
    printed = run("evaluate", "--agent_model", tiny_llama, *few, "--protocol", "discussion", "--output", "talk.json")
    assert "protocol  discussion" in printed and "eval/turn_2/reward_mean" in printed
    talk = json.loads(Path("talk.json").read_text())
    assert talk["settings"]["protocol"] == "discussion" and len(talk["episodes"][0]["turns"]) == 2


# --------------------------------------------------------------------------------------------------------------- errors
BROKEN_TASK = """
from mlrl import Task

calls = []

def reward(first, second):
    calls.append(1)
    if len(calls) > 3:  # two items of evaluation, one of training
        raise KeyError("no such word")  # the broken line
    return [1.0] * len(first)

task = Task(train_dataset=[{"prompt": "a"}, {"prompt": "b"}], eval_dataset=[{"prompt": "c"}] * 2, reward_func=reward)
"""


def test_an_error_in_a_users_reward_reaches_the_user_and_leaves_the_run_folder(tiny_llama):
    Path("broken.py").write_text(BROKEN_TASK)
    words = ["--task", "broken.py", "--agent_model", tiny_llama, "--run_name", "mine", *SMALL.split()]
    done = start(str(ROOT / "train/magrpo.py"), *words)
    assert done.returncode == 1
    assert done.stderr.count('raise KeyError("no such word")  # the broken line') == 1
    assert "KeyError: 'no such word'" in "".join(done.stderr.splitlines()[-2:])  # from Python 3.11 on with a note
    assert done.stderr.count("Traceback") == 1
    assert "evaluation at step 0" in done.stdout
    (line,) = read_metrics(Path("runs/mine"))  # the evaluation before
    assert line["eval/turn_1/reward_mean"] == 1.0
    assert yaml.safe_load(Path("runs/mine/config.yaml").read_text())["run_name"] == "mine"


WRONG_TASK = """
from mlrl import Task

def reward(first, second):
    return [0.5]

task = Task(train_dataset=[{"prompt": "a"}, {"prompt": "b " * 300}], reward_func=reward)
"""

BAD_INPUT = [  # script, words, exit code, what the one line must hold
    ("magrpo", ["--num_generation", "4"], 2, ["--num_generation", "--num_generations"]),
    ("maremax", ["--num_generations", "1"], 2, ["num_generations=1", "2 or more"]),
    ("marloo", ["--task", "lenght_ratio"], 2, ["task='lenght_ratio'", "length_ratio"]),
    ("mareinforce", ["--top_p", "0.9"], 2, ["top_p=0.9", "Set top_p to 1"]),
    ("evaluate", ["--agents_dir", "nowhere"], 2, ["agents_dir='nowhere'", "agent_0"]),
    ("magrpo", ["--agent_model", "nobody/no-such-model"], 2, ["agent_model='nobody/no-such-model'", "hub id"]),
    (
        "magrpo",
        ["--task", "wrong.py", "--rollout_batch_size", "1"],
        1,
        ["[0.5]", "1 reward for 2", "item 0", "turn 0"],
    ),
    ("magrpo", ["--task", "wrong.py", "--rollout_batch_size", "2"], 1, ["item 1, turn 0", "max_prompt_tokens"]),
]


@pytest.mark.parametrize(("script", "words", "code", "parts"), BAD_INPUT, ids=lambda value: str(value)[:40])
def test_bad_input_is_one_line(run, capfd, tiny_llama, script, words, code, parts):
    Path("wrong.py").write_text(WRONG_TASK)
    if "wrong.py" in words:
        words = [*words, "--agent_model", tiny_llama, "--num_generations", "2", "--max_new_tokens", "8"]
    with pytest.raises(SystemExit) as stop:
        run(script, *words)
    message = capfd.readouterr().err
    assert stop.value.code == code
    assert message.startswith(f"{script}.py: error: ") and message.count("\n") == 1
    assert [part for part in parts if part not in message] == [], message


def test_a_wrong_setting_ends_the_process_at_once():
    began = time.perf_counter()
    done = start(str(ROOT / "train/maremax.py"), "--num_generations", "1")
    assert time.perf_counter() - began < 3
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("maremax.py: error: num_generations=1: ") and done.stderr.count("\n") == 1


# ----------------------------------------------------------------------------------------------------------------- help
@pytest.mark.parametrize("script", [*TRAINING, *PREFERENCES, "evaluate"])
def test_help_is_quick_and_the_script_small(script):
    began = time.perf_counter()
    done = start(str(ROOT / f"train/{script}.py"), "--help")
    seconds = time.perf_counter() - began
    assert (done.returncode, done.stderr) == (0, "")
    assert seconds < 3
    source = (ROOT / f"train/{script}.py").read_text()
    assert len(source.splitlines()) < 120
    assert done.stdout.startswith(source.partition('"""')[2].partition("\n")[0])
    assert f"./launch.sh train/{script}.py" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 120


@pytest.mark.parametrize("script", [*TRAINING, *PREFERENCES, "evaluate"])
def test_what_a_script_restates_is_documented_as_in_mlrl(script):
    arguments = runpy.run_path(str(ROOT / f"train/{script}.py"), run_name=script)["Arguments"]
    sys.modules[script] = type(sys)(script)  # so that the source of the class can be found
    sys.modules[script].__file__ = str(ROOT / f"train/{script}.py")
    try:
        restated = field_docs(arguments)
    finally:
        del sys.modules[script]
    own = next(base for base in arguments.__mro__ if base.__name__.endswith("Config"))
    documented = field_docs(own) | field_docs(TaskArguments)
    assert restated.keys() == documented.keys()
    different = {name for name in documented if restated[name] != documented[name]}
    assert different == set()
