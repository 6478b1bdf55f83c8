"""TRL's GRPO and RLOO trainers on trees: their function of log-probs, overridden.

    from trl import GRPOTrainer
    from treepack.integrations.trl import TreeLogProbs

    class TreeGRPOTrainer(TreeLogProbs, GRPOTrainer):
        keep_groups = True

Policy, old and reference log-probs, entropies and the router's loss of padded rows come from trees; generation,
rewards, losses and metrics stay TRL's. TRL is not imported here: the mixin finds it in the class beside it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...distributed.foreign import refuse_foreign
from ..transformers.checks.model import check_model
from ..transformers.model import ATTENTION, unwrap
from ..transformers.row_batch import read_rows
from ..transformers.rows import row_values
from .groups import Batch, grouped, window_of
from .switch import WORKS_WITH

__all__ = ["TreeLogProbs"]

_METHOD = "_get_per_token_logps_and_entropies"
_ARGUMENTS = (
    "model",
    "input_ids",
    "attention_mask",
    "logits_to_keep",
    "batch_size",
    "compute_entropy",
    "compute_aux_loss",
)

# A type checker sees what a trainer has; at run time the trainer stands beside the mixin.
_Trainer: Any = Any if TYPE_CHECKING else object


class TreeLogProbs(_Trainer):  # type: ignore[misc]
    """A mixin for `GRPOTrainer`, `RLOOTrainer` and what is derived from them (`GMPOTrainer`): put it first.

    Shared prefixes are forwarded once in each micro-batch. The model runs under `attn_implementation="treepack"`; while
    TRL generates with it, under the implementation that it came with.

    Raises:
        TypeError: a class beside it without the method that is overridden, or with other arguments.
        ValueError: a model that would not compute on a tree what it computes on each row (`check_model`); images;
            Liger's kernels; DeepSpeed ZeRO-3; accelerate's sequence or context parallelism.
    """

    keep_groups: bool = False
    """TRL shuffles the rows of a generation over its micro-batches, which tears the answers to a prompt apart. True
    brings them together again, within the micro-batches of each optimizer step: the step has the same rows."""

    max_tokens: int | None = None
    """Most positions of a tree. None: one tree for each micro-batch; for old and reference log-probs as many positions
    as TRL would forward together."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for one in cls.__mro__[: cls.__mro__.index(TreeLogProbs)]:
            if _METHOD in vars(one) and not issubclass(one, TreeLogProbs):
                raise TypeError(
                    f"{cls.__name__} has {one.__name__} before TreeLogProbs, whose log-probs would be used; put it "
                    f"first: class {cls.__name__}(TreeLogProbs, {one.__name__})"
                )

    def __init__(self, *args: Any, **kwargs: Any):
        _check_method(type(self))
        super().__init__(*args, **kwargs)
        _check_arguments(self)
        if self.keep_groups:
            window_of(self.args.steps_per_generation, self.args.gradient_accumulation_steps)
        self._generates_with = _attention_of(self.model)
        for model in (self.model, self.ref_model):
            if model is not None:
                unwrap(model).set_attn_implementation(ATTENTION)
                _check(model)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(log-probs, entropies or None, router loss or None) as TRL's own returns them."""
        from trl.extras.profiling import profiling_context

        for name, value in more.items():
            if value is not None:
                raise ValueError(
                    f"{type(self).__name__} was given {name}: packed trees run text alone, and images would be lost; "
                    "train such rows with TRL's own trainer, without TreeLogProbs"
                )
        budget = self.max_tokens
        if budget is None and batch_size is not None and batch_size < len(input_ids):
            budget = batch_size * input_ids.shape[1]
        several = self.accelerator.num_processes > 1
        with profiling_context(self, _METHOD), self.accelerator.autocast():
            values = row_values(
                model,
                read_rows(input_ids, attention_mask, None, None, logits_to_keep),
                input_ids.device,
                temperature=self.temperature,
                entropy=compute_entropy,
                aux_loss=compute_aux_loss,
                max_tokens=budget,
                group=torch.distributed.group.WORLD if several else None,
                head_autocast=not getattr(self.args, "cast_lm_head_to_fp32", False),
            )
        return values.log_probs, values.entropy, values.aux_loss

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with _attention(self.model, self._generates_with):
            return super()._generate_single_turn(*args, **kwargs)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self.keep_groups or self._buffered_inputs is before or self._buffered_inputs is None:
            return inputs
        # A new generation, shuffled and cut by TRL.
        batches: list[Batch] = self._buffered_inputs
        window = window_of(len(batches), self.args.gradient_accumulation_steps)
        for start in range(0, len(batches), window):
            batches[start : start + window] = grouped(batches[start : start + window])
        return batches[self._step % len(batches)]


def _check_method(kind: type) -> None:
    """TypeError where TRL's method is not the one that is overridden."""
    after = kind.__mro__[kind.__mro__.index(TreeLogProbs) + 1 :]
    theirs = next((vars(one)[_METHOD] for one in after if _METHOD in vars(one)), None)
    known = f"TreeLogProbs is known to work with trl {', '.join(WORKS_WITH)}"
    if theirs is None:
        raise TypeError(
            f"{kind.__name__} has no {_METHOD} after TreeLogProbs; {known}: class {kind.__name__}(TreeLogProbs, "
            "GRPOTrainer)"
        )
    lacks = [name for name in _ARGUMENTS if name not in inspect.signature(theirs).parameters]
    if lacks:
        raise TypeError(f"{kind.__name__}: TRL's {_METHOD} takes no {', '.join(lacks)}; {known}")


def _check_arguments(trainer: Any) -> None:
    name, args = type(trainer).__name__, trainer.args
    refuse_foreign()  # TRL sees what its arguments say, and not what a launcher's file does
    if args.use_liger_kernel:
        raise ValueError(
            f"{name} has use_liger_kernel=True: Liger's kernels change the model and its loss, and were not compared; "
            "set it to False"
        )
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3:
        raise ValueError(
            f"{name} runs under DeepSpeed ZeRO stage 3, in which the LM head is spread over the ranks when it is read; "
            "use stage 2, or FSDP2 with the head left out"
        )


def _check(model: Any) -> None:
    """`check_model`, as it will find the model when it trains."""
    inner = unwrap(model)
    training = inner.training
    try:
        check_model(model.train(), weighted=True)
    except ValueError as error:
        error.add_note(
            "In TRL: disable_dropout=True sets every dropout to 0, that of LoRA too; what is refused otherwise trains "
            "with TRL's own trainer, without TreeLogProbs"
        )
        raise
    finally:
        model.train(training)


def _attention_of(model: Any) -> str:
    found: str = unwrap(model).config.get_text_config()._attn_implementation
    return "sdpa" if found == ATTENTION else found


@contextmanager
def _attention(model: Any, implementation: str) -> Iterator[None]:
    inner = unwrap(model)
    inner.set_attn_implementation(implementation)
    try:
        yield
    finally:
        inner.set_attn_implementation(ATTENTION)
