"""Law 5 for names: what is built is parsed back, and what cannot be a name is refused with its text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from together_post_training import names
from together_post_training.errors import PostTrainingError, Reason
from together_post_training.names import CheckpointPath

SESSIONS = st.from_regex(r"[A-Za-z0-9_\-:]{1,20}", fullmatch=True)
CHECKPOINTS = st.from_regex(r"[A-Za-z0-9_\-]([A-Za-z0-9_\-.]{0,30}[A-Za-z0-9_\-])?", fullmatch=True)


@given(session=SESSIONS, folder=st.sampled_from(["weights", "sampler_weights"]), name=CHECKPOINTS)
def test_law_5_checkpoint_paths_come_back(session, folder, name):
    path = CheckpointPath(session=session, folder=folder, name=name)
    assert names.parse_checkpoint_path(str(path)) == path


@given(session=SESSIONS, sequence=st.integers(1, names.MAX_SEQUENCE))
def test_law_5_operation_names_come_back(session, sequence):
    assert names.parse_operation_name(names.operation_name(session, sequence)) == (
        session,
        sequence,
    )


def refusal(parse: Callable[[str], object], text: str) -> PostTrainingError | None:
    try:
        parse(text)
    except PostTrainingError as error:
        return error
    return None


@given(st.text(max_size=30))
def test_any_text_is_parsed_or_refused(text):
    for parse, reason in (
        (names.parse_checkpoint_path, Reason.INVALID_PATH),
        (names.parse_operation_name, Reason.INVALID_NAME),
        (names.check_checkpoint_name, Reason.INVALID_NAME),
        (names.check_session_id, Reason.INVALID_NAME),
    ):
        error = refusal(parse, text)
        assert error is None or (error.reason is reason and repr(text) in error.message)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "tinker://",
        "tinker://s/weights",
        "tinker://s/weights/",
        "tinker:///weights/a",
        "tinker://s/Weights/a",
        "tinker://s/checkpoints/a",
        "tinker://s/weights/a/b",
        "tinker://s/weights/..",
        "tinker://s/weights/.hidden",
        "tinker://s/weights/a.",
        "tinker://s/weights/a\n",
        "tinker://s\n/weights/a",
        "tinker://../weights/a",
        "tinker://s/weights/" + "a" * 129,
        "https://s/weights/a",
        " tinker://s/weights/a",
    ],
)
def test_bad_checkpoint_paths_are_refused(path):
    with pytest.raises(PostTrainingError) as error:
        names.parse_checkpoint_path(path)
    assert error.value.reason is Reason.INVALID_PATH


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "a\\b", "a b", "a:b", "ä", "a\n", "-" * 129]
)
def test_bad_checkpoint_names_are_refused(name):
    with pytest.raises(PostTrainingError) as error:
        names.check_checkpoint_name(name)
    assert error.value.reason is Reason.INVALID_NAME


@pytest.mark.parametrize(
    "name",
    [
        "sessions/s/operations/0",
        "sessions/s/operations/-1",
        "sessions/s/operations/01",
        "sessions/s/operations/1.0",
        f"sessions/s/operations/{names.MAX_SEQUENCE + 1}",
        "sessions//operations/1",
        "operations/1",
        "sessions/s/operations/1\n",
    ],
)
def test_bad_operation_names_are_refused(name):
    with pytest.raises(PostTrainingError) as error:
        names.parse_operation_name(name)
    assert error.value.reason is Reason.INVALID_NAME
