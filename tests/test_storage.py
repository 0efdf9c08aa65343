"""Full disks and forbidden folders: the path is named, and what was there before is whole."""

import errno
import json
import os
import resource
import signal

import pytest
from safetensors import SafetensorError

from mlrl.config import MAGRPOConfig
from mlrl.config_file import dump_config
from mlrl.errors import StorageError
from mlrl.run_folder import RunFolder, append_jsonl
from mlrl.storage import whole_files, write_whole, writing


@pytest.fixture
def small_files():
    """No file may grow beyond 100 bytes: a write succeeds in part, and then fails, as on a disk that fills up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, ignored)


def full_disk(*arguments, **named):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def forbidden(*arguments, **named):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_a_line_that_does_not_fit_leaves_the_lines_before(tmp_path, small_files):
    path = tmp_path / "metrics.jsonl"
    append_jsonl(path, [{"step": 1, "text": "x" * 40}])
    with pytest.raises(StorageError, match="metrics.jsonl: cannot be written .File too large.*Give a folder"):
        append_jsonl(path, [{"step": 2, "text": "y" * 60}])  # 40 bytes of it would fit
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1, "text": "x" * 40}]
    append_jsonl(path, [{"step": 2}])  # what fits goes on where the file ended
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_full_disk_is_named_with_its_remedy(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(StorageError) as caught:
        append_jsonl(path, [{"step": 1}])
    assert str(caught.value) == (
        f"{path}: cannot be written (No space left on device). Make room on that disk, or give a folder on another "
        "one; what was written before is whole."
    )


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "completions").write_text("")
    with pytest.raises(StorageError, match="completions/train-000001.jsonl: cannot be written"):
        RunFolder(tmp_path).write_completions([{"item": 0}], "train", 1)


def test_a_config_is_written_whole_or_stays_as_it_was(tmp_path, small_files):
    path = tmp_path / "config.yaml"
    path.write_text("before")
    with pytest.raises(StorageError, match="config.yaml: cannot be written"):
        dump_config(MAGRPOConfig(), {}, path)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_take_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", forbidden)
    with pytest.raises(StorageError, match="results.json: cannot be written .Permission denied.*Allow writing there"):
        write_whole(tmp_path / "results.json", "{}")
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_folder_come_together(tmp_path):
    (tmp_path / "mine.txt").write_text("stays")
    (tmp_path / "a").write_text("old")
    with whole_files(tmp_path) as folder:
        (folder / "a").write_text("new")
        (folder / "deep").mkdir()
        (folder / "deep" / "b").write_text("new")
        assert (tmp_path / "a").read_text() == "old"
    found = {str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*") if p.is_file()}
    assert found == {"mine.txt": "stays", "a": "new", "deep/b": "new"}


def test_files_of_a_folder_stay_as_they_were(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(StorageError, match="No space left"), whole_files(tmp_path) as folder:
        (folder / "a").write_text("new")
        full_disk()
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "old"


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        Exception("No space left on device (os error 28)"),  # as the tokenizers library says it
    ],
)
def test_full_disks_of_rust_libraries(error):
    with pytest.raises(StorageError, match="here: cannot be written .*No space left.*Make room"), writing("here"):
        raise error


def test_other_errors_pass():
    with pytest.raises(ZeroDivisionError), writing("here"):
        raise ZeroDivisionError


SAVES = [
    ("safetensors.torch.serialize_file", "the weights"),
    ("peft.LoraConfig.save_pretrained", "the adapter's settings"),
    ("transformers.PreTrainedTokenizerBase.save_pretrained", "the tokenizer"),
    ("os.replace", "a file's place"),
]


@pytest.mark.parametrize("fault", [full_disk, forbidden])
@pytest.mark.parametrize(("target", "what"), SAVES, ids=[what for _, what in SAVES])
def test_agents_that_cannot_be_saved_leave_those_that_were(tiny_agents, tmp_path, monkeypatch, target, what, fault):
    team = tiny_agents
    team.save(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with monkeypatch.context() as patched:
        patched.setattr(target, fault)
        with pytest.raises(StorageError, match="agent_0: cannot be written"):
            team.save(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    team.save(tmp_path)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == set(before)


@pytest.fixture(scope="module")
def tiny_agents():
    import torch

    from mlrl.agents import Team
    from mlrl.config import AgentArguments
    from mlrl.parallel.mesh import Mesh
    from mlrl.sources import load_tokenizers, resolve_source
    from tests.tiny import tiny_model, tiny_tokenizer

    sources = [resolve_source(tiny_model())] * 2
    tokenizers = load_tokenizers(sources, tiny_tokenizer())
    return Team.load(
        AgentArguments(), sources, tokenizers, device=torch.device("cpu"), dtype=torch.float32, seed=0,
        mesh=Mesh.alone(2),
    )  # fmt: skip
