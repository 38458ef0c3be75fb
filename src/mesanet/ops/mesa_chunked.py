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
from mesanet.ops.mesa_gradient import MesaGradients, TileErrors
from mesanet.ops.mesa_problems import MesaChunks, Problems, Slow, chunks_first
from mesanet.ops.mesa_tiles import plan_tiles, problems_at_once
from mesanet.ops.precision import own_precision
from mesanet.ops.ridge_system import Preconditioner
from mesanet.ops.solver import ConjugateGradient
from mesanet.ops.state import MesaState
from mesanet.ops.workspace import Workspace


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
        wants_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the output [B, T, H, V], the states after the last token, and the steps [B, T, H]."""
        chunks = MesaChunks.cut(k, v, log_decay, write, ridge, sign, MesaState(kk, kv), layout)
        queries = chunks_first(layout, layout.pad(q))
        padded_output = v.new_empty(layout.batch, layout.chunks * layout.chunk, *v.shape[2:])
        output = chunks_first(layout, padded_output)
        steps = torch.empty_like(chunks.write, dtype=torch.int32)
        final = MesaState(kk.clone(), kv.clone())
        workspace = Workspace(kk.dtype, kk.device)
        precondition = solver.preconditioner == "auto" and solver.max_steps > 0 and sign is None
        groups = plan_tiles(chunks.log_decay.sum(dim=-1), problems_at_once(layout, k.shape[-1], v.shape[-1], kk))
        last = groups[-1][-1] if wants_gradient and groups else None
        solved = None if last is None else kk.new_empty(last.problems.stop, layout.chunk, k.shape[-1])
        starts_kk, starts_kv = (
            None if last is None else state.new_empty(last.starts.stop, *state.shape[2:]) for state in (kk, kv)
        )
        slow: list[Slow | None] = []
        preconditioners: list[Tensor] = []
        for group in groups:
            carried: MesaState | None = None
            for tile in group:
                if carried is not None and starts_kk is not None and starts_kv is not None:
                    starts_kk[tile.starts], starts_kv[tile.starts] = carried
                problems = chunks.load(tile, carried, workspace, final)
                carried = problems.after
                rhs = tile.gather(queries, workspace.room("rhs", *problems.keys.shape))
                slow.append(problems.slow() if precondition else None)
                solution, preconditioner = problems.solve(rhs, solver, slow[-1], None)
                tile.put(steps, solution.steps)
                tile.scatter(output, _read(problems, solution.value))
                if solved is not None:
                    solved[tile.problems] = solution.value
                    if preconditioner is not None:
                        preconditioners += preconditioner

        ctx.save_for_backward(
            k, v, log_decay, write, ridge, sign, kk, kv, solved, starts_kk, starts_kv, *preconditioners
        )
        ctx.layout, ctx.solver, ctx.groups, ctx.slow = layout, solver, groups, slow
        ctx.dtypes = [tensor.dtype for tensor in (q, k, v, log_decay, write, ridge, kk, kv)]
        merged_steps = layout.merge(steps.movedim(2, 0).movedim(1, 2), torch.int32)
        ctx.mark_non_differentiable(merged_steps)
        return layout.unpad(padded_output), final.kk, final.kv, merged_steps

    @staticmethod
    @first_derivative_only("mesanet.mesa")
    def backward(
        ctx: Any, grad_output: Tensor, grad_kk: Tensor, grad_kv: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients for the eight tensors of `forward`."""
        with own_precision(grad_output.device):
            k, v, log_decay, write, ridge, sign, kk, kv, solved, starts_kk, starts_kv, *preconditioners = (
                ctx.saved_tensors
            )
            layout: ChunkLayout = ctx.layout
            chunks = MesaChunks.cut(k, v, log_decay, write, ridge, sign, MesaState(kk, kv), layout)
            workspace = Workspace(kk.dtype, kk.device)
            grads = MesaGradients.begin(chunks, layout, grad_output, MesaState(grad_kk, grad_kv), workspace)
            slow = reversed(ctx.slow)
            for group in reversed(ctx.groups):
                carried: MesaState | None = None
                for tile in reversed(group):
                    start = None
                    if tile is not group[0]:
                        start = MesaState(starts_kk[tile.starts], starts_kv[tile.starts])
                    problems = chunks.load(tile, start, workspace, None)
                    own_slow, preconditioner = next(slow), None
                    if own_slow is not None:
                        preconditioner = Preconditioner(*preconditioners[-3:])
                        del preconditioners[-3:]
                    work = TileErrors(problems, solved[tile.problems], grads.load_errors(tile, problems))
                    e_star, owed = work.solve(ctx.solver, own_slow, preconditioner)
                    carried = grads.add(tile, work, e_star, owed, carried)
            return (*grads.merged(ctx.dtypes), None, None, None, None)


def _read(problems: Problems, solved: Tensor) -> Tensor:
    """G_t solved_t for every token: one step of gated linear attention with the solved queries."""
    room = problems.workspace.room
    weighted = torch.mul(solved, problems.from_start, out=room("direction", *solved.shape))
    output = torch.bmm(weighted, problems.states.kv, out=room("output", *problems.values.shape))
    scores = torch.bmm(solved, problems.keys_transposed, out=room("scores", *problems.weights.shape))
    return output.baddbmm_(scores.mul_(problems.weights), problems.values)
