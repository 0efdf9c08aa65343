"""config.yaml: reading settings from a YAML file, and writing down those of a run."""

import importlib.metadata
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

import mlrl
from mlrl.config_help import field_groups
from mlrl.errors import ConfigError
from mlrl.storage import write_whole

# Section of config.yaml about the run itself; --config skips it, so that a run's file can start another run.
RECORD = "record"
_PACKAGES = ("torch", "transformers", "peft", "accelerate", "deepspeed", "tokenizers", "datasets", "numpy")
# A name that says "secret": api_key, HF_TOKEN, password … but not max_new_tokens or key_frames.
_SECRET_NAME = re.compile(r"(?i)(^|[_\-.])(api_?key|key|token|secret|passw(or)?d|credentials?)$")
MASK = "***"  # stands for a secret that was not written down


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: 1e-4 is a number; no, off and 1:30 are texts. A key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen and isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem=f"{key_node.value!r} stands twice", problem_mark=key_node.start_mark)
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {}
_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan"
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|None|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    (
        "float",
        _FLOAT,
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def _plain_int(loader: yaml.Loader, node: yaml.ScalarNode) -> int:
    return int(node.value)  # 010 is ten


def _plain_float(loader: yaml.Loader, node: yaml.ScalarNode) -> float:
    return float(node.value.replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor("tag:yaml.org,2002:int", _plain_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _plain_float)


def parse_value(text: str) -> Any:
    """One value as YAML reads it: 3, 0.5, true, None, [1, 2], {a: 1}; anything else is the text itself."""
    try:
        return yaml.load(text, _Loader) if text.strip() else text
    except yaml.YAMLError:
        return text


def read_config(path: str | Path, settings: Iterable[str] | None = None) -> dict[str, Any]:
    """The settings in a YAML file, unchecked.

    A config.yaml that a run wrote works too: its record is skipped, and so is a run name made from task and time.

    Args:
        path: the file.
        settings: the settings of this script; what a run of another script wrote beyond them is left out.

    Raises:
        ConfigError: no such file, not YAML, or no mapping of names to values.
    """
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config={str(path)!r}: cannot be read ({error}). Give a YAML file.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"config={str(path)!r}: is not YAML: {' '.join(str(error).split())}. Correct it.") from error
    content = {} if content is None else content
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"config={str(path)!r}: holds no settings. Write one `name: value` a line.")
    if not isinstance(content.get(RECORD), dict):
        return content
    record = content.pop(RECORD)
    if "run_name" in record.get("sources", {}).get("derived", []):
        content.pop("run_name", None)
    return content if settings is None else {name: content[name] for name in settings if name in content}


def dump_config(config: Any, sources: dict[str, str], path: str | Path, extra: dict[str, Any] | None = None) -> None:
    """Write a config with its origins, the command line, package versions and git commit as YAML.

    Values of task arguments and of command-line words with a secret's name are masked; no environment variable is
    written.

    Args:
        config: any of the configs of `mlrl.config`.
        sources: field → where its value came from (`mlrl.cli.Run.sources`); may be empty.
        path: the file.
        extra: more entries of the record, such as the number of processes.
    """
    lines = ["# Settings of this run. To start another one with them: --config <this file>"]
    for heading, names in field_groups(type(config)):
        values = {name: getattr(config, name) for name in names}
        lines += ["", f"# {heading}", _as_yaml(masked(values))]
    by_source: dict[str, list[str]] = {}
    for name, source in sources.items():
        by_source.setdefault(source, []).append(name)
    record = {
        "command": shlex.join(_masked_words(sys.argv)),
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "packages": package_versions(),
        **masked(extra or {}),
        "sources": by_source,
    }
    lines += ["", "# How the run was started, and where each value came from (--config skips this)"]
    lines.append(_as_yaml({RECORD: record}))
    write_whole(path, "\n".join(lines) + "\n")


def package_versions() -> dict[str, str]:
    """Versions of the packages that a run's numbers depend on, as far as they are installed."""
    versions = {"mlrl": mlrl.__version__}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def git_commit(folder: str | Path | None = None) -> str | None:
    """Commit of the repository around a folder (default: the current one), ``+changes`` if files differ; else None."""
    try:
        commit = _git("rev-parse", "HEAD", folder=folder)
        return commit + ("+changes" if _git("status", "--porcelain", "-uno", folder=folder) else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str, folder: str | Path | None) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def masked(values: Any) -> Any:
    """The same values, with those under a secret's name masked."""
    if isinstance(values, dict):
        return {k: MASK if v and _SECRET_NAME.search(str(k)) else masked(v) for k, v in values.items()}
    return [masked(v) for v in values] if isinstance(values, list | tuple) else values


def _masked_words(words: list[str]) -> list[str]:
    """Command-line words, with what stands under a secret's name in a name=value masked."""
    shown = []
    for word in words:
        name, equals, text = word.partition("=")
        value = parse_value(text)
        hidden = masked({name: value})[name]
        shown.append(f"{name}={hidden}" if equals and hidden != value else word)
    return shown


class _Dumper(yaml.SafeDumper):
    """Short lists on one line, and texts that our loader would read as something else in quotes."""

    def represent_list(self, data: list[Any]) -> yaml.Node:
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)

    def represent_other(self, data: Any) -> yaml.Node:
        return self.represent_str(repr(data))  # whatever a user put into task_args from Python


_Dumper.add_representer(list, _Dumper.represent_list)
_Dumper.add_representer(tuple, _Dumper.represent_list)
_Dumper.add_representer(None, _Dumper.represent_other)
_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def _as_yaml(values: dict[str, Any]) -> str:
    text = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=False)
    return text.rstrip("\n")
