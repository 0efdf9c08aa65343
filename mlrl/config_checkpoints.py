"""Settings of checkpoints: when they are written, and from which one a run goes on."""

from dataclasses import dataclass
from typing import Any

from mlrl.errors import ConfigError


@dataclass(kw_only=True)
class CheckpointArguments:
    """Checkpoints"""

    save_steps: int = 10
    """Steps between checkpoints; also one at the end and on SIGTERM; 0: none at all"""
    save_total_limit: int | None = 2
    """Checkpoints kept, the newest; None: all"""
    resume_from_checkpoint: str | None = None
    """latest (of run_name; starts anew where there is none), or a checkpoint's folder"""
    allow_changed: list[str] | None = None
    """Settings or fingerprints that may differ from those of the checkpoint"""


def check_checkpoints(config: Any) -> list[str]:
    """A checkpoint that is named, and names that matter."""
    if config.resume_from_checkpoint == "":
        raise ConfigError("resume_from_checkpoint='': names nothing. Give latest, or a checkpoint's folder.")
    if config.allow_changed and config.resume_from_checkpoint is None:
        return [f"allow_changed={config.allow_changed!r} has no effect without resume_from_checkpoint"]
    return []
