"""Samples -> packed trees.

    options     PackOptions: how
    batch       pack(): all samples at once
    stream      Packer: one by one, as they arrive

Needs NumPy alone.
"""

from .batch import pack
from .stream import Packer

__all__ = ["Packer", "pack"]
