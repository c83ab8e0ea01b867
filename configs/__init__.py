"""Configuration: the schema and the YAML files of raydix."""

from raydix.configs.load import load_config
from raydix.configs.schema import Config

__all__ = ["Config", "load_config"]
