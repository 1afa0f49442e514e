"""The YAML configuration: loading, checking, resolving, and describing it. Imports no framework."""

from hpcli.config.errors import ConfigError, Problem
from hpcli.config.export import json_schema, yaml_reference
from hpcli.config.load import LoadedConfig, load_config
from hpcli.config.overrides import Override
from hpcli.config.schema import Config
from hpcli.config.validate import ResolvedConfig, resolve_config

__all__ = [
    "Config",
    "ConfigError",
    "LoadedConfig",
    "Override",
    "Problem",
    "ResolvedConfig",
    "json_schema",
    "load_config",
    "resolve_config",
    "yaml_reference",
]
