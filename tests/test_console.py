"""The console: plain lines, the live display in a pseudo-terminal, quiet mode, silence off the main process."""

import io
import os
import pty
import subprocess
import sys
import textwrap

import pytest

from mlrl.console import Console


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def make(**arguments):
    file, clock = io.StringIO(), Clock()
    return Console(file=file, clock=clock, **arguments), file, clock


def take_steps(console, clock, steps, seconds=10.0, total=6):
    for step in range(1, steps + 1):
        console.phase("sampling")
        clock.now += seconds
        console.step(step=step, items=4 * step, env_step=32 * step, reward=step / 10, tokens_per_s=1234.0)


def step_lines(file):
    return [line for line in file.getvalue().splitlines() if line.startswith("step")]


def test_a_file_gets_plain_lines_with_everything_a_reader_needs():
    console, file, clock = make()
    assert console.plain
    console.start(total_steps=6, total_items=24)
    clock.now += 50  # the evaluation before training does not count in a step's time
    console.evaluation({"eval/turn_1/reward_mean": 0.25}, step=0)
    clock.now += 30
    console.step(step=2, items=8, env_step=64, reward=0.5, tokens_per_s=1234.0, extra={"loss": -0.01234})
    # 30 s for 2 steps are 15 s a step, 4 steps are left: 60 s
    assert step_lines(file) == [
        "step 2/6 | items 8/24 | env_step 64 | reward 0.500 | 1,234 tokens/s overall | loss -0.012 | ETA 1m 00s"
    ]
    assert "\x1b" not in file.getvalue()


def test_plain_lines_keep_the_interval_and_average_what_they_skip():
    console, file, clock = make(log_interval=64)
    console.start(6, 24)
    take_steps(console, clock, 6)
    # env_steps 32, 64, …, 192: the first line at 32, then every 64; 192 is the last step, so it has a line as well
    assert [line.split(" | ")[0] for line in step_lines(file)] == ["step 1/6", "step 3/6", "step 5/6", "step 6/6"]
    # rewards 0.1 | (0.2 + 0.3)/2 | (0.4 + 0.5)/2 | 0.6
    assert [line.split(" | ")[3] for line in step_lines(file)] == [
        "reward 0.100",
        "reward 0.250",
        "reward 0.450",
        "reward 0.600",
    ]


def test_unknown_totals_and_absent_numbers():
    console, file, _clock = make()
    console.start(None, None)
    console.step(step=1, items=4, env_step=8, reward=float("nan"), tokens_per_s=None)
    console.step(step=2, items=8, env_step=16, reward=None, tokens_per_s=3.0)
    assert step_lines(file)[0] == "step 1 | items 4 | env_step 8 | reward - | ETA -"
    assert "reward - | 3.000 tokens/s overall" in step_lines(file)[1]


def test_steps_that_evaluate_no_reward_have_lines_by_their_count():
    console, file, clock = make(log_interval=2)
    console.start(None, None)
    for step in range(1, 7):
        clock.now += 5
        if step == 3:
            console.expect(7)  # the run has found out
        console.step(step=step, items=step, env_step=80, reward=0.5, tokens_per_s=None)
    lines = step_lines(file)
    assert [line.split(" | ")[0] for line in lines] == ["step 1", "step 3/7", "step 5/7"]
    assert [line.split(" | ")[-1] for line in lines] == ["ETA -", "ETA 20s", "ETA 10s"]


def test_a_resumed_run_counts_only_its_own_steps_for_the_eta():
    console, file, clock = make()
    console.start(10, 40, step=6)
    clock.now += 20
    console.step(step=8, items=32, env_step=64, reward=0.5, tokens_per_s=1.0)
    assert step_lines(file)[0].endswith("ETA 20s")  # 20 s for 2 steps, 2 steps left


def test_evaluations_are_compared_with_the_first():
    console, file, _ = make()
    console.evaluation({"eval/turn_1/reward_mean": 0.4, "eval/pass_rate": 0.5}, step=0)
    console.evaluation({"eval/turn_1/reward_mean": 0.7, "eval/pass_rate": 0.25, "eval/new": 1}, step=6)
    assert file.getvalue().splitlines() == [
        "evaluation at step 0",
        "  eval/turn_1/reward_mean  0.400",
        "  eval/pass_rate           0.500",
        "evaluation at step 6",
        "  eval/turn_1/reward_mean  0.700  (first 0.400, +0.300)",
        "  eval/pass_rate           0.250  (first 0.500, -0.250)",
        "  eval/new                 1  (first -, -)",
    ]


