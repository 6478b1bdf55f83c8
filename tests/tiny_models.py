"""Tiny random models of many architectures, samples that share prefixes, and packed against alone on them."""

import dense_reference  # noqa: F401
import numpy as np
import torch
from tiny_hybrids import HYBRIDS, MOE
from tiny_latent import LATENT
from torch.overrides import TorchFunctionMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import treepack
import treepack.integrations.transformers
from treepack import term_log_probs

# Tensors here are so small that handing them to other threads costs more than computing them.
torch.set_num_threads(1)

VOCABULARY = 64
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BOTH = ["sliding_attention", "full_attention"]
#: What each family brings beside the common sizes. Windows are shorter than the samples.
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen2_window": {"use_sliding_window": True, "sliding_window": 3, "layer_types": BOTH},
    "qwen3": {},
    "qwen3_moe": MOE | {"decoder_sparse_step": 1, "norm_topk_prob": True},
    "mistral": {"sliding_window": 4},
    "gemma2": {
        "sliding_window": 4,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
        "layer_types": BOTH,
    },
    "gemma3_text": {"sliding_window": 4, "query_pre_attn_scalar": 8, "layer_types": BOTH},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, "layer_types": BOTH},
    "phi3": {"sliding_window": 5, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "olmo3": {"sliding_window": 4, "layer_types": BOTH},
    "smollm3": {"no_rope_layers": [1, 0]},
    "glm4": {},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "cohere2": {"logit_scale": 0.25, "sliding_window": 4, "layer_types": BOTH},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
}


def config(family, **more):
    """The config of a family (a suffix after the name of the model type is free: `qwen2_window`)."""
    kind = family if family in CONFIG_MAPPING else family.rpartition("_")[0]
    sizes = COMMON | (FAMILIES | HYBRIDS | LATENT).get(family, {}) | more
    return CONFIG_MAPPING[kind](**sizes)


