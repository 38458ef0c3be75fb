"""Recurrent sequence layers that solve the ridge regression over all tokens so far, at every token.

The public names are listed twice, and a test keeps the two lists equal: once for type checkers, under TYPE_CHECKING,
and once in `_HOME` (or `_SUBMODULES`), from where they are imported at first use, so that `import mesanet` stays fast.
To add a public name, add one line to each, in alphabetical order.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesanet import config as config
    from mesanet import mixers as mixers
    from mesanet import ops as ops
    from mesanet import presets as presets
    from mesanet.config.generation import GenerationConfig as GenerationConfig
    from mesanet.config.model import ModelConfig as ModelConfig
    from mesanet.config.model import SolverConfig as SolverConfig
    from mesanet.errors import UserError as UserError
    from mesanet.model.backbone import LanguageModel as LanguageModel
    from mesanet.model.files import load_model as load_model
    from mesanet.model.files import save_model as save_model
    from mesanet.model.generate import generate as generate
    from mesanet.ops.mesa import MesaOutput as MesaOutput
    from mesanet.ops.mesa import mesa as mesa
    from mesanet.ops.solver import ConjugateGradient as ConjugateGradient
    from mesanet.ops.state import MesaState as MesaState

__version__ = "0.1.0"

_HOME = {
    "ConjugateGradient": "mesanet.ops.solver",
    "GenerationConfig": "mesanet.config.generation",
    "LanguageModel": "mesanet.model.backbone",
    "MesaOutput": "mesanet.ops.mesa",
    "MesaState": "mesanet.ops.state",
    "ModelConfig": "mesanet.config.model",
    "SolverConfig": "mesanet.config.model",
    "UserError": "mesanet.errors",
    "generate": "mesanet.model.generate",
    "load_model": "mesanet.model.files",
    "mesa": "mesanet.ops.mesa",
    "save_model": "mesanet.model.files",
}
_SUBMODULES = frozenset({"config", "mixers", "ops", "presets"})

__all__ = [*_HOME, *_SUBMODULES]


def __getattr__(name: str) -> Any:
    """Import a public name, or a public subpackage, at its first use."""
    if name in _SUBMODULES:
        return importlib.import_module(f"mesanet.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'mesanet' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Every public name, imported yet or not."""
    return sorted({*globals(), *__all__})
