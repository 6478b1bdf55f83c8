"""Implementations of tree attention and of the kept-set scatter; none of them imports another.

`reference` (plain torch) defines correct. `triton_*` is the portable GPU kernel, `flex` and `fa4` run other kernels
on the same tiles, `scatter` pads
ragged kept sets. Modules are imported only when chosen, so that `import treepack` needs neither torch nor triton.
"""
