"""Command-line words → settings: only those that were really given, as Python values of the right type."""

import argparse
import types
import typing
from typing import Any, Literal, NoReturn

from mlrl.config_checks import alternatives, check_field, suggestion
from mlrl.config_file import parse_value
from mlrl.errors import ConfigError


def read_flags(argv: list[str], hints: dict[str, Any]) -> dict[str, Any]:
    """The settings that were given as flags, checked one by one.

    Args:
        argv: the words after the script's name.
        hints: setting → type.

    Raises:
        ConfigError: an unknown flag, a missing value, a wrong type, word or range.
    """
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name, hint in hints.items():
        options = [typing.get_origin(option) or option for option in alternatives(hint)]
        many, boolean = list in options or dict in options, bool in options
        parser.add_argument(f"--{name}", nargs="+" if many else "*" if boolean else 1)
        if boolean:
            parser.add_argument(f"--no_{name}", dest=name, action="store_const", const=["false"])
    given, rest = parser.parse_known_args(_normal_form(argv))
    for word in rest:
        if not word.startswith("--"):
            raise ConfigError(f"{word!r}: belongs to no flag. Put a flag's name before it; most flags take one value.")
        name = word.partition("=")[0]
        hint = suggestion(name, [f"--{known}" for known in hints]) or " --help lists all."
        raise ConfigError(f"{name}: there is no such flag.{hint}")
    return {
        name: check_field(name, _value(name, words, hints[name]), hints[name]) for name, words in vars(given).items()
    }


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}. --help says what each flag takes.")


def _normal_form(argv: list[str]) -> list[str]:
    """Underscores in the names of flags; negative numbers joined to their flag, or argparse takes -1e-3 for a flag."""
    words: list[str] = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            words.append("--" + name[2:].replace("-", "_") + equals + value)
        elif word.startswith("-") and _number(word, float) is not None and words and words[-1].startswith("--"):
            words[-1] += "=" + word
        else:
            words.append(word)
    return words


def _value(name: str, words: list[str], hint: Any) -> Any:
    """What the words after a flag mean for its type; a text where they mean nothing, which the check then refuses."""
    options = alternatives(hint)
    lists = [option for option in options if typing.get_origin(option) is list]
    singles = [option for option in options if option not in lists]
    if dict in [typing.get_origin(option) for option in options]:
        return _mapping(name, words)
    if not words:
        return True  # --flag of a yes-or-no setting
    if len(words) == 1:
        value = _single(words[0], singles)
        if value != words[0] or not lists or set(singles) - {types.NoneType}:
            return value
    if not lists:
        raise ConfigError(f"{name}={' '.join(words)!r}: is several values. Give one.")
    elements = alternatives(typing.get_args(lists[0])[0])
    return [_single(word, elements) for word in words]


def _single(word: str, options: list[Any] | tuple[Any, ...]) -> Any:
    """One word as the first type that reads it: None, a known word, yes or no, a number, else the text."""
    if types.NoneType in options and word.lower() in ("none", "null"):
        return None
    if any(typing.get_origin(option) is Literal and word in typing.get_args(option) for option in options):
        return word
    if bool in options and word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in (int, float):
        if {kind, float} & set(options) and (number := _number(word, kind)) is not None:
            return number
    return word


def _number(word: str, kind: type) -> Any:
    try:
        return kind(word)
    except ValueError:
        return None


def _mapping(name: str, words: list[str]) -> dict[str, Any]:
    """key=value words as a mapping, values read as YAML."""
    pairs = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"{name}={word!r}: is not of the form key=value. Write for example {name} size=3.")
        pairs[key] = parse_value(value)
    return pairs
