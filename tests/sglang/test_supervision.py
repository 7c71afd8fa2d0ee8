"""A server of the generator's own: started again when it dies, and gone when the generator is closed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import psutil
import pytest

from tests.conformance.bench import Bench
from tests.conformance.data import always, call
from tests.conformance.engines import Engine
from tests.sglang.engines import KINDS, start
from tests.sglang.environment import Installation
from together_post_training.errors import PostTrainingError, Reason

pytestmark = pytest.mark.sglang

# Enough to be running still when the server is killed: it takes seconds.
NUM_TOKENS = 900


@pytest.fixture(scope="module")
def own(
    sglang: Installation,
    loop: asyncio.AbstractEventLoop,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Bench]:
    """With a server that no other test uses."""
    kind = KINDS[0]
    trainer, generator = start(kind, sglang, tmp_path_factory.mktemp("own"))
    yield Bench(
        engine=Engine(
            name="own", start=lambda: (trainer, generator), is_succ16=True, tolerance=kind.tolerance
        ),
        trainer=trainer,
        generator=generator,
        wait=loop.run_until_complete,
        numbers=itertools.count(),
    )
    loop.run_until_complete(generator.close())


def processes(bench: Bench) -> list[psutil.Process]:
    """The server and what it started."""
    (server,) = (
        process
        for process in psutil.Process().children(recursive=True)
        if process.name().startswith("python")
        and "sglang.launch_server" in process.cmdline()
        and bench.generator.model.location in process.cmdline()
        and "guard.py" not in " ".join(process.cmdline())
    )
    return [server, *server.children(recursive=True)]


def test_a_sample_survives_the_death_of_its_server(own: Bench):
    """It goes on under the same snapshot, which the next server is given before anything else is asked of it."""
    session = own.session()
    snapshot = own.name("snapshot")
    own.add(snapshot, always(own.trainer, session, token=9, delta=8.0))
    asked = call([3], snapshot=snapshot, max_tokens=NUM_TOKENS, temperature=0.0)

    async def kill_while_running():
        running = asyncio.ensure_future(own.generator.sample(asked))
        await asyncio.sleep(0.5)
        assert not running.done()
        for process in processes(own):
            if process.name().startswith("sglang::sched"):
                process.kill()
        return await running

    (sequence,) = own.wait(kill_while_running()).sequences
    assert sequence.tokens.tolist() == [9] * NUM_TOKENS
    assert own.sample(call([3], temperature=0.0)).sequences[0].tokens.tolist() == [4]


def test_a_closed_generator_refuses_and_leaves_nothing_running(own: Bench):
    before = processes(own)
    assert len(before) >= 3
    own.wait(own.generator.close())
    # The last of them were just killed.
    _, alive = psutil.wait_procs(before, timeout=5)
    assert not alive
    with pytest.raises(PostTrainingError) as error:
        own.sample(call([1], max_tokens=1))
    assert error.value.reason is Reason.UNAVAILABLE
