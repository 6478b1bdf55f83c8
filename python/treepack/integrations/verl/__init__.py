"""verl on treepack: its FSDP engines run the mini-batches of actor, reference and critic as prefix trees. One line:

    actor_rollout_ref.model.external_lib=treepack.integrations.verl

or the environment variable VERL_USE_EXTERNAL_MODULES=treepack.integrations.verl. Importing this module registers the
engines for the strategies "fsdp" and "fsdp2" on NVIDIA GPUs, in front of verl's own: docs/migrating-verl.md.
"""

from __future__ import annotations

from importlib import metadata

__all__ = ["WORKS_WITH", "TreeEngineWithLMHead", "TreeEngineWithValueHead"]

#: Versions of verl that this is tested with.
WORKS_WITH = ("0.9.1",)


def _unknown(what: str) -> str:
    return f"{what}; treepack.integrations.verl is known to work with verl {', '.join(WORKS_WITH)}"


try:
    _version = metadata.version("verl")
except metadata.PackageNotFoundError as error:
    raise ModuleNotFoundError(_unknown("verl is not installed"), name="verl") from error
try:
    from verl.workers.engine import EngineRegistry

    from .engine import TreeEngineWithLMHead, TreeEngineWithValueHead
except (ImportError, AttributeError) as error:
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("verl"):
        raise  # something that verl itself needs
    raise ImportError(_unknown(f"verl {_version} has another engine ({error})")) from error

for _kind, _engine in (("language_model", TreeEngineWithLMHead), ("value_model", TreeEngineWithValueHead)):
    # A key with a vendor is looked up before verl's own, which has none.
    EngineRegistry.register(model_type=_kind, backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia")(_engine)