def test_finish_tells_reward_before_and_after_and_where_things_are():
    console, file, clock = make()
    console.header({"task": "length_ratio [two roles]", "device": "cpu"})
    console.start(2, 8)
    console.evaluation({"eval/turn_1/reward_mean": 0.4}, 0)
    take_steps(console, clock, 2, seconds=100)
    console.evaluation({"eval/turn_1/reward_mean": 0.65}, 2)
    console.finish({"agents": "runs/a/agents", "metrics": "runs/a/metrics.jsonl"}, summary={"note": "converged"})
    text = file.getvalue()
    assert text.startswith("task    length_ratio [two roles]\ndevice  cpu\n")
    assert text.endswith(
        textwrap.dedent(
            """\
            finished
            trained            2 steps, 8 items, env_step 64 in 3m 20s
            evaluation reward  0.400 -> 0.650 (+0.250)
            note               converged
            agents             runs/a/agents
            metrics            runs/a/metrics.jsonl
            """
        )
    )


def test_finish_names_the_turns_where_there_are_several_and_shows_a_single_evaluation_once():
    console, file, _ = make()
    console.evaluation({"eval/turn_1/reward_mean": 0.4, "eval/turn_2/reward_mean": 0.5, "eval/turn_1/other": 9.0}, 0)
    console.finish({})
    assert file.getvalue().splitlines()[-2:] == ["evaluation reward, turn 1  0.400", "evaluation reward, turn 2  0.500"]


def test_one_of_a_thing_is_no_plural():
    console, file, clock = make()
    console.start(1, 4)
    take_steps(console, clock, 1)
    console.finish({})
    assert "1 step, 4 items, env_step 32 in 10s" in file.getvalue()


def test_quiet_shows_only_evaluations_and_the_end():
    console, file, clock = make(verbose=False)
    console.header({"task": "length_ratio"})
    console.note("resumed")
    console.start(2, 8)
    take_steps(console, clock, 2)
    assert file.getvalue() == ""
    console.evaluation({"eval/turn_1/reward_mean": 0.4}, 2)
    console.finish({"agents": "runs/a/agents"})
    assert "evaluation at step 2" in file.getvalue() and "runs/a/agents" in file.getvalue()


@pytest.mark.parametrize("plain", [True, False])
def test_other_processes_write_nothing(plain, capsys):
    with Console(enabled=False, plain=plain) as console:
        console.header({"task": "x"})
        console.start(2, 8)
        console.phase("update")
        console.step(step=1, items=4, env_step=8, reward=1.0, tokens_per_s=1.0)
        console.note("x")
        console.evaluation({"eval/turn_1/reward_mean": 0.4}, 1)
        console.finish({"agents": "x"})
    assert capsys.readouterr() == ("", "")


def run_in_terminal(code):
    """Output and exit status of Python code whose stdout and stderr are a pseudo-terminal of 80 columns."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=follower, stderr=follower, env=environment
    )
    os.close(follower)
    output = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # Linux: the other side is closed
            break
        if not part:
            break
        output += part
    os.close(leader)
    return output.decode(), process.wait(timeout=60)


LIVE = """
from mlrl.console import Console
with Console() as console:
    assert not console.plain
    console.start(3, 12)
    console.phase("sampling")
    console.step(step=2, items=8, env_step=1234, reward=0.625, tokens_per_s=99.5, extra={{"loss": 0.25}})
    {then}
    console.evaluation({{"eval/turn_1/reward_mean": 0.75}}, 2)
    console.finish({{"agents": "runs/" + 30 * "long/" + "agents"}})
"""
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def test_terminal_gets_a_live_bar_and_whole_paths():
    output, status = run_in_terminal(LIVE.format(then="pass"))
    assert status == 0, output
    for part in (
        "step 2/3",
        "items 8/12",
        "env_step 1,234",
        "reward 0.625",
        "100 tokens/s overall",
        "loss 0.250",
        "ETA",
    ):
        assert part in output
    assert "sampling" in output and "eval/turn_1/reward_mean" in output
    assert "runs/" + 30 * "long/" + "agents" in output  # not folded: it has to be copied
    assert output.rindex(SHOW_CURSOR) > output.rindex(HIDE_CURSOR)


def test_an_exception_gives_the_terminal_back():
    output, status = run_in_terminal(LIVE.format(then="raise KeyboardInterrupt"))
    assert status != 0 and "KeyboardInterrupt" in output
    assert HIDE_CURSOR in output and output.rindex(SHOW_CURSOR) > output.rindex(HIDE_CURSOR)
    assert output.index("Traceback") > output.rindex(SHOW_CURSOR)


def test_a_resumed_run_says_which_of_its_steps_the_time_is_of():
    console, file, clock = make()
    console.start(10, 40, step=6)
    clock.now += 20
    console.step(step=8, items=32, env_step=64, reward=0.5, tokens_per_s=1.0)
    console.finish({})
    assert "8 steps, 32 items, env_step 64, 2 of the steps in 20s" in file.getvalue()
