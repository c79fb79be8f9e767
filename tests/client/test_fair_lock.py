"""`FairLock`: reentrant, and nobody is overtaken by the thread that has just had it."""

import threading
import time

from corespan.client.fair_lock import FairLock


def test_a_thread_that_wants_the_lock_again_at_once_waits_behind_one_that_waits_already():
    lock, order = FairLock(), []

    def take(name):
        with lock:
            order.append(name)

    waiting = threading.Thread(target=take, args=["waiting"])
    with lock:
        waiting.start()
        while not lock._next_in_line.locked():
            time.sleep(0.001)
    take("again")
    waiting.join()

    assert order == ["waiting", "again"]


def test_its_holder_may_take_it_again_though_others_wait():
    lock, order = FairLock(), []

    def take():
        with lock:
            order.append("other")

    other = threading.Thread(target=take)
    with lock:
        other.start()
        while not lock._next_in_line.locked():
            time.sleep(0.001)
        with lock:
            order.append("holder")
    other.join()

    assert order == ["holder", "other"]
