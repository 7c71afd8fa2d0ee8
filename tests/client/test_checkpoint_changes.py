"""Changes of checkpoints whose answer is lost."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from tests.client.fake_service import FakeService
from together_post_training.client.address import parse_address
from together_post_training.client.channel import Connection, FixedServer
from together_post_training.client.checkpoint_changes import delete, publish, unpublish
from together_post_training.client.loop import background_loop
from together_post_training.errors import PostTrainingError, Reason, fail

PATH = "tinker://run/weights/a"
CHANGES = [
    (publish, "PublishCheckpoint", Reason.ALREADY_PUBLIC),
    (unpublish, "UnpublishCheckpoint", Reason.NOT_PUBLIC),
    (delete, "DeleteCheckpoint", Reason.CHECKPOINT_NOT_FOUND),
]


def changed(fake: FakeService, change: Any) -> Any:
    connection = Connection(FixedServer(parse_address(fake.address, what="address")))
    return background_loop().start(change(connection, PATH)).result(10)


@pytest.mark.parametrize(("change", "method", "refusal"), CHANGES)
def test_change_whose_answer_was_lost_is_made(fake, change, method, refusal):
    fake.inject(method, code=grpc.StatusCode.UNAVAILABLE)
    fake.inject(method, error=fail(refusal, "again"))
    shown = changed(fake, change)
    assert shown is None if change is delete else shown.path == PATH
    assert len(fake.received(method)) == 2


@pytest.mark.parametrize(("change", "method", "refusal"), CHANGES)
def test_change_that_is_refused_at_once_is_refused(fake, change, method, refusal):
    fake.inject(method, error=fail(refusal, "at once"))
    with pytest.raises(PostTrainingError, match="at once"):
        changed(fake, change)


@pytest.mark.parametrize(("change", "method", "refusal"), CHANGES)
def test_change_that_is_refused_for_something_else_is_refused(fake, change, method, refusal):
    fake.inject(method, code=grpc.StatusCode.UNAVAILABLE)
    fake.inject(method, error=fail(Reason.INVALID_PATH, "no path"))
    with pytest.raises(PostTrainingError, match="no path"):
        changed(fake, change)
