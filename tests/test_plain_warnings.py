"""Warnings on the console: one line, without the code that made them."""

import warnings

import pytest

from mlrl.plain_warnings import warn_in_one_line


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)


def test_a_plain_warning_is_one_line():
    warn_in_one_line("magrpo")
    shown = warnings.formatwarning("reward_fallback=0: is the reward", UserWarning, __file__, 3)
    assert shown == "magrpo: warning: reward_fallback=0: is the reward\n"


def test_another_kind_keeps_its_place_but_not_its_code():
    warn_in_one_line("magrpo")
    shown = warnings.formatwarning("old", FutureWarning, __file__, 3)  # line 3 of this file is `import warnings`
    assert shown == f"{__file__}:3: FutureWarning: old\n"
