"""Law 14: a snapshot that somebody holds answers from its own weights, for ever. And what nobody holds goes.

Whatever is published, opened, followed, held, let go, forgotten, swept, spilled and deleted, in any order.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backend.checkpoints.manifest import Manifest
from backend.checkpoints.store import CheckpointStore
from backend.generator.bigram import BigramGenerator
from backend.operations.memory_journal import MemoryJournal
from backend.operations.registry import OperationRegistry
from backend.operations.sequencer import Sequencer
from backend.operations.session import Session
from backend.operations.work import SyncType
from backend.resources.catalog import Catalog, ModelSpec
from backend.resources.engines import Engines
from backend.resources.live import Use
from backend.resources.resource import Resource, ResourceFactory
from backend.resources.resources import Resources
from backend.resources.retention import Lifetimes
from backend.resources.snapshots import Snapshots
from backend.trainer import bigram
from backend.trainer.base import Adapter, LoraConfig
from backend.trainer.bigram_trainer import BigramTrainer
from tests.generator.calls import call
from tests.services.harness import MODEL, Clock
from together_post_training.errors import PostTrainingError, Reason
from together_post_training.names import CheckpointPath, live_snapshot
from together_post_training.v1 import sessions_pb2

T = TypeVar("T")

LORA = LoraConfig(rank=2, alpha=4.0, seed=1)
LEASE_S, RETENTION_S = 10.0, 100.0
MAX_RESIDENT = 2
SYNCS: tuple[SyncType, ...] = ("synchronous", "background", "pipeline")
PROMPT = np.arange(17) % 16


@dataclass(slots=True, kw_only=True, eq=False)
class Published:
    """A session, and what the model knows of it."""

    session: Session
    sequence: int = 0
    newest: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class Running:
    """A call that goes on until the test ends it. started_from: the name that it asked for."""

    use: Use
    stack: AsyncExitStack
    started_from: str


@dataclass(slots=True, kw_only=True, eq=False)
class Holder:
    """names: those that the server must keep for it."""

    names: set[str] = field(default_factory=set)
    heard_s: float = 0.0


class Law14(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.TemporaryDirectory()
        root = Path(self.directory.name)
        self.spilled = root / "spilled"
        self.spilled.mkdir()
        self.clock = Clock(1000.0)
        self.journal = MemoryJournal()
        self.checkpoints = CheckpointStore(root / "checkpoints", self.clock)
        self.model = bigram.load(MODEL)
        self.generator = BigramGenerator(self.model)
        self.resource = self.do(self.start())
        self.scores: dict[str, np.ndarray] = {}
        self.sessions: list[Published] = []
        self.holders = {name: Holder() for name in "ab"}
        self.running: list[Running] = []
        self.saved: dict[str, CheckpointPath] = {}
        self.num_weights = 0

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 20))

    async def start(self) -> Resource:
        async def open_resource(spec: ModelSpec) -> Resource:
            return await factory.open(spec, self.snapshots)

        factory = ResourceFactory(
            open_engines=lambda name, path: Engines(
                trainer=BigramTrainer(self.model), generator=self.generator, tokenizer_dir=None
            ),
            registry=OperationRegistry(self.journal, self.clock),
            checkpoints=self.checkpoints,
            spill_dir=self.spilled,
            max_resident=MAX_RESIDENT,
            deterministic=False,
            on_death=lambda: None,
            clock=self.clock,
        )
        self.resources = Resources(
            Catalog((ModelSpec(name=MODEL, path=MODEL),), load_on_demand=False), open_resource
        )
        lifetimes = Lifetimes(lease_s=LEASE_S, retention_s=RETENTION_S)
        self.snapshots = Snapshots(
            self.journal, self.checkpoints, self.resources, lifetimes, self.clock
        )
        return await self.resources.get(MODEL)

    def weights(self) -> Adapter:
        """New ones."""
        self.num_weights += 1
        rng = np.random.default_rng(self.num_weights)
        trainer = BigramTrainer(self.model)
        trainer.create_session("s", LORA)
        made = trainer.weights("s")
        assert isinstance(made, Adapter)
        tensors = {k: rng.normal(size=v.shape).astype(np.float32) for k, v in made.tensors.items()}
        return Adapter(lora=LORA, tensors=tensors, targets=made.targets)

    def expected(self, weights: Adapter) -> np.ndarray:
        return self.model.logprobs(weights)[PROMPT[:-1], PROMPT[1:]].astype(np.float32)

    async def score(self, name: str) -> np.ndarray:
        async with self.snapshots.use(name) as use:
            asked = call(PROMPT, snapshot=use.engine_name, max_tokens=0, prompt_logprobs=True)
            result = await self.generator.sample(asked)
        assert result.prompt_logprobs is not None
        return result.prompt_logprobs[1:]

    def target(self, name: str) -> str:
        """What it stands for."""
        targets = {live_snapshot(one.session.id): one.newest for one in self.sessions}
        return targets.get(name, name)

    def claimed(self) -> set[str]:
        """What somebody holds, as the server must see it."""
        living = [h for h in self.holders.values() if self.clock.now - h.heard_s <= LEASE_S]
        names = set().union(*(holder.names for holder in living))
        return names | {self.target(name) for name in names}

    def can_answer(self, name: str) -> bool:
        """Now, whether or not anybody holds it."""
        if not name.startswith("snapshots/checkpoint:"):
            return name in self.scores
        return self.resource.residency.has(name) or name in self.saved

    @rule()
    def start_session(self) -> None:
        if len(self.sessions) >= 3:
            return
        shown = sessions_pb2.Session(id=f"s{len(self.sessions)}", base_model=MODEL)
        session = Session(
            shown=shown,
            weights=LORA,
            sequencer=Sequencer(max_held=10, gap_timeout_s=60.0, now=0.0),
            policy_version=0,
            last_request_time=0.0,
        )
        self.sessions.append(Published(session=session))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), sync=st.sampled_from(SYNCS))
    def publish(self, data: st.DataObject, sync: SyncType) -> None:
        one = data.draw(st.sampled_from(self.sessions))
        if not one.session.is_running:
            return
        one.sequence += 1
        one.session.policy_version += 1
        weights = self.weights()

        async def publish() -> str:
            await self.snapshots.settle(one.session)
            done = await self.snapshots.publish(one.session, one.sequence, weights, sync)
            return done.snapshot

        one.newest = self.do(publish())
        self.scores[one.newest] = self.expected(weights)
        if sync == "pipeline":
            live = live_snapshot(one.session.id)
            for call_ in self.running:
                if call_.use.follows and call_.started_from == live:
                    assert list(call_.use.snapshots.values())[-1].name == one.newest

    @precondition(lambda self: any(one.session.is_running for one in self.sessions))
    @rule(data=st.data())
    def stop_session(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.sessions)).session.is_running = False

    @rule(name=st.sampled_from("xy"))
    def save_and_open(self, name: str) -> None:
        """Overwrites one of that name; those who opened that go on."""
        weights = self.weights()
        manifest = Manifest(
            session="saved",
            name=name,
            kind="inference",
            base_model=MODEL,
            weights=LORA,
            policy_version=self.num_weights,
            create_time_s=self.clock.now,
            expire_time_s=None,
            user_metadata={},
        )
        self.checkpoints.save(manifest, weights, None, overwrite=True)
        self.saved = {k: path for k, path in self.saved.items() if path != manifest.path}
        snapshot = self.do(self.snapshots.open_checkpoint(manifest.path)).name
        self.saved[snapshot] = manifest.path
        self.scores[snapshot] = self.expected(weights)

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def delete_checkpoint(self, data: st.DataObject) -> None:
        snapshot = data.draw(st.sampled_from(sorted(self.saved)))
        self.checkpoints.delete(self.saved.pop(snapshot))

    @rule(data=st.data(), holder=st.sampled_from("ab"))
    def hold(self, data: st.DataObject, holder: str) -> None:
        live = [live_snapshot(one.session.id) for one in self.sessions if one.newest]
        names = data.draw(st.sets(st.sampled_from(sorted([*self.scores, *live]) or ["none"])))
        could = {name for name in names if self.can_answer(self.target(name))}

        async def hold() -> set[str]:
            missing = self.snapshots.hold(holder, sorted(names))
            await asyncio.gather(*self.snapshots._returning.values())
            return set(missing)

        missing = self.do(hold())
        self.holders[holder] = Holder(names=could - missing, heard_s=self.clock.now)

    @rule(seconds=st.sampled_from([1.0, LEASE_S * 0.6, LEASE_S + 1, RETENTION_S + 1]))
    def pass_(self, seconds: float) -> None:
        self.clock.now += seconds
        self.do(self.snapshots.sweep())

    @precondition(lambda self: self.scores)
    @rule(data=st.data(), follow=st.booleans())
    def begin_call(self, data: st.DataObject, *, follow: bool) -> None:
        live = [live_snapshot(one.session.id) for one in self.sessions if one.newest]
        name = data.draw(st.sampled_from(sorted([*self.scores, *live])))
        stack = AsyncExitStack()
        try:
            use = self.do(stack.enter_async_context(self.snapshots.use(name, follow=follow)))
        except PostTrainingError as error:
            if error.reason is not Reason.SNAPSHOT_NOT_FOUND:
                raise
            assert self.target(name) not in self.must_answer(), "it is held"
        else:
            assert use.follows == (follow and name.startswith("snapshots/live:"))
            self.running.append(Running(use=use, stack=stack, started_from=name))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end_call(self, data: st.DataObject) -> None:
        ending = data.draw(st.sampled_from(self.running))
        self.running.remove(ending)
        self.do(ending.stack.aclose())

    def must_answer(self) -> set[str]:
        newest = {one.newest for one in self.sessions if one.session.is_running and one.newest}
        return (self.claimed() & self.scores.keys()) | newest

    @invariant()
    def what_is_held_answers_from_its_own_weights(self) -> None:
        for name in sorted(self.must_answer()):
            np.testing.assert_allclose(self.do(self.score(name)), self.scores[name], atol=1e-6)

    @invariant()
    def weights_of_running_calls_are_in_the_generator(self) -> None:
        for one in self.running:
            for engine_name, shown in one.use.snapshots.items():
                table = self.generator._table(engine_name)[PROMPT[:-1], PROMPT[1:]]
                np.testing.assert_allclose(table, self.scores[shown.name], atol=1e-6)

    @invariant()
    def memory_is_bounded(self) -> None:
        self.do(asyncio.sleep(0))
        self.do(self.resource.residency._spilled_surplus())
        in_use = {name for one in self.running for name in one.use.snapshots}
        assert len(set(self.generator._snapshots) - in_use) <= MAX_RESIDENT

    def teardown(self) -> None:
        """When all have gone, so has everything."""
        for one in self.running:
            self.do(one.stack.aclose())
        for one in self.sessions:
            one.session.is_running = False
        for seconds in (LEASE_S + 1, RETENTION_S + 1):
            self.clock.now += seconds
            self.do(self.snapshots.sweep())
        # Whoever still writes one down finds that it is gone, and deletes the file.
        self.do(self.resource.residency._spilled_surplus())
        assert not self.generator._snapshots
        assert not list(self.spilled.iterdir())
        kept = {shown.name for shown in self.do(self.journal.list_snapshots())}
        assert kept <= self.saved.keys()
        self.do(self.resource.executor.drain(5.0))
        self.do(self.resources.close())
        self.loop.close()
        self.directory.cleanup()


TestLaw14 = Law14.TestCase
TestLaw14.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
