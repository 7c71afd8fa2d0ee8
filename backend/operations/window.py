"""The gradient window: from one optim_step to the next.

A failed operation contributes nothing and voids the window until the caller has seen the failure, so that what
was sent along before it was known never trains on half a batch:

- While the window is void, its forward_backwards and its optim_step fail (WINDOW_VOID). Those failures follow
  from the first and void nothing themselves.
- The optim_step that meets a void window changes nothing and closes it: its gradients are dropped before
  anything else enters, and the next window is clean.
- A caller that has seen the failure goes on with the gradients of the window's other operations. When the failed
  operation was one of several that a single call was split into, those gradients are dropped instead, because
  they may hold the rest of that call.

Pure. The executor owns it, and calls it in sequence order.
"""

from __future__ import annotations

from dataclasses import dataclass

from together_post_training.errors import PostTrainingError, Reason, fail


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An operation that contributed nothing.

    num_chunks: into how many operations its call was split; None: it never arrived, so nobody knows.
    is_partial: it may have contributed a part before it failed.
    """

    sequence: int
    what: str
    error: PostTrainingError
    num_chunks: int | None
    is_partial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Whether an operation may run. Gradients are dropped first where `drop_gradients` says so."""

    void: PostTrainingError | None
    drop_gradients: bool


class GradientWindow:
    def __init__(self) -> None:
        self._failures: list[Failure] = []
        self._has_chunks = False
        self._drop = False

    def enter(self, seen_through: int) -> Entry:
        """Called before a forward_backward or an optim_step of this window.

        Args:
            seen_through: the caller knew of the failures up to this sequence number; 0: of none.
        """
        self._see(seen_through)
        if self._failures:
            return Entry(void=_void(self._failures[0]), drop_gradients=False)
        drop, self._drop = self._drop, False
        if drop:
            self._has_chunks = False
        return Entry(void=None, drop_gradients=drop)

    def contributed(self, num_chunks: int) -> None:
        """An operation added its gradient."""
        self._has_chunks |= num_chunks > 1

    def failed(self, failure: Failure, seen_through: int = 0) -> None:
        """An operation failed, other than by meeting a void window."""
        self._see(seen_through)
        self._failures.append(failure)

    def close(self, *, drop_gradients: bool = False) -> None:
        """An optim_step or a load ended it. `drop_gradients`: it may have left some, which the next entry drops."""
        self._failures.clear()
        self._has_chunks, self._drop = False, drop_gradients

    def _see(self, seen_through: int) -> None:
        seen = [f for f in self._failures if f.sequence <= seen_through]
        self._failures = [f for f in self._failures if f.sequence > seen_through]
        self._drop |= any(self._taints(failure) for failure in seen)

    def _taints(self, failure: Failure) -> bool:
        if failure.is_partial:
            return True
        return self._has_chunks if failure.num_chunks is None else failure.num_chunks > 1


def _void(cause: Failure) -> PostTrainingError:
    return fail(
        Reason.WINDOW_VOID,
        f"Not run, nothing was changed: {cause.what} (operation {cause.sequence}) failed earlier in the same gradient "
        f"window ({cause.error.reason}: {cause.error.message}) Send the work since the last optim_step again.",
        cause_sequence=cause.sequence,
        cause_reason=cause.error.reason,
        cause_message=cause.error.message,
    )
