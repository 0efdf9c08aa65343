"""The reward of two agents who write one Python program: a helper function, and the main function that may call it.

```
+0.4  the helper is defined and returns something                    (no stop)
+0.6  the main function is defined and returns something             else stop
+0.5  imports, helper and main function parse together               else stop
+passed/total of the tests
where a test passed and the main function uses the helper:
+0.5  for the use   +1.0  unless the main function only returns what the helper returns   −0.5  the result is ignored
```
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlrl.tasks.code_text import (
    Function,
    calls,
    code_of,
    find_function,
    ignores_result,
    imports_in,
    is_thin_wrapper,
    syntax_problem,
)
from mlrl.tasks.sandbox import FunctionJob, Outcome, Sandbox

MAXIMUM = 4.0


@dataclass(frozen=True)
class Score:
    """What a joint response earned, and why.

    Attributes:
        helper, main: whether the function is defined and returns something.
        problem: why the program does not parse, else None.
        outcomes: one a test; all skipped where the program was not run.
        uses_helper, thin_wrapper, ignores_helper: of the main function, by its syntax tree.
    """

    helper: bool
    main: bool
    problem: str | None
    outcomes: tuple[Outcome, ...]
    load_problem: str = ""
    uses_helper: bool = False
    thin_wrapper: bool = False
    ignores_helper: bool = False

    @property
    def passed(self) -> int:
        """Tests passed."""
        return sum(outcome.status == "passed" for outcome in self.outcomes)

    @property
    def solved(self) -> bool:
        """Whether every test passed."""
        return self.passed == len(self.outcomes) > 0

    @property
    def definition(self) -> float:
        """0.4 for the helper, 0.6 for the main function."""
        return 0.4 * self.helper + 0.6 * self.main

    @property
    def syntax(self) -> float:
        """0.5 where the whole parses."""
        return 0.5 * (self.main and self.problem is None)

    @property
    def tests(self) -> float:
        """The share of tests passed."""
        return self.passed / len(self.outcomes) if self.syntax and self.outcomes else 0.0

    @property
    def cooperation(self) -> float:
        """The bonus for a main function that makes something of the helper."""
        if not (self.tests and self.uses_helper):
            return 0.0
        return 0.5 + 1.0 * (not self.thin_wrapper) - 0.5 * self.ignores_helper

    @property
    def total(self) -> float:
        """The reward, between 0 and 4."""
        return self.definition + self.syntax + self.tests + self.cooperation

    def metrics(self) -> dict[str, float]:
        """Everything by name, as numbers."""
        return {
            "reward": self.total,
            "definition_reward": self.definition,
            "syntax_reward": self.syntax,
            "tests_reward": self.tests,
            "cooperation_bonus": self.cooperation,
            "syntax_valid": float(bool(self.syntax)),
            "tests_passed": float(self.passed),
            "tests_total": float(len(self.outcomes)),
            "pass_rate": self.tests,
            "solved": float(self.solved),
            "timeouts": float(sum(outcome.status == "timeout" for outcome in self.outcomes)),
            "uses_helper": float(self.uses_helper),
            "not_a_wrapper": float(self.uses_helper and not self.thin_wrapper),
            "ignores_helper": float(self.ignores_helper),
        }


def judge(
    sandbox: Sandbox, item: dict[str, Any], responses: Sequence[tuple[str, str]], helper_name: str = "aux"
) -> list[Score]:
    """A score for each (helper's text, main function's text) written for one item.

    Args:
        item: `entry_point`, `preamble` (source in front of the program), `setup` (source that tests need), `tests`.
    """
    programs = [_Program(item, helper_name, *texts) for texts in responses]
    jobs = [
        FunctionJob(program.source, item["entry_point"], tuple(item["tests"]), item["setup"])
        for program in programs
        if program.runs
    ]
    verdicts = iter(sandbox.run(jobs))
    return [program.score(next(verdicts) if program.runs else None) for program in programs]


class _Program:
    """What two texts amount to before anything is run."""

    def __init__(self, item: dict[str, Any], helper_name: str, helper_text: str, main_text: str):
        helper_code, main_code = code_of(helper_text), code_of(main_text)
        self.tests = item["tests"]
        self.name = helper_name
        self.helper = find_function(helper_code, helper_name)
        self.main = find_function(main_code, item["entry_point"])
        parts = [
            item["preamble"],
            *dict.fromkeys([*imports_in(helper_code), *imports_in(main_code)]),
            self.helper.source if self.helper else "",
            self.main.source if self.main else "",
        ]
        self.source = "\n".join(part for part in parts if part) + "\n"
        self.problem = syntax_problem(self.source)
        self.runs = _returns(self.main) and self.problem is None

    def score(self, verdict) -> Score:
        skipped = tuple(Outcome("skipped") for _ in self.tests)
        node = self.main.node if self.main else None
        uses = node is not None and self.helper is not None and calls(node, self.name)
        return Score(
            helper=_returns(self.helper),
            main=_returns(self.main),
            problem=self.problem,
            outcomes=verdict.outcomes if verdict else skipped,
            load_problem=verdict.message if verdict else "",
            uses_helper=uses,
            thin_wrapper=uses and is_thin_wrapper(node, self.name),
            ignores_helper=uses and ignores_result(node, self.name),
        )


def _returns(function: Function | None) -> bool:
    return function is not None and function.has_return
