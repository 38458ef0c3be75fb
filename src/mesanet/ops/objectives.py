"""The objective that each layer lowers while it reads, and the update of its linear map that follows from it.

All of it concerns one head and one token t, in the paper's orientation: `phi` [V, K] maps keys to values. The rules
are here to be read, tested and plotted; the ops that run layers are the other modules of this package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What a rule may look at when token t has come; the last row of `keys` and `values` is that token."""

    previous: Tensor
    """[V, K] the linear map after the token before."""
    keys: Tensor
    """[t, K] keys so far."""
    values: Tensor
    """[t, V] values so far."""
    forget: Tensor
    """[t] forget gates in (0, 1]: gamma of the paper."""
    write: Tensor
    """[t] input gates in (0, 1]: beta of the paper, the step size of the gradient rules."""
    ridge: Tensor
    """[K] diagonal of Mesa's regulariser."""
    precision: Tensor
    """[V] LongHorn's weight of each value channel's error: its beta, a vector."""
    window: int = 4
    """How many of the last tokens Omega looks at."""
    momentum: Tensor | None = None
    """[V, K] Atlas's accumulated gradient before this token; none is zero."""
    momentum_decay: float = 0.9
    """How much of the accumulated gradient Atlas keeps."""
    newton_schulz_steps: int = 5
    """Steps that Atlas takes towards the nearest orthogonal matrix."""

    @property
    def key(self) -> Tensor:
        """[K] the newest key."""
        return self.keys[-1]

    @property
    def value(self) -> Tensor:
        """[V] the newest value."""
        return self.values[-1]

    @property
    def remaining(self) -> Tensor:
        """[t] zeta_ts: the product of the forget gates after each token s."""
        later = torch.cat([self.forget[1:], self.forget.new_ones(1)])
        return later.flip(0).cumprod(0).flip(0)


class Updated(NamedTuple):
    """What a rule carries from one token to the next."""

    phi: Tensor
    """[V, K] the linear map after this token: `previous` of the next moment."""
    momentum: Tensor | None = None
    """[V, K] Atlas's accumulated gradient after this token: `momentum` of the next moment."""


def linear_attention_objective(phi: Tensor, moment: Moment) -> Tensor:
    """- v^T Phi k + (1 - gamma) / (2 beta) Tr(Phi Phi^T): Hopfield energy and a decay towards zero."""
    strength = (1 - moment.forget[-1]) / (2 * moment.write[-1])
    return -moment.value @ phi @ moment.key + strength * phi.square().sum()


def linear_attention_update(moment: Moment) -> Updated:
    """gamma Phi + beta v k^T: one gradient step on the energy."""
    return Updated(moment.forget[-1] * moment.previous + moment.write[-1] * torch.outer(moment.value, moment.key))


def delta_objective(phi: Tensor, moment: Moment) -> Tensor:
    """1/2 |v - Phi k|^2: squared error on the newest token."""
    return (moment.value - phi @ moment.key).square().sum() / 2


def delta_update(moment: Moment) -> Updated:
    """Phi + beta (v - Phi k) k^T: one gradient step on the newest squared error."""
    error = moment.value - moment.previous @ moment.key
    return Updated(moment.previous + moment.write[-1] * torch.outer(error, moment.key))


def longhorn_objective(phi: Tensor, moment: Moment) -> Tensor:
    """1/2 (v - Phi k)^T diag(beta) (v - Phi k) + 1/2 |Phi - Phi_previous|^2."""
    error = moment.value - phi @ moment.key
    return (moment.precision * error.square()).sum() / 2 + (phi - moment.previous).square().sum() / 2


def longhorn_update(moment: Moment) -> Updated:
    """Phi + diag(epsilon) (v - Phi k) k^T with epsilon = beta / (1 + beta k^T k): the minimiser."""
    step = moment.precision / (1 + moment.precision * moment.key.square().sum())
    error = moment.value - moment.previous @ moment.key
    return Updated(moment.previous + torch.outer(step * error, moment.key))


