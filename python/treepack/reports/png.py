"""Bytes to a PNG file: browsers read it, and an imaging library would be a dependency for these few lines."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """(H, W) grey or (H, W, 3) red-green-blue uint8 as a PNG file (W3C PNG, section 5: signature, IHDR, IDAT, IEND)."""
    height, width = pixels.shape[:2]
    colour_type = 2 if pixels.ndim == 3 else 0
    header = struct.pack(">IIBBBBB", width, height, 8, colour_type, 0, 0, 0)
    lines = np.zeros((height, 1 + pixels[0].size), np.uint8)  # each line starts with its filter: 0, none
    lines[:, 1:] = pixels.reshape(height, -1)
    data = zlib.compress(lines.tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
