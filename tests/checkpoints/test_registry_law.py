"""Two servers on one store, against a dictionary."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from backend.checkpoints.store import CheckpointStore
from tests.checkpoints.data import Clock, adapter, assert_same_tensors, manifest
from together_post_training.errors import PostTrainingError, Reason
from together_post_training.names import CheckpointPath

# (session, name): few, so that they meet.
SESSIONS, NAMES = st.sampled_from(["s", "t"]), st.sampled_from(["a", "b"])
KEYS = st.tuples(SESSIONS, NAMES)
TTLS = st.one_of(st.none(), st.sampled_from([1.0, 2.0, 5.0]))
SERVERS = st.integers(0, 1)
Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """weights: the seed that they were made from."""

    weights: int
    create_time_s: float
    expire_time_s: float | None
    is_public: bool = False
    copied_from: str = ""


class Registry(RuleBasedStateMachine):
    """Law 13: what either server shows is what was done last to what was neither deleted nor has expired, whole."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.clock = Clock()
        self.stores = [CheckpointStore(self.root, self.clock) for _ in range(2)]
        self.model: dict[Key, Expected] = {}
        self.num_saved = 0

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @initialize(key=KEYS, server=SERVERS)
    def begin(self, key: Key, server: int) -> None:
        self.save(key, server, None, False)

    @rule(key=KEYS, server=SERVERS, ttl_s=TTLS, overwrite=st.booleans())
    def save(self, key: Key, server: int, ttl_s: float | None, overwrite: bool) -> None:
        self.num_saved += 1
        made = manifest(
            key[1],
            session=key[0],
            kind="inference",
            create_time_s=self.clock.now,
            expire_time_s=self.after(ttl_s),
        )
        refused = Reason.CHECKPOINT_EXISTS if key in self.model and not overwrite else None
        self.do(
            refused, self.stores[server].save, made, adapter(self.num_saved), None,
            overwrite=overwrite,
        )  # fmt: skip
        if refused is None:
            self.model[key] = Expected(
                weights=self.num_saved,
                create_time_s=self.clock.now,
                expire_time_s=self.after(ttl_s),
            )

    @rule(key=KEYS, server=SERVERS, ttl_s=TTLS)
    def set_ttl(self, key: Key, server: int, ttl_s: float | None) -> None:
        self.do(self.missing(key), self.stores[server].set_ttl, path_of(key), ttl_s)
        if key in self.model:
            self.model[key] = replace(self.model[key], expire_time_s=self.after(ttl_s))

    @rule(key=KEYS, server=SERVERS, is_public=st.booleans())
    def mark(self, key: Key, server: int, is_public: bool) -> None:
        store, there = self.stores[server], self.model.get(key)
        refused = self.missing(key)
        if there is not None and there.is_public == is_public:
            refused = Reason.ALREADY_PUBLIC if is_public else Reason.NOT_PUBLIC
        self.do(refused, store.publish if is_public else store.unpublish, path_of(key))
        if there is not None:
            self.model[key] = replace(there, is_public=is_public)

    @rule(key=KEYS, server=SERVERS, session=SESSIONS, ttl_s=TTLS)
    def copy(self, key: Key, server: int, session: str, ttl_s: float | None) -> None:
        source, target = self.model.get(key), (session, key[1])
        there = self.model.get(target)
        refused = self.missing(key)
        is_same = (
            source is not None
            and there is not None
            and there.copied_from == str(path_of(key))
            and there.weights == source.weights
        )
        if source is not None and there is not None and not is_same:
            refused = Reason.CHECKPOINT_EXISTS
        self.do(refused, self.stores[server].copy, path_of(key), session, ttl_s)
        if source is not None and there is None:
            self.model[target] = Expected(
                weights=source.weights,
                create_time_s=self.clock.now,
                expire_time_s=self.after(ttl_s),
                copied_from=str(path_of(key)),
            )

    @rule(key=KEYS, server=SERVERS)
    def delete(self, key: Key, server: int) -> None:
        self.do(self.missing(key), self.stores[server].delete, path_of(key))
        self.model.pop(key, None)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def pass_(self, seconds: float) -> None:
        self.clock.now += seconds
        for key, there in list(self.model.items()):
            if there.expire_time_s is not None and there.expire_time_s <= self.clock.now:
                del self.model[key]

    @rule(server=SERVERS)
    def sweep(self, server: int) -> None:
        self.stores[server].sweep()
        # Nothing else is left on the disk.
        assert len(list((self.root / ".data").iterdir())) == len(self.model)

    @rule(server=SERVERS)
    def restart(self, server: int) -> None:
        self.stores[server] = CheckpointStore(self.root, self.clock)

    @invariant()
    def both_servers_show_what_is_there(self) -> None:
        for store in self.stores:
            shown = {(made.session, made.name): made for made in store.list()}
            assert shown.keys() == self.model.keys()
            for key, there in self.model.items():
                made = shown[key]
                assert store.get(path_of(key)) == made
                assert made.create_time_s == there.create_time_s
                assert made.expire_time_s == there.expire_time_s
                assert made.is_public == there.is_public
                assert made.copied_from == there.copied_from
                loaded = store.load(path_of(key), optimizer=False)
                assert_same_tensors(loaded.weights, adapter(there.weights))

    def after(self, ttl_s: float | None) -> float | None:
        return None if ttl_s is None else self.clock.now + ttl_s

    def missing(self, key: Key) -> Reason | None:
        return None if key in self.model else Reason.CHECKPOINT_NOT_FOUND

    def do(self, refused: Reason | None, call, *args, **kwargs) -> None:
        outcome = None
        try:
            call(*args, **kwargs)
        except PostTrainingError as error:
            outcome = error.reason
        assert outcome == refused


def path_of(key: Key) -> CheckpointPath:
    return manifest(key[1], session=key[0], kind="inference").path


TestRegistry = Registry.TestCase
TestRegistry.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
