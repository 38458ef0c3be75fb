"""Configurations: frozen keyword-only dataclasses that check themselves and survive the way through JSON."""

from mesanet.config.base import ConfigError as ConfigError
from mesanet.config.base import check_fields as check_fields
from mesanet.config.base import check_in_range as check_in_range
from mesanet.config.base import check_not_empty as check_not_empty
from mesanet.config.base import check_one_of as check_one_of
from mesanet.config.base import check_positive as check_positive
from mesanet.config.base import from_dict as from_dict
from mesanet.config.base import from_json as from_json
from mesanet.config.base import to_dict as to_dict
from mesanet.config.base import to_json as to_json
from mesanet.config.generation import GenerationConfig as GenerationConfig
from mesanet.config.model import ModelConfig as ModelConfig
from mesanet.config.model import SolverConfig as SolverConfig
