"""Compiled blocks compute what plain ones do, and their graphs hold no loops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.training.tiny import losses, tiny_run

from mesanet.config.model import ModelConfig
from mesanet.model.backbone import LanguageModel
from mesanet.training.loop import compile_blocks
from mesanet.training.run import train


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_compiled_model_trains_alike(tiny_data: Path, tmp_path: Path) -> None:
    for name, settings in (("plain", {}), ("compiled", {"compile": True})):
        train(tiny_run(tiny_data, **settings), tmp_path / name, quiet=True)
    # Fused kernels round differently; twelve steps at a rate of 0.01 let that grow.
    assert losses(tmp_path / "compiled")[:4] == pytest.approx(losses(tmp_path / "plain")[:4], abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("validation_interval", [0, 2])
def test_compiling_goes_with_computing_activations_again(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validation_interval: int
) -> None:
    """What a block computes the second time has to be what it computed the first time, tables shared by layers too."""
    torch.compiler.reset()
    compile_module = torch.nn.Module.compile
    # Without the code generator, which is the slow part, and does not matter here.
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compile_module(module, backend="aot_eager"))
    for name, saving in (("plain", False), ("saving", True)):
        config = tiny_run(
            tiny_data, mixers=("attention", "sliding_window", "attention", "hawk"), layers=4, steps=4,
            validation_interval=validation_interval, compile=saving, activation_checkpointing=saving,
        )  # fmt: skip
        train(config, tmp_path / name, quiet=True)
    # The same operations in another order of rounding, over four steps.
    assert losses(tmp_path / "saving") == pytest.approx(losses(tmp_path / "plain"), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hawk", "mlstm", "attention"])
def test_compiled_graphs_do_not_grow_with_the_length(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over the tokens or chunks of a sequence would be unrolled into as many nodes."""
    compile_module = torch.nn.Module.compile
    nodes: list[int] = []

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        nodes.append(len(graph.graph.nodes))
        return graph.forward

    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compile_module(module, backend=count))
    found = []
    for length in (32, 256):
        torch.compiler.reset()
        model = LanguageModel(ModelConfig(mixers=(name,), layers=1, width=32, heads=2, key_size=8, vocabulary=61))
        compile_blocks(model)
        tokens = torch.randint(61, (1, length))
        model.loss(tokens, tokens)
        found.append(sum(nodes))
        nodes.clear()
    assert found[0] > 10
    assert found[0] == found[1]
