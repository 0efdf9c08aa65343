"""Every command and code block of the pages is run, or read where it needs more than one process without network."""

import re
import sys
from pathlib import Path

import pytest

from mlrl.config import field_names
from mlrl.errors import ConfigError
from tests.docs.blocks import PAGES, ROOT, Block, blocks_of
from tests.docs.following import Follower
from tests.docs.reading import Training, Unreadable
from tests.tiny import tiny_model, tiny_tokenizer

# By the fast tests, since others run each algorithm, task and tracker, and these pages take a minute or more.
READ_ONLY = ("train/preferences.md", "train/tracking.md", "mlrl/tasks/README.md", "train/README.md")
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.fixture(scope="session")
def long_tiny(tmp_path_factory) -> str:
    """A tiny model that holds the prompts of real tasks."""
    folder = tmp_path_factory.mktemp("models") / "tiny-long"
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.config.max_position_embeddings = tokenizer.model_max_length = 32768
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def follower(tmp_path, monkeypatch, long_tiny):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("mlrl.embedded.embedded_model_path", lambda: long_tiny)
    before = set(sys.modules)
    yield Follower(long_tiny, monkeypatch)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]  # the files of a page


@pytest.mark.parametrize("name", NAMES)
def test_a_page_can_be_followed(follower, name):
    follower.follow(blocks_of(ROOT / name), run=name not in READ_ONLY)


@pytest.mark.slow
@pytest.mark.parametrize("name", READ_ONLY)
def test_every_command_of_a_long_page_runs(follower, name):
    follower.follow(blocks_of(ROOT / name), run=True)
    assert len(follower.executed) > 3


def page_of(text: str, language: str = "bash") -> list[Block]:
    return [Block(ROOT / "README.md", language, text, 1)]


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("bash", "make everything\n"),
        ("bash", "./launch.sh my_script.py --task tldr\n"),
        ("bash", "./launch.sh test tests/test_nothing.py\n"),
        ("bash", "./launch.sh train/magrpo.py --num_generation 4\n"),
        ("bash", "./launch.sh train/magrpo.py --task_args middle=3\n"),
        ("bash", "./launch.sh train/magrpo.py --joint_mode crossed\n"),
        ("bash", "./launch.sh --config_file accelerate_configs/zero4.yaml train/magrpo.py\n"),
        ("bash", "accelerate launch --num_procs 2 train/magrpo.py\n"),
        ("bash", "NUM_NODES=2 ./launch.sh train/magrpo.py\n"),
        ("bash", "#SBATCH --nodes=2\nsrun ./launch.sh train/magrpo.py --num_generation 4\n"),
        ("bash", "pip install -e '.[everything]'\n"),
        ("python", "import mlrl\n"),
        ("python", "# broken.py\nfrom mlrl import Tasks\n"),
        ("yaml", "num_turns: 2\n"),
        ("", "./launch.sh train/magrpo.py\n"),
    ],
)
def test_a_block_that_is_wrong_or_unknown_is_found(follower, language, text):
    with pytest.raises((AssertionError, Unreadable, ImportError, ConfigError)):
        follower.follow(page_of(text, language), run=True)


def test_what_is_run_is_a_step_of_what_the_page_says(follower, long_tiny):
    follower.follow(
        page_of("./launch.sh train/marloo.py --num_agents 3 --agent_model some/model --run_name a  # b\n"), True
    )
    (ran,) = follower.executed
    assert ran.startswith("marloo.py --num_agents 3 --agent_model some/model --run_name a --max_new_tokens 6")
    assert ran.endswith(f"--agent_model {long_tiny}")
    assert sorted(path.name for path in Path("runs/a/agents").iterdir()) == ["agent_0", "agent_1", "agent_2"]


# ---------------------------------------------------------------------------------------------------------- the text
def settings() -> set[str]:
    """Names of all flags of the scripts."""
    commands = [Training.of_script(path) for path in (ROOT / "train").glob("*.py")]
    return {name for training in commands for name in field_names(training.arguments)}


def test_flags_that_the_text_names_exist():
    elsewhere = {"help", "config", "report", "max_mb", "no-deps", "cpu", "logdir"}
    elsewhere |= {"num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"}
    elsewhere |= {"mixed_precision", "config_file"}
    elsewhere |= {"enable-lora", "max-loras", "max-cpu-loras", "max-lora-rank", "logprobs-mode"}  # of vllm serve
    known = settings() | elsewhere
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        named = {flag for code in re.findall(r"`([^`]+)`", text) for flag in re.findall(r"--([a-z][\w-]*)", code)}
        assert named - known == set(), page


def anchor(heading: str) -> str:
    """A heading as the web page names its place."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            if target.startswith("http"):
                continue
            path, _, place = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            assert there.exists(), f"{page}: {target}"
            if place:
                headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
                assert place in map(anchor, headings), f"{page}: {target}"
