"""Being asked to stop, in this process."""

import os
import signal

import pytest

from mlrl.parallel import signals
from mlrl.parallel.group import Group
from mlrl.parallel.signals import StopRequests


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_second_press_ends_at_once_and_nothing_disturbs_the_end(handlers, monkeypatch, capfd):
    requests = StopRequests(Group.alone(), says=True)
    with pytest.raises(KeyboardInterrupt), requests:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the same press, by the terminal and by the launcher
        assert requests.asked() == signal.SIGINT
        monkeypatch.setattr(signals, "_ONE_PRESS_S", 0.0)
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            os.kill(os.getpid(), signal.SIGINT)  # of the second press too
    os.kill(os.getpid(), signal.SIGINT)
    assert "the run stops with a checkpoint" in capfd.readouterr().err


def test_handlers_come_back(handlers):
    with StopRequests(Group.alone(), says=False) as requests:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert requests.asked() == signal.SIGUSR1
    assert {number: signal.getsignal(number) for number in handlers} == handlers
