"""Samples of a user -> the columns that Rust packs, borrowed where they are ready.

    aliases        the names that columns go by elsewhere
    convert        one value -> one array
    columns        the columns of a call as they cross the border
    lookalikes     what the values of a column look like, whatever its name
    column_checks  columns of a call that are more than that
    account        which column of an input is read, carried or not read, and why
    finite         log-probs that are no numbers where a loss reads them
    tables         DataFrames, Arrow tables and columns of lists -> rows
    batches        padded and flat batches
    nested         batches of nested tensors -> flat batches
    samples        whatever `treepack.pack` takes
    reader         ... again and again: what looks as it did before is borrowed without a look from Python

Needs NumPy alone.
"""
