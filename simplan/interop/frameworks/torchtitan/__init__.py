"""Configurations of torchtitan: TOML files, launch scripts and the names of version 0.3."""

from simplan.interop.formats import Format
from simplan.interop.frameworks.torchtitan.files import read, recognizes

__all__ = ["FORMAT"]

FORMAT = Format("torchtitan", "torchtitan job configuration or launch script", recognizes, read)
