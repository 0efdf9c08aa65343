"""The reward of agents who each write some methods of one class.

```
0 where the merged class does not compile, else
2 · valid methods / methods  +  4 · tests passed / tests  −  methods written by several agents / methods
```
"""

import ast
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlrl.tasks.code_text import Function, code_of, functions_in, imports_in, syntax_problem
from mlrl.tasks.sandbox import Outcome, Sandbox, UnittestJob

MAXIMUM = 6.0


@dataclass(frozen=True)
class ClassScore:
    """What a joint response earned, and why.

    Attributes:
        methods: of the class, without what its skeleton gives; valid: written and parsed; overlapping: written by
            more than one agent.
        problem: why the merged class does not compile, else None.
        outcomes: one a test, in the order of `tests`; all skipped where nothing was run.
    """

    methods: int
    valid: int
    overlapping: int
    problem: str | None
    tests: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    load_problem: str = ""

    @property
    def passed(self) -> int:
        """Tests passed."""
        return sum(outcome.status == "passed" for outcome in self.outcomes)

    @property
    def solved(self) -> bool:
        """Whether every test passed."""
        return self.passed == len(self.outcomes) > 0

    @property
    def syntax(self) -> float:
        """2 for every method valid; 0 where the class does not compile."""
        return 2.0 * self.valid / self.methods if self.problem is None else 0.0

    @property
    def tests_reward(self) -> float:
        """4 for every test passed."""
        return 4.0 * self.passed / len(self.outcomes) if self.problem is None else 0.0

    @property
    def overlap_penalty(self) -> float:
        """1 for every method written by several agents; 0 where the class does not compile."""
        return self.overlapping / self.methods if self.problem is None else 0.0

    @property
    def total(self) -> float:
        """The reward, between −1 and 6."""
        return self.syntax + self.tests_reward - self.overlap_penalty

    def metrics(self) -> dict[str, float]:
        """Everything by name, as numbers."""
        return {
            "ce_reward/level1_syntax": self.syntax,
            "ce_reward/level2_tests": self.tests_reward,
            "ce_reward/level3_overlap_penalty": self.overlap_penalty,
            "ce_reward/total": self.total,
            "compiles": float(self.problem is None),
            "valid_methods": self.valid / self.methods,
            "overlapping_methods": self.overlapping / self.methods,
            "tests_passed": float(self.passed),
            "tests_total": float(len(self.outcomes)),
            "pass_rate": self.passed / len(self.outcomes),
            "solved": float(self.solved),
            "timeouts": float(sum(outcome.status == "timeout" for outcome in self.outcomes)),
        }


def judge(
    sandbox: Sandbox, item: dict[str, Any], responses: Sequence[Sequence[str]], shares: Sequence[Sequence[str]]
) -> list[ClassScore]:
    """A score for each joint response, one text an agent.

    Args:
        item: a row of `mlrl.tasks.class_data.class_row`.
        shares: the methods of each agent.
    """
    merged = [Merged(item, texts, shares) for texts in responses]
    jobs = [UnittestJob(m.source, item["test"], tuple(item["tests"])) for m in merged if m.problem is None]
    verdicts = iter(sandbox.run(jobs))
    return [m.score(next(verdicts) if m.problem is None else None) for m in merged]


class Merged:
    """One class out of what each agent wrote.

    Of several versions of a method the one of the agent whose share it is in counts where it parses, else the first
    that does. Methods that the class does not have are kept as helpers, those that the skeleton gives are not replaced.
    """

    def __init__(self, item: dict[str, Any], texts: Sequence[str], shares: Sequence[Sequence[str]]):
        self.item = item
        codes = [code_of(text) for text in texts]
        written = [own_methods(code) for code in codes]
        self.versions = {name: [own[name] for own in written if name in own] for name in item["methods"]}
        chosen = {}
        for name in item["methods"]:
            owners = [agent for agent, share in enumerate(shares) if name in share]
            order = [*owners, *(agent for agent in range(len(texts)) if agent not in owners)]
            candidates = [written[agent][name] for agent in order if name in written[agent]]
            if candidates:
                chosen[name] = next((f for f in candidates if f.node is not None), candidates[0])
        self.valid = sum(function.node is not None for function in chosen.values())
        for own in written:
            for name, function in own.items():
                if function.node is not None and not _is_special(name):
                    chosen.setdefault(name, function)
        imports = dict.fromkeys(line for code in codes for line in imports_in(code))
        body = [textwrap.indent(_source(function), "    ") for function in chosen.values()]
        self.source = "\n".join([*imports, item["head"], *body]) + "\n"
        self.problem = syntax_problem(self.source)

    def score(self, verdict) -> ClassScore:
        tests = tuple(self.item["tests"])
        return ClassScore(
            methods=len(self.item["methods"]),
            valid=self.valid,
            overlapping=sum(len(versions) > 1 for versions in self.versions.values()),
            problem=self.problem,
            tests=tests,
            outcomes=verdict.outcomes if verdict else tuple(Outcome("skipped") for _ in tests),
            load_problem=verdict.message if verdict else "",
        )


def own_methods(code: str) -> dict[str, Function]:
    """The functions of a code by name, inside a class or not; of several of one name the last that parses."""
    found: dict[str, Function] = {}
    for function in functions_in(code, at_any_depth=True):
        if function.node is not None or function.name not in found:
            found[function.name] = function
    return found


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _source(function: Function) -> str:
    """Source that can be indented: printed from the tree, so that no line of a text constant moves."""
    try:
        return ast.unparse(function.node) if function.node is not None else function.source
    except (RecursionError, ValueError):
        return function.source
