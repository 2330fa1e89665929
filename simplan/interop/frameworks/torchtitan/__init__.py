"""Configurations of torchtitan: TOML files, launch scripts, and the configurations of version 0.3 by name."""

from simplan.interop.formats import Format
from simplan.interop.frameworks.torchtitan.files import read, recognizes
from simplan.interop.frameworks.torchtitan.writing import export_arguments, export_toml, settings_of

__all__ = ["FORMAT", "TOML_FORMAT"]

FORMAT = Format(
    "torchtitan",
    "torchtitan job configuration or launch script",
    recognizes,
    read,
    settings_of,
    export_arguments,
    profile="torchtitan",
)
TOML_FORMAT = Format(
    "torchtitan-toml", "torchtitan job configuration of version 0.2", export=export_toml, profile="torchtitan-2025"
)
