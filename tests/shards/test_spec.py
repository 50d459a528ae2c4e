"""A shard compiles all code that its expected workers need before it can be reached."""

import subprocess
import sys

import pytest

from shards.delta_pulls import KINDS as CHANGES
from shards.messages import Kind
from shards.pull_encodings import KINDS as WHOLE

# In a separate process, because code that another test has compiled would count as compiled here.
SCRIPT = """
import sys
import numpy as np
from shards import payloads
from shards.messages import Kind
from tests.support.shard_dsl import Talk, gradient, pull, push, spec

def compiled():
    loops = [m for n, m in sys.modules.items() if n.startswith("cupy_kernels.ops.")]
    found = {}
    for module in loops:
        for name, one in vars(module).items():
            if hasattr(one, "signatures"):
                found[module.__name__, name] = list(one.signatures)
    return found

def frame_of(kind, keys):
    if kind is Kind.SPARSE:
        return payloads.sparse(np.arange(3, dtype=np.uint32), np.ones(3, np.float32)).tobytes()
    return bytes(payloads.PAYLOADS[kind].max_bytes(keys))

spec().prepare()
assert "cupy_kernels.ops.codecs.cpu" not in sys.modules, "plain floats need no codec"
for pushed, pulled in map(str.split, sys.argv[1:]):
    pushed, pulled = Kind(pushed), Kind(pulled)
    spec(pushed=pushed, pulled=pulled).prepare()
    before = compiled()
    assert before
    talk, base = Talk(bound=None), 0
    talk.enter("w")
    for seq in (1, 2):
        frame = frame_of(pushed, talk.shard.size)
        ((_, ack),) = talk.say(push("w", seq, kind=pushed), [frame])
        assert ack.version == seq, ack
        ((_, weights),) = talk.say(pull("w", seq, kind=pulled, base=base, share=0.1))
        base = weights.parts[0].number
    assert weights.parts[0].kind is pulled, weights
    assert compiled() == before, (pushed, pulled)
    print(pushed, pulled)
"""


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("compiled_start")
def test_nothing_is_compiled_while_messages_wait() -> None:
    """Pushes and pulls of every kind that a job may name compile nothing; plain floats need no
    codec."""
    pushed = [kind for kind in Kind if kind is not Kind.F4]
    pulled = [kind for kind in (*WHOLE, *CHANGES) if kind is not Kind.F4]
    assert len(pushed) >= len(pulled)
    pairs = [f"{one} {pulled[at % len(pulled)]}" for at, one in enumerate(pushed)]
    child = subprocess.run(
        [sys.executable, "-c", SCRIPT, *pairs], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines() == pairs
