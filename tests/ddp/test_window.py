"""window.py: counting micro-batches and finding the boundary."""

from __future__ import annotations

import pytest

from shardengine.ddp.window import Window


def micro_batch(window: Window) -> None:
    """A backward and a ``step()`` off the boundary."""
    window.begin_backward()
    window.count()


def test_the_boundary_is_the_last_micro_batch_of_the_window() -> None:
    window = Window(3)
    boundaries = []
    for _ in range(3):
        before = window.is_boundary
        window.begin_backward()
        boundaries.append((before, window.is_boundary))
        if not window.is_boundary:
            window.count()
    assert boundaries == [(False, False), (False, False), (True, True)]


def test_a_window_of_one_is_always_at_its_boundary() -> None:
    window = Window(1)
    for _ in range(2):
        assert window.is_boundary and window.is_first
        window.begin_backward()
        assert window.is_boundary and not window.is_first
        assert window.close() == 1


def test_closing_returns_the_micro_batches_and_starts_a_new_window() -> None:
    window = Window(2)
    micro_batch(window)
    window.begin_backward()
    assert window.close() == 2
    assert window.is_first and not window.is_boundary and window.micro_batches == 0
    assert window.total == 2


def test_a_window_closed_early_has_fewer_micro_batches() -> None:
    window = Window(4)
    window.begin_backward()
    assert window.close() == 1 and window.total == 1


def test_a_loop_that_steps_only_at_the_end_is_counted_at_the_next_backward() -> None:
    window = Window(3)
    for expected in (1, 2, 3):
        assert window.is_boundary is (expected == 4)
        window.begin_backward()
        assert window.micro_batches == expected
        assert window.is_boundary is (expected == 3)
    assert window.close() == 3


def test_counting_twice_counts_one_micro_batch_once() -> None:
    window = Window(3)
    micro_batch(window)
    window.count()
    assert (window.micro_batches, window.total) == (1, 1)


def test_a_backward_that_was_refused_does_not_count() -> None:
    window = Window(2)
    window.begin_backward()
    window.backward_failed()
    assert window.micro_batches == 0 and window.is_first


@pytest.mark.parametrize("boundary", [True, False])
def test_an_override_of_the_boundary_lasts_until_the_step_is_applied(boundary: bool) -> None:
    window = Window(2)
    window.set_boundary(boundary)
    micro_batch(window)
    assert window.is_boundary is boundary
    micro_batch(window)
    assert window.is_boundary is boundary
    window.close()
    assert window.is_boundary is False
    micro_batch(window)
    assert window.is_boundary is True


def test_no_sync_lasts_as_long_as_its_outermost_block_also_through_an_error() -> None:
    window = Window(1)
    with window.no_sync():
        with window.no_sync():
            assert not window.synchronises
        assert not window.synchronises
    assert window.synchronises
    with pytest.raises(ValueError), window.no_sync():
        raise ValueError
    assert window.synchronises


def test_restarting_forgets_the_micro_batches_and_the_override() -> None:
    window = Window(2)
    window.set_boundary(True)
    window.begin_backward()
    window.restart()
    assert window.is_first and not window.is_boundary and window.micro_batches == 0