def omega_objective(phi: Tensor, moment: Moment) -> Tensor:
    """Sum over the last `window` tokens of zeta_ts |v_s - Phi k_s|^2, here with a linear memory."""
    errors = moment.values[-moment.window :] - moment.keys[-moment.window :] @ phi.mT
    return (moment.remaining[-moment.window :] * errors.square().sum(dim=-1)).sum()


def omega_momentum(moment: Moment) -> Tensor:
    """Atlas's accumulated gradient [V, K] after this token: theta times the old one plus the gradient of Omega."""
    keys, values = moment.keys[-moment.window :], moment.values[-moment.window :]
    errors = keys @ moment.previous.mT - values
    gradient = 2 * (moment.remaining[-moment.window :, None] * errors).mT @ keys
    return gradient if moment.momentum is None else moment.momentum_decay * moment.momentum + gradient


def atlas_update(moment: Moment) -> Updated:
    """gamma Phi - beta NewtonSchulz(momentum)."""
    momentum = omega_momentum(moment)
    direction = newton_schulz(momentum, moment.newton_schulz_steps)
    return Updated(moment.forget[-1] * moment.previous - moment.write[-1] * direction, momentum)


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Move `matrix` [V, K] towards the nearest matrix with orthonormal rows or columns, by matrix products alone.

    Every step maps each singular value s to s (3 - s^2) / 2, which tends to one from anywhere in (0, sqrt(3)).
    """
    norm = torch.linalg.matrix_norm(matrix)
    matrix = torch.where(norm > 0, matrix / norm, matrix)
    for _ in range(steps):
        matrix = (3 * matrix - matrix @ matrix.mT @ matrix) / 2
    return matrix


def mesa_objective(phi: Tensor, moment: Moment) -> Tensor:
    """1/2 sum over all tokens of zeta_ts beta_s |v_s - Phi k_s|^2 + 1/2 Tr(Phi Lambda Phi^T)."""
    errors = moment.values - moment.keys @ phi.mT
    weighted = moment.remaining * moment.write * errors.square().sum(dim=-1)
    return weighted.sum() / 2 + (phi.square() * moment.ridge).sum() / 2


def mesa_update(moment: Moment) -> Updated:
    """G (H + Lambda)^-1: the minimiser, whatever the map was before."""
    weighted = (moment.remaining * moment.write)[:, None] * moment.keys
    covariance = moment.keys.mT @ weighted + torch.diag(moment.ridge)
    return Updated(torch.cholesky_solve(weighted.mT @ moment.values, torch.linalg.cholesky(covariance)).mT)


@dataclass(frozen=True, kw_only=True)
class TestTimeRule:
    """One row of the table: what a layer minimises, and how it moves."""

    __test__ = False  # the name begins like a test class, which pytest must not collect

    objective: Callable[[Tensor, Moment], Tensor]
    """(phi, moment) -> the loss at token t, a scalar."""
    update: Callable[[Moment], Updated]
    """moment -> the linear map after token t, and the momentum if the rule has one."""
    optimiser: str
    """How the update follows from the objective: "gradient step", "argmin", or "orthogonalised momentum"."""


TEST_TIME_RULES = {
    "gla": TestTimeRule(
        objective=linear_attention_objective, update=linear_attention_update, optimiser="gradient step"
    ),
    "deltanet": TestTimeRule(objective=delta_objective, update=delta_update, optimiser="gradient step"),
    "longhorn": TestTimeRule(objective=longhorn_objective, update=longhorn_update, optimiser="argmin"),
    "atlas": TestTimeRule(objective=omega_objective, update=atlas_update, optimiser="orthogonalised momentum"),
    "mesa": TestTimeRule(objective=mesa_objective, update=mesa_update, optimiser="argmin"),
}
"""The paper's table of test-time training rules."""
