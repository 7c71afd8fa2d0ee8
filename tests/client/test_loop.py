"""The background loop: futures, cancelling, and processes that are forked off."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from concurrent.futures import CancelledError, Future
from pathlib import Path

import pytest

from together_post_training.client.loop import background_loop


async def value() -> int:
    return 7


def test_loop_is_one_for_all_threads():
    loops: list[object] = []
    threads = [threading.Thread(target=lambda: loops.append(background_loop())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, loops))) == 1


def test_loop_knows_its_own_thread():
    async def inside() -> bool:
        return background_loop().is_current()

    assert background_loop().start(inside()).result(5) is True
    assert background_loop().is_current() is False


def test_start_completes_a_given_future():
    future: Future[int] = Future()
    assert background_loop().start(value(), future) is future
    assert future.result(5) == 7


def test_start_begins_coroutines_in_order():
    begun: list[int] = []

    async def note(i: int) -> None:
        begun.append(i)

    futures = [background_loop().start(note(i)) for i in range(100)]
    for future in futures:
        future.result(5)
    assert begun == list(range(100))


def test_cancelling_the_future_cancels_the_coroutine():
    cancelled = threading.Event()
    running = threading.Event()

    async def forever() -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    future = background_loop().start(forever())
    assert running.wait(5)
    assert future.cancel()
    assert cancelled.wait(5)
    with pytest.raises(CancelledError):
        future.result(5)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_coroutine_that_wants_to_end_the_process_gives_its_caller_the_error_and_the_loop_goes_on(
    error,
):
    async def leave() -> None:
        raise error

    futures = [background_loop().start(value()) for _ in range(3)]
    left = background_loop().start(leave())
    futures += [background_loop().start(value()) for _ in range(3)]
    with pytest.raises(type(error)):
        left.result(5)
    assert [future.result(5) for future in futures] == [7] * 6


def test_dropping_the_future_does_not_stop_the_coroutine():
    done = threading.Event()

    async def later() -> None:
        await asyncio.sleep(0.05)
        done.set()

    background_loop().start(later())
    gc.collect()
    assert done.wait(5)


FORK = """
import os
from together_post_training.client.loop import background_loop

async def value():
    return 7

background_loop()
pid = os.fork()
if pid == 0:
    try:
        background_loop()
    except RuntimeError as error:
        print("child:", error, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print("parent:", background_loop().start(value()).result(5))
"""


def test_loop_of_a_forked_child_is_refused_with_advice_and_the_parent_goes_on():
    output = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORK],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "child: This process was forked" in output.stdout, output.stderr
    assert "spawn" in output.stdout
    assert "parent: 7" in output.stdout
    assert output.stderr == ""
