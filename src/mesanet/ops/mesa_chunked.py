"""Forward and backward of the Mesa rule over tiles of chunks.

A tile is a handful of (sequence, head, chunk) problems that stays in cache for all of its solver steps. Chunks that forget
slowly, and so need a preconditioner, are put in tiles of their own, and the others are sorted by how much they keep, so
that the tokens of a tile need about the same number of steps: a tile goes on until its last token has converged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mesanet.ops.chunks import ChunkLayout
from mesanet.ops.decay import ChunkDecay, decay_from_start, decay_to_end, decay_within, scan_states, scan_states_backwards
from mesanet.ops.ridge_system import SLOW, Preconditioner, RidgeSystems
from mesanet.ops.solver import ConjugateGradient, Solution, conjugate_gradient

CPU_TILE_BYTES = 6 << 20
"""Working set of a tile on a CPU: about what the second- and third-level caches hold of it."""
DEVICE_TILE_BYTES = 1 << 30
"""Working set of a tile elsewhere: enough problems to fill a GPU."""


class Tile(NamedTuple):
    """Some of the problems, and whether they have a preconditioner."""

    index: Tensor
    """[n] which of the R * H * N problems."""
    slow: bool


@dataclass(frozen=True, kw_only=True)
class Chunked:
    """The inputs of the rule, cut into R * H * N = P problems of one chunk each, in the solver's dtype."""

    keys: Tensor
    """[P, C, K]"""
    values: Tensor
    """[P, C, V]"""
    log_decay: Tensor
    """[P, C]"""
    write: Tensor
    """[P, C]"""
    sign: Tensor | None
    """[P, C]"""
    ridge: Tensor
    """[H, K]"""
    kk: Tensor
    """[P, K, K] H at the start of each chunk."""
    kv: Tensor
    """[P, K, V] G transposed, likewise."""
    grid: tuple[int, int, int]
    """R, H, N."""

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All the tensors, in the order in which `from_tensors` takes them."""
        return (self.keys, self.values, self.log_decay, self.write, self.sign, self.ridge, self.kk, self.kv)

    @staticmethod
    def from_tensors(tensors: list[Any], grid: tuple[int, int, int]) -> Chunked:
        """The inverse of `tensors`."""
        keys, values, log_decay, write, sign, ridge, kk, kv = tensors
        return Chunked(
            keys=keys,
            values=values,
            log_decay=log_decay,
            write=write,
            sign=sign,
            ridge=ridge,
            kk=kk,
            kv=kv,
            grid=grid,
        )

    def heads(self, index: Tensor) -> Tensor:
        """Which head each of the problems belongs to."""
        return index.div(self.grid[2], rounding_mode="floor") % self.grid[1]

    def decay(self, index: Tensor) -> ChunkDecay:
        """The forget factors of some problems."""
        log_decay = self.log_decay[index]
        sign = None if self.sign is None else self.sign[index]
        return ChunkDecay(
            within=decay_within(log_decay, sign),
            from_start=decay_from_start(log_decay, sign),
            to_end=decay_to_end(log_decay, sign),
        )

    def tiles(self, solver: ConjugateGradient) -> list[Tile]:
        """All the problems in tiles of like with like."""
        if self.keys.numel() == 0:
            return []
        kept = self.log_decay.sum(dim=-1)
        slow = torch.zeros_like(kept, dtype=torch.bool)
        if solver.preconditioner == "auto" and solver.max_steps > 0 and self.sign is None:
            slow = kept >= math.log(SLOW)
        order = kept.argsort(stable=True)
        count = self._problems_per_tile()
        groups = [(order[~slow[order]], False), (order[slow[order]], True)]
        return [Tile(part, is_slow) for group, is_slow in groups if len(group) for part in group.split(count)]

    def _problems_per_tile(self) -> int:
        _, chunk, size = self.keys.shape
        numbers = 6 * chunk * size + 2 * chunk * (size + chunk) + 2 * size * (size + chunk)
        room = CPU_TILE_BYTES if self.keys.device.type == "cpu" else DEVICE_TILE_BYTES
        return max(1, room // (numbers * self.keys.element_size()))


class ChunkedMesa(torch.autograd.Function):
    """The Mesa rule with the implicit gradient: the backward pass solves the same systems for another right-hand side."""

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
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the output [B, T, H, V], the states after the last token, and the steps [B, T, H]."""
        keys, values = layout.split(k, dtype), layout.split(v, dtype)
        decays, writes = layout.split(log_decay, dtype), layout.split(write, dtype)
        signs = None if sign is None else layout.split(sign - 1, dtype) + 1
        from_start, to_end = decay_from_start(decays, signs), decay_to_end(decays, signs)
        added = keys * (to_end * writes).unsqueeze(-1)
        total = from_start[..., -1]
        kk_states, kk_final = scan_states(added, keys, total, kk.to(dtype), layout)
        kv_states, kv_final = scan_states(added, values, total, kv.to(dtype), layout)
        del added
        chunked = Chunked(
            keys=keys.flatten(0, 2),
            values=values.flatten(0, 2),
            log_decay=decays.flatten(0, 2),
            write=writes.flatten(0, 2),
            sign=None if signs is None else signs.flatten(0, 2),
            ridge=ridge.to(dtype),
            kk=kk_states.flatten(0, 2),
            kv=kv_states.flatten(0, 2),
            grid=(keys.shape[0], keys.shape[1], keys.shape[2]),
        )
        queries = layout.split(q, dtype).flatten(0, 2)
        solved = torch.empty_like(queries)
        output = torch.empty_like(chunked.values)
        steps = torch.empty(queries.shape[:2], dtype=torch.int32, device=q.device)
        tiles = chunked.tiles(solver)
        preconditioners = []
        keep = any(ctx.needs_input_grad)
        for tile in tiles:
            systems = _systems(chunked, tile)
            preconditioners.append(systems.preconditioner if keep else None)
            solution = _solve(systems, queries[tile.index], solver)
            solved[tile.index] = solution.value
            steps[tile.index] = solution.steps
            output[tile.index] = _read(systems, solution.value, chunked, tile.index)

        ctx.save_for_backward(*chunked.tensors(), solved)
        ctx.grid, ctx.layout, ctx.solver, ctx.dtype = chunked.grid, layout, solver, dtype
        ctx.tiles, ctx.preconditioners = tiles, preconditioners
        ctx.dtypes = [tensor.dtype for tensor in (q, k, v, log_decay, write, ridge, kk, kv)]
        grid = keys.shape[:3]
        merged_steps = layout.merge(steps.unflatten(0, grid), torch.int32)
        ctx.mark_non_differentiable(merged_steps)
        return layout.merge(output.unflatten(0, grid), v.dtype), kk_final, kv_final, merged_steps

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, grad_output: Tensor, grad_kk: Tensor, grad_kv: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients for the eight tensors of `forward`."""
        *inputs, solved = ctx.saved_tensors
        layout, dtype = ctx.layout, ctx.dtype
        chunked = Chunked.from_tensors(inputs, ctx.grid)
        errors = layout.split(grad_output, dtype).flatten(0, 2)
        solved_errors = torch.empty_like(solved)
        from_state = torch.empty_like(chunked.write)
        grad_ridge = torch.empty_like(solved[:, 0])
        for tile, preconditioner in zip(ctx.tiles, ctx.preconditioners, strict=True):
            systems = _systems(chunked, tile, preconditioner)
            part = _solve_errors(systems, chunked, tile.index, errors, solved, ctx.solver)
            solved_errors[tile.index], from_state[tile.index], grad_ridge[tile.index] = part

        from_start = decay_from_start(chunked.log_decay, chunked.sign)
        read_weight = from_start.unsqueeze(-1)
        grid = ctx.grid
        total = from_start[:, -1].unflatten(0, grid)
        seen = (solved * read_weight).unflatten(0, grid)
        arrived_kv, initial_kv = scan_states_backwards(seen, errors.unflatten(0, grid), total, grad_kv, layout)
        seen.neg_()
        arrived_kk, initial_kk = scan_states_backwards(seen, solved_errors.unflatten(0, grid), total, grad_kk, layout)
        del seen
        arrived_kv, arrived_kk = arrived_kv.flatten(0, 2), arrived_kk.flatten(0, 2)
        grads = [torch.empty_like(tensor) for tensor in (chunked.keys, chunked.values, chunked.log_decay, chunked.write)]
        for tile in ctx.tiles:
            tile_grads = _spread_errors(
                chunked, tile.index, solved, errors, solved_errors, arrived_kk, arrived_kv, from_state
            )
            for grad, tile_grad in zip(grads, tile_grads, strict=True):
                grad[tile.index] = tile_grad

        q_dtype, k_dtype, v_dtype, decay_dtype, write_dtype, ridge_dtype, kk_dtype, kv_dtype = ctx.dtypes
        return (
            layout.merge(solved_errors.unflatten(0, grid), q_dtype),
            layout.merge(grads[0].unflatten(0, grid), k_dtype),
            layout.merge(grads[1].unflatten(0, grid), v_dtype),
            layout.merge(grads[2].unflatten(0, grid), decay_dtype),
            layout.merge(grads[3].unflatten(0, grid), write_dtype),
            grad_ridge.unflatten(0, grid).sum((0, 2)).to(ridge_dtype),
            initial_kk.to(kk_dtype),
            initial_kv.to(kv_dtype),
            None,
            None,
            None,
            None,
        )


def _solve_errors(
    systems: RidgeSystems,
    chunked: Chunked,
    index: Tensor,
    errors: Tensor,
    solved: Tensor,
    solver: ConjugateGradient,
) -> tuple[Tensor, Tensor, Tensor]:
    """The second solve, e*_t = (H_t + ridge)^-1 G_t^T e_t, of some problems.

    Returns e* [n, C, K], what the state at the start of the chunk contributes to each token's loss [n, C], and the
    gradient for the ridge [n, K].
    """
    error, x = errors[index], solved[index]
    keys, kk, kv = systems.keys, chunked.kk[index], chunked.kv[index]
    through_state = torch.bmm(error, kv.mT)
    scores = torch.bmm(error, chunked.values[index].mT).mul_(systems.weights)
    rhs = torch.baddbmm(through_state * systems.from_start, scores, keys)
    solved_error = _solve(systems, rhs, solver).value
    state_term = torch.linalg.vecdot(x, through_state - torch.bmm(solved_error, kk))
    grad_ridge = (x * solved_error).sum(1).neg_()
    return solved_error, state_term * systems.from_start.squeeze(-1), grad_ridge


def _spread_errors(
    chunked: Chunked,
    index: Tensor,
    solved: Tensor,
    errors: Tensor,
    solved_errors: Tensor,
    arrived_kk: Tensor,
    arrived_kv: Tensor,
    from_state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of keys, values, log decays and write gates of some problems.

    The loss depends on token s through every later read-out t of its chunk, with weight zeta_ts, and through the state at
    the end of the chunk, with weight to_end_s.
    """
    keys, values, write = chunked.keys[index], chunked.values[index], chunked.write[index]
    x, e, e_star = solved[index], errors[index], solved_errors[index]
    d_kk, d_kv = arrived_kk[index], arrived_kv[index]
    within, from_start, to_end = chunked.decay(index)
    end = to_end.unsqueeze(-1)

    x_keys = torch.bmm(x, keys.mT)
    e_values = torch.bmm(e, values.mT).sub_(torch.bmm(e_star, keys.mT)).mul_(within)
    pairs = x_keys * e_values
    x_keys *= within

    grad_values = torch.baddbmm(torch.bmm(keys, d_kv).mul_(end), x_keys.mT, e)
    state_values = torch.bmm(values, d_kv.mT)
    state_keys = torch.bmm(keys, d_kk.mT)
    to_state = torch.linalg.vecdot(keys, state_values + state_keys).mul_(to_end)
    grad_keys = state_values.add_(state_keys).baddbmm_(keys, d_kk).mul_(end)
    grad_keys.baddbmm_(e_values.mT, x).baddbmm_(x_keys.mT, e_star, alpha=-1)

    grad_write = pairs.sum(1).add_(to_state)
    weight = write.unsqueeze(-1)
    through = torch.linalg.vecdot(chunked.kv[index].flatten(1), d_kv.flatten(1))
    through = through + torch.linalg.vecdot(chunked.kk[index].flatten(1), d_kk.flatten(1))
    grad_log_decay = _crossing(pairs * write.unsqueeze(1), from_state[index], to_state * write)
    grad_log_decay += (through * from_start[:, -1]).unsqueeze(-1)
    return grad_keys.mul_(weight), grad_values.mul_(weight), grad_log_decay, grad_write


