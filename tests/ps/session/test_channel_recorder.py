"""The recorder notes each push that the shards' exported state may lack, once."""

from typing import Any

from ps.session.channel_recorder import ChannelRecorder
from ps.session.events import Exported
from shards.messages import Kind, Push

FRAMES: tuple[Any, ...] = ()


def push(seq: int) -> Push:
    return Push(9, "j", "w", 0, 1, 1, "t", seq, seq, seq, 1, 1, seq, Kind.F4, [0, 4], 0.5, 0.0, 0.0)


def test_the_push_that_brings_the_news_is_noted() -> None:
    """A shard's first acknowledgement after an export is for a push that the export lacks."""
    unsaved = ChannelRecorder(1)
    assert unsaved.record_export(0, 0, [(0, push(3), FRAMES)]) is None
    on_their_way = [(0, push(4), FRAMES), (0, push(5), FRAMES)]
    assert unsaved.record_export(0, 3, on_their_way) == Exported(
        3, {4: {0: (push(4), FRAMES)}, 5: {0: (push(5), FRAMES)}}
    )
    assert unsaved.record_export(0, 3, [(0, push(5), FRAMES)]) is None
    assert unsaved.record_export(0, 2, [(0, push(6), FRAMES)]) is None  # a late answer


def test_shards_export_at_pushes_of_their_own() -> None:
    """The smallest export counts; pushes between the shards' exports are recorded whole, and only
    once.
    """
    unsaved = ChannelRecorder(2)
    unsaved.pushed(0, push(4), FRAMES)
    assert unsaved.record_export(0, 3, [(0, push(4), FRAMES)]) is None
    for shard in (0, 1):
        unsaved.pushed(shard, push(5), FRAMES)
    exported = unsaved.record_export(1, 4, [(1, push(5), FRAMES)])
    assert exported is not None
    assert exported.base == 3
    assert {seq: sorted(parts) for seq, parts in exported.noted.items()} == {4: [0], 5: [0, 1]}
    unsaved.pushed(0, push(6), FRAMES)
    again = unsaved.record_export(1, 5, [(1, push(6), FRAMES)])
    assert again is None
    exported = unsaved.record_export(0, 5, [(0, push(6), FRAMES)])
    assert exported is not None
    assert {seq: sorted(parts) for seq, parts in exported.noted.items()} == {6: [0, 1]}


def test_a_shard_that_was_not_asked_costs_no_memory() -> None:
    """When one shard reports no export, recording stops; the next export is recorded as usual."""
    unsaved = ChannelRecorder(2)
    assert unsaved.record_export(0, 3, [(0, push(4), FRAMES)]) is None
    for seq in range(5, 1000):
        unsaved.pushed(0, push(seq), FRAMES)
    assert len(unsaved._noted) == 0
    assert unsaved.record_export(0, 999, [(0, push(1000), FRAMES)]) is None
    exported = unsaved.record_export(1, 1000, [(1, push(1001), FRAMES)])
    assert exported is not None
    assert (exported.base, sorted(exported.noted)) == (999, [1000, 1001])
