"""One value of a user -> one array: lists, NumPy and torch become C-contiguous native NumPy arrays, or an error.

Every function takes `where`, for its errors: the column, and the sample that the value is of, or none where it is of a
whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import OF_TOKEN, PackError, Where

Array = npt.NDArray[Any]

_NUMBERS = "booleans, integers and floats"
_LEAVE_OUT = "leave it out of what is packed"
_TO_INTEGERS = "convert it by .astype(int), a tensor by .long()"
_RAGGED_SAMPLE = "its items have different lengths; one number, or one row of numbers, for each token is needed"
_RAGGED_BATCH = (
    "its lists have different lengths; give a list of dicts, one for each sample, or pad the lists and say in an "
    "attention_mask what is padding"
)


def is_array(value: Any) -> bool:
    """Whether a value has rows (per token), as opposed to a scalar or 0-d value (per sample)."""
    if isinstance(value, list | tuple):
        return True
    return getattr(value, "ndim", 0) > 0


def to_numpy(value: Any, where: Where, allowed: str = _NUMBERS, text: str = _LEAVE_OUT) -> Array:
    """Any array-like of numbers, C-contiguous and in native byte order. Python floats become float32, NumPy and torch
    dtypes stay. TypeError for strings, objects and what NumPy has no dtype for; PackError for ragged lists.

    allowed, text: for the message, what may be there instead, and what to do about text."""
    array = _as_numpy(value, where)
    if array.dtype.kind not in "biufc":
        remedy = f": {text}" if array.dtype.kind in "US" else ""
        raise where.type_error(f"{_no_numbers(array)}; allowed are {allowed}{remedy}")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.ndim and not (array.flags.c_contiguous and array.flags.aligned):
        array = np.require(array, requirements=["C", "A"])
    return array


def _as_numpy(value: Any, where: Where) -> Array:
    if isinstance(value, np.ndarray):
        if isinstance(value, np.ma.MaskedArray):
            raise where.type_error("is a masked array; give plain arrays, and padding by attention_mask")
        return np.asarray(value)  # subclasses index and reshape by rules of their own
    if hasattr(value, "detach") and hasattr(value, "resolve_conj"):  # a tensor, or of a subclass of any module
        return _from_torch(value, where)
    try:
        array = np.asarray(value)
    except ValueError:
        raise where.error(f"is ragged: {_RAGGED_BATCH if where.is_of_batch else _RAGGED_SAMPLE}") from None
    if isinstance(value, list | tuple) and array.size == 0:
        # An empty list says nothing of its dtype.
        return array.astype(np.int64)
    if array.dtype == np.float64 and not isinstance(value, np.generic):
        exact = _as_integers(value, array, where)
        return _to_float32(array, where) if exact is None else exact
    if array.dtype.kind == "O" and array.size and all(isinstance(x, int) for x in array.flat):
        raise where.error(f"holds {max(array.flat, key=abs)}; allowed are integers that fit into 64 bits")
    return array


def _as_integers(value: Any, array: Array, where: Where, of_samples: bool = False) -> Array | None:
    """Integers of which NumPy made floats, since one is beyond int64 and another is not: as uint64, or PackError where
    none holds them all; None where there are floats among them. `of_samples`: one of each sample."""
    if not (np.abs(array) >= 2.0**63).any():
        return None
    exact = np.asarray(value, object)
    if not all(isinstance(x, int | np.integer) for x in exact.flat):
        return None
    low, high = int(min(exact.flat)), int(max(exact.flat))
    if low >= 0 and high < 2**64:
        return exact.astype(np.uint64)
    where = Where(where.column, int(exact.argmax())) if of_samples else where
    raise where.error(f"holds {high}, and {low} beside it; allowed are integers that fit into 64 bits")


def _to_float32(array: Array, where: Where, of_samples: bool = False) -> Array:
    """Python floats as float32; PackError for one that is too large for it. `of_samples`: one of each sample."""
    try:
        with np.errstate(over="raise"):
            return array.astype(np.float32)
    except FloatingPointError:
        at = int(np.where(np.isfinite(array), np.abs(array), 0.0).argmax())
        where = Where(where.column, at) if of_samples else where
        text = f"holds {array.flat[at]}, and Python floats become float32, up to 3.4e38; give an array of float64"
        raise where.error(text) from None


def _no_numbers(array: Array) -> str:
    """What an array that holds no numbers is."""
    if array.dtype.kind in "US":
        return f"is text (dtype {array.dtype})"
    kinds = (type(x) for x in array.flat if not isinstance(x, int | float | complex | np.generic))
    kind = next(kinds, None) if array.dtype.kind == "O" else None
    if kind is None:
        return f"has dtype {array.dtype}"
    return f"{'holds' if array.ndim else 'is'} {'None' if kind is type(None) else f'a {kind.__name__}'}"


def _from_torch(value: Any, where: Where) -> Array:
    if value.device.type != "cpu":
        raise where.type_error(f"is on {value.device}; packing works on the host: call .cpu() first")
    try:
        array: Array = value.detach().resolve_conj().resolve_neg().numpy()
    except (TypeError, RuntimeError, NotImplementedError):
        raise where.type_error(_not_in_numpy(value)) from None
    return array


def _not_in_numpy(tensor: Any) -> str:
    if tensor.is_nested:
        return (
            "is a nested tensor; give one sample for each of its parts, a padded batch, or nested input_ids beside it"
        )
    if str(tensor.layout) != "torch.strided":
        return f"has layout {tensor.layout}; packing works on dense tensors: call .to_dense() first"
    if tensor.is_quantized:
        return f"is quantized ({tensor.dtype}); call .dequantize() or .int_repr() first"
    return f"has dtype {tensor.dtype}, which NumPy does not have; convert it, say with .float()"


def to_ids(value: Any, where: Where) -> npt.NDArray[np.int64]:
    """Token ids, int64 (L,). Any integer dtype; floats and booleans are a TypeError."""
    array = _integers(value, where)
    _one_axis(array, where)
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise where.error(f"is {array.max()}; allowed are ids from 0 to {2**31 - 1}", int(array.argmax()))
    return np.ascontiguousarray(array, np.int64)


def to_int32(value: Any, where: Where) -> npt.NDArray[np.int32]:
    """Counts, int32 (any,). Any integer dtype with values that fit."""
    array = _integers(value, where)
    _one_axis(array, where)
    at = _first_beyond_int32(array)
    if at is not None:
        raise where.error(f"is {array[at]}; allowed are integers from 0 to {2**31 - 1}", at)
    return np.ascontiguousarray(array, np.int32)


def to_kept_ids(value: Any, counts: npt.NDArray[np.int32], where: Where) -> npt.NDArray[np.int32]:
    """Kept ids, int32 (any,), of tokens with `counts` ids each. Any integer dtype with values that fit."""
    array = _integers(value, where)
    _one_axis(array, where)
    at = _first_beyond_int32(array)
    if at is not None:
        token = None  # of a batch: asked for again sample by sample
        if where.sample is not None:
            token = int(np.searchsorted(np.cumsum(counts, dtype=np.int64), at, side="right"))
        text = ("the kept set", f" holds id {array[at]}; allowed are ids from 0 to {2**31 - 1}")
        raise PackError(text, sample=where.sample, token=token, token_as=OF_TOKEN)
    return np.ascontiguousarray(array, np.int32)


def _first_beyond_int32(array: Array) -> int | None:
    """Index of the first value that int32 cannot hold. Other negative values are left to a check that knows more."""
    if array.size == 0 or np.can_cast(array.dtype, np.int32):
        return None
    beyond = (array > 2**31 - 1) | (array < -(2**31)) if array.dtype.kind == "i" else array > 2**31 - 1
    return int(beyond.argmax()) if beyond.any() else None


def to_mask(value: Any, where: Where) -> Array:
    """A completion mask, one byte per token (uint8 or bool). Any integer or boolean dtype; Rust checks the bytes."""
    array = _mask_like(value, where)
    if array.dtype not in (np.uint8, np.bool_):
        _check_mask(array, where, "0 (context) and 1 (trained)")
        array = array.astype(np.uint8)
    return array


def to_attention_mask(value: Any, where: Where) -> npt.NDArray[np.bool_]:
    """A mask that says which tokens are real (1) and which padding (0). Any integer or boolean dtype."""
    array = _mask_like(value, where)
    _check_mask(array, where, "0 (padding) and 1 (real)", of_samples=where.is_of_batch and array.ndim == 2)
    real: npt.NDArray[np.bool_] = array != 0  # no bytes but 0 and 1, where a view as booleans may have others
    return real


def _mask_like(value: Any, where: Where) -> Array:
    allowed = "booleans and integers"
    array = to_numpy(value, where, allowed)
    if array.dtype.kind not in "biu":
        raise where.type_error(f"has dtype {array.dtype}; allowed are {allowed}: {_TO_INTEGERS}")
    return array


def _check_mask(array: Array, where: Where, allowed: str, of_samples: bool = False) -> None:
    """PackError for a value that is neither 0 nor 1. `of_samples`: the array has a row for each sample."""
    wrong = np.argwhere((array != 0) & (array != 1))
    if not len(wrong):
        return
    at = tuple(wrong[0].tolist())
    problem = f"is {array[at]}; allowed are {allowed}"
    if len(at) == 1:
        raise where.error(problem, at[0])
    place = f"[{', '.join(map(str, at))}]" if at else ""
    raise Where(where.column + place, at[0] if of_samples else where.sample, where.source).error(problem)


def to_identity(value: Any, where: Where) -> Array:
    """Identity rows (L, ...) of integers or booleans."""
    array = to_numpy(value, where)
    if array.dtype.kind not in "biu":
        raise where.type_error(f"has dtype {array.dtype}; identity is compared for equality: integers or booleans")
    return array


def to_scalars(values: Any, name: str) -> Array:
    """A per-sample column (n,) from one scalar per sample."""
    where = Where(name)
    if isinstance(values, np.ndarray) or hasattr(values, "detach"):
        array = to_numpy(values, where)
    elif isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping | Set):
        array = _stack(list(values), where)
    else:
        raise where.type_error(f"is {_kind(values)}; a list or an array with one value per sample is needed")
    if array.ndim != 1:
        raise where.error(f"has shape {array.shape}; a per-sample column has one value per sample: (n,)")
    return np.ascontiguousarray(array)


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _stack(values: Any, where: Where) -> Array:
    kinds = set(map(type, values))
    if not kinds <= {float, int, bool}:
        # 0-d arrays and tensors keep their dtype, scalars of Python follow the rule for Python floats.
        values = [_scalar(value, Where(where.column, i)) for i, value in enumerate(values)]
        kinds = set(map(type, values))
    array = np.asarray(values)
    if array.dtype == np.float64 and float not in kinds:
        exact = _as_integers(values, array, where, of_samples=True)
        array = array if exact is None else exact
    if array.dtype == np.float64 and kinds <= {float, int, bool}:
        array = _to_float32(array, where, of_samples=True)
    if array.dtype.kind == "O":
        largest = max(range(array.size), key=lambda i: abs(array[i])) if array.ndim == 1 else None
        raise Where(where.column, largest).error("holds an integer that does not fit into 64 bits")
    return array


def _scalar(value: Any, where: Where) -> Any:
    if type(value) in (float, int, bool):
        return value
    if is_array(value):
        raise where.error("is an array", against=(0, "has a scalar there"))
    if value is None:
        raise where.type_error("is None; a number is needed")
    return to_numpy(value, where)[()]


def plain(value: Any, where: Where) -> Any:
    """A NumPy scalar, 0-d array or tensor as the number or text that it holds; anything else as it is."""
    if isinstance(value, np.generic | np.ndarray) and value.ndim == 0 and value.dtype.kind in "USO":
        return value.item()
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return to_numpy(value, where)[()].item()
    return value


def _integers(value: Any, where: Where) -> Array:
    array = to_numpy(value, where, "integers", "tokenize it first")
    if array.dtype.kind not in "iu":
        raise where.type_error(f"has dtype {array.dtype}; allowed are integers: {_TO_INTEGERS}")
    return array


def _one_axis(array: Array, where: Where) -> None:
    if array.ndim != 1:
        raise where.error(f"has shape {array.shape}; one axis is needed")
