"""Connections to other frameworks, each behind its own import: nothing here is loaded by `import treepack`."""

from ..extras import require

require("torch", "treepack.integrations", "torch")
