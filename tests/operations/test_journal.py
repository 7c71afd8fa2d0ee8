"""One suite over every journal."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.operations.ended import is_ended
from backend.operations.journal import Journal, OperationEntry, SessionEntry
from backend.operations.memory_journal import MemoryJournal
from backend.operations.registry import mark_failed
from backend.operations.session import new_header
from backend.operations.sqlite_journal import MAX_INLINE_BYTES, SqliteJournal
from backend.store import open_embedded_store, open_store
from tests.operations.bench import Bench, good, run, step
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.v1 import generator_pb2, sessions_pb2
from together_post_training.v1 import operations_pb2 as pb

OpenJournal = Callable[[], Journal]


@pytest.fixture(params=["memory", "sqlite", "sqlite, machine"])
def open_journal(request: pytest.FixtureRequest, tmp_path: Path) -> OpenJournal:
    """Opens the same journal each time, as a restarted server would; a memory journal is its own restart."""
    if request.param == "memory":
        journal = MemoryJournal()
        return lambda: journal
    (tmp_path / "operations").mkdir()
    durability = "machine" if "machine" in request.param else "process"
    return lambda: SqliteJournal(tmp_path / "journal.sqlite3", tmp_path / "operations", durability)


def used(open_journal: OpenJournal, test: Callable[[Journal], Coroutine]) -> None:
    async def main() -> None:
        journal = open_journal()
        try:
            await test(journal)
        finally:
            await journal.close()

    asyncio.run(main())


def session(session_id: str, **fields) -> SessionEntry:
    shown = sessions_pb2.Session(id=session_id, state=sessions_pb2.SESSION_STATE_RUNNING, **fields)
    return SessionEntry(session=shown, digest=session_id.encode())


def entry(sequence: int, session_id: str = "s") -> OperationEntry:
    header = new_header(session_id, sequence, pb.OPERATION_KIND_FORWARD_BACKWARD, 1000.5)
    return OperationEntry(operation=header, digest=bytes([sequence]))


def succeeded(sequence: int, num_bytes: int = 8) -> pb.Operation:
    done = entry(sequence).operation
    done.state = pb.OPERATION_STATE_SUCCEEDED
    tensors = done.forward_backward.loss_fn_outputs.add().tensors
    tensors["logprobs"].raw = bytes(num_bytes)
    return done


def lost() -> pb.Operation:
    operation = pb.Operation()
    mark_failed(operation, fail(Reason.SESSION_LOST, "Lost."), pb.OPERATION_STATE_FAILED, 0.0)
    return operation


SIZES = [1, MAX_INLINE_BYTES - 100, MAX_INLINE_BYTES + 1, 300_000]


@pytest.mark.parametrize("num_bytes", SIZES)
def test_journal_keeps_requests_and_results_of_every_size_over_a_restart(
    open_journal: OpenJournal, num_bytes: int
):
    async def write(journal: Journal) -> None:
        await journal.put_session(session("s"))
        await journal.add_operation("s", 1, entry(1), b"r" * num_bytes)
        await journal.finish_operation("s", 1, succeeded(1, num_bytes), None)
        await journal.add_operation("s", 2, entry(2), b"q" * num_bytes)

    async def read(journal: Journal) -> None:
        kept = await journal.get_operation("s", 1)
        assert kept == OperationEntry(operation=succeeded(1, num_bytes), digest=b"\x01")
        unfinished = await journal.get_operation("s", 2)
        assert unfinished == entry(2)
        assert await journal.requests("s") == [(1, b"r" * num_bytes), (2, b"q" * num_bytes)]

    used(open_journal, write)
    used(open_journal, read)


def test_journal_lists_operations_newest_first_without_results(open_journal: OpenJournal):
    async def test(journal: Journal) -> None:
        await journal.put_session(session("s"))
        await journal.put_session(session("other"))
        for n in (3, 1, 2, 4):
            await journal.add_operation("s", n, entry(n), b"")
        await journal.add_operation("other", 1, entry(1, "other"), b"")
        await journal.finish_operation("s", 3, succeeded(3), None)
        listed = await journal.list_operations("s", 4, 2)
        assert [op.name[-1] for op in listed] == ["3", "2"]
        assert listed[0].state == pb.OPERATION_STATE_SUCCEEDED
        assert listed[0].WhichOneof("result") is None
        assert await journal.list_operations("unknown", 10, 10) == []
        assert await journal.get_operation("unknown", 1) is None
        assert await journal.get_operation("s", 5) is None

    used(open_journal, test)


def test_journal_keeps_sessions_with_the_policy_version_of_the_last_step(
    open_journal: OpenJournal,
):
    async def write(journal: Journal) -> None:
        await journal.put_session(session("a", display_name="first", policy_version=2))
        await journal.put_session(session("b"))
        await journal.add_operation("a", 1, entry(1), b"")
        await journal.finish_operation("a", 1, succeeded(1), 7)

    async def read(journal: Journal) -> None:
        entries = await journal.list_sessions()
        assert [e.session.id for e in entries] == ["b", "a"]
        assert await journal.get_session("a") == entries[1]
        kept = entries[1]
        assert kept.session.policy_version == 7
        assert kept.session.display_name == "first"
        assert kept.digest == b"a"
        assert await journal.get_session("c") is None

    used(open_journal, write)
    used(open_journal, read)


def test_journal_loses_running_sessions_and_their_unfinished_operations_on_recovery(
    open_journal: OpenJournal,
):
    async def write(journal: Journal) -> None:
        stopped = session("stopped")
        stopped.session.state = sessions_pb2.SESSION_STATE_STOPPED
        await journal.put_session(stopped)
        await journal.put_session(session("s"))
        for n in (1, 2, 4):
            await journal.add_operation("s", n, entry(n), b"r" * 100_000)
        await journal.finish_operation("s", 1, succeeded(1), None)
        await journal.put_snapshot(generator_pb2.Snapshot(name="published", session="s"))
        await journal.put_snapshot(generator_pb2.Snapshot(name="opened", session="s", path="p"))
        await journal.put_snapshot(generator_pb2.Snapshot(name="base"))

    async def recover(journal: Journal) -> None:
        assert await journal.recover(lost(), 2000.0) == 1
        assert await journal.recover(lost(), 3000.0) == 0

    async def read(journal: Journal) -> None:
        states = {e.session.id: e.session.state for e in await journal.list_sessions()}
        assert states == {
            "s": sessions_pb2.SESSION_STATE_LOST,
            "stopped": sessions_pb2.SESSION_STATE_STOPPED,
        }
        found = await journal.get_session("s")
        assert found is not None
        assert found.session.last_sequence == 2
        first = await journal.get_operation("s", 1)
        assert first is not None
        assert first.operation == succeeded(1)
        for n in (2, 4):
            kept = await journal.get_operation("s", n)
            assert kept is not None
            assert kept.operation.error.reason == Reason.SESSION_LOST
            assert kept.operation.end_time.seconds == 2000
            assert is_ended(kept.operation)
        assert await journal.requests("s") == []
        assert [s.name for s in await journal.list_snapshots()] == ["opened", "base"]

    used(open_journal, write)
    used(open_journal, recover)
    used(open_journal, read)


def test_journal_forgets_requests_and_keeps_results(open_journal: OpenJournal):
    async def test(journal: Journal) -> None:
        for name in ("s", "t"):
            await journal.put_session(session(name))
            await journal.add_operation(name, 1, entry(1, name), b"r" * 100_000)
            await journal.add_operation(name, 2, entry(2, name), b"r")
        await journal.finish_operation("s", 1, succeeded(1), None)
        await journal.forget_requests("s")
        assert await journal.requests("s") == []
        assert len(await journal.requests("t")) == 2
        kept = await journal.get_operation("s", 1)
        assert kept is not None
        assert kept.operation == succeeded(1)

    used(open_journal, test)


def test_journal_keeps_snapshots_in_the_order_of_their_names_first_appearance(
    open_journal: OpenJournal,
):
    async def write(journal: Journal) -> None:
        for name, version in (("b", 1), ("a", 1), ("b", 2)):
            await journal.put_snapshot(generator_pb2.Snapshot(name=name, policy_version=version))

    async def read(journal: Journal) -> None:
        kept = [(s.name, s.policy_version) for s in await journal.list_snapshots()]
        assert kept == [("b", 2), ("a", 1)]

    used(open_journal, write)
    used(open_journal, read)


def test_journal_forgets_snapshots_and_takes_their_names_again(open_journal: OpenJournal):
    async def write(journal: Journal) -> None:
        for name in "abc":
            await journal.put_snapshot(generator_pb2.Snapshot(name=name))
        for name in ("a", "c", "never"):
            await journal.delete_snapshot(name)
        await journal.put_snapshot(generator_pb2.Snapshot(name="a", policy_version=7))

    async def read(journal: Journal) -> None:
        kept = [(s.name, s.policy_version) for s in await journal.list_snapshots()]
        assert kept == [("b", 0), ("a", 7)]

    used(open_journal, write)
    used(open_journal, read)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 6), st.booleans()), max_size=20),
)
def test_sqlite_journal_equals_the_memory_journal_whatever_is_written_at_once(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[str, int, bool]]
):
    async def write(journal: Journal) -> list[pb.Operation]:
        await asyncio.gather(*(journal.put_session(session(name)) for name in "ab"))
        numbers = {(name, n) for name, n, _ in writes}
        await asyncio.gather(*(journal.add_operation(*key, entry(key[1]), b"x") for key in numbers))
        done = {(name, n) for name, n, is_done in writes if is_done}
        await asyncio.gather(
            *(journal.finish_operation(*key, succeeded(key[1]), None) for key in done)
        )
        read = [await journal.get_operation(*key) for key in sorted(numbers)]
        listed = [
            *await journal.list_operations("a", 9, 9),
            *await journal.list_operations("b", 9, 9),
        ]
        return [e.operation for e in read if e is not None] + listed

    async def main() -> None:
        directory = tmp_path_factory.mktemp("journal")
        sqlite = SqliteJournal(directory / "j", directory)
        assert await write(sqlite) == await write(MemoryJournal())
        await sqlite.close()

    asyncio.run(main())


def test_operations_run_over_every_journal_and_are_read_back_from_it(open_journal: OpenJournal):
    journal = open_journal()

    async def test(made: Bench) -> None:
        for one in (good(1), good(2), step(3)):
            await made.submit(one)
        await made.ended(3)
        for n in (1, 2, 3):
            kept = await journal.get_operation("s", n)
            assert kept is not None
            assert kept.operation == await made.ended(n)
        assert [n for n, _ in await journal.requests("s")] == [1, 2, 3]
        assert (await journal.requests("s"))[0][1] == good(1).SerializeToString(deterministic=True)
        await journal.close()

    run(test, journal)


def test_sqlite_journal_can_be_read_by_another_process_while_it_is_written(tmp_path: Path):
    """CO-05."""
    reader = sqlite3.connect(tmp_path / "j", timeout=0)

    async def test(journal: Journal) -> None:
        await journal.put_session(session("s"))
        for n in range(1, 50):
            reader.execute("SELECT count(*) FROM operations").fetchone()
            await journal.add_operation("s", n, entry(n), b"x")
        assert reader.execute("SELECT count(*) FROM operations").fetchone() == (49,)

    used(lambda: SqliteJournal(tmp_path / "j", tmp_path), test)
    reader.close()


def test_sqlite_journal_leaves_the_other_writes_of_a_commit_alone_when_one_fails(tmp_path: Path):
    async def test(journal: Journal) -> None:
        await journal.put_session(session("s"))
        await journal.add_operation("s", 1, entry(1), b"x")
        results = await asyncio.gather(
            journal.add_operation("s", 2, entry(2), b"x"),
            journal.add_operation("s", 1, entry(1), b"twice"),
            journal.add_operation("s", 3, entry(3), b"x"),
            return_exceptions=True,
        )
        assert [type(r) for r in results] == [type(None), sqlite3.IntegrityError, type(None)]
        assert [n for n, _ in await journal.requests("s")] == [1, 2, 3]

    used(lambda: SqliteJournal(tmp_path / "j", tmp_path), test)


def test_sqlite_journal_says_that_the_disk_is_full_and_writes_nothing(tmp_path: Path):
    async def test(journal: SqliteJournal) -> None:
        await journal.put_session(session("s"))
        await journal._database.call(lambda db: db.execute("PRAGMA max_page_count = 12").fetchone())
        writes = (journal.add_operation("s", n, entry(n), bytes(30_000)) for n in range(1, 9))
        results = await asyncio.gather(*writes, return_exceptions=True)
        errors = [r for r in results if r is not None]
        assert errors
        for error in errors:
            assert isinstance(error, PostTrainingError)
            assert error.reason == Reason.RESOURCE_EXHAUSTED
            assert "full" in error.message
        assert len(await journal.requests("s")) == len(results) - len(errors)

    async def main() -> None:
        journal = SqliteJournal(tmp_path / "j", tmp_path)
        await test(journal)
        await journal.close()

    asyncio.run(main())


@pytest.mark.parametrize("version", [0, 2, 99])
def test_sqlite_journal_of_another_version_is_refused_and_left_as_it_is(
    tmp_path: Path, version: int
):
    database = sqlite3.connect(tmp_path / "j")
    database.executescript(f"CREATE TABLE sessions (x); PRAGMA user_version = {version};")
    database.close()
    before = (tmp_path / "j").read_bytes()
    with pytest.raises(PostTrainingError) as caught:
        SqliteJournal(tmp_path / "j", tmp_path)
    for says in (
        str(tmp_path / "j"),
        f"the version {version};",
        "version 1.",
        "move",
        "checkpoints stay",
    ):
        assert says in caught.value.message
    assert (tmp_path / "j").read_bytes() == before


def test_sqlite_journal_that_is_no_database_is_refused_with_a_sentence(tmp_path: Path):
    (tmp_path / "j").write_bytes(b"no database" * 1000)
    with pytest.raises(PostTrainingError, match=r"not a database.*checkpoints stay"):
        SqliteJournal(tmp_path / "j", tmp_path)


def test_sqlite_journal_whose_making_was_cut_short_is_made_again(tmp_path: Path):
    """An empty file is what a process leaves that was killed before it had made the tables."""
    (tmp_path / "j").touch()

    async def test(journal: Journal) -> None:
        await journal.put_session(session("s"))
        assert await journal.get_session("s") == session("s")

    used(lambda: SqliteJournal(tmp_path / "j", tmp_path), test)


def test_store_is_used_by_one_server_at_a_time(tmp_path: Path):
    store = open_store(tmp_path / "new" / "store")
    with pytest.raises(PostTrainingError, match="in use by another server") as caught:
        open_store(tmp_path / "new" / "store")
    assert caught.value.reason == Reason.UNAVAILABLE
    assert caught.value.metadata["process"] == str(os.getpid())
    store.close()
    open_store(tmp_path / "new" / "store").close()


def test_store_is_used_by_any_number_of_embedded_servers_which_share_its_checkpoints(
    tmp_path: Path,
):
    stores = [open_store(tmp_path), *(open_embedded_store(tmp_path) for _ in range(3))]
    assert [s.part.name for s in stores] == ["server", "embedded-1", "embedded-2", "embedded-3"]
    assert {s.checkpoints for s in stores} == {tmp_path / "checkpoints"}
    stores[2].close()
    again = open_embedded_store(tmp_path)
    assert again.part == stores[2].part, "the first free one"
    for store in (*stores[:2], stores[3], again):
        store.close()
