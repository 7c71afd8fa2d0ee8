from __future__ import annotations

import time

import grpc
import pytest

from tests.services.harness import Caller, Running, cross_entropy, refusal, sample
from together_post_training.v1 import data_pb2
from together_post_training.v1 import operations_pb2 as pb
from together_post_training.v1 import trainer_pb2 as t


def get(name: str) -> pb.GetOperationRequest:
    return pb.GetOperationRequest(name=name)


def test_operation_is_read_again_with_its_result_as_often_as_asked(caller: Caller):
    run = caller.session()
    done = run.do("Forward", loss=cross_entropy(), samples=[sample([1, 2])])
    for _ in range(2):
        assert caller.operations.GetOperation(get(done.name)) == done
        assert caller.wait(done) == done


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "INVALID_NAME"),
        ("operations/1", "INVALID_NAME"),
        ("sessions/x/operations/0", "INVALID_NAME"),
        ("sessions/x/operations/-1", "INVALID_NAME"),
        ("sessions/x/operations/99999999999999999999", "INVALID_NAME"),
        ("sessions/nobody/operations/1", "SESSION_NOT_FOUND"),
        ("sessions/{run}/operations/7", "OPERATION_NOT_FOUND"),
    ],
)
def test_operation_that_is_not_there_is_refused(caller: Caller, name: str, reason: str):
    refused = refusal(caller.operations.GetOperation, get(name.format(run=caller.session().id)))
    assert refused.reason == reason
    assert refused.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)


def test_wait_is_woken_by_the_end_and_not_before(watched: Running):
    assert watched.watched is not None
    run = watched.caller.session()
    watched.watched.gate.clear()
    operation = run.submit("Forward", loss=cross_entropy(), samples=[sample([1, 2])])
    waiting = watched.caller.operations.WaitOperation.future(  # pyright: ignore
        pb.WaitOperationRequest(name=operation.name)
    )
    early = watched.caller.wait(operation, timeout_s=0.05)
    assert early.state == pb.OPERATION_STATE_RUNNING
    assert not waiting.done()
    watched.watched.gate.set()
    assert waiting.result(5).state == pb.OPERATION_STATE_SUCCEEDED


@pytest.mark.parametrize("timeout_s", [-1.0, 61.0, float("nan")])
def test_wait_refuses_a_timeout_out_of_range(caller: Caller, timeout_s: float):
    run = caller.session()
    request = pb.WaitOperationRequest(name=f"sessions/{run.id}/operations/1", timeout_s=timeout_s)
    assert "0 to 60" in refusal(caller.operations.WaitOperation, request).message


def test_wait_of_0_answers_at_once(caller: Caller):
    run = caller.session()
    request = pb.WaitOperationRequest(name=f"sessions/{run.id}/operations/1", timeout_s=0)
    start = time.monotonic()
    assert caller.operations.WaitOperation(request).state == pb.OPERATION_STATE_UNSPECIFIED
    assert time.monotonic() - start < 1


def test_operations_are_listed_newest_first_without_results_in_pages(caller: Caller):
    run = caller.session()
    for _ in range(5):
        run.do("Forward", loss=cross_entropy(), samples=[sample([1, 2])])
    got, token = [], ""
    for _ in range(3):
        page = caller.operations.ListOperations(
            pb.ListOperationsRequest(session=run.id, page_size=2, page_token=token)
        )
        got += page.operations
        token = page.next_page_token
    assert [op.name.rpartition("/")[2] for op in got] == ["5", "4", "3", "2", "1"]
    assert not token
    assert {op.state for op in got} == {pb.OPERATION_STATE_SUCCEEDED}
    assert not any(op.WhichOneof("result") for op in got)


def test_cancel_ends_what_has_not_started_and_uses_up_what_never_came(watched: Running):
    assert watched.watched is not None
    caller, run = watched.caller, watched.caller.session()
    watched.watched.gate.clear()
    samples = [sample([1, 2])]
    running = run.submit("ForwardBackward", loss=cross_entropy(), samples=samples)
    waiting = run.submit("ForwardBackward", loss=cross_entropy(), samples=samples)
    watched.watched.started.wait(5)
    names = [running.name, waiting.name, f"sessions/{run.id}/operations/3"]
    cause = "the custom loss raised ValueError"
    got = [
        caller.operations.CancelOperation(pb.CancelOperationRequest(name=name, cause=cause))
        for name in names
    ]
    assert [op.state for op in got] == [
        pb.OPERATION_STATE_RUNNING,
        pb.OPERATION_STATE_CANCELLED,
        pb.OPERATION_STATE_CANCELLED,
    ]
    assert cause in got[1].error.message
    run.sequence = 3
    after = run.submit("OptimStep", adam=t.AdamParams(), failures_seen_through=3)
    watched.watched.gate.set()
    assert caller.wait(after).optim_step.policy_version == 1
    assert len(watched.watched.passes) == 1
    again = caller.operations.CancelOperation(pb.CancelOperationRequest(name=after.name))
    assert again.state == pb.OPERATION_STATE_SUCCEEDED


def test_retry_with_a_maps_entries_in_another_order_is_the_same_request(caller: Caller):
    """grpcurl sends them in another order each time."""
    run = caller.session()
    head = t.ForwardRequest(session=run.id, sequence=1, loss=cross_entropy()).SerializeToString()
    whole = sample([3, 4, 9], weights=[1.0, 0.5])
    fields = [data_pb2.Sample(model_input=whole.model_input)]
    fields += [
        data_pb2.Sample(loss_fn_inputs={key: value}) for key, value in whole.loss_fn_inputs.items()
    ]
    # Messages are merged by joining their bytes.
    pieces = [field.SerializeToString() for field in fields]
    submit = caller.channel.unary_unary("/together_post_training.v1.TrainerService/Forward")
    operations = []
    for order in (pieces, pieces[::-1]):
        data = b"".join(order)
        assert len(data) < 128, "its length is one byte"
        message = head + bytes([4 << 3 | 2, len(data)]) + data
        operations.append(pb.Operation.FromString(submit(message)))
    assert operations[0].name == operations[1].name
    assert caller.wait(operations[0]).state == pb.OPERATION_STATE_SUCCEEDED


def test_request_of_another_kind_with_the_same_number_and_fields_is_refused(caller: Caller):
    run = caller.session()
    fields = {"session": run.id, "sequence": 1, "loss": cross_entropy()}
    samples = [sample([3, 4, 9])]
    caller.trainer.Forward(t.ForwardRequest(samples=samples, **fields))
    request = t.ForwardBackwardRequest(samples=samples, **fields)
    assert refusal(caller.trainer.ForwardBackward, request).reason == "SEQUENCE_REUSED"


def test_cancel_keeps_only_the_beginning_of_a_long_cause(caller: Caller):
    run = caller.session()
    name = f"sessions/{run.id}/operations/1"
    request = pb.CancelOperationRequest(name=name, cause="x" * 100_000)
    ended = caller.operations.CancelOperation(request)
    assert ended.error.message.startswith("Cancelled by the caller: xxx")
    assert ended.ByteSize() < 2000
