"""An outside model that reads all answers of a team and suggests to each agent how to change its own.

The model is reached over HTTP (`mlrl.remote`: retries, budget, answers that are asked for only once); its key comes
from an environment variable. Where no suggestion can be had or read, an agent is told that there is none.
"""

import warnings
from collections.abc import Sequence
from typing import Any

from mlrl import ConfigError
from mlrl.remote import RemoteModel, RemoteRequest, RemoteSettings
from mlrl.tasks.answer_text import json_object

NO_EDITS = "No edits were suggested."


class Expert:
    """A model that suggests edits.

    Args:
        settings: fields of `RemoteSettings`, as task arguments named with the prefix ``expert_``.

    Raises:
        ConfigError: no address, or whatever `RemoteModel` refuses, such as a variable without a key.
    """

    def __init__(self, **settings: Any):
        if settings.get("url") is None:
            raise ConfigError(
                "task_args.expert_url=None: feedback=expert_edits asks a model over HTTP. Give its full address, such "
                "as https://host/v1/chat/completions, with expert_model and expert_key_env."
            )
        try:
            self._model = RemoteModel(RemoteSettings(temperature=0.3, max_new_tokens=2048, max_retries=3, **settings))
        except ConfigError as error:
            raise ConfigError(f"task_args.expert_{error}") from None
        self._warned = False

    def edits(self, prompt: str, parts: Sequence[str]) -> list[str]:
        """The suggestion for each part: what stands under its name in the JSON object that answers the prompt.

        Raises:
            RemoteError: the server refuses, whatever is asked.
        """
        answer = self._model.complete([RemoteRequest(prompt)])[0][0]
        if answer is None and not self._warned:
            self._warned = True
            why = self._model.stats.first_failure or "an answer without text"
            warnings.warn(f"feedback=expert_edits: an agent goes without ({why})", stacklevel=2)
        found = json_object(answer or "")[0] or {}
        return [_text(found.get(part)) or NO_EDITS for part in parts]


def _text(value: Any) -> str:
    """A suggestion as text; lists of texts a line each, anything else is none."""
    lines = value if isinstance(value, list) else [value]
    return "\n".join(line.strip() for line in lines if isinstance(line, str)).strip()
