"""What operations do to their session's gradient window and policy version: when they enter, succeed or fail.

Called in sequence order, by the executor.
"""

from __future__ import annotations

from backend.operations.session import Operation
from backend.operations.window import Entry, Failure
from together_post_training.errors import PostTrainingError, Reason
from together_post_training.v1 import operations_pb2 as pb

# What changes weights or gradients: when one of these fails, what was sent along behind it does not run.
_VOIDING = frozenset(
    {
        pb.OPERATION_KIND_UNSPECIFIED,
        pb.OPERATION_KIND_FORWARD_BACKWARD,
        pb.OPERATION_KIND_CUSTOM_FORWARD_BACKWARD,
        pb.OPERATION_KIND_OPTIM_STEP,
        pb.OPERATION_KIND_LOAD_CHECKPOINT,
    }
)
_GRADIENT = frozenset(
    {
        pb.OPERATION_KIND_FORWARD_BACKWARD,
        pb.OPERATION_KIND_CUSTOM_FORWARD_BACKWARD,
        pb.OPERATION_KIND_OPTIM_STEP,
    }
)
_FREE = Entry(void=None, drop_gradients=False)


def entered(operation: Operation) -> Entry:
    """Whether the operation may run."""
    if operation.kind not in _GRADIENT:
        return _FREE
    window = operation.session.window
    entry = window.enter(operation.seen_through)
    if entry.void is not None and operation.kind == pb.OPERATION_KIND_OPTIM_STEP:
        window.close(drop_gradients=True)
    return entry


def succeeded(operation: Operation, result: pb.Operation) -> None:
    session = operation.session
    version = new_policy_version(result)
    if version is not None:
        session.policy_version = version
        session.window.close()
    elif operation.kind in _GRADIENT:
        session.window.contributed(operation.num_chunks or 1)


def failed(operation: Operation, error: PostTrainingError) -> None:
    """It ran, or was to run, and failed."""
    if operation.kind == pb.OPERATION_KIND_OPTIM_STEP:
        # The window ends here; its gradient is not to be found in the next one.
        operation.session.window.close(drop_gradients=True)
        if error.reason != Reason.INTERNAL:
            return  # Nothing was changed.
    refused(operation, error)


def refused(operation: Operation, error: PostTrainingError) -> None:
    """It will not run, or failed."""
    if operation.kind in _VOIDING:
        failure = Failure(
            sequence=operation.sequence,
            what=operation.what,
            error=error,
            num_chunks=operation.num_chunks,
            is_partial=operation.is_started and error.reason == Reason.INTERNAL,
        )
        operation.session.window.failed(failure, operation.seen_through)


def new_policy_version(result: pb.Operation) -> int | None:
    """None: the operation leaves it as it is."""
    if result.HasField("optim_step"):
        return result.optim_step.policy_version
    if result.HasField("load_checkpoint"):
        return result.load_checkpoint.policy_version
    return None
