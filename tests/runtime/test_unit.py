"""unit.py: the state machine of a unit's weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardengine.errors import InternalError
from shardengine.runtime.unit import Summoned, Unit, UnshardState, weight_bytes
from tests.support.parts import collectives, contents, is_hidden, make_unit, spec
from tests.support.ranks import RankPool

SPECS = [spec("b", 7), spec("a", 4, 5), spec("f", 3, trainable=False)]
EVERY = {0, 1, 2}


def sharded_unit() -> tuple[Unit, list[nn.Parameter]]:
    """Its shards lie in memory of their own, as on several ranks."""
    unit, parameters = make_unit(SPECS)
    for bucket in unit.buckets():
        bucket.detach_shard()
    unit.reshard()
    return unit, parameters


def test_at_one_rank_nothing_is_copied() -> None:
    unit, parameters = make_unit(SPECS)
    unit.detach_shards()
    place = unit.flat_buffers[0].flat.data_ptr()
    for abandon in (False, True):
        assert unit.state is UnshardState.SHARDED and all(is_hidden(p) for p in parameters)
        unit.unshard(collectives())
        unit.wait_for_unshard()
        assert shows_contents(parameters) and unit.flat_buffers[0].flat.data_ptr() == place
        assert weight_bytes([unit]).total() == 4 * unit.elements
        unit.reshard(abandon=abandon)
    unit.unshard(collectives())
    unit.recover()
    assert unit.state is UnshardState.SHARDED and weight_bytes([unit]).total() == 4 * unit.elements


def shows_contents(parameters: list[nn.Parameter]) -> bool:
    return all(torch.equal(p.data, contents(s, i)) for i, (s, p) in enumerate(zip(SPECS, parameters, strict=True)))


def test_a_new_unit_is_full() -> None:
    unit, parameters = make_unit(SPECS)
    assert unit.state is UnshardState.UNSHARDED and shows_contents(parameters)


def test_a_sharded_unit_shows_poison_and_keeps_only_its_shards() -> None:
    unit, parameters = sharded_unit()
    assert unit.state is UnshardState.SHARDED
    assert all(is_hidden(p) and tuple(p.shape) == s.shape for p, s in zip(parameters, SPECS, strict=True))
    shards = sum(b.shard().nbytes for flat_buffer in unit.flat_buffers for b in flat_buffer.buckets)
    assert weight_bytes([unit]).total() == shards == 4 * unit.elements


def test_while_gathering_a_unit_still_shows_poison() -> None:
    unit, parameters = sharded_unit()
    unit.unshard(collectives())
    assert unit.state is UnshardState.UNSHARDING
    assert all(is_hidden(p) for p in parameters)


def test_an_unsharded_unit_shows_its_weights_to_the_users_own_parameters() -> None:
    unit, parameters = sharded_unit()
    unit.unshard(collectives())
    unit.wait_for_unshard()
    assert unit.state is UnshardState.UNSHARDED and shows_contents(parameters)
    assert weight_bytes([unit]).total() == 2 * 4 * unit.elements


class Keeps:
    """Keeps what was written into the first parameter, as somebody does who finds it."""

    def take(self, unit: Unit) -> None:
        member = next(member for member in unit.members if member.index == 0)
        for bucket in member.flat_buffer.buckets:
            slot = member.flat_buffer.layout.slots[member.slot]
            bucket.keep([(slot.start, slot.end)], bucket.full)

    def take_summoned(self, unit: Unit, held: Summoned, *, writable: bool) -> None:
        for bucket, part in held.parts.items():
            bucket.keep([(bucket.layout.start, bucket.layout.end)], part)


def test_a_keeper_is_asked_before_weights_are_let_go_of() -> None:
    """Without one what was written is lost, and what nobody keeps is lost with one."""
    unit, parameters = sharded_unit()
    for keeper in (None, Keeps()):
        if keeper is not None:
            unit.ask(keeper)
        unit.unshard(collectives())
        unit.wait_for_unshard()
        assert shows_contents(parameters)
        for parameter in parameters:
            parameter.data.zero_()
        unit.reshard()
    unit.unshard(collectives())
    unit.wait_for_unshard()
    assert not parameters[0].any() and torch.equal(parameters[1].data, contents(SPECS[1], 1))


def test_an_abandoning_reshard_leaves_views_outside_alone() -> None:
    unit, parameters = sharded_unit()
    unit.unshard(collectives())
    unit.wait_for_unshard()
    outside = parameters[1].data
    unit.reshard(abandon=True)
    assert torch.equal(outside, contents(SPECS[1], 1))
    unit.unshard(collectives())
    unit.wait_for_unshard()
    assert shows_contents(parameters) and parameters[1].data_ptr() != outside.data_ptr()


def test_recovering_leaves_what_is_in_flight_its_memory() -> None:
    unit, parameters = sharded_unit()
    held = unit.summon(collectives(), EVERY)
    unit.unshard(collectives())
    written = unit.flat_buffers[0].flat
    unit.recover()
    assert unit.state is UnshardState.SHARDED and not unit.summoned and is_hidden(parameters[0])
    assert written.untyped_storage().nbytes() and unit.flat_buffers[0].storage_bytes == 0
    unit.unshard(collectives())
    written.fill_(-1)
    unit.wait_for_unshard()
    unit.release_summoned(collectives(), held, writable=True)
    assert shows_contents(parameters)


def test_relocating_shows_the_same_weights_in_other_memory() -> None:
    unit, parameters = make_unit(SPECS)
    places = [parameter.data_ptr() for parameter in parameters]
    unit.relocate()
    assert shows_contents(parameters) and unit.state is UnshardState.UNSHARDED
    assert not {parameter.data_ptr() for parameter in parameters} & set(places)


@pytest.mark.parametrize(
    ("state", "move"),
    [
        (UnshardState.UNSHARDED, "unshard"), (UnshardState.UNSHARDED, "wait_for_unshard"),
        (UnshardState.SHARDED, "wait_for_unshard"), (UnshardState.SHARDED, "reshard"),
        (UnshardState.UNSHARDING, "unshard"), (UnshardState.UNSHARDING, "reshard"),
    ],
)  # fmt: skip
def test_an_illegal_move_is_refused_with_both_states(state: UnshardState, move: str) -> None:
    unit, _ = make_unit(SPECS)
    if state is not UnshardState.UNSHARDED:
        unit.detach_shards()
    if state is UnshardState.UNSHARDING:
        unit.unshard(collectives())
    moves: dict[str, Callable[[], None]] = {
        "unshard": lambda: unit.unshard(collectives()),
        "wait_for_unshard": unit.wait_for_unshard, "reshard": unit.reshard,
    }  # fmt: skip
    with pytest.raises(InternalError, match=f"'block': illegal move from {state.name} to"):
        moves[move]()
    assert unit.state is state


def test_a_summoned_unit_shows_full_weights_whatever_its_state() -> None:
    unit, parameters = sharded_unit()
    held = unit.summon(collectives(), EVERY)
    assert unit.summoned and unit.state is UnshardState.SHARDED and shows_contents(parameters)
    unit.unshard(collectives())
    unit.wait_for_unshard()
    assert shows_contents(parameters)
    unit.reshard()
    assert shows_contents(parameters)
    unit.release_summoned(collectives(), held, writable=False)
    assert not unit.summoned and all(is_hidden(p) for p in parameters)


def test_a_parameter_is_summoned_with_its_buckets_alone() -> None:
    unit, parameters = sharded_unit()
    before = weight_bytes([unit]).total()
    outer = unit.summon(collectives(), {0})
    assert not unit.summoned and unit.is_summoned(0) and parameters[0].tolist() == contents(SPECS[0], 0).tolist()
    assert is_hidden(parameters[1]) and is_hidden(parameters[2]) and not unit.misplaced()
    assert weight_bytes([unit]).total() - before == sum(part.nbytes for part in outer.parts.values()) < 4 * 48
    unit.unshard(collectives())
    unit.wait_for_unshard()
    assert shows_contents(parameters)
    unit.reshard()
    inner = unit.summon(collectives(), EVERY)
    assert unit.summoned and shows_contents(parameters)
    unit.release_summoned(collectives(), inner, writable=False)
    assert parameters[0].tolist() == contents(SPECS[0], 0).tolist() and is_hidden(parameters[1])
    unit.release_summoned(collectives(), outer, writable=False)
    assert is_hidden(parameters[0]) and weight_bytes([unit]).total() == before


def test_writes_to_a_pin_are_for_a_keeper_unless_it_is_writable() -> None:
    unit, parameters = sharded_unit()
    for keeper in (None, Keeps()):
        if keeper is not None:
            unit.ask(keeper)
        held = unit.summon(collectives(), EVERY)
        assert shows_contents(parameters)
        parameters[0].data.fill_(7)
        unit.release_summoned(collectives(), held, writable=False)
    held = unit.summon(collectives(), EVERY)
    assert parameters[0].tolist() == [7.0] * 7
    parameters[0].data.fill_(9)
    unit.release_summoned(collectives(), held, writable=True)
    unit.summon(collectives(), EVERY)
    assert parameters[0].tolist() == [9.0] * 7
    assert torch.equal(parameters[1].data, contents(SPECS[1], 1))


def test_a_writable_pin_reaches_the_full_weights_of_a_replicated_unit() -> None:
    unit, parameters = make_unit(SPECS)
    held = unit.summon(collectives(), EVERY)
    parameters[0].data.fill_(9)
    unit.release_summoned(collectives(), held, writable=True)
    assert unit.state is UnshardState.UNSHARDED and parameters[0].tolist() == [9.0] * 7
    assert parameters[0].data_ptr() == next(m for m in unit.members if m.index == 0).view.data_ptr()


def test_a_unit_knows_whose_parameter_shows_no_longer_what_it_was_given() -> None:
    unit, parameters = make_unit(SPECS)
    (member,) = [m for m in unit.members if m.index == 0]
    assert not unit.misplaced() and unit.misplaced({0}) == [member]
    parameters[0].data = parameters[0].data.clone()
    assert unit.misplaced() == [member]
    unit.detach_shards()
    assert not unit.misplaced()


def test_a_unit_knows_its_trainable_parameters_and_its_storages() -> None:
    unit, _ = make_unit(SPECS)
    other, _ = make_unit(SPECS)
    assert unit.trainable == {0, 1} and unit.has_frozen
    assert not make_unit(SPECS[:2])[0].has_frozen
    assert unit.owns_storage({unit.flat_buffers[-1].storage_key}) and not unit.owns_storage(
        {other.flat_buffers[0].storage_key}
    )
    assert unit.elements == 48 + 16


def life_at_two_ranks() -> list[bool]:
    """What holds on a rank: shards are slices, gathers put them together, a writable summon takes rank 0's contents."""
    link = collectives()
    rank = link.mesh.rank
    unit, parameters = make_unit(SPECS, ranks=2, rank=rank)
    unit.detach_shards()
    half = weight_bytes([unit]).total() == 4 * unit.elements // 2
    unit.unshard(link)
    unit.wait_for_unshard()
    unsharded = shows_contents(parameters)
    unit.reshard()
    held = unit.summon(link, EVERY)
    summoned = shows_contents(parameters)
    parameters[1].data.fill_(5.0 + rank)
    unit.release_summoned(link, held, writable=True)
    unit.unshard(link)
    unit.wait_for_unshard()
    written = parameters[1].eq(5).all().item() and torch.equal(parameters[0].data, contents(SPECS[0], 0))
    return [half, unsharded, summoned, bool(written)]


def test_two_ranks_hold_half_each_and_see_the_whole(pools: Callable[[int], RankPool]) -> None:
    assert pools(2).run(life_at_two_ranks) == [[True] * 4] * 2


def write_replicated_at_two_ranks() -> bool:
    """Whether rank 0's writes through summoned weights are the whole weights of a unit that rests replicated."""
    link = collectives()
    unit, parameters = make_unit(SPECS, ranks=2, rank=link.mesh.rank)
    held = unit.summon(link, EVERY)
    parameters[1].data.fill_(5.0 + link.mesh.rank)
    unit.release_summoned(link, held, writable=True)
    return bool(parameters[1].eq(5).all()) and torch.equal(parameters[0].data, contents(SPECS[0], 0))


def test_a_writable_pin_reaches_all_of_a_replicated_unit_on_every_rank(pools: Callable[[int], RankPool]) -> None:
    assert pools(2).run(write_replicated_at_two_ranks) == [True, True]
