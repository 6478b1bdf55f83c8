"""verl's FSDP engines on packed trees: subclasses that cut a mini-batch into trees and run the model on them.

    mini-batch -> trees, as many on every rank -> a micro-batch of verl's for each -> its losses, metrics, gradients

Everything else stays verl's: how models are made, sharded, saved and sent to the rollout, losses, optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.engine.utils import postprocess_batch_func

from ..._pages import page
from ...tree.tree import HostTree
from ..transformers import ATTENTION, check_model, model_inputs
from ..transformers.inside import InsideHead
from .batch import chunks, entries, one_tree, rows_of, token_positions, trees_of_rank
from .refusals import refuse_batch, refuse_engine

__all__ = ["TreeEngineWithLMHead", "TreeEngineWithValueHead"]


class _OnTrees:
    """What both engines do; before verl's class in the order of bases."""

    _host: HostTree | None = None  # the tree of the micro-batch that runs next
    _run: Any = None

    def __init__(self, model_config: Any, engine_config: Any, *arguments: Any, **keywords: Any) -> None:
        refuse_engine(model_config, engine_config)
        super().__init__(model_config, engine_config, *arguments, **keywords)  # type: ignore[call-arg]

    def _build_module(self) -> Any:
        """verl's model with tree attention."""
        self.model_config.hf_config._attn_implementation = ATTENTION  # type: ignore[attr-defined]
        module = super()._build_module()  # type: ignore[misc]
        if hasattr(module, "v_head"):
            raise ValueError(
                "treepack under verl: the critic was loaded with TRL's AutoModelForCausalLMWithValueHead; a model that "
                f"transformers' AutoModelForTokenClassification knows is needed ({page('migrating-verl')})"
            )
        module.set_attn_implementation(ATTENTION)
        check_model(module)
        return module

    def forward_backward_batch(
        self: Any, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """As verl's: {"model_output", "loss", "metrics"}, in the order of `data`, gradients of all micro-batches.

        Raises:
            PackError: a sample that does not fit; on every rank.
            ValueError: what trees do not compute, by the name of the setting.
        """
        refuse_batch(data, loss_function)
        group = self.get_data_parallel_group()
        tokens = data["loss_mask"].sum().to(get_device_id())  # of a jagged mask too
        dist.all_reduce(tokens, op=dist.ReduceOp.SUM, group=group)
        tu.assign_non_tensor(data, sp_size=1, batch_num_tokens=tokens.item(), dp_size=self.get_data_parallel_size())
        keep = forward_only or tu.get_non_tensor_data(data=data, key="return_model_output", default=False)
        trees, micro_batches, indices = self._micro_batches(data, group)
        found = []
        for i, (tree, micro_batch) in enumerate(zip(trees, micro_batches, strict=True)):
            last = i == len(trees) - 1
            graph = torch.no_grad() if forward_only else self._gradient_sync_context(is_last_micro_batch=last)
            with graph, torch.profiler.record_function(f"micro_batch{i}"):
                self._host = tree
                loss, output = self.forward_step(micro_batch, loss_function=loss_function, forward_only=forward_only)
                if not forward_only:
                    (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            if not keep:
                output.pop("model_output", None)
            found.append(output)
        return postprocess_batch_func(output_lst=found, indices=indices, data=data)

    def _micro_batches(self: Any, data: Any, group: Any) -> tuple[list[HostTree], list[Any], Any]:
        rows = rows_of(data)
        multiple = self.pad_to_length_bucket if self.pad_to_length else None
        if not tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
            trees = chunks(rows, data["micro_batch_size_per_gpu"], multiple)
            return trees, tu.chunk_tensordict(data, len(trees)), None
        budget = data["max_token_len_per_gpu"]
        trees, samples = trees_of_rank(rows, budget, group, get_device_name(), pad_to_multiple_of=multiple)
        return trees, [tu.index_select_tensor_dict(data, some) for some in samples], samples

    def forward_step(self: Any, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        """As verl's, on the tree of the micro-batch."""
        host, self._host = self._host, None
        if host is None:  # called for itself
            refuse_batch(micro_batch, loss_function)
            host = one_tree(rows_of(micro_batch))
        with self._running(host, micro_batch):
            return super().forward_step(micro_batch, loss_function, forward_only)  # type: ignore[misc]

    def _running(self, host: HostTree, micro_batch: Any) -> Any:
        raise NotImplementedError


class TreeEngineWithLMHead(_OnTrees, FSDPEngineWithLMHead):  # type: ignore[misc]
    """Actor and reference: log-probs and entropy of the responses."""

    @contextmanager
    def _running(self, host: HostTree, micro_batch: Any) -> Iterator[None]:
        entropy = tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False)
        tree = host.to(get_device_id())
        run = InsideHead(self.module, tree, temperature=_temperature(micro_batch), entropy=bool(entropy))
        place = torch.from_numpy(entries(host)).to(get_device_id())
        self._run = run, place
        try:
            with run:
                yield
        finally:
            self._run = None

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        run, _ = self._run
        return _without_cache(run.inputs), {}

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        run, place = self._run
        values = run.values(output)
        ids = micro_batch["input_ids"]

        def jagged(terms: Tensor) -> Tensor:
            flat = terms.new_zeros(len(ids.values())).index_copy(0, place, terms)
            return torch.nested.nested_tensor_from_jagged(flat, ids.offsets())

        found = {"log_probs": jagged(values.log_probs)}
        if values.entropy is not None:
            found["entropy"] = jagged(values.entropy)
        return found


class TreeEngineWithValueHead(_OnTrees, FSDPEngineWithValueHead):  # type: ignore[misc]
    """Critic: a value for every token."""

    @contextmanager
    def _running(self, host: HostTree, micro_batch: Any) -> Iterator[None]:
        tree = host.to(get_device_id())
        inputs = model_inputs(tree, model=self.module, model_check=False)
        self._run = inputs, torch.from_numpy(token_positions(host)).to(get_device_id())
        try:
            yield
        finally:
            self._run = None

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        inputs, _ = self._run
        return _without_cache(inputs), {}

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        _, positions = self._run
        values = output.logits[0, :, 0][positions]
        return {"values": torch.nested.nested_tensor_from_jagged(values, micro_batch["input_ids"].offsets())}


def _without_cache(inputs: dict[str, Any]) -> dict[str, Any]:
    """verl gives `use_cache` itself."""
    return {name: value for name, value in inputs.items() if name != "use_cache"}


def _temperature(micro_batch: Any) -> Any:
    """One number, or one for each sample."""
    temperature = micro_batch["temperature"]
    return temperature.tolist() if isinstance(temperature, Tensor) and temperature.dim() else float(temperature)
