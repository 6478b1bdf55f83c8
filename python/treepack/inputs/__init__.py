"""Samples of a user -> the columns that Rust packs, borrowed where they are ready.

    aliases     the names that columns go by elsewhere
    convert     one value -> one array
    columns     the columns of a call as they cross the border
    batches     padded and flat batches
    samples     whatever `treepack.pack` takes
    reader      ... again and again: what looks as it did before is borrowed without a look from Python

Needs NumPy alone.
"""
