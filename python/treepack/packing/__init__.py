"""Samples -> packed trees: all at once (`pack`), or one by one as they arrive (`Packer`)."""

from .batch import pack
from .stream import Packer

__all__ = ["Packer", "pack"]
