"""Metrics and completions of a run: ``metrics.jsonl`` always, and trackers where asked.

W&B, TensorBoard, trackio and the others are Accelerate's own tracker classes. ``env_step``, the number of joint
rewards evaluated since the start of the run, is the x-axis of every metric everywhere and never decreases.
"""

import contextlib
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from mlrl.completions_table import completions_table
from mlrl.run_folder import RunFolder, append_jsonl, to_jsonable
from mlrl.tracking_settings import check_report_to, check_wandb_config

DEFAULT_PROJECT = "mlrl"
ROW_KEYS = ("env_step", "step", "epoch")


class Tracking:
    """Writes every metric to ``metrics.jsonl`` and to the trackers that were asked for, on the main process only.

    A tracker that cannot start or fails while logging gives one warning and training goes on: ``metrics.jsonl``
    has every number.

    Args:
        run_folder: The run's folder; its name is the run's name in the trackers.
        report_to: Names of Accelerate's trackers, or "none".
        wandb_config: See `check_wandb_config`; project, name and config also serve the other trackers.
        config: The run's resolved configuration (no secret in it), stored as the run's hyperparameters.
        is_main: Whether this process writes; on the others every method does nothing.

    Raises:
        ConfigError: see `check_report_to` and `check_wandb_config`.
    """

    def __init__(
        self,
        run_folder: RunFolder,
        report_to: str | Sequence[str] = "none",
        wandb_config: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        *,
        is_main: bool = True,
    ):
        self.run_folder = run_folder
        self.is_main = is_main
        self._trackers: list[GeneralTracker] = []
        self._warned: set[str] = set()
        self._last_env_step = 0
        names = check_report_to(report_to)
        settings = check_wandb_config(wandb_config)
        if not is_main:
            return
        if not {"wandb", "trackio"} & set(names) and set(settings) - {"config_sections"}:
            warnings.warn(
                f"wandb_config={dict(settings)!r}: nothing goes to W&B, because report_to={names or 'none'!r}. "
                "Add 'wandb' to report_to.",
                stacklevel=2,
            )
        if names:
            PartialState()  # Accelerate's trackers log through it; does nothing where the trainer has made it already
        merged = to_jsonable({**(config or {}), **settings.get("config_sections", {})})
        for name in names:
            self._start(name, settings, merged)

    def _start(self, name: str, settings: Mapping[str, Any], config: dict[str, Any]) -> None:
        project = settings.get("project", DEFAULT_PROJECT)
        run_name = settings.get("name", self.run_folder.name)
        tracker_class = LOGGER_TYPE_TO_CLASS[name]
        try:
            if name == "wandb":
                chosen = {key: settings[key] for key in ("entity", "tags", "id", "resume") if key in settings}
                folder = os.fspath(settings.get("dir", self.run_folder.path))
                tracker = tracker_class(project, name=run_name, dir=folder, **chosen)
            elif name == "trackio":
                # trackio takes a configuration at its start only
                tracker = tracker_class(project, name=run_name, config=config, embed=False)
            elif tracker_class.requires_logging_directory:
                tracker = tracker_class(name, os.fspath(self.run_folder.path))  # <run folder>/tensorboard
            else:
                tracker = tracker_class(project)
            tracker.start()
            if name == "wandb":
                tracker.tracker.define_metric("env_step")
                tracker.tracker.define_metric("*", step_metric="env_step")
                tracker.store_init_configuration(config)
            elif name != "trackio":
                tracker.store_init_configuration(dict(_flatten(config)))
        except Exception as error:  # a tracker may fail in any way; it must not cost the run
            self._warn(name, "could not start", error)
        else:
            self._trackers.append(tracker)

    def log(self, metrics: Mapping[str, Any], *, step: int, env_step: int, epoch: float) -> None:
        """Log one row of scalars.

        Args:
            metrics: Scalars by name (numbers, 0-d tensors or arrays). NaN and infinities become null in
                ``metrics.jsonl``; None is written there as null and not passed to trackers.
            step: Rollout batches done.
            env_step: Joint rewards evaluated so far; several rows may share one.
            epoch: Passes over the training items, with fraction.

        Raises:
            ValueError: ``env_step`` is smaller than in an earlier row, or a metric is called like a row key.
            TypeError: a metric is not a scalar.
        """
        if not self.is_main:
            return
        if env_step < self._last_env_step:
            raise ValueError(f"env_step={env_step}: it was {self._last_env_step} already. It must never decrease.")
        if taken := sorted(set(metrics) & set(ROW_KEYS)):
            raise ValueError(f"metrics={taken!r}: reserved names. Pass them as arguments of log.")
        self._last_env_step = env_step
        row = {name: _scalar(name, metrics[name]) for name in sorted(metrics)}
        place = {"env_step": int(env_step), "step": int(step), "epoch": float(epoch)}
        append_jsonl(self.run_folder.metrics, [{**place, **row}])
        row = {name: value for name, value in row.items() if value is not None}
        for tracker in self._trackers:
            # trackio reserves the word "step" for its own x-axis, which is env_step here
            values = {key: value for key, value in place.items() if (tracker.name, key) != ("trackio", "step")} | row
            try:
                tracker.log(values, step=int(env_step))
            except Exception as error:  # see _start
                self._warn(tracker.name, "failed to log", error)

    def log_histograms(self, values: Mapping[str, Sequence[float]], *, step: int, env_step: int, epoch: float) -> None:
        """Pass the distribution of each named set of values to the trackers that draw histograms; see `log`."""
        place = {"env_step": int(env_step), "step": int(step), "epoch": float(epoch)}
        for tracker in self._trackers:
            try:
                if tracker.name == "wandb":
                    import wandb

                    drawn = {name: wandb.Histogram(list(own)) for name, own in values.items()}
                    tracker.log({**place, **drawn}, step=int(env_step))
                elif tracker.name == "tensorboard":
                    for name, own in values.items():
                        tracker.writer.add_histogram(name, np.asarray(own, dtype=float), int(env_step))
                elif tracker.name == "trackio":
                    import trackio

                    drawn = {name: trackio.Histogram(list(own)) for name, own in values.items()}
                    tracker.log({"env_step": int(env_step), "epoch": float(epoch), **drawn}, step=int(env_step))
            except Exception as error:  # see _start
                self._warn(tracker.name, "failed to log", error)

    def log_completions(self, records: Sequence[Mapping[str, Any]], split: str, *, env_step: int) -> None:
        """Pass what was written to W&B, as a table `completions/<split>` with a row a joint response.

        Args:
            records: of nodes, as they stand in the run's completions.
        """
        for tracker in self._trackers:
            if tracker.name == "wandb" and records:
                columns, rows = completions_table(records)
                try:
                    tracker.log_table(f"completions/{split}", columns=columns, data=rows, step=int(env_step))
                except Exception as error:  # see _start
                    self._warn(tracker.name, "failed to log", error)

    def wandb_identity(self) -> dict[str, str] | None:
        """id, project and entity of the W&B run, None without one; a run that goes on continues it."""
        for tracker in self._trackers:
            if tracker.name == "wandb":
                return {name: getattr(tracker.tracker, name, None) for name in ("id", "project", "entity")}
        return None

    def finish(self, failed: bool = False) -> None:
        """Close the trackers; call it once after training. Later rows still reach ``metrics.jsonl``.

        Args:
            failed: An error ended the run, which W&B then shows as failed.
        """
        trackers, self._trackers = self._trackers, []
        for tracker in trackers:
            try:
                if failed and tracker.name == "wandb":
                    tracker.tracker.finish(exit_code=1)
                else:
                    tracker.finish()
            except Exception as error:  # see _start
                self._warn(tracker.name, "failed to finish", error)

    def _warn(self, name: str, what: str, error: Exception) -> None:
        if name not in self._warned:
            self._warned.add(name)
            where = self.run_folder.metrics
            warnings.warn(
                f"report_to={name!r}: the tracker {what} ({type(error).__name__}: {error}). "
                f"Training goes on; every metric is in {where}.",
                stacklevel=3,
            )


def _scalar(name: str, value: Any) -> bool | int | float | None:
    if hasattr(value, "item"):
        with contextlib.suppress(RuntimeError, ValueError):  # more than one element: refused below by the metric's name
            value = value.item()
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise TypeError(f"{name}={value!r}: a metric must be one number.")


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, bool | int | float | str]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, (bool, int, float, str)) else str(value)
