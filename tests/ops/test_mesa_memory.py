"""Memory of a forward and backward pass grows with T (K + V) and (T / C) K (K + V), never with T K K."""

from __future__ import annotations

import subprocess
import sys

import pytest

MEASURE = """
import resource, sys
import torch
from mesanet import mesa

torch.set_num_threads(1)
time = int(sys.argv[1])
q, k = (torch.nn.functional.normalize(torch.randn(1, time, 8, 128), dim=-1).requires_grad_() for _ in range(2))
v = torch.randn(1, time, 8, 128, requires_grad=True)
log_decay = torch.full((1, time, 8), -0.001)
log_decay[..., 4:] = torch.rand(1, time, 4).log() / 8
write = torch.rand(1, time, 8)
ridge = torch.full((8, 128), 0.5)
gates = [tensor.requires_grad_() for tensor in (log_decay, write, ridge)]
grad_output = torch.randn(1, time, 8, 128)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
mesa(q, k, v, *gates).output.backward(grad_output)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize(
    # The bound for 16384 tokens is 1.5 GiB; a quarter of the tokens, a quarter of it and the tiles' fixed room.
    ("time", "mebibytes"),
    [(4096, 384 + 64), pytest.param(16384, 1536, marks=pytest.mark.slow)],
)
def test_peak_memory(time: int, mebibytes: int) -> None:
    if sys.platform != "linux":
        pytest.skip("the peak memory of a process is read in Linux's units")
    process = subprocess.run([sys.executable, "-c", MEASURE, str(time)], capture_output=True, text=True, check=True)
    assert int(process.stdout) / 1024 < mebibytes
