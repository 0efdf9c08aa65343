"""The checks of what only evaluation has: the file it writes, and the protocol by which it plays."""

import tempfile
from pathlib import Path
from typing import Any

from mlrl.config_rules import check_writable
from mlrl.errors import ConfigError


def check_output(output: str | None) -> None:
    """Raise `ConfigError` unless the output file can be written, by trying; one that exists is replaced."""
    if output is None:
        return
    if output.endswith("/") or Path(output).is_dir():
        raise ConfigError(f"output={output!r}: is a folder. Give the name of a file, such as results.json.")
    check_writable("output", output, Path(output).parent)
    folder, name = Path(output).absolute().parent, Path(output).name
    while not folder.exists():
        folder, name = folder.parent, folder.name
    try:  # a file system may refuse what permissions allow, and names of any length; while written, names are longer
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}."):
            pass
    except OSError as error:
        raise ConfigError(
            f"output={output!r}: nothing can be written there ({error.strerror}). Give another file."
        ) from None


def check_protocol(config: Any) -> None:
    """Raise `ConfigError` for a baseline of several answers where one text holds them all."""
    if config.protocol != "team" and config.collaboration_mode == "centralized":
        raise ConfigError(
            f"collaboration_mode='centralized': one text holds the answers of all agents, so there is nothing for "
            f"protocol {config.protocol} to play. Leave one of the two out."
        )
