"""Selects the layers of a net for a phase.

A net file holds the layers for training and for testing together. A layer with `include` rules is
kept if one of them meets the state (phase, level, stages); a layer with `exclude` rules is kept if
none does; a layer with neither is always kept. The net's own `state` adds stages, and a level.
"""

from enum import StrEnum

import msgspec

from shards.errors import BadInput
from worker.caffe.caffe_pb2 import TRAIN, LayerParameter, NetParameter, NetStateRule


class Phase(StrEnum):
    """The use of a net: training, or measurement and inference."""

    TRAIN = "TRAIN"
    TEST = "TEST"


class NetState(msgspec.Struct, frozen=True):
    """The phase, level and stages that the rules are compared with."""

    phase: Phase
    stages: tuple[str, ...] = ()
    level: int = 0


def layers_kept(net: NetParameter, state: NetState, file: str) -> list[LayerParameter]:
    """The layers of `net` that `state`, with the net's own stages and level, keeps, in order."""
    net_state = net.state
    state = NetState(state.phase, (*net_state.stage, *state.stages), state.level or net_state.level)
    return [layer for layer in net.layer if _keeps(layer, state, file)]


def _keeps(layer: LayerParameter, state: NetState, file: str) -> bool:
    if layer.include and layer.exclude:
        raise BadInput(
            f"{file}: layer {layer.name}: has include and exclude rules; expected one kind"
        )
    if layer.include:
        return any(_meets(rule, state) for rule in layer.include)
    return not any(_meets(rule, state) for rule in layer.exclude)


def _meets(rule: NetStateRule, state: NetState) -> bool:
    """A rule is met when everything that it states holds."""
    phase = Phase.TRAIN if rule.phase == TRAIN else Phase.TEST
    return (
        (not rule.HasField("phase") or phase is state.phase)
        and (not rule.HasField("min_level") or state.level >= rule.min_level)
        and (not rule.HasField("max_level") or state.level <= rule.max_level)
        and all(stage in state.stages for stage in rule.stage)
        and not any(stage in state.stages for stage in rule.not_stage)
    )
