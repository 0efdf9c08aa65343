"""What a run shows while it trains: a live bar in a terminal, readable plain lines in a log file or a pipe."""

import math
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mlrl.wording import counted

REWARD_NAME = re.compile(r"(?:eval/)?turn_(\d+)/reward_mean")


class Console:
    """Shows one run. Use it as a context manager, so that the terminal is restored whatever happens.

    Args:
        enabled: False on every process but the main one; every method then does nothing.
        plain: Plain lines instead of the live display (default: whether ``file`` is not a terminal).
        verbose: False shows evaluations and the end only (``config_sections.output.verbose``).
        log_interval: In plain mode, the smallest ``env_step`` gap between two step lines; of steps that evaluate no
            reward, as learning from pairs, the smallest gap in steps.
        reward: What the reward of a step is called.
        first_evaluation: Of a run that goes on: what its evaluations are shown beside.
        file: Where to write (default: ``sys.stdout``).
        clock: Time in seconds, for tests.
    """

    def __init__(
        self,
        enabled: bool = True,
        plain: bool | None = None,
        verbose: bool = True,
        log_interval: int = 1,
        reward: str = "reward",
        first_evaluation: dict[str, Any] | None = None,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.enabled = enabled
        self.verbose = verbose
        self._log_interval = log_interval
        self._reward_name = reward
        self._file = file
        self._clock = clock
        self._rich = RichConsole(file=file, highlight=False)
        if plain is None:
            plain = not (file or sys.stdout).isatty() or self._rich.is_dumb_terminal
        self.plain = plain
        self._live: Live | None = None
        self.first_evaluation = first_evaluation
        self._last_evaluation: dict[str, Any] | None = None
        self._started = clock()
        self._phase = ("", clock())  # name, since when
        self._first_step, self._first_time = 0, clock()
        self._total_steps: int | None = None
        self._total_items: int | None = None
        self._step = self._items = self._env_step = 0
        self._reward: float | None = None
        self._stats: list[str] = []
        self._line_env_step: int | None = None
        self._line_step = 0
        self._line_rewards: list[float] = []

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def header(self, lines: Mapping[str, Any]) -> None:
        """Show what is about to run: task, agents, trainable parameters, device, where it is saved …"""
        if self.verbose:
            self._show_block(lines)

    def start(
        self, total_steps: int | None, total_items: int | None, step: int = 0, items: int = 0, env_step: int = 0
    ) -> None:
        """Start the progress display; totals may be unknown (None), the others count what was done before."""
        self._total_steps, self._total_items = total_steps, total_items
        self._items, self._env_step = items, env_step
        self._step = self._first_step = step
        self._started = self._first_time = self._clock()
        if self.enabled and self.verbose and not self.plain and self._live is None:
            self._live = Live(console=self._rich, get_renderable=self._bar, refresh_per_second=2)
            self._live.start()

    def expect(self, total_steps: int) -> None:
        """Say how many steps there will be in all, where only the run itself finds out."""
        self._total_steps = total_steps

    def phase(self, name: str) -> None:
        """Name what goes on now ("sampling", "update" …). Costs nothing; seen in the live display only."""
        self._phase = (name, self._clock())

    def step(
        self,
        *,
        step: int,
        items: int,
        env_step: int,
        reward: float | None,
        tokens_per_s: float | None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Show a finished step.

        Args:
            step: Rollout batches done.
            items: Training items done.
            env_step: Joint rewards evaluated.
            reward: Mean reward of the step's rollouts; a plain line shows the mean over the steps since the last line.
            tokens_per_s: Sampled tokens, over the seconds of the whole step.
            extra: More numbers or words to show behind these.
        """
        self._step, self._items, self._env_step = step, items, env_step
        self._reward = None if reward is None else float(reward)
        self._stats = [f"{_rate(tokens_per_s)} tokens/s overall"] if tokens_per_s else []  # 0 where pairs are learned
        self._stats += [f"{name} {_number(value)}" for name, value in (extra or {}).items()]
        if self.enabled and self.verbose and self.plain:
            if self._reward is not None:
                self._line_rewards.append(self._reward)
            gap = env_step - (self._line_env_step or 0) or step - self._line_step
            if self._line_env_step is None or gap >= self._log_interval or step == self._total_steps:
                self._print_step()

    def evaluation(
        self,
        metrics: Mapping[str, Any],
        step: int | None = None,
        intervals: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """Show an evaluation as a table, beside the first evaluation of this run; outside of training without step.

        Args:
            intervals: 95 % confidence intervals by metric, shown outside of training.
        """
        if self._step == self._first_step:
            self._first_time = self._clock()  # an evaluation before training is no part of the time a step takes
        with_change = self.first_evaluation is not None
        self._last_evaluation = dict(metrics)
        first = self.first_evaluation = self.first_evaluation or self._last_evaluation
        if not self.enabled:
            return
        title = "evaluation" if step is None else f"evaluation at step {step}"
        rows = [(name, _number(value), *_change(first.get(name), value)) for name, value in metrics.items()]
        if intervals:
            self._show_intervals(title, metrics, intervals)
            return
        if self.plain:
            width = max((len(name) for name in metrics), default=0)
            self._print(Text(title))
            for name, value, before, change in rows:
                self._print(Text(f"  {name:<{width}}  {value}" + (f"  (first {before}, {change})" * with_change)))
            return
        table = Table(title=title, title_justify="left", title_style="bold")
        table.add_column("metric")
        for name in ("value", "first", "change") if with_change else ("value",):
            table.add_column(name, justify="right")
        for name, *numbers in rows:
            table.add_row(Text(name), *(numbers if with_change else numbers[:1]))
        self._rich.print(table)

    def _show_intervals(self, title: str, metrics: Mapping[str, Any], intervals: Mapping[str, tuple]) -> None:
        rows = [
            (name, _number(value), " .. ".join(map(_number, intervals[name])) if name in intervals else "")
            for name, value in metrics.items()
        ]
        if self.plain:
            names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
            self._print(Text(f"{title} (95 % confidence intervals)"))
            for name, value, interval in rows:
                self._print(Text(f"  {name:<{names}}  {value:>{values}}  {interval}".rstrip()))
            return
        table = Table(title=title, title_justify="left", title_style="bold")
        table.add_column("metric")
        table.add_column("value", justify="right")
        table.add_column("95 % interval", justify="right")
        for name, value, interval in rows:
            table.add_row(Text(name), value, interval)
        self._rich.print(table)

    def note(self, text: str) -> None:
        """Show one line, above the live display."""
        if self.enabled and self.verbose:
            self._print(Text(text))

    def warn(self, text: str) -> None:
        """Show what went wrong without ending the run; also where progress is not shown."""
        if self.enabled:
            self._print(Text(f"warning: {text}"))

    def finish(self, saved: Mapping[str, Any], summary: Mapping[str, Any] | None = None) -> None:
        """End the display: evaluation reward of the first and the last evaluation, and where things were saved.

        Args:
            saved: Paths by what they hold ("agents", "metrics" …).
            summary: More lines to show before them.
        """
        self.close()
        lines = {}
        if self._step:
            own = f", {self._step - self._first_step:,} of the steps" if self._first_step else ""
            lines["trained"] = (
                f"{counted(self._step, 'step')}, {counted(self._items, 'item')}, env_step {self._env_step:,}{own} "
                f"in {_duration(self._clock() - self._started)}"
            )
        lines |= self._before_after()
        self._show_block({**lines, **(summary or {}), **saved}, title="finished")

    def close(self) -> None:
        """Stop the live display and give the terminal back. Safe to call again."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _before_after(self) -> dict[str, str]:
        first, last = self.first_evaluation or {}, self._last_evaluation or {}
        turns = {name: match[1] for name in last if (match := REWARD_NAME.fullmatch(name))}
        arrow = "->" if self.plain else "→"
        lines = {}
        for name, turn in turns.items():
            label = "evaluation reward" if len(turns) == 1 else f"evaluation reward, turn {turn}"
            before, change = _change(first.get(name), last[name])
            lines[label] = (
                _number(last[name]) if first is last else f"{before} {arrow} {_number(last[name])} ({change})"
            )
        return lines

    def _show_block(self, lines: Mapping[str, Any], title: str | None = None) -> None:
        if not self.enabled:
            return
        if title:
            self._print(Text(title, style="bold"))
        width = max((len(name) for name in lines), default=0)
        for name, value in lines.items():
            self._print(Text.assemble((f"{name:<{width}}  ", "bold"), str(value)))

    def _print_step(self) -> None:
        rewards = self._line_rewards
        reward = sum(rewards) / len(rewards) if rewards else None
        counts = [f"step {_of(self._step, self._total_steps)}", f"items {_of(self._items, self._total_items)}"]
        progress = [f"env_step {self._env_step:,}", f"{self._reward_name} {_number(reward)}"]
        self._print(Text(" | ".join([*counts, *progress, *self._stats, f"ETA {self._eta()}"])))
        self._line_env_step, self._line_step, self._line_rewards = self._env_step, self._step, []

    def _print(self, text: Text) -> None:
        if self.plain:
            print(text.plain, file=self._file or sys.stdout, flush=True)
        else:
            self._rich.print(text, soft_wrap=True)  # whole lines, so that a long path can be copied

    def _bar(self) -> RenderableType:
        now = self._clock()
        line = Table.grid(padding=(0, 1))
        line.add_row(
            ProgressBar(total=self._total_steps, completed=self._step, width=24, pulse=self._total_steps is None),
            Text(f"step {_of(self._step, self._total_steps)}", style="bold"),
            Text(f"items {_of(self._items, self._total_items)}"),
            Text(f"ETA {self._eta()}", style="cyan"),
        )
        name, since = self._phase
        stats = [f"{name} {_duration(now - since)}"] if name else []
        stats += [f"env_step {self._env_step:,}", f"{self._reward_name} {_number(self._reward)}", *self._stats]
        return Group(line, Text(" · ".join(stats), style="dim", no_wrap=True, overflow="ellipsis"))

    def _eta(self) -> str:
        done = self._step - self._first_step
        if done <= 0 or self._total_steps is None:
            return "-"
        seconds_a_step = (self._clock() - self._first_time) / done
        return _duration(seconds_a_step * max(self._total_steps - self._step, 0))


def _of(done: int, total: int | None) -> str:
    return f"{done:,}" if total is None else f"{done:,}/{total:,}"


def _number(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None or not math.isfinite(value):
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.1f}"


def _rate(value: float | None) -> str:
    return f"{value:,.0f}" if value is not None and value >= 10 else _number(value)


def _change(before: Any, after: Any) -> tuple[str, str]:
    if before is None or after is None or not math.isfinite(after - before):
        return _number(before), "-"
    sign = "+" if after >= before else "-"
    return _number(before), sign + _number(abs(after - before))


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {seconds:02d}s" if minutes else f"{seconds}s"
