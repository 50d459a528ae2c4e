"""The encodings of a version: each is made once, none outlives it, others are refused."""

import numpy as np
import pytest

from shards import delta_pulls, pull_encodings
from shards.errors import BadMessage
from shards.messages import Kind, Weights
from shards.pull_encodings import PullEncodings
from tests.support.shard_dsl import Talk, gradient, pull, push, refusal

pytestmark = pytest.mark.usefixtures("on_host_and_device")

WEIGHTS = np.random.default_rng(1).standard_normal(768).astype(np.float32)


def test_a_version_is_rounded_once_for_all_workers() -> None:
    """The second worker's frames are the first one's memory, for each kind and with zstd."""
    forms = PullEncodings()
    for kind in (Kind.FP16, Kind.BF16):
        for zstd in (False, True):
            first, second = (forms.frame(WEIGHTS, 3, kind, zstd) for _ in range(2))
            assert first is second
    assert forms.frame(WEIGHTS, 4, Kind.FP16, False) is not forms.frame(
        WEIGHTS, 3, Kind.FP16, False
    )


def test_plain_floats_are_the_version() -> None:
    """They cost nothing, and hold no buffer once they are sent."""
    assert PullEncodings().frame(WEIGHTS, 1, Kind.F4, False) is WEIGHTS


def test_other_weights_under_an_old_number() -> None:
    """After an Install none of the former weights are served."""
    forms = PullEncodings()
    before = forms.frame(WEIGHTS, 0, Kind.BF16, False)
    forms.forget()
    after = forms.frame(np.zeros(768, np.float32), 0, Kind.BF16, False)
    assert before.any()
    assert not after.any()


@pytest.mark.parametrize(
    "kind", [kind for kind in Kind if kind not in pull_encodings.KINDS + delta_pulls.KINDS]
)
def test_encodings_that_are_not_served(kind: Kind) -> None:
    """Such a pull is refused at once, even one that would have to wait at the gate."""
    talk = Talk()
    talk.enter("a", "b")
    for clock in (0, 9):
        answer = refusal(talk.say(pull("a", clock, kind=kind)))
        assert answer.text == f"pull as {kind}: expected f4, fp16, bf16, int8, int4, sparse"
    with pytest.raises(BadMessage):
        pull_encodings.check(kind, False, 0.1)


@pytest.mark.parametrize("share", [0.0, -1.0, 0.51, float("nan"), float("inf")])
def test_an_invalid_share_is_refused(share: float) -> None:
    """The share of largest changes may be up to one half."""
    with pytest.raises(BadMessage, match="pull as sparse: expected a share above 0"):
        pull_encodings.check(Kind.SPARSE, False, share)


def test_a_parked_pull_keeps_its_kind() -> None:
    """A pull that waited at the gate gets its own kind, of the version that opened it."""
    talk = Talk(bound=0)
    talk.enter("a", "b")
    talk.say(push("a", 1), gradient(1.0))
    assert talk.say(pull("a", 1, kind=Kind.FP16, zstd=True)) == []
    answers = talk.say(push("b", 1), gradient(1.0))
    (weights,) = (message for _, message in answers if isinstance(message, Weights))
    (part,) = weights.parts
    assert (part.kind, part.zstd, weights.version) == (Kind.FP16, True, 2)
