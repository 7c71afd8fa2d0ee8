from __future__ import annotations

from backend.operations.window import Failure, GradientWindow
from together_post_training.errors import Reason, fail


def failure(sequence: int, num_chunks: int | None = 1, *, is_partial: bool = False) -> Failure:
    return Failure(
        sequence=sequence,
        what="forward_backward",
        error=fail(Reason.NON_FINITE_LOSS, "The loss is inf."),
        num_chunks=num_chunks,
        is_partial=is_partial,
    )


def test_window_is_void_until_the_failure_was_seen():
    window = GradientWindow()
    window.failed(failure(2))
    for seen in (0, 1):
        void = window.enter(seen).void
        assert void is not None
        assert void.reason == Reason.WINDOW_VOID
    entry = window.enter(2)
    assert entry.void is None
    assert not entry.drop_gradients
    assert window.enter(0).void is None


def test_window_names_the_operation_that_voided_it_and_why():
    window = GradientWindow()
    window.failed(failure(7))
    window.failed(failure(8))
    void = window.enter(0).void
    assert void is not None
    assert void.metadata["cause_sequence"] == "7"
    assert void.metadata["cause_reason"] == "NON_FINITE_LOSS"
    assert "forward_backward (operation 7)" in void.message
    assert "The loss is inf." in void.message


def test_window_stays_void_for_a_second_failure_that_was_not_seen():
    window = GradientWindow()
    window.failed(failure(2))
    window.failed(failure(3))
    assert window.enter(2).void is not None
    assert window.enter(3).void is None


def test_window_drops_its_gradients_once_when_a_chunk_of_a_call_failed():
    window = GradientWindow()
    window.contributed(3)
    window.failed(failure(2, num_chunks=3))
    assert window.enter(0).void is not None
    entry = window.enter(2)
    assert entry.void is None
    assert entry.drop_gradients
    assert not window.enter(2).drop_gradients


def test_window_drops_its_gradients_when_an_operation_may_have_added_a_part():
    window = GradientWindow()
    window.failed(failure(1, is_partial=True))
    assert window.enter(1).drop_gradients


def test_window_drops_chunks_that_a_lost_number_may_have_belonged_to():
    for num_chunks, drops in ((1, False), (2, True)):
        window = GradientWindow()
        window.contributed(num_chunks)
        window.failed(failure(2, num_chunks=None))
        assert window.enter(2).drop_gradients is drops


def test_window_is_clean_after_it_was_closed():
    window = GradientWindow()
    window.contributed(2)
    window.failed(failure(2, num_chunks=2))
    window.close(drop_gradients=True)
    entry = window.enter(0)
    assert entry.void is None
    assert entry.drop_gradients
    window.failed(failure(5, num_chunks=None))
    assert not window.enter(5).drop_gradients, "the chunks were of the window before"
    window.close()
    assert not window.enter(0).drop_gradients


def test_window_takes_note_of_what_a_failed_operation_had_seen():
    window = GradientWindow()
    window.failed(failure(1))
    window.failed(failure(2), seen_through=1)
    void = window.enter(1).void
    assert void is not None
    assert void.metadata["cause_sequence"] == "2"
