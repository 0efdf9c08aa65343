"""The code blocks and commands of the pages that people read."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(
        page
        for room in ("mlrl", "mlrl/tasks", "train", "accelerate_configs")
        for page in sorted((ROOT / room).glob("*.md"))
    ),
]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_STARTS = r"\./launch\.sh|accelerate|\S*python3?|pip|git|cd|export|sbatch|srun|[A-Z_]+=\S+ \S|wandb|tensorboard"
_COMMAND = re.compile(rf"^ *\$? *({_STARTS}) ", re.MULTILINE)
_LOOP = re.compile(r"^for (\w+) in ([^;\n]*); do\n(.*?)^done\n", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block: the word behind its fence, its text and the line of the page where the text begins."""

    page: Path
    language: str
    text: str
    line: int

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file_name(self) -> str | None:
        """What a Python block says to be: its first line is `# name.py`."""
        match = re.match(r"# (\w+\.py)\n", self.text)
        return match and match[1]


@dataclass(frozen=True)
class Command:
    """One command: what is set in its environment, its words, and where its output goes."""

    where: str
    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    output: str | None = None

    def __str__(self) -> str:
        return f"{self.where}: {shlex.join(self.words)}"


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text()
    return [Block(page, m[1], m[2], text[: m.start(2)].count("\n") + 1) for m in _FENCE.finditer(text)]


def hidden_commands(block: Block) -> list[str]:
    """Lines of a block without a language, shown output or formulas, that are commands and should be in a bash one."""
    return [] if block.language else [match[0] for match in _COMMAND.finditer(block.text)]


def is_script(block: Block) -> bool:
    """Whether a bash block is a program of a batch system rather than commands, one a line."""
    return "#SBATCH" in block.text


def commands_of(block: Block) -> list[Command]:
    """The commands of a bash block; of a batch script, its lines that start a training."""
    text = re.sub(r"\\\n\s*", " ", block.text)
    lines = _LOOP.sub(_unrolled, text).splitlines()
    if is_script(block):
        lines = [line[line.index("./launch.sh") :].removesuffix(" &") for line in lines if "./launch.sh" in line]
    commands = []
    for line in lines:
        for part in line.split(" && "):
            words = shlex.split(part, comments=True)
            if words:
                commands.append(_command(block.where, words))
    return commands


def _unrolled(loop: re.Match) -> str:
    """The body of a loop once for each word."""
    name, words, body = loop.groups()
    return "".join(body.replace(f"${name}", word) for word in words.split())


def _command(where: str, words: list[str]) -> Command:
    environment, output = {}, None
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    if len(words) > 2 and words[-2] == ">":
        output, words = words[-1], words[:-2]
    return Command(where, tuple(words), environment, output)
