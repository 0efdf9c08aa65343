"""Finding parts of what a model wrote: code fences, two marked sections, a balanced JSON object."""

import json
import re
from typing import Any

_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_SECOND_HEADING = re.compile(r"^[#*\s]*paragraph\s*(?:2|two)\b[*:.\s]*", re.IGNORECASE | re.MULTILINE)
_FIRST_HEADING = re.compile(r"\A[#*\s]*paragraph\s*(?:1|one)\b[*:.\s]*", re.IGNORECASE)


def without_fences(text: str) -> str:
    """The inside of the fenced code blocks, joined by newlines; the whole text where there is none."""
    blocks = _FENCE.findall(text)
    return "\n".join(blocks) if blocks else text


def two_sections(text: str, marker: str) -> tuple[str, str]:
    """Cuts one answer in two: at the first `marker`, else at a "Paragraph 2" heading, else after a third of it."""
    first, found, second = text.partition(marker)
    if not found:
        heading = _SECOND_HEADING.search(text)
        if heading:
            first, second = text[: heading.start()], text[heading.end() :]
        else:
            cut = len(text) // 3
            first, second = text[:cut], text[cut:]
    return _FIRST_HEADING.sub("", first).strip(), second.strip()


def json_object(text: str) -> tuple[dict[str, Any] | None, str]:
    """The first balanced JSON object in a text, and the text around it; (None, text) where there is none.

    Braces within strings do not count. An object that is balanced but not JSON is passed over.
    """
    start = text.find("{")
    tries = 0
    while start != -1 and tries < 20:  # a bound on the work that a hostile text can cause
        end = _closing_brace(text, start)
        if end is None:
            return None, text
        value = _parsed(text[start : end + 1])
        if isinstance(value, dict):
            return value, text[:start] + text[end + 1 :]
        start = text.find("{", start + 1)
        tries += 1
    return None, text


def _closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one at `start`."""
    depth, in_string, escaped = 0, False, False
    for index in range(start, len(text)):
        char = text[index]
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string = False
        elif char == '"':
            in_string = True
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return index
    return None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
