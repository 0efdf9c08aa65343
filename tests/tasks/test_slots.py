import os
import signal
import threading
import time

from mlrl.tasks.slots import Slots


def test_no_more_than_the_count_at_once():
    slots, lock, most, inside = Slots(2), threading.Lock(), 0, 0

    def work():
        nonlocal most, inside
        with slots.taken():
            with lock:
                inside += 1
                most = max(most, inside)
            time.sleep(0.02)
            with lock:
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 2


def test_forks_share_the_places_and_a_dead_one_gives_its_back():
    slots = Slots(1)
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        with slots.taken():
            os.write(tell, b"x")
            time.sleep(60)
        os._exit(0)
    os.read(told, 1)
    assert slots._take() is None
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with slots.taken():
        assert slots._take() is None
    assert slots._take() is not None


def test_the_files_go_with_the_last_use():
    slots = Slots(3)
    folder = slots._folder
    with slots.taken():
        assert os.listdir(folder) == ["0"]
    del slots
    assert not os.path.exists(folder)
