"""What a forward cannot do without: operations, bytes, and the time they take at measured rates; and how experts are hit.

Rows are prompts that start from nothing, or single tokens of sequences that are under way. Activations are not counted:
these are lower bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from statistics import fmean

import torch

from kda_ckpt.layers import FLOAT32_WEIGHTS, ModelConfig, kda_state_shapes, parameter_shapes
from kda_ckpt.metadata import Row


def operations(config: ModelConfig, rows: Sequence[Row]) -> dict[str, int]:
    """Floating point operations of a forward, a multiplication and an addition as two.

    weights: every token times its active weights, the last of a row also times the output layer's
    attention: scores and mixtures of the MLA layers, causal; with one query over latents (2·rank + rope wide) for single tokens
    recurrence: three products of each token with its KDA states: read at k, rank-one update, read at q
    """
    heads, full = config.num_heads, sum(config.is_full_attention)
    tokens, output = sum(row.query_len for row in rows), config.vocab_size * config.hidden_size
    expanded = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    absorbed = 2 * config.kv_lora_rank + config.qk_rope_head_dim
    pairs = sum(
        absorbed * row.end
        if row.query_len == 1
        else expanded * (row.query_len * row.start + row.query_len * (row.query_len + 1) // 2)
        for row in rows
    )
    return {
        "weights": 2 * (tokens * (config.active_parameters() - output) + len(rows) * output),
        "attention": 2 * heads * pairs * full,
        "recurrence": 6 * tokens * heads * config.head_dim**2 * (config.num_layers - full),
    }


def traffic(
    config: ModelConfig, rows: Sequence[Row], touched: int, checkpoints: int = 0, itemsize: int = 2
) -> dict[str, int]:
    """Bytes that a forward has to move, each once.

    touched: experts that at least one token chose, summed over layers; checkpoints: states stored beside the final ones
    dense_weights: all weights but the routed experts', and the tokens' rows of the embedding
    expert_weights: those of the touched experts
    cache_read, cache_written: KDA states (float32) and convolution windows of every row, MLA latents
    """
    full, tokens = sum(config.is_full_attention), sum(row.query_len for row in rows)
    dense, expert = tokens * config.hidden_size * itemsize, 0
    for name, shape in parameter_shapes(config).items():
        size = 4 if name.rpartition(".")[2] in FLOAT32_WEIGHTS else itemsize
        if len(shape) == 3 and ".ffn." in name:
            expert += prod(shape) // config.num_experts * size
        elif name != "embedding":
            dense += prod(shape) * size
    moe_layers = max(1, config.num_layers - config.first_dense_layers)
    window, state = map(prod, kda_state_shapes(config))
    state = 4 * state + window * itemsize
    states, latent = (config.num_layers - full) * state, (config.kv_lora_rank + config.qk_rope_head_dim) * itemsize
    return {
        "dense_weights": dense,
        "expert_weights": expert // moe_layers * touched,
        "cache_read": sum(states * (row.start > 0) + full * latent * row.start for row in rows),
        "cache_written": (len(rows) + checkpoints) * states + full * latent * tokens,
    }


def bound(flops: int, moved: int, step_ms: float, copy_gbs: float, matmul_tflops: float) -> dict:
    """The time that operations and bytes take at the measured rates, the larger one as the bound, and how the step compares."""
    compute, memory = flops / matmul_tflops / 1e9, moved / copy_gbs / 1e6
    tflops = flops / step_ms / 1e9
    return {
        "compute_ms": round(compute, 4),
        "memory_ms": round(memory, 4),
        "bound_ms": round(max(compute, memory), 4),
        "bound_by": "operations" if compute > memory else "bytes",
        "step_over_bound": round(step_ms / max(compute, memory), 3),
        "tflops": round(tflops, 2),
        "matmul_share": round(tflops / matmul_tflops, 4),
        "gbs": round(moved / step_ms / 1e6, 1),
    }


def spread(values: Sequence[int]) -> dict:
    """Mean, least and most."""
    return {"mean": round(fmean(values), 2), "min": min(values), "max": max(values)}


def expert_statistics(counts: torch.Tensor, top_k: int) -> dict:
    """How the tokens of a forward fell on the experts: counts [layers, experts], the tokens that each one got.

    touched: experts of a layer with at least one token, over the layers; uniform_touched: E·(1 − (1 − k/E)^T), expected if
    each token chose its k of E experts evenly; busiest: tokens of a layer's fullest expert, over the layers
    """
    layers, experts = counts.shape
    tokens = int(counts[0].sum()) // top_k
    touched, busiest = (counts > 0).sum(1).tolist(), counts.max(1).values.tolist()
    return {
        "tokens": tokens,
        "layers": layers,
        "experts": experts,
        "touched": spread(touched),
        "uniform_touched": round(experts * (1 - (1 - top_k / experts) ** tokens), 2),
        "tokens_per_expert": round(tokens * top_k / experts, 3),
        "tokens_per_touched_expert": round(layers * tokens * top_k / sum(touched), 3),
        "busiest": spread(busiest),
        "touched_by_layer": touched,
        "busiest_by_layer": busiest,
    }
