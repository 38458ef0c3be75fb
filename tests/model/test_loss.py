"""The loss: cross entropy in pieces, the targets that count, and what is no target."""

from __future__ import annotations

import pytest
import torch

from mesanet.config.model import ModelConfig
from mesanet.model import loss as loss_module
from mesanet.model.backbone import LanguageModel
from mesanet.model.layers import soft_cap
from mesanet.model.loss import chunked_loss


def small() -> LanguageModel:
    return LanguageModel(ModelConfig(mixers=("gla",), layers=2, width=32, heads=2, key_size=16, vocabulary=61))


@pytest.mark.parametrize("chunk", [61 * 3, 61 * 1000])
def test_the_chunked_loss_is_cross_entropy(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", chunk)
    hidden = (3 * torch.randn(2, 7, 16, dtype=torch.float64)).requires_grad_()
    table = torch.randn(61, 16, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(61, (2, 7))
    targets[0, 3] = targets[1, 0] = -100
    logits = soft_cap(hidden @ table.T, 5.0)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    mean, each = chunked_loss(hidden, table, targets, 5.0)
    torch.testing.assert_close(mean, expected)
    torch.testing.assert_close(
        each, torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none", ignore_index=-100)
    )
    wanted = torch.autograd.grad(2 * expected, (hidden, table))
    for actual, gradient in zip(torch.autograd.grad(2 * mean, (hidden, table)), wanted, strict=True):
        torch.testing.assert_close(actual, gradient)
    nothing, _ = chunked_loss(hidden, table, torch.full((2, 7), -1), 5.0)
    assert nothing.item() == 0


def test_second_derivatives_of_the_loss_are_refused() -> None:
    """A penalty on the gradient would otherwise count it as a constant."""
    hidden = torch.randn(2, 7, 16, requires_grad=True)
    mean, _ = chunked_loss(hidden, torch.randn(61, 16), torch.randint(61, (2, 7)), 30.0)
    with pytest.raises(RuntimeError, match="chunked_loss: got a request for second derivatives"):
        torch.autograd.grad(mean, hidden, create_graph=True)


def test_float16_loses_no_gradient_that_is_small_before_it_is_scaled() -> None:
    """Most words have a likelihood of some 1e-5, which float16 holds; over the number of tokens it would be nothing."""
    torch.manual_seed(0)
    hidden, table = torch.randn(3000, 16), 0.1 * torch.randn(1000, 16)
    hidden[:, 0], table[:20, 0], table[20:, 0] = 3.0, 1.5, -1.5
    hidden.requires_grad_()
    table.requires_grad_()
    targets, scale = torch.randint(20, (3000,)), 2.0**14
    exact = torch.autograd.grad(chunked_loss(hidden, table, targets, 30.0)[0], (hidden, table))
    with torch.autocast("cpu", dtype=torch.float16):
        mean, _ = chunked_loss(hidden, table, targets, 30.0)
    rounded = [gradient / scale for gradient in torch.autograd.grad(scale * mean, (hidden, table))]
    # The gradient of the words that never come is made of those likelihoods alone.
    pairs = [*zip(rounded, exact, strict=True), (rounded[1][20:], exact[1][20:])]
    for actual, expected in pairs:
        # Logits of up to ten, rounded to 2^-11 of themselves, make likelihoods that far off; so are all factors.
        assert (actual - expected).norm() < 10 * 2.0**-10 * expected.norm()


def test_float16_sums_do_not_overflow() -> None:
    """Every token of many has the same gradient."""
    hidden, table = torch.full((20_000, 8), 8.0, requires_grad=True), torch.zeros(2, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.float16):
        mean, _ = chunked_loss(hidden, table, torch.zeros(20_000, dtype=torch.long), 30.0)
    (gradient,) = torch.autograd.grad(mean, table)
    torch.testing.assert_close(gradient, torch.tensor([[-4.0], [4.0]]).expand(2, 8))


@pytest.mark.parametrize("kind", [torch.bool, torch.long])
def test_targets_at_padding_do_not_count(kind: torch.dtype) -> None:
    model = small()
    tokens, targets = torch.randint(61, (2, 9)), torch.randint(61, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :4] = False
    expected = (model.loss(tokens[:1, 4:], targets[:1, 4:]) * 5 + model.loss(tokens[1:], targets[1:]) * 9) / 14
    mean, each, _ = model.losses(tokens, targets, mask=mask.to(kind))
    torch.testing.assert_close(mean, expected)
    assert (each[0, :4] == 0).all()
    assert (each[mask] > 0).all()


def test_targets_of_any_integers_are_taken() -> None:
    model = small()
    tokens, targets = torch.randint(61, (2, 5)), torch.randint(61, (2, 5))
    mask = torch.tensor([[False, True, True, True, True]]).expand(2, 5)
    expected = model.loss(tokens, targets, mask=mask)
    for kind in (torch.uint8, torch.int32, torch.int16):
        assert torch.equal(model.loss(tokens, targets.to(kind), mask=mask), expected)
    vectors = model.embedding(tokens)
    assert torch.equal(model.loss(vectors, targets, mask=mask), expected)


def test_wrong_targets_are_named() -> None:
    model = small()
    tokens = torch.randint(61, (2, 5))
    with pytest.raises(ValueError, match=r"targets: got shape \(2, 4\), expected that of tokens, \(2, 5\)"):
        model.loss(tokens, tokens[:, 1:])
    with pytest.raises(ValueError, match="targets: got 61, expected ids up to 60"):
        model.loss(tokens, torch.full((2, 5), 61))
    for wrong in (tokens.float(), tokens > 3):
        with pytest.raises(ValueError, match=rf"targets: got {wrong.dtype}, expected integer ids"):
            model.loss(tokens, wrong)
