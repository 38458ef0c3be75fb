"""The gated ops beside the implementations in transformers, which others wrote: float32, the same inputs, to 1e-5."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mesanet.ops.delta_rule import gated_delta_rule
from mesanet.ops.linear_attention import gated_linear_attention
from mesanet.ops.mlstm import mlstm
from mesanet.ops.rg_lru import rg_lru
from mesanet.ops.state import MlstmState

pytest.importorskip("transformers")

B, T, H, K, V = 2, 150, 3, 16, 24
BACKENDS = pytest.mark.parametrize("backend", ["chunked", "reference"])


def close(ours: Tensor, theirs: Tensor) -> None:
    """Relative error below 1e-5: both sides round to 6e-8 in each of some hundred terms of every sum."""
    assert ours.shape == theirs.shape
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def close_with_gradients(ours: list[Tensor], theirs: list[Tensor], inputs: list[Tensor]) -> None:
    weights = [torch.randn_like(result) for result in theirs]
    for one, other in zip(ours, theirs, strict=True):
        close(one, other)
    grads = torch.autograd.grad(ours, inputs, weights)
    for one, other in zip(grads, torch.autograd.grad(theirs, inputs, weights), strict=True):
        close(one, other)


def tokens() -> list[Tensor]:
    q, k, v = torch.randn(B, T, H, K), torch.randn(B, T, H, K), torch.randn(B, T, H, V)
    return [tensor.requires_grad_() for tensor in (q, torch.nn.functional.normalize(k, dim=-1), v)]


@BACKENDS
@pytest.mark.parametrize("peer", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
def test_gated_delta_rule_is_that_of_qwen3_next(backend: str, peer: str) -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next

    function: Callable[..., tuple[Tensor, Tensor]] = getattr(modeling_qwen3_next, peer)
    q, k, v = tokens()
    log_decay, write = (-torch.rand(B, T, H)).requires_grad_(), torch.rand(B, T, H).requires_grad_()
    state = torch.randn(B, H, K, V).requires_grad_()
    theirs = function(q, k, v, log_decay, write, initial_state=state, output_final_state=True)
    # They scale the queries inside.
    ours = gated_delta_rule(q * K**-0.5, k, v, log_decay, write, state=state, backend=backend)
    close_with_gradients(list(ours), list(theirs), [q, k, v, log_decay, write, state])


@BACKENDS
def test_mamba2_is_that_of_mamba2(backend: str) -> None:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    hidden, dt = torch.randn(B, T, H, V).requires_grad_(), torch.rand(B, T, H).requires_grad_()
    rate = (-torch.rand(H) - 0.1).requires_grad_()
    # One group of keys ("B") and queries ("C") for all heads, as Mamba2 has it.
    key, query = torch.randn(B, T, 1, K).requires_grad_(), torch.randn(B, T, 1, K).requires_grad_()
    state = torch.randn(B, H, V, K).requires_grad_()
    output, last = mamba2_chunk_scan(
        hidden, dt, rate, key, query, chunk_size=64, initial_states=state, return_final_states=True
    )
    ours, ours_last = gated_linear_attention(
        query.expand(B, T, H, K),
        key.expand(B, T, H, K),
        hidden * dt.unsqueeze(-1),
        rate * dt,
        state=state.mT,
        backend=backend,
    )
    close_with_gradients([ours, ours_last.mT], [output, last], [hidden, dt, rate, key, query, state])


def test_mamba2_step_is_that_of_mamba2() -> None:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update

    hidden, dt, rate = torch.randn(B, H, V), torch.rand(B, H), -torch.rand(H) - 0.1
    key, query, state = torch.randn(B, 1, K), torch.randn(B, 1, K), torch.randn(B, H, V, K)
    ours, last = gated_linear_attention(
        query.unsqueeze(1).expand(B, 1, H, K),
        key.unsqueeze(1).expand(B, 1, H, K),
        (hidden * dt.unsqueeze(-1)).unsqueeze(1),
        (rate * dt).unsqueeze(1),
        state=state.mT,
    )
    theirs = mamba2_selective_state_update(
        state, hidden, dt.unsqueeze(-1).expand(B, H, V), rate[:, None, None].expand(H, V, K), key, query
    )
    close(ours[:, 0], theirs)
    close(last.mT, state)


@BACKENDS
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("peer", ["mlstm_recurrent_sequence_native", "mlstm_chunkwise_native_autograd"])
def test_mlstm_is_that_of_xlstm(backend: str, with_state: bool, peer: str) -> None:
    from transformers.models.xlstm import modeling_xlstm

    if not hasattr(modeling_xlstm, peer):
        pytest.skip("transformers hands xLSTM to the xlstm package where that is installed")
    time = 128  # their chunkwise form takes only multiples of its chunk
    q, k, v = (tensor.detach()[:, :time] for tensor in tokens())
    # Positive queries and keys, so that the normaliser does not cancel: where it does, the division by it amplifies the
    # rounding of either side without bound.
    q, k, v = q.abs().requires_grad_(), k.abs().requires_grad_(), v.requires_grad_()
    forget, gate = (torch.randn(B, time, H) + 2).requires_grad_(), (3 * torch.randn(B, time, H)).requires_grad_()
    parts = [torch.randn(B, H, K, V), torch.rand(B, H, K), torch.randn(B, H)] if with_state else []
    parts = [part.requires_grad_() for part in parts]
    theirs, last = getattr(modeling_xlstm, peer)(
        *(tensor.transpose(1, 2) for tensor in (q, k, v)),
        *(tensor.transpose(1, 2).contiguous() for tensor in (gate, forget)),
        *([parts[0], parts[1], parts[2].unsqueeze(-1)] if with_state else []),
        return_last_states=True,
    )
    ours, state = mlstm(
        q * K**-0.5,
        k,
        v,
        torch.nn.functional.logsigmoid(forget),
        gate,
        state=MlstmState(*parts) if with_state else None,
        backend=backend,
    )
    theirs_last = [last[0], last[1], last[2].squeeze(-1)]
    close_with_gradients([ours, *state], [theirs.transpose(1, 2), *theirs_last], [q, k, v, forget, gate, *parts])


@BACKENDS
def test_rg_lru_is_that_of_recurrent_gemma(backend: str) -> None:
    from transformers import RecurrentGemmaConfig
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

    width = 12
    layer = RecurrentGemmaRglru(RecurrentGemmaConfig(lru_width=width, num_attention_heads=3))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    activations = torch.randn(B, T, width, requires_grad=True)
    # The second row has a second document in it.
    positions = torch.stack([torch.arange(T), torch.arange(T) % 100])

    def gated(x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's two gates, made with its weights: what goes in, and how much is kept."""
        blocks = x.unflatten(-1, (3, -1))
        into = torch.einsum("bthi,hij->bthj", blocks, layer.input_gate_weight) + layer.input_gate_bias
        keep = torch.einsum("bthi,hij->bthj", blocks, layer.recurrent_gate_weight) + layer.recurrent_gate_bias
        speed = torch.nn.functional.softplus(layer.recurrent_param)
        log_decay = -8.0 * keep.sigmoid().flatten(2) * speed
        return x * into.sigmoid().flatten(2), log_decay.masked_fill((position == 0).unsqueeze(-1), -torch.inf)

    theirs = layer(activations, positions)
    ours, state = rg_lru(*gated(activations, positions), backend=backend)
    close_with_gradients([ours, state], [theirs, layer.recurrent_states], [activations, *layer.parameters()])

    following = torch.randn(B, 1, width)
    step = torch.full((B, 1), T)
    next_theirs = layer(following, step)
    next_ours, _ = rg_lru(*gated(following, step), state=state, backend=backend)
    close(next_ours, next_theirs)
