"""Connections to other frameworks, each behind its own import: nothing here is loaded by `import treepack`."""

from .._optional import require

require("torch", "treepack.integrations", "torch")
