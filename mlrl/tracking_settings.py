"""Which trackers a run has, and the settings of its W&B run: read and checked before any model is loaded."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import LoggerType

from mlrl.errors import ConfigError

WANDB_CONFIG_KEYS = ("project", "entity", "name", "run_name", "tags", "dir", "id", "resume", "config_sections")
PIP_NAMES = {"comet_ml": "comet-ml"}  # where the package is not called like the tracker


def check_report_to(report_to: str | Sequence[str]) -> list[str]:
    """The trackers that ``report_to`` names, "none" left out. Needs no model, so call it before any is loaded.

    Raises:
        ConfigError: an unknown word, "none" beside another word, or a tracker whose package is not installed.
    """
    names = [report_to] if isinstance(report_to, str) else list(report_to)
    known = ["none", *LOGGER_TYPE_TO_CLASS]
    for name in names:
        if name not in known:
            words = ", ".join(known)
            raise ConfigError(f"report_to={name!r}: unknown tracker. Choose from {words}.{_closest(name, known)}")
    if "none" in names and len(names) > 1:
        raise ConfigError(f"report_to={names!r}: 'none' beside other trackers. Leave out 'none' or the others.")
    absent = set(LoggerType.list()) - {str(tracker) for tracker in get_available_trackers()}
    for name in names:
        if name in absent:
            raise ConfigError(
                f"report_to={name!r}: the package is not installed. "
                f"Install it with: pip install {PIP_NAMES.get(name, name)}"
            )
    return [name for name in dict.fromkeys(names) if name != "none"]


def check_wandb_config(wandb_config: Mapping[str, Any] | None, **flags: Any) -> dict[str, Any]:
    """One W&B setting out of a trainer's ``wandb_config`` and the config's ``wandb_*`` fields.

    Args:
        wandb_config: May hold project, entity, name (or run_name), tags, dir, id, resume and config_sections.
        flags: ``project=, entity=, tags=, dir=`` from the config; None means not given.

    Returns:
        A dict with ``run_name`` renamed to ``name`` and no None in it.

    Raises:
        ConfigError: an unknown key, a config_sections or output section that is no mapping, or two places that
            disagree.
    """
    settings = {key: value for key, value in dict(wandb_config or {}).items() if value is not None}
    for key in settings:
        if key not in WANDB_CONFIG_KEYS:
            raise ConfigError(
                f"wandb_config={key!r}: unknown key. Choose from {', '.join(WANDB_CONFIG_KEYS)}."
                f"{_closest(key, WANDB_CONFIG_KEYS)}"
            )
    section: Any = settings
    for key in ("config_sections", "output"):
        section = section.get(key, {})
        if not isinstance(section, Mapping):
            raise ConfigError(f"wandb_config {key}={section!r}: not a mapping. Give a dict.")
    if "run_name" in settings:
        flags["name"] = settings.pop("run_name")
    for key, value in flags.items():
        if value is None:
            continue
        if settings.get(key, value) != value:
            raise ConfigError(
                f"wandb_config[{key!r}]={settings[key]!r}: another place says {value!r}. Give it in one place only."
            )
        settings[key] = value
    return settings


def wandb_flags(args: Any) -> dict[str, Any]:
    """The flags of W&B in a config, by their names in a `wandb_config`."""
    return {name: getattr(args, f"wandb_{name}") for name in ("project", "entity", "tags", "dir")}


def resumed_wandb(identity: Mapping[str, str] | None, wandb_config: Mapping[str, Any]) -> dict[str, Any]:
    """The `wandb_config` of a run that goes on: the same W&B run again, unless the user names one."""
    if not identity or "id" in wandb_config:
        return dict(wandb_config)
    return {**wandb_config, "id": identity["id"], "resume": wandb_config.get("resume", "allow")}


def is_verbose(wandb_config: Mapping[str, Any] | None) -> bool:
    """``config_sections.output.verbose`` of a ``wandb_config``: whether progress is shown (default True)."""
    sections = check_wandb_config(wandb_config).get("config_sections", {})
    return bool(sections.get("output", {}).get("verbose", True))


def _closest(word: str, known: Sequence[str]) -> str:
    match = difflib.get_close_matches(str(word), known, n=1)
    return f" Did you mean {match[0]!r}?" if match else ""
