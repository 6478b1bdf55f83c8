"""Drawn arguments for what Rust exports: anything that only Python can hand over."""

from types import SimpleNamespace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from treepack import PackError

#: What a wrong argument may raise: refused by the packer, of the wrong type, without what is read of it by name, not
#: within the numbers of the border. `PanicException` is none of them, and no `Exception` at all.
ERRORS = (PackError, TypeError, ValueError, MemoryError, AttributeError, KeyError, OverflowError, IndexError)
MORE = settings(max_examples=2 * settings().max_examples)

HUGE = [2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -1, -(2**31), -(2**63), -(2**70)]
NUMBERS = st.one_of(st.integers(-2, 20), st.sampled_from(HUGE))
BITS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"]
DTYPES = [*BITS, ">i8", ">i4", "f4", "f8", "O", "U2", "M8[s]", "V3", "i4,f4"]
ODD = [None, 0, -1, 7, 2**70, 0.5, "a", b"ab", [], [1, 2], [None], (), {}, {"ids": 1}, np.int64(3), object()]


@st.composite
def arrays(draw):
    """Any dtype, shape and strides: transposed, reversed, with steps, misaligned, read-only, of length 0, of rows
    without width (more of them than there is memory for), broadcast."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(st.sampled_from([(), (0,), (1,), (3,), (8,), (2, 3), (3, 0), (0, 3), (1, 2, 2), (2**40, 0)]))
    size = int(np.prod(shape))
    values = np.array(draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))).reshape(shape)
    array = values.astype(dtype) if dtype.kind not in "V" else np.zeros(shape, dtype)
    if dtype.kind in "iu" and size and draw(st.integers(0, 3)) == 0:
        huge = np.array(draw(st.sampled_from(HUGE[:6])), np.uint64)
        array.flat[draw(st.integers(0, size - 1))] = huge.astype(dtype)
    form = draw(st.sampled_from(["plain", "plain", "plain", "reversed", "steps", "transposed", "shifted", "broadcast"]))
    if form == "reversed" and array.ndim:
        return array[::-1]
    if form == "steps" and array.ndim and size:
        return np.repeat(array, 2, axis=0)[::2]
    if form == "transposed":
        return array.T
    if form == "shifted" and size and not dtype.hasobject:
        raw = np.zeros(array.nbytes + 1, np.uint8)[1:]
        raw[:] = np.frombuffer(array.tobytes(), np.uint8)
        return raw.view(dtype).reshape(shape)
    return np.broadcast_to(array[..., :1], array.shape) if form == "broadcast" and array.ndim and size else array


THREE = st.tuples(arrays(), arrays(), arrays())
ANYTHING = st.one_of(st.sampled_from(ODD), arrays(), st.lists(arrays(), max_size=3), THREE)


def attempt(call):
    """(result, False), or (None, True) after an error that users may see."""
    try:
        return call(), False
    except ERRORS:
        return None, True


def change(draw, value, replacement, tries=6):
    """A value somewhere within nested lists, tuples, dicts and namespaces replaced; the rest as it is."""
    at, steps = [], value
    for _ in range(draw(st.integers(0, tries))):
        inside = vars(steps) if isinstance(steps, SimpleNamespace) else steps
        if not isinstance(inside, list | tuple | dict) or not inside:
            break
        keys = list(inside) if isinstance(inside, dict) else range(len(inside))
        at.append(draw(st.sampled_from(list(keys))))
        steps = inside[at[-1]]
    return replaced(value, at, replacement)


def replaced(value, at, replacement):
    if not at:
        return replacement
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**replaced(vars(value), at, replacement))
    if isinstance(value, dict):
        return {**value, at[0]: replaced(value[at[0]], at[1:], replacement)}
    items = [replaced(x, at[1:], replacement) if n == at[0] else x for n, x in enumerate(value)]
    return tuple(items) if isinstance(value, tuple) else items
