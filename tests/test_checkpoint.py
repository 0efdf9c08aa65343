"""A checkpoint is there whole or not at all, whatever fails while it is written."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from mlrl import checkpoint as module
from mlrl.checkpoint import Entity, damage, load_entity, read_checkpoint_metadata
from mlrl.checkpoint_writing import CheckpointError, write_checkpoint
from mlrl.errors import ConfigError
from mlrl.parallel.engine import Engine, OptimizerSettings
from mlrl.parallel.group import Group
from mlrl.resume import find_resume

SETTINGS = OptimizerSettings(0.1, 0.01, None, "constant", 0, 0)
STATE = {"env_step": 3, "run_folder": "nowhere", "sizes": {}}


def entity(seed: int, updates: int = 1, dtype: torch.dtype = torch.float32) -> Entity:
    """Two weights that were trained a little."""
    torch.manual_seed(seed)
    parameters = [nn.Parameter(torch.randn(3, 2, dtype=dtype)), nn.Parameter(torch.randn(4, dtype=dtype))]
    engine = Engine(parameters, SETTINGS)
    for _ in range(updates):
        engine.backward(sum((parameter.float() ** 3).sum() for parameter in parameters))
        engine.step(engine.grad_norm())
    return Entity("agent_0", ["a", "b"], engine)


def write(folder: Path, step: int, trained: Entity, limit: int | None = None) -> Path:
    return write_checkpoint(folder, step, STATE, [trained], Group.alone(), limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("updates", [0, 3])
def test_weights_and_optimizer_come_back_bit_for_bit(updates, dtype, tmp_path):
    trained, fresh = entity(0, updates, dtype), entity(1, 2, dtype)
    load_entity(write(tmp_path, 5, trained), fresh)
    for kind in ("master", "step", "exp_avg", "exp_avg_sq"):
        for one, other in zip(trained.engine.state(kind), fresh.engine.state(kind), strict=True):
            assert one.equal(other)
    for one, other in zip(trained.engine.parameters, fresh.engine.parameters, strict=True):
        assert one.equal(other)
    for engine in (trained.engine, fresh.engine):
        engine.backward(sum(parameter.float().sum() for parameter in engine.parameters))
        engine.step(engine.grad_norm())
    for one, other in zip(trained.engine.masters, fresh.engine.masters, strict=True):
        assert one.equal(other)  # the same next update


def test_what_it_says_about_itself(tmp_path):
    path = write(tmp_path, 7, entity(0))
    assert path.name == "checkpoint-7" and (tmp_path / "latest").read_text() == "checkpoint-7\n"
    told = read_checkpoint_metadata(path)
    assert told["step"] == 7 and told["env_step"] == 3
    sizes = {name: size for name, (size, _) in told["files"].items()}
    assert sizes == {str(file.relative_to(path)): file.stat().st_size for file in path.rglob("*.safetensors")}
    assert len(sizes) == 4


def test_other_weights_are_refused(tmp_path):
    path, other = write(tmp_path, 1, entity(0)), entity(0)
    wider = Entity(
        "agent_0", ["a", "b"], Engine([nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(5))], SETTINGS)
    )
    with pytest.raises(ConfigError, match=r"agent_0 has a weight b of \[5\], and the checkpoint one of \[4\]"):
        load_entity(path, wider)
    with pytest.raises(ConfigError, match=r"weight c of \[4\], and the checkpoint no such weight"):
        load_entity(path, Entity("agent_0", ["a", "c"], other.engine))
    with pytest.raises(ConfigError, match="holds nothing of agent_1"):
        load_entity(path, Entity("agent_1", ["a", "b"], other.engine))


def test_old_ones_go_and_later_ones_of_another_time_stay(tmp_path):
    trained = entity(0)
    for step in (1, 2, 9):
        write(tmp_path, step, trained)
    write(tmp_path, 3, trained, limit=2)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-3",
        "checkpoint-9",
    ]
    write(tmp_path, 3, trained, limit=1)  # a second time: it takes the place of the first
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-9"]
    assert not list(tmp_path.glob(".writing*"))


# Faults while writing -------------------------------------------------------------------------------------------------

OPERATIONS = ("os.mkdir", "open", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


class FailsAt:
    """Lets the n-th file operation of a thread fail, as a full or broken disk does; an audit hook sees them all."""

    def __init__(self, folder: Path):
        self.folder, self.left, self.seen = str(folder), None, 0
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple) -> None:
        if self.left is None or event not in OPERATIONS or not str(arguments[0]).startswith(self.folder):
            return
        self.seen += 1
        if self.seen == self.left:
            self.left = None
            raise OSError(errno.ENOSPC, "No space left on device", str(arguments[0]))


def test_a_failure_of_any_file_operation_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    earlier, later = entity(0), entity(1)
    fails = FailsAt(tmp_path)
    failures = 0
    for number in range(1, 200):
        folder = tmp_path / str(number)
        write(folder, 1, earlier)
        fails.left, fails.seen = number, 0
        try:
            write(folder, 2, later, limit=1)
        except CheckpointError as error:
            assert "No space left" in str(error)
        reached, fails.left = fails.left is None, None
        assert_loads_one_of(folder, earlier, later)
        write(folder, 2, later, limit=1)  # with space again it works
        assert damage(folder / "checkpoint-2") is None
        assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-2", "latest"]
        if not reached:
            break
        failures += 1
    assert failures > 10 and not reached


@pytest.mark.parametrize(
    "name", ["os.fsync", "os.rename", "os.replace", "safetensors.torch.save_file", "shutil.rmtree"]
)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_a_failure_below_the_file_system(name, code, tmp_path, monkeypatch):
    earlier, later = entity(0), entity(1)
    place, _, function = name.rpartition(".")
    original = getattr(sys.modules[place], function)
    for number in range(1, 60):
        folder = tmp_path / str(number)
        write(folder, 1, earlier)
        calls = iter(range(1, 1000))

        def failing(*arguments, calls=calls, number=number, **named):
            if next(calls) == number:
                raise OSError(code, os.strerror(code))
            return original(*arguments, **named)

        with monkeypatch.context() as patch:
            patch.setattr(name, failing)
            try:
                write(folder, 2, later, limit=1)
            except CheckpointError as error:
                assert os.strerror(code) in str(error)
            reached = next(calls) > number
        assert_loads_one_of(folder, earlier, later)
        if not reached:
            return
    raise AssertionError("never came to the end")


def assert_loads_one_of(folder: Path, earlier: Entity, later: Entity) -> None:
    """What a run would go on from is one of the two, whole."""
    found = find_resume(str(folder), "nowhere", None).checkpoint
    fresh = entity(2)
    load_entity(found, fresh)
    wanted = {"checkpoint-1": earlier, "checkpoint-2": later}[found.name]
    for one, other in zip(wanted.engine.masters, fresh.engine.masters, strict=True):
        assert one.equal(other)


# Damage ---------------------------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path):
    first, second = write(tmp_path, 1, entity(0)), write(tmp_path, 2, entity(1))
    target = second / "agent_0" / "exp_avg.safetensors"
    whole = target.read_bytes()
    for content, word in ((whole[:-1], "bytes"), (whole[:-1] + bytes([whole[-1] ^ 1]), "checksum"), (None, "read")):
        target.unlink() if content is None else target.write_bytes(content)
        found = find_resume(str(tmp_path), "nowhere", None)
        assert found.checkpoint == first
        assert str(second) in found.notes[0] and "damaged" in found.notes[0] and word in found.notes[0]
    target.write_bytes(whole)
    assert find_resume(str(tmp_path), "nowhere", None).checkpoint == second

    state = second / "state.json"
    text = state.read_text()
    for content in (text.replace('"env_step": 3', '"env_step": 4'), text[:40], "", "[]", "{}\n"):
        state.write_text(content)
        found = find_resume(str(tmp_path), "nowhere", None)
        assert found.checkpoint == first and "damaged" in found.notes[0], content
        with pytest.raises(ConfigError, match="state.json"):
            read_checkpoint_metadata(second)
    state.unlink()
    assert "never finished" in find_resume(str(tmp_path), "nowhere", None).notes[0]

    shutil.rmtree(first / "agent_0")
    state.write_text("x")
    with pytest.raises(ConfigError, match=r"no whole checkpoint\. .*checkpoint-2: .*checkpoint-1: "):
        find_resume(str(tmp_path), "nowhere", None)


def test_nothing_yet_is_a_fresh_start_that_says_so(tmp_path):
    for folder in (tmp_path, tmp_path / "checkpoints"):
        folder.mkdir(exist_ok=True)
        (folder / ".writing-checkpoint-3").mkdir(exist_ok=True)
        found = find_resume(str(folder), "nowhere", None)
        assert found.checkpoint is None and "starts from step 0" in found.notes[-1]


def test_nothing_in_it_is_unpickled(tmp_path):
    kinds = {path.suffix for path in write(tmp_path, 1, entity(0)).rglob("*") if path.is_file()}
    assert kinds == {".safetensors", ".json"}
    body = (tmp_path / "checkpoint-1" / "state.json").read_text().partition("\n")[2]
    assert json.loads(body)["format"] == module.FORMAT


def test_what_the_state_tells_of_other_files_reaches_the_disk_first(tmp_path, monkeypatch):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("{}\n")
    flushed, fsync = [], os.fsync

    def recording(descriptor):
        flushed.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    write_checkpoint(tmp_path, 1, STATE, [entity(0)], Group.alone(), beside=[metrics])
    state = next(place for place, path in enumerate(flushed) if path.endswith("state.json"))
    assert str(metrics.resolve()) in flushed[:state]
