"""Memory of a forward and backward pass grows with T (K + V) and (T / C) K (K + V), never with T K K."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from tests.ops.mesa_cases import make_inputs
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mesanet.ops.mesa import mesa

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


def test_nothing_outlives_the_backward_pass() -> None:
    """What is kept for it autograd holds: it is freed by the backward pass, with the loss still there."""
    inputs = make_inputs(1, 256, 2, 32, 16, gamma=(0.99, 1.0)).with_grad()
    saved: list[weakref.ref[Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(weakref.ref(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = mesa(*inputs[:6]).output
    shapes = [reference().shape for reference in saved]
    assert shapes.count((4, 32, 32)) == 2, "the inverses of four chunks, of each of two heads, are among it"
    torch.autograd.grad(output.sum(), inputs[:6])
    gc.collect()
    own = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    alive = [reference() for reference in saved]
    assert all(tensor is None or tensor.untyped_storage().data_ptr() in own for tensor in alive)


def test_a_checkpoint_computes_all_of_it_again() -> None:
    inputs = make_inputs(1, 256, 2, 32, 16, gamma=(0.2, 1.0)).with_grad()

    def run(*tensors: Tensor) -> Tensor:
        return mesa(*tensors).output

    expected = torch.autograd.grad(run(*inputs[:6]).sum(), inputs[:6])
    found = torch.autograd.grad(checkpoint(run, *inputs[:6], use_reentrant=False).sum(), inputs[:6])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
