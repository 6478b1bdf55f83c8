# mypy: ignore-errors
"""Names of Gluon that moved between the Triton versions that the Hopper kernels run with (`versions.TESTED`), so
that the kernels themselves do not branch.

    here               3.6                                3.7                                3.8, 3.9
    ----               ---                                ---                                --------
    thread_barrier     gl.thread_barrier                  gl.barrier                         gl.barrier
    copy_to_shared     tma.async_copy_global_to_shared    tma.async_copy_global_to_shared    tma.async_load
    copy_to_global     tma.async_copy_shared_to_global    tma.async_copy_shared_to_global    tma.async_store
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma


def _first(module, *names):
    """What a module has under the newest of its names. Older names may still be there and raise when they are called
    (3.9), so the order matters."""
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise ImportError(f"{module.__name__} of this Triton has none of {', '.join(names)}")


thread_barrier = _first(gl, "barrier", "thread_barrier")
copy_to_shared = _first(tma, "async_load", "async_copy_global_to_shared")
copy_to_global = _first(tma, "async_store", "async_copy_shared_to_global")
