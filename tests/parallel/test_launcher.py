"""The exit code of a launch, and what is said of processes that could not say it themselves."""

import pytest

from mlrl.parallel.launcher import main, report


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ([(7, 0, 2), (7, 1, -15)], 2, ""),
        ([(7, 0, -15), (7, 1, 75)], 75, ""),
        ([(7, 0, 1), (7, 3, -11)], 139, "rank 3 was ended by SIGSEGV\n"),  # its end ended the other
        ([(7, 0, 1), (7, 1, -6)], 1, ""),  # a library's abort, since rank 0 was gone
        ([(7, 1, -9), (7, 0, -15)], 137, "rank 1 was ended by SIGKILL, as by a system that runs out of memory\n"),
        ([(7, 1, 3), (37, 0, -9)], 3, ""),  # the launcher's own, of one that did not hear its SIGTERM
        ([(7, 1, -15), (8, 0, -15)], 143, "rank 1 was ended by SIGTERM\n"),
        ([(7, 0, -40)], 168, "rank 0 was ended by signal 40\n"),
    ],
)
def test_exit_code_and_words(ends, code, said, capsys):
    assert report(ends) == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("words", [["--max_steps", "3", "train/magrpo.py"], ["--cpu"]])
def test_wrong_options_get_one_line(words, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["launcher", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "unrecognized arguments: --max_steps" in said or "required: training_script" in said
