"""Import of packages that only some features need."""

from __future__ import annotations

import importlib
from typing import Any

from mesanet.errors import UserError


def import_optional(module: str, extra: str) -> Any:
    """Import `module`, or raise UserError that names the extra of mesanet that brings it.

    `matplotlib.pyplot` and other submodules work too. Only the absence of the package itself is turned into a
    UserError: a broken installation shows its own error.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        message = f"{package} is needed for this and is not installed; install it with: pip install 'mesanet[{extra}]'"
        raise UserError(message) from error
