"""The sequence mixers, by name.

Adding one: write a class with `mix` (or a whole `forward`), and add a line to the table, and its name to MIXER_NAMES in
`config/model.py`, which tells a misspelt name before any mixer is imported. docs/models.md shows it.
"""

from __future__ import annotations

from difflib import get_close_matches

from mesanet.config.model import accept_mixers
from mesanet.mixers.attention import Attention, SlidingWindow
from mesanet.mixers.base import Gates as Gates
from mesanet.mixers.base import HeadMixer as HeadMixer
from mesanet.mixers.base import Mixer as Mixer
from mesanet.mixers.base import Observation as Observation
from mesanet.mixers.delta import DeltaNet, GatedDeltaNet
from mesanet.mixers.hawk import Hawk
from mesanet.mixers.layout import Layout as Layout
from mesanet.mixers.linear import GLA, MLSTM, Longhorn, Mamba2
from mesanet.mixers.mesa import Mesa, RecursiveMesa

MIXERS: dict[str, type[Mixer]] = {
    "attention": Attention,
    "sliding_window": SlidingWindow,
    "mamba2": Mamba2,
    "gla": GLA,
    "deltanet": DeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "mlstm": MLSTM,
    "hawk": Hawk,
    "longhorn": Longhorn,
    "mesa": Mesa,
    "mesa_rls": RecursiveMesa,
}

accept_mixers(MIXERS)


def mixer_class(name: str) -> type[Mixer]:
    """The mixer of this name; a ValueError suggests the nearest one."""
    if name not in MIXERS:
        close = get_close_matches(name, MIXERS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"mixers: there is no mixer {name!r}, only {', '.join(MIXERS)}{hint}")
    return MIXERS[name]
