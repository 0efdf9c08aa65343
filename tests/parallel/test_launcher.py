"""The exit code of a launch, and what is said of processes that could not say it themselves."""

import pytest

from mlrl.parallel.launcher import report


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ({0: 2, 1: 1}, 2, ""),
        ({1: 75}, 75, ""),
        ({0: 1, 3: -11}, 139, "rank 3 was ended by SIGSEGV\n"),
        ({1: -9}, 137, "rank 1 was ended by SIGKILL, as by a system that runs out of memory\n"),
        ({0: -15, 1: -40}, 143, "rank 0 was ended by SIGTERM\nrank 1 was ended by signal 40\n"),
    ],
)
def test_exit_code_and_words(ends, code, said, capsys):
    assert report(ends) == code
    assert capsys.readouterr().err == said
