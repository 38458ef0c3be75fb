"""The Mesa rule over tiles of chunks, with the implicit gradient.

The gradient of a solution of A x = q needs no look at how it was found: one more solve with the same matrix, for the
error that comes in, gives all of it. Derivations are in docs/maths.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mesanet.ops.chunks import ChunkLayout
from mesanet.ops.derivatives import first_derivative_only
from mesanet.ops.mesa_gradient import solve_errors, spread_errors
from mesanet.ops.mesa_tiles import MesaChunks, Tile
from mesanet.ops.precision import own_precision
from mesanet.ops.ridge_system import RidgeSystems
from mesanet.ops.solver import ConjugateGradient, solve
from mesanet.ops.state import MesaState


class ChunkedMesa(torch.autograd.Function):
    """The Mesa rule; its backward pass solves the same systems for another right-hand side."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        write: Tensor,
        ridge: Tensor,
        kk: Tensor,
        kv: Tensor,
        sign: Tensor | None,
        solver: ConjugateGradient,
        layout: ChunkLayout,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the output [B, T, H, V], the states after the last token, and the steps [B, T, H]."""
        chunks, after = MesaChunks.build(k, v, log_decay, write, ridge, sign, MesaState(kk, kv), layout)
        queries = layout.view(layout.pad(q))
        padded_output = torch.empty_like(layout.pad(v), memory_format=torch.contiguous_format)
        output = layout.view(padded_output)
        steps = torch.empty_like(chunks.write, dtype=torch.int32)
        tiles = chunks.tiles(solver)
        keep = any(ctx.needs_input_grad)
        solved = chunks.bank.new_empty(*steps.shape, q.shape[-1]) if keep else None
        preconditioners = []
        for tile in tiles:
            systems = chunks.systems(tile)
            rhs = tile.gather(queries, "rhs")
            solution = solve(systems, rhs, solver, tile.workspace)
            steps[tile.where] = solution.steps
            tile.scatter(output, _read(systems, solution.value, chunks, tile))
            if solved is not None:
                solved[tile.where] = solution.value
                preconditioners.append(systems.preconditioner)

        ctx.save_for_backward(*chunks.tensors(), solved)
        ctx.layout, ctx.solver, ctx.tiles, ctx.preconditioners = layout, solver, tiles, preconditioners
        ctx.dtypes = [tensor.dtype for tensor in (q, k, v, log_decay, write, ridge, kk, kv)]
        merged_steps = layout.merge(steps.unflatten(0, chunks.grid), torch.int32)
        ctx.mark_non_differentiable(merged_steps)
        return layout.unpad(padded_output), after.kk, after.kv, merged_steps

    @staticmethod
    @first_derivative_only("mesanet.mesa")
    def backward(
        ctx: Any, grad_output: Tensor, grad_kk: Tensor, grad_kv: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients for the eight tensors of `forward`."""
        with own_precision(grad_output.device):
            *inputs, solved = ctx.saved_tensors
            layout = ctx.layout
            chunks = MesaChunks.from_tensors(inputs)
            errors = layout.view(layout.pad(grad_output))
            padded_solved_errors = solved.new_empty(layout.rows, layout.chunks * layout.chunk, *chunks.ridge.shape)
            solved_errors = layout.view(padded_solved_errors)
            from_state = torch.empty_like(chunks.write)
            grad_ridge = solved.new_empty(solved.shape[0], solved.shape[-1])
            for tile, preconditioner in zip(ctx.tiles, ctx.preconditioners, strict=True):
                systems = chunks.systems(tile, preconditioner)
                e_star, from_state[tile.where], grad_ridge[tile.where] = solve_errors(
                    systems, chunks, tile, errors, solved, ctx.solver
                )
                tile.scatter(solved_errors, e_star)
            arriving = MesaState(grad_kk, grad_kv)
            spread = spread_errors(chunks, layout, errors, solved, solved_errors, from_state, arriving)
            grads = [
                layout.unpad(padded_solved_errors),
                layout.unpad(spread.keys),
                layout.unpad(spread.values),
                layout.merge(spread.log_decay, ctx.dtypes[3]),
                layout.merge(spread.write, ctx.dtypes[4]),
                grad_ridge.unflatten(0, chunks.grid).sum((0, 2)),
                spread.state.kk,
                spread.state.kv,
            ]
            return (*(grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)), None, None, None)


def _read(systems: RidgeSystems, solved: Tensor, chunks: MesaChunks, tile: Tile) -> Tensor:
    """G_t solved_t for every token: one step of gated linear attention with the solved queries."""
    room = tile.workspace.room
    kv, values = tile.take(chunks.kv, "kv"), tile.gather(chunks.values, "values")
    weighted = torch.mul(solved, systems.from_start, out=room("weighted", *solved.shape))
    output = torch.bmm(weighted, kv, out=room("output", *values.shape))
    scores = torch.bmm(solved, systems.keys.mT, out=room("scores", *systems.weights.shape))
    return output.baddbmm_(scores.mul_(systems.weights), values)
