"""The recurrent ops beside causal softmax attention and the delta rule of transformers, in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mesanet.bench.gated_report import draw, progress, show
from mesanet.bench.heads import mixed_heads
from mesanet.bench.op import DataType, checked_device
from mesanet.bench.timing import available_memory, machine, time_interleaved
from mesanet.config import check_fields, check_not_empty, check_one_of, check_positive, to_dict
from mesanet.io import write_json_atomic
from mesanet.ops import gated_delta_rule, gated_linear_attention, longhorn, mlstm, rg_lru
from mesanet.ops.mesa import mesa
from mesanet.optional import import_optional

OPS = ("gla", "mamba2", "deltanet", "gated_deltanet", "mlstm", "rg_lru", "longhorn", "mesa")
"""What can be measured."""
PEERS = ("sdpa", "transformers")
"""What it can be measured beside: softmax attention, and the chunkwise gated delta rule of transformers."""


@dataclass(frozen=True, kw_only=True)
class GatedBenchmark:
    """Time every recurrent op, forward+backward, beside softmax attention and transformers' gated delta rule.

    All of them, at all lengths, run in turns within one process, best of several rounds. The heads are mixed: a quarter
    each with gamma 1, 0.9975, uniform in 0.9..1 and uniform in 0.5..1.
    """

    lengths: tuple[int, ...] = (2048, 8192)
    """Sequence lengths; those that do not fit into the memory are skipped."""
    ops: tuple[str, ...] = OPS
    """Which ops."""
    peers: tuple[str, ...] = PEERS
    """What to measure them beside: sdpa, transformers (the fallback of qwen3_next, at the shortest length only)."""
    batch: int = 4
    """Sequences in a batch."""
    heads: int = 8
    """Heads; rg_lru gets heads * key_size channels."""
    key_size: int = 128
    """Size of a query, a key and a value of one head."""
    dtype: DataType = "float32"
    """Data type of queries, keys and values."""
    repeats: int = 3
    """Rounds that count, after one that does not. In each, everything is timed twice in a row."""
    seconds: float = 600.0
    """No further round begins when it would end after this many seconds."""
    device: str = "cpu"
    """Where to run: cpu, cuda, cuda:1 ..."""
    threads: int | None = None
    """Threads of torch on the processor; None leaves torch's own choice."""
    seed: int = 0
    """Seed of the inputs."""
    out: Path = Path("runs/bench-gated")
    """Folder for the record, gated.json, and the figure, gated.png."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_not_empty("lengths", self.lengths)
        for position, length in enumerate(self.lengths):
            check_positive(f"lengths[{position}]", length)
        for position, op in enumerate(self.ops):
            check_one_of(f"ops[{position}]", op, OPS)
        for position, peer in enumerate(self.peers):
            check_one_of(f"peers[{position}]", peer, PEERS)
        check_not_empty("ops", self.ops)
        for name in ("batch", "heads", "key_size", "repeats", "seconds"):
            check_positive(name, getattr(self, name))
        if self.threads is not None:
            check_positive("threads", self.threads)


def run_gated_benchmark(options: GatedBenchmark) -> dict[str, Any]:
    """Measure, show the table, and write the record and the figure; returns the record."""
    device = checked_device(options.device)
    import_optional("matplotlib.figure", "report")  # Better missed now than after minutes of measuring.
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    record: dict[str, Any] = {
        "benchmark": "gated",
        "settings": to_dict(options),
        "machine": machine(device),
        **measure(options, device),
    }
    write_json_atomic(options.out / "gated.json", record)
    print(progress(record), flush=True)
    show(record)
    draw(record, options.out / "gated.png")
    print(f"Record and figure are in {options.out}")
    return record


def measure(options: GatedBenchmark, device: torch.device) -> dict[str, Any]:
    """Time everything at every length that fits; returns the timings by length and what was skipped."""
    there = available_memory(device)
    lengths = sorted(set(options.lengths))
    needed = 0
    fitting: list[int] = []
    for length in lengths:
        # What is measured runs in turns, so the inputs of all lengths are there at once.
        needed += needed_memory(options, length)
        if there is None or needed <= there:
            fitting.append(length)
    work: dict[str, Callable[[], object]] = {}
    for length in fitting:
        peers = options.peers if length == fitting[0] else tuple(set(options.peers) - {"transformers"})
        for name, run in callables(options, length, peers, device).items():
            work[f"{name} {length}"] = run
    timings = (
        time_interleaved(work, repeats=options.repeats, in_a_row=2, budget=options.seconds, device=device)
        if work
        else {}
    )
    rows = []
    for length in fitting:
        suffix = f" {length}"
        seconds = {
            name.removesuffix(suffix): list(timing.seconds) for name, timing in timings.items() if name.endswith(suffix)
        }
        rows.append({"time": length, "seconds": seconds, "best": {name: min(all_) for name, all_ in seconds.items()}})
    return {"lengths": rows, "skipped": [length for length in lengths if length not in fitting]}


def callables(
    options: GatedBenchmark, length: int, peers: Sequence[str], device: torch.device
) -> dict[str, Callable[[], object]]:
    """Forward and backward pass of each op and peer, for one length."""
    dtype = getattr(torch, options.dtype)
    inputs = mixed_heads(
        batch=options.batch,
        time=length,
        heads=options.heads,
        key_size=options.key_size,
        value_size=options.key_size,
        dtype=dtype,
        device=device,
        seed=options.seed,
    )
    q, k, v, log_decay, write, ridge = (tensor.requires_grad_() for tensor in inputs)
    generator = torch.Generator().manual_seed(options.seed + 1)
    incoming = torch.randn(v.shape, generator=generator).to(device, dtype)
    # Softmax attention gets the layout that it is fastest with: [B, H, T, K], contiguous.
    heads_first = [tensor.detach().transpose(1, 2).contiguous().requires_grad_() for tensor in (q, k, v)]
    queries, keys, values = heads_first
    incoming_heads_first = incoming.transpose(1, 2).contiguous()
    # Half a logit around zero: input gates of mLSTM at the start of training.
    log_input = (0.5 * torch.randn(write.shape, generator=generator)).to(device).requires_grad_()
    precision = write.detach().unsqueeze(-1).expand(v.shape).clone().requires_grad_()
    channels = v.detach().flatten(2).requires_grad_()
    decays = log_decay.detach().repeat_interleave(options.key_size, dim=2).requires_grad_()

    def gradients(output: Tensor, inputs: Sequence[Tensor], grad: Tensor = incoming) -> Sequence[Tensor]:
        return torch.autograd.grad(output, inputs, grad)

    def attention() -> Sequence[Tensor]:
        output = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return gradients(output, heads_first, incoming_heads_first)

    every: dict[str, Callable[[], object]] = {
        "gla": lambda: gradients(gated_linear_attention(q, k, v, log_decay, write)[0], (q, k, v, log_decay, write)),
        "mamba2": lambda: gradients(gated_linear_attention(q, k, v, log_decay)[0], (q, k, v, log_decay)),
        "deltanet": lambda: gradients(gated_delta_rule(q, k, v, None, write)[0], (q, k, v, write)),
        "gated_deltanet": lambda: gradients(
            gated_delta_rule(q, k, v, log_decay, write)[0], (q, k, v, log_decay, write)
        ),
        "mlstm": lambda: gradients(mlstm(q, k, v, log_decay, log_input)[0], (q, k, v, log_decay, log_input)),
        "rg_lru": lambda: gradients(rg_lru(channels, decays)[0], (channels, decays), incoming.flatten(2)),
        "longhorn": lambda: gradients(longhorn(q, k, v, precision)[0], (q, k, v, precision)),
        "mesa": lambda: gradients(mesa(q, k, v, log_decay, write, ridge).output, (q, k, v, log_decay, write, ridge)),
        "sdpa": attention,
    }
    chosen = {name: run for name, run in every.items() if name in (*options.ops, *peers)}
    if "transformers" in peers:
        fallback = transformers_delta_rule()
        chosen["transformers"] = lambda: gradients(fallback(q, k, v, log_decay, write)[0], (q, k, v, log_decay, write))
    return chosen


def transformers_delta_rule() -> Callable[..., tuple[Tensor, Tensor]]:
    """The chunkwise gated delta rule that transformers runs where no kernels are installed."""
    module = import_optional("transformers.models.qwen3_next.modeling_qwen3_next", "transformers")
    function: Callable[..., tuple[Tensor, Tensor]] = module.torch_chunk_gated_delta_rule
    return function


def needed_memory(options: GatedBenchmark, length: int) -> int:
    """An estimate, on the high side, of the bytes that measuring one length takes."""
    tokens = options.batch * options.heads * length
    # The inputs of all ops, and then what the one that runs keeps: gradients, states and the rows of its chunks.
    return 4 * tokens * options.key_size * 24
