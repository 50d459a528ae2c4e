"""Inverted dropout, with the same mask when a step is repeated.

Srivastava et al. 2014, "Dropout"; scaled by 1 / (1 - ratio) while training, so that a test needs no
scaling. The mask comes from a counter-based generator, Philox4x32-10 (Salmon et al. 2011), keyed by
seed, step and layer: there is no generator state that a restart could lose, and both
implementations draw the same mask.

Element i takes word i % 4 of philox(counter = (i / 4, step >> 32, step, layer), key = seed), and is
dropped where the word is below `limit(ratio)`.
"""

from cupy_kernels.backends import HostOperation
from cupy_kernels.ops.dropout import cpu, gpu

forward = HostOperation(cpu.forward).with_kernels(gpu.forward)
backward = HostOperation(cpu.backward).with_kernels(gpu.backward)
