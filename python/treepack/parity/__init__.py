"""`treepack.testing.Parity` and `check_parity` under the name of the module that they were in."""

from ..testing.parity import Parity, check_parity

__all__ = ["Parity", "check_parity"]