def _crossing(pairs: Tensor, from_state: Tensor, to_state: Tensor) -> Tensor:
    """What passes each gate j of a chunk: everything read at t >= j that was written at s < j.

    `pairs` [n, C, C] is read at its row and written at its column; `from_state` [n, C] is written before the chunk,
    `to_state` [n, C] read after it.
    """
    written_before = torch.zeros_like(pairs)
    torch.cumsum(pairs[..., :-1], dim=-1, out=written_before[..., 1:])
    written_before += from_state.unsqueeze(-1)
    passed = written_before.tril_().sum(1)
    passed[:, 1:] += to_state[:, :-1].cumsum(-1)
    return passed


def _systems(chunked: Chunked, tile: Tile, preconditioner: Preconditioner | None = None) -> RidgeSystems:
    index = tile.index
    keys, kk, write, ridge = chunked.keys[index], chunked.kk[index], chunked.write[index], chunked.ridge[chunked.heads(index)]
    decay = chunked.decay(index)
    if tile.slow and preconditioner is None:
        preconditioner = Preconditioner(keys, kk, decay.from_start, write, ridge)
    return RidgeSystems(keys, kk, decay, write, ridge, preconditioner)


def _solve(systems: RidgeSystems, rhs: Tensor, solver: ConjugateGradient) -> Solution:
    return conjugate_gradient(systems, rhs, max_steps=solver.max_steps, tolerance=solver.tolerance)


def _read(systems: RidgeSystems, solved: Tensor, chunked: Chunked, index: Tensor) -> Tensor:
    """G_t solved_t for every token: one step of gated linear attention with the solved queries."""
    scores = torch.bmm(solved, systems.keys.mT).mul_(systems.weights)
    through_state = torch.bmm(solved * systems.from_start, chunked.kv[index])
    return through_state.baddbmm_(scores, chunked.values[index])
