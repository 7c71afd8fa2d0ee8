"""Training runs and sessions out of what the server lists: grouped, ordered, cut into pages, searched."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker import types

from tinker_compat.rest_conversion import (
    USER_URN,
    checkpoint_from,
    checkpoint_path,
    training_run_from,
    ttl_from,
    weights_info_from,
)
from tinker_compat.run_records import (
    ClientRecord,
    check_access_scope,
    clients_from,
    page,
    paged,
    runs_from,
)
from tinker_compat.session_search import search
from together_post_training.errors import PostTrainingError, Reason
from together_post_training.v1 import checkpoints_pb2, sessions_pb2, trainer_pb2

START = datetime(2026, 1, 1, tzinfo=UTC)
RUNNING, STOPPED, LOST = (
    sessions_pb2.SESSION_STATE_RUNNING,
    sessions_pb2.SESSION_STATE_STOPPED,
    sessions_pb2.SESSION_STATE_LOST,
)
TRAINING, INFERENCE, EXTERNAL = (
    trainer_pb2.CHECKPOINT_KIND_TRAINING,
    trainer_pb2.CHECKPOINT_KIND_INFERENCE,
    trainer_pb2.CHECKPOINT_KIND_EXTERNAL,
)
FOLDERS = {TRAINING: "weights", INFERENCE: "sampler_weights", EXTERNAL: "external_weights"}
needs_search = pytest.mark.skipif(
    not hasattr(types, "SessionSearchRequest"), reason="this tinker has no search"
)


def at(minutes: float) -> datetime:
    return START + timedelta(minutes=minutes)


def session(id_: str, minutes: float = 0, **fields) -> sessions_pb2.Session:
    message = sessions_pb2.Session(**{"id": id_, "base_model": "m", "state": RUNNING, **fields})
    message.create_time.FromDatetime(at(minutes))
    message.last_request_time.FromDatetime(at(minutes + 1))
    return message


def checkpoint(
    session_id: str, name: str = "a", minutes: float = 0, kind=TRAINING, **fields
) -> checkpoints_pb2.Checkpoint:
    message = checkpoints_pb2.Checkpoint(
        path=f"tinker://{session_id}/{FOLDERS[kind]}/{name}",
        session=session_id,
        kind=kind,
        **{"base_model": "m", "size_bytes": 10, **fields},
    )
    message.create_time.FromDatetime(at(minutes))
    return message


def test_a_run_has_its_latest_checkpoint_of_each_kind():
    saved = [
        checkpoint("s:train:0", "d", 4, EXTERNAL),
        checkpoint("s:train:0", "c", 3, INFERENCE),
        checkpoint("s:train:0", "b", 2),
        checkpoint("s:train:0", "a", 1),
        checkpoint("other:train:0", "z", 0),
    ]
    run = next(r for r in runs_from([session("s:train:0")], saved) if r.id == "s:train:0")
    shown = training_run_from(run)
    assert shown.last_checkpoint is not None
    assert shown.last_checkpoint.checkpoint_id == "weights/b"
    assert shown.last_sampler_checkpoint is not None
    assert shown.last_sampler_checkpoint.tinker_path == "tinker://s:train:0/sampler_weights/c"


def test_a_run_is_what_its_session_says():
    lora = sessions_pb2.LoraConfig(rank=8)
    (run,) = runs_from([session("s:train:0", lora=lora, user_metadata={"k": "v"})], [])
    shown = training_run_from(run)
    assert (shown.training_run_id, shown.base_model, shown.model_owner) == (
        "s:train:0",
        "m",
        USER_URN,
    )
    assert (shown.is_lora, shown.lora_rank, shown.corrupted) == (True, 8, False)
    assert (shown.user_metadata, shown.last_request_time) == ({"k": "v"}, at(1))
    assert (shown.last_checkpoint, shown.last_sampler_checkpoint) == (None, None)


def test_full_weights_have_no_rank_and_a_lost_session_is_corrupted():
    full = sessions_pb2.FullWeightsConfig()
    (run,) = runs_from([session("s:train:0", full_weights=full, state=LOST)], [])
    shown = training_run_from(run)
    assert (shown.is_lora, shown.lora_rank, shown.corrupted) == (False, None, True)
    assert shown.user_metadata is None


def test_a_run_that_has_only_checkpoints_left_is_known_by_the_newest():
    saved = [
        checkpoint(
            "s:train:0", "b", 5, lora=sessions_pb2.LoraConfig(rank=2), user_metadata={"k": "v"}
        ),
        checkpoint("s:train:0", "a", 1, user_metadata={"k": "old"}),
    ]
    (run,) = runs_from([], saved)
    shown = training_run_from(run)
    assert (shown.base_model, shown.is_lora, shown.lora_rank) == ("m", True, 2)
    assert (shown.user_metadata, shown.last_request_time) == ({"k": "v"}, at(5))
    assert run.create_time == at(1)


def test_runs_come_newest_first_with_or_without_a_session():
    sessions = [session("old", 1), session("new", 3)]
    runs = runs_from(sessions, [checkpoint("copied", minutes=2), checkpoint("old", minutes=9)])
    assert [run.id for run in runs] == ["new", "copied", "old"]


@given(st.lists(st.integers()), st.integers(0, 12), st.integers(0, 12))
def test_pages_next_to_each_other_are_the_list(items, limit, offset):
    first, rest = paged(items, offset, 0), paged(items, len(items), offset)
    assert [*first, *rest] == items
    assert list(paged(items, limit, offset)) == list(rest)[:limit]


@pytest.mark.parametrize("limit", [7, "7", np.int64(7)])
def test_a_page_is_given_in_numbers_of_any_kind(limit):
    assert page(limit, limit, 20) == (7, 7)
    assert {type(number) for number in page(limit, limit, 20)} == {int}
    assert page(None, None, 20) == (20, 0)


@pytest.mark.parametrize(
    ("limit", "offset"), [(-1, 0), (1, -1), (1.5, 0), ("x", 0), (True, 0), ("", 0)]
)
def test_a_page_of_no_whole_number_is_refused_with_its_value(limit, offset):
    with pytest.raises(PostTrainingError, match="must be a whole number") as refused:
        page(limit, offset, 20)
    assert refused.value.reason is Reason.INVALID_ARGUMENT


def test_scopes_are_tinkers_two():
    check_access_scope("owned")
    check_access_scope("accessible")
    with pytest.raises(PostTrainingError, match="'mine': must be 'owned' or 'accessible'"):
        check_access_scope("mine")


def test_sessions_are_what_comes_before_the_number_of_a_run():
    sessions = [session("a:train:0", 1), session("a:train:1", 5), session("b:train:0", 3)]
    clients = clients_from(runs_from([*sessions, session("native", 2)], []))
    assert [(c.id, [run.id for run in c.runs]) for c in clients] == [
        ("b", ["b:train:0"]),
        ("native", ["native"]),
        ("a", ["a:train:1", "a:train:0"]),
    ]
    assert clients[-1].create_time == at(1)


def test_a_sessions_metadata_is_what_all_its_runs_have():
    (client,) = clients_from(
        runs_from(
            [
                session("a:train:0", user_metadata={"team": "x", "k": "0"}, display_name="N"),
                session("a:train:1", user_metadata={"team": "x", "k": "1", "l": "1"}),
            ],
            [],
        )
    )
    assert (client.user_metadata, client.display_name) == ({"team": "x"}, "N")


def test_a_checkpoint_shows_everything_that_it_is():
    message = checkpoint("s:train:0", "a", 1, INFERENCE, is_public=True, user_metadata={"k": "v"})
    message.expire_time.FromDatetime(at(60))
    shown = checkpoint_from(message)
    assert shown == types.Checkpoint(
        checkpoint_id="sampler_weights/a",
        checkpoint_type="sampler",
        time=at(1),
        tinker_path="tinker://s:train:0/sampler_weights/a",
        size_bytes=10,
        public=True,
        expires_at=at(60),
        **(
            {"user_metadata": {"k": "v"}}
            if "user_metadata" in types.Checkpoint.model_fields
            else {}
        ),
    )
    plain = checkpoint_from(checkpoint("s:train:0"))
    assert (plain.expires_at, plain.public, plain.checkpoint_type) == (None, False, "training")


def test_external_checkpoints_are_listed_also_by_tinkers_that_know_none():
    shown = checkpoint_from(checkpoint("s:train:0", kind=EXTERNAL))
    listed = types.CheckpointsListResponse(checkpoints=[shown])
    assert listed.checkpoints[0].checkpoint_type == "external"
    assert listed.checkpoints[0].checkpoint_id == "external_weights/a"


def test_weights_info_tells_what_is_trained_and_nothing_that_is_not_known():
    lora = sessions_pb2.LoraConfig(rank=4, train_mlp=True, train_attn=False, train_unembed=True)
    info = weights_info_from(checkpoint("s", lora=lora))
    assert (info.base_model, info.is_lora, info.lora_rank) == ("m", True, 4)
    assert (info.train_mlp, info.train_attn, info.train_unembed) == (True, False, True)
    named = sessions_pb2.LoraConfig(rank=4, target_modules=["q_proj"], train_unembed=False)
    info = weights_info_from(checkpoint("s", lora=named))
    assert (info.train_mlp, info.train_attn, info.train_unembed) == (None, None, False)
    info = weights_info_from(checkpoint("s", full_weights=sessions_pb2.FullWeightsConfig()))
    assert (info.is_lora, info.lora_rank, info.train_mlp) == (False, None, None)


@pytest.mark.parametrize("folder", FOLDERS.values())
def test_paths_are_read_as_tinkers_parser_reads_them(folder):
    path = checkpoint_path(f"tinker://0-1:train:0/{folder}/step 1")
    assert (path.session, path.folder, path.name) == ("0-1:train:0", folder, "step 1")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "x",
        "tinker://",
        "tinker://a/weights",
        "tinker://a/other/b",
        "tinker://a/weights/b/c",
        "xtinker://a/weights/b",
        "https://a/weights/b",
        "tinker:/a/weights/b",
        None,
    ],
)
def test_what_is_no_path_is_a_value_error_that_begins_as_tinkers(path):
    with pytest.raises(ValueError, match=r"^Invalid tinker path: "):
        checkpoint_path(path)


def test_a_time_to_live_is_whole_seconds_or_none():
    assert ttl_from(None) is None
    assert [getattr(ttl_from(given), "seconds", 0) for given in (3600, 3600.0)] == [3600, 3600]


@pytest.mark.parametrize(("given", "kind"), [("1h", TypeError), (0.5, TypeError)])
def test_any_other_time_to_live_is_named(given, kind):
    with pytest.raises(kind, match=f"ttl_seconds is {given!r}: must be a whole number"):
        ttl_from(given)
    with pytest.raises(ValueError, match="ttl_seconds is 1000000000"):
        ttl_from(10**20)


def clients() -> list[ClientRecord]:
    """Newest first: "c" (lost), "b" (ended), "a" (runs, and saved two checkpoints)."""
    sessions = [
        session("a:train:0", 1, user_metadata={"team": "x"}, display_name="Nightly math run"),
        session("b:train:0", 2, user_metadata={"team": "y"}, state=STOPPED),
        session("c:train:0", 3, user_metadata={"team": "x", "k": "v"}, state=LOST),
    ]
    saved = [checkpoint("a:train:0", "b", 3), checkpoint("a:train:0", "a", 2)]
    return clients_from(runs_from(sessions, saved))


def found(**filters) -> list[str]:
    page = search(clients(), types.SessionSearchRequest(**filters))
    assert page.next_cursor is None
    return [summary.session_id for summary in page.sessions]


@needs_search
def test_a_search_for_nothing_finds_everything_newest_first():
    assert found() == ["c", "b", "a"]


@needs_search
def test_a_search_shows_what_a_session_is():
    summary = search(clients(), types.SessionSearchRequest(session_id="a")).sessions[0]
    assert (summary.created_at, summary.owner, summary.project_id) == (at(1), USER_URN, "")
    assert (summary.checkpoints_count, summary.checkpoint_storage_bytes) == (2, 20)
    assert (summary.display_name, summary.user_metadata) == ("Nightly math run", {"team": "x"})
    assert summary.status == types.SessionActive()


@needs_search
def test_names_match_word_by_word_in_any_case_or_the_id_does():
    assert found(display_name="MATH night") == ["a"]
    assert found(display_name="math other") == []
    assert found(session_id="b") == ["b"]
    assert found(session_id="b", display_name="math") == ["b", "a"]
    assert found(session_id="nobody", display_name="nothing") == []


@needs_search
def test_every_pair_of_metadata_must_hold():
    assert found(user_metadata={"team": "x"}) == ["c", "a"]
    assert found(user_metadata={"team": "x", "k": "v"}) == ["c"]
    assert found(user_metadata={"team": "z"}) == []


@needs_search
def test_owners_are_everybody_or_the_one_there_is():
    assert found(owner=types.AccessibleSearchOwner()) == ["c", "b", "a"]
    assert found(owner=types.UserSearchOwner(owner_urns=[USER_URN, "x"])) == ["c", "b", "a"]
    assert found(owner=types.UserSearchOwner(owner_urns=["urn:somebody"])) == []


@needs_search
def test_statuses_are_those_that_the_server_can_know():
    assert found(statuses=[types.ActiveSessionStatusQuery()]) == ["a"]
    assert found(statuses=[types.FailedSessionStatusQuery()]) == ["c"]
    assert found(statuses=[types.CancelledSessionStatusQuery()]) == []
    both = [types.FailedSessionStatusQuery(), types.ActiveSessionStatusQuery()]
    assert found(statuses=both) == ["c", "a"]
    with pytest.raises(PostTrainingError, match="does not record how clients ended"):
        found(statuses=[types.ClientFinishedSessionStatusQuery()])
    lost, ended, _ = search(clients(), types.SessionSearchRequest()).sessions
    assert ended.status is None
    assert (lost.status.category, lost.status.reason.training_run_id) == ("internal", "c:train:0")


@needs_search
@given(times=st.lists(st.integers(0, 3), max_size=8), limit=st.integers(1, 4))
def test_pages_of_a_search_are_all_that_it_finds_each_once(times, limit):
    records = clients_from(
        runs_from([session(f"s{i}:train:0", minutes) for i, minutes in enumerate(times)], [])
    )
    request, seen = types.SessionSearchRequest(limit=limit), []
    while True:
        page = search(records, request)
        seen += [summary.session_id for summary in page.sessions]
        if page.next_cursor is None:
            break
        assert len(page.sessions) == limit
        # As it comes back from a file.
        cursor = types.SessionSearchCursor.model_validate_json(page.next_cursor.model_dump_json())
        request = request.model_copy(update={"cursor": cursor})
    assert seen == [record.id for record in records]
