"""Where the scenarios of a shard keep its weights and slots: on the host and on a device."""

import pytest

from cupy_kernels.backends import EmulatorBackend
from cupy_kernels.emulator import Emulator
from tests.support.shard_dsl import Talk

_EMULATOR = EmulatorBackend(Emulator())


@pytest.fixture(params=["host", "device"])
def on_host_and_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test twice, on a device too: the emulator, which runs the CUDA kernels."""
    if request.param == "device":
        request.getfixturevalue("emulated")
        monkeypatch.setattr(Talk, "place", _EMULATOR)
