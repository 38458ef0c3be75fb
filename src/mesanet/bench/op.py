"""The Mesa op beside causal softmax attention and a large matrix product, over sequence lengths, in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mesanet.bench.heads import GAMMA_RANGES, MesaInputs, mixed_heads
from mesanet.bench.op_report import draw, progress, show
from mesanet.bench.timing import available_memory, machine, time_interleaved
from mesanet.config import check_fields, check_in_range, check_not_empty, check_positive, to_dict
from mesanet.io import write_json_atomic
from mesanet.ops.mesa import mesa
from mesanet.ops.solver import ConjugateGradient
from mesanet.optional import import_optional

CHUNK = 64
"""Tokens per chunk by which the floating-point operations of a solver step are counted."""
MATRIX_SIZE = 2048
"""Rows and columns of the matrix product that stands for what the machine can do."""

DataType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class OpBenchmark:
    """Time the Mesa op, forward and forward+backward, beside causal softmax attention and a large matrix product.

    All of them run in turns within one process, best of several rounds. Unless `gamma` is given, the heads are mixed: a
    quarter each with gamma 1, 0.9975, uniform in 0.9..1 and uniform in 0.5..1.
    """

    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    """Sequence lengths; those that do not fit into the memory are skipped."""
    batch: int = 4
    """Sequences in a batch."""
    heads: int = 8
    """Heads."""
    key_size: int = 128
    """Size of a query and of a key of one head."""
    value_size: int | None = None
    """Size of a value of one head; None for the key size."""
    dtype: DataType = "float32"
    """Data type of queries, keys and values."""
    tolerance: float = 1e-4
    """Relative residual at which a token stops."""
    max_steps: int = 30
    """The most solver steps that a token may take."""
    plain_steps: int = 30
    """Steps of the plain solver (no preconditioner, no early stop) in the measurement of its rate."""
    correlated: bool = False
    """Draw correlated keys, which make the systems stiff."""
    gamma: tuple[float, float] | None = None
    """Draw the forget gates of all heads from this range; None mixes the heads."""
    strong_gates: float = 0.0
    """Share of the tokens at which all heads keep only 5 % of what they would else have kept."""
    repeats: int = 3
    """Rounds that count, after one that does not. In each, everything is timed twice in a row."""
    seconds_per_length: float = 300.0
    """No further round begins when it would end after this many seconds."""
    device: str = "cpu"
    """Where to run: cpu, cuda, cuda:1 ..."""
    threads: int | None = None
    """Threads of torch on the processor; None leaves torch's own choice."""
    seed: int = 0
    """Seed of the inputs."""
    out: Path = Path("runs/bench-op")
    """Folder for the record, op.json, and the figure, op.png."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_not_empty("lengths", self.lengths)
        for position, length in enumerate(self.lengths):
            check_positive(f"lengths[{position}]", length)
        for name in ("batch", "heads", "key_size", "plain_steps", "repeats", "seconds_per_length"):
            check_positive(name, getattr(self, name))
        for name in ("value_size", "threads"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        check_in_range("max_steps", self.max_steps, low=0)
        check_in_range("tolerance", self.tolerance, low=0, high=1, high_open=True)
        check_in_range("strong_gates", self.strong_gates, low=0, high=1)
        for position, gamma in enumerate(self.gamma or ()):
            check_in_range(f"gamma[{position}]", gamma, low=0, high=1)


def run_op_benchmark(options: OpBenchmark) -> dict[str, Any]:
    """Measure every length, show the table, and write the record and the figure; returns the record.

    The record is written anew after every length, so that an interrupted run keeps what it has measured.
    """
    device = checked_device(options.device)
    # Better missed now than after minutes of measuring.
    import_optional("matplotlib.figure", "report")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    record: dict[str, Any] = {
        "benchmark": "op",
        "settings": to_dict(options),
        "gamma_ranges": [list(bounds) for bounds in gamma_ranges(options)],
        "matrix_size": MATRIX_SIZE,
        "machine": machine(device),
        "lengths": [],
    }
    for length in options.lengths:
        record["lengths"].append(measure(options, length, device))
        write_json_atomic(options.out / "op.json", record)
        print(progress(record["lengths"][-1]), flush=True)
    show(record)
    draw(record, options.out / "op.png")
    print(f"Record and figure are in {options.out}")
    return record


def gamma_ranges(options: OpBenchmark) -> Sequence[tuple[float, float]]:
    """The range of the forget gates of each part of the heads."""
    return GAMMA_RANGES if options.gamma is None else (options.gamma,)


def checked_device(name: str) -> torch.device:
    """Return the device, or raise ValueError if there is no such device here."""
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device: got {name!r}, expected one that torch can use here, such as 'cpu'") from error
    return device


def measure(options: OpBenchmark, length: int, device: torch.device) -> dict[str, Any]:
    """Return the timings, steps and rates of one length, or why it was skipped."""
    needed, there = needed_memory(options, length), available_memory(device)
    if there is not None and needed > there:
        reason = f"needs about {needed / 2**30:.1f} GiB of memory, {there / 2**30:.1f} GiB are free"
        return {"time": length, "skipped": reason}
    value_size = options.key_size if options.value_size is None else options.value_size
    inputs = mixed_heads(
        batch=options.batch,
        time=length,
        heads=options.heads,
        key_size=options.key_size,
        value_size=value_size,
        correlated=options.correlated,
        gamma_ranges=gamma_ranges(options),
        strong_gates=options.strong_gates,
        dtype=getattr(torch, options.dtype),
        device=device,
        seed=options.seed,
    )
    timings = time_interleaved(
        callables(options, inputs),
        repeats=options.repeats,
        in_a_row=2,
        budget=options.seconds_per_length,
        device=device,
    )
    with torch.no_grad():
        steps = mesa(*inputs, solver=tolerant(options)).steps.float()
    best = {name: timing.best for name, timing in timings.items()}
    peak = 2 * MATRIX_SIZE**3 / best["matrix product"]
    plain = plain_step_operations(options, length) * options.plain_steps / best["mesa plain forward"]
    return {
        "time": length,
        "seconds": {name: list(timing.seconds) for name, timing in timings.items()},
        "best": best,
        "forward_ratio": best["mesa forward"] / best["attention forward"],
        "training_ratio": best["mesa forward+backward"] / best["attention forward+backward"],
        "steps_mean_by_head": steps.mean((0, 1)).tolist(),
        "steps_max_by_head": steps.amax((0, 1)).tolist(),
        "matrix_product_gflops": peak / 1e9,
        "plain_gflops": plain / 1e9,
        "plain_share_of_matrix_product": plain / peak,
    }


def tolerant(options: OpBenchmark) -> ConjugateGradient:
    """The solver that stops at the tolerance."""
    return ConjugateGradient(max_steps=options.max_steps, tolerance=options.tolerance)


def callables(options: OpBenchmark, inputs: MesaInputs) -> dict[str, Callable[[], object]]:
    """Everything that is timed side by side."""
    plain = ConjugateGradient(max_steps=options.plain_steps, tolerance=0, preconditioner=None)
    trained = MesaInputs(*(tensor.clone().requires_grad_() for tensor in inputs))
    # Softmax attention gets the layout that it is fastest with: [B, H, T, K], contiguous.
    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in inputs[:3])
    trained_q, trained_k, trained_v = (tensor.clone().requires_grad_() for tensor in (q, k, v))
    incoming = torch.randn(inputs.v.shape, dtype=inputs.v.dtype, device=inputs.v.device)
    incoming_heads_first = incoming.transpose(1, 2).contiguous()
    square = torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=inputs.v.device, dtype=torch.float32)

    def mesa_with(solver: ConjugateGradient) -> Tensor:
        with torch.no_grad():
            return mesa(*inputs, solver=solver).output

    def attention() -> Tensor:
        with torch.no_grad():
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    def mesa_training() -> Sequence[Tensor]:
        output = mesa(*trained, solver=tolerant(options)).output
        return torch.autograd.grad(output, trained, incoming)

    def attention_training() -> Sequence[Tensor]:
        output = scaled_dot_product_attention(trained_q, trained_k, trained_v, is_causal=True)
        return torch.autograd.grad(output, (trained_q, trained_k, trained_v), incoming_heads_first)

    return {
        "matrix product": lambda: square @ square,
        "mesa forward": lambda: mesa_with(tolerant(options)),
        "attention forward": attention,
        "mesa forward+backward": mesa_training,
        "attention forward+backward": attention_training,
        "mesa plain forward": lambda: mesa_with(plain),
    }


def plain_step_operations(options: OpBenchmark, length: int) -> float:
    """Floating-point operations of the two matrix products that one plain step of all tokens needs.

    For a chunk of C tokens these are P K^T, [C, K] x [K, C], and [masked P K^T | decayed P] [K; H], [C, C + K] x
    [C + K, K]. What the solver does besides, its vectors, the states and the read-out, is counted as time only.
    """
    size = options.key_size
    chunks = options.batch * options.heads * length / CHUNK
    return chunks * (2 * CHUNK * CHUNK * size + 2 * CHUNK * (CHUNK + size) * size)


def needed_memory(options: OpBenchmark, length: int) -> int:
    """An estimate, on the high side, of the bytes that measuring one length takes."""
    value_size = options.key_size if options.value_size is None else options.value_size
    tokens = options.batch * options.heads * length
    # Inputs, copies with gradients and in attention's layout, outputs, gradients and the solver's vectors.
    vectors = 14 * tokens * max(options.key_size, value_size)
    # The states at the chunk boundaries, and their gradients.
    states = 3 * (tokens / CHUNK) * options.key_size * (options.key_size + value_size)
    return int(4 * (vectors + states))
