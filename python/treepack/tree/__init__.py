"""Packed trees: what `treepack.pack` returns.

    segments    segments -> the positions of a path
    columns     the gathered columns of a tree, by name
    kept_sets   ragged kept sets -> a padded table, on a device
    tree        PackedTree
    layout      which arrays a tree has; trees that are made from arrays
    packed      Packed, Stats, Skipped

Needs NumPy alone, but for what goes to a device and for kept_sets: they need torch.
"""