def tiny(family, dtype=torch.float64, attention="treepack", seed=0, **more):
    """A random model with weights large enough that attention, windows, caps and sinks matter."""
    torch.manual_seed(seed)
    settings = config(family, **more)
    # Mistral 4 is known as the text of a model that takes images.
    auto = AutoModelForCausalLM if type(settings) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    model = auto.from_config(settings, attn_implementation=attention, experts_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sinks" in name or "bias" in name:
                parameter.normal_(0, 0.3)
    return model.to(dtype).eval()


def shared_samples(seed=0, count=6, vocab_size=VOCABULARY, sets=False):
    """Samples of one to three levels of sharing, 6 to 18 tokens, among them a strict prefix and a duplicate."""
    rng = np.random.default_rng(seed)
    trunk = rng.integers(0, vocab_size, 7)
    branch = [rng.integers(0, vocab_size, 4) for _ in range(2)]
    samples = []
    for i in range(count):
        tail = rng.integers(0, vocab_size, 2 + i)
        ids = np.concatenate([trunk, branch[i % 2], tail] if i % 3 else [trunk[:5], tail])
        mask = (np.arange(len(ids)) >= 4 + i % 3).astype(np.uint8)
        samples.append({"input_ids": ids, "completion_mask": mask, "advantage": float(rng.standard_normal())})
    samples.append(dict(samples[1], advantage=0.5))  # the same tokens again, with another advantage
    ids = samples[2]["input_ids"][:9]
    samples.append({"input_ids": ids, "completion_mask": np.ones(9, np.uint8), "advantage": -1.0})
    if sets:
        for sample in samples:
            add_sets(sample, rng, vocab_size)
    return samples


def add_sets(sample, rng, vocab_size):
    """Kept sets of 1 to 5 ids with the target for each trained token."""
    ids, counts, kept = sample["input_ids"], [], []
    for i, token in enumerate(ids):
        if not sample["completion_mask"][i]:
            counts.append(0)
            continue
        others = rng.choice(np.delete(np.arange(vocab_size), token), rng.integers(0, 5), replace=False)
        one = rng.permutation(np.append(others, token))
        counts.append(len(one))
        kept.append(one)
    sample["sampling_mask_counts"] = np.array(counts, np.int32)
    sample["sampling_mask"] = np.concatenate(kept).astype(np.int32)


def weights_of(count):
    """Fixed weights of different sizes and signs, in place of advantages."""
    return torch.cos(torch.arange(count, dtype=torch.float64))


def alone_log_probs(model, samples, attention="dense64", temperature=1.0):
    """Log-probs of the trained tokens of each sample run alone through `attention`, by the model's own logits."""
    model.set_attn_implementation(attention)
    out = []
    for sample in samples:
        ids = torch.as_tensor(sample["input_ids"])
        logits = model(input_ids=ids[None], use_cache=False).logits[0] / temperature
        target = 1 + torch.as_tensor(sample["completion_mask"])[1:].nonzero()[:, 0]
        rows = logits[target - 1]
        if "sampling_mask" in sample:
            rows = keep(rows, sample, target)
        out.append(rows.log_softmax(-1)[torch.arange(len(target)), ids[target]])
    model.set_attn_implementation("treepack")
    return out


def keep(rows, sample, target):
    """Logits of the ids outside each set at -inf."""
    end = np.cumsum(sample["sampling_mask_counts"])
    dropped = torch.ones(rows.shape, dtype=torch.bool)
    for i, t in enumerate(target.tolist()):
        dropped[
            i, torch.as_tensor(sample["sampling_mask"][end[t] - sample["sampling_mask_counts"][t] : end[t]]).long()
        ] = False
    return rows.masked_fill(dropped, -torch.inf)


def packed_log_probs(model, samples, pack=None, **options):
    """The same from packed trees, in the order of the samples."""
    found = {}
    for tree in treepack.pack(samples, **({"max_tokens": 64} | (pack or {}))):
        device = tree.to("cpu")
        values = term_log_probs(model, device, **options)
        found.update(zip(tree.sample_index.tolist(), device.unpack_terms(values), strict=True))
    return [found[i] for i in range(len(samples))]


def gradients(model, values):
    """The gradient of every parameter that takes part, for a loss with the fixed weights."""
    values = torch.cat(values)
    model.zero_grad()
    (values * weights_of(len(values)).to(values.dtype)).sum().div(len(values)).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def check_step(model, alone, loss=None):
    """Asserts that the gradients in `model`, and the loss where it is given, are those of the scalar `alone`, computed
    from the same parameters; clears them. Gradients are compared as shares of the largest."""
    wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
    expected = dict(zip(wanted, torch.autograd.grad(alone, list(wanted.values()), allow_unused=True), strict=True))
    loose = 1e-6 if next(model.parameters()).dtype == torch.float64 else 1e-3  # norms are float32 in any model
    if loss is not None:
        assert abs(float(loss) - alone.item()) < loose * max(1.0, abs(alone.item())), (float(loss), alone.item())
    largest = max(g.abs().max().item() for g in expected.values() if g is not None)
    assert largest > 0
    for name, parameter in wanted.items():
        got = parameter.new_zeros(parameter.shape) if parameter.grad is None else parameter.grad
        there = parameter.new_zeros(parameter.shape) if expected[name] is None else expected[name]
        assert (got - there).abs().max() < loose * largest, name
    model.zero_grad()


def sampled_rollouts(model, prompt, count, **sampler):
    """What `model.generate` drew after a prompt (L,), as a sampler would hand it on: ids, and of each drawn token its
    log-prob and kept ids."""
    attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    out = model.generate(
        torch.as_tensor(prompt)[None], attention_mask=torch.ones(1, len(prompt)), do_sample=True, min_new_tokens=8,
        max_new_tokens=8, num_return_sequences=count, output_scores=True, return_dict_in_generate=True, **sampler,
    )  # fmt: skip
    model.set_attn_implementation(attention)
    scores = torch.stack(out.scores, 1)  # (count, 8, V): -inf outside of the kept set
    drawn = out.sequences[:, len(prompt) :]
    log_probs = scores.log_softmax(-1).gather(-1, drawn[..., None])[..., 0]
    return [
        {
            "prompt": np.asarray(prompt),
            "completion": drawn[i].numpy(),
            "log_probs": log_probs[i].numpy(),
            "kept": [row.isfinite().nonzero()[:, 0].numpy() for row in scores[i]],
            "advantage": (-1.0) ** i,
        }
        for i in range(count)
    ]


def largest_difference(a, b):
    """Over two dicts or lists of tensors with the same keys; NaN is infinite."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        a, b = list(a.values()), [b[name] for name in a]
    return max(
        float((x - y).abs().detach().nan_to_num(torch.inf).max()) for x, y in zip(a, b, strict=True) if x.numel()
    )


class KeepDouble(TorchFunctionMode):
    """Models cast norms, rotary angles and router weights to float32; under this mode float64 stays float64, so that
    parity can be asked for to the last bits and not to those of float32."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        double = args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64
        if double and function is torch.Tensor.float:
            return args[0]
        if double and function in (torch.Tensor.to, torch.Tensor.type):
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        if double and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        if double and function is torch.Tensor.matmul:
            args = (args[0], args[1].to(torch.float64))
        return function(*args, **kwargs)
