"""Configuration: the schema and the YAML files of raydix."""

from configs.load import load_config
from configs.schema import Config

__all__ = ["Config", "load_config"]
