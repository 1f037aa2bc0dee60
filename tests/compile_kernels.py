"""Compile every Triton kernel for an H100 or H200 without a GPU; run by test_triton_compiles.py in a process of its own.

The driver is replaced by one that names its target and launches nothing, so the calls below compile exactly what the same
calls would on the GPU: Triton's interpreter accepts programs that its compiler does not.
"""

from __future__ import annotations

import os
import sys

os.environ.pop("TRITON_INTERPRET", None)
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Hopper:
    """What the compiler asks a driver for."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")


launch, compiled = JITFunction.run, []


def compile_only(self, *args, grid, warmup, **kwargs):
    compiled.append(self.__name__)
    return launch(self, *args, grid=grid, warmup=True, **kwargs)


driver.set_active(Hopper())
JITFunction.run = compile_only

from kda_ckpt import fused, triton_kda  # noqa: E402
from kda_ckpt.reference import random_inputs  # noqa: E402

BF16, F32 = torch.bfloat16, torch.float32
ids = torch.tensor([3, 0, 1])
ints = torch.tensor([0, 7, 10], dtype=torch.int32)


def fused_kernels(dtype: torch.dtype) -> None:
    """The operations around the model's products; attention and grouped products only in half precision."""
    x, weight, places = (
        torch.randn(10, 2304).to(dtype),
        torch.ones(2304).to(dtype),
        torch.zeros(10, 8, dtype=torch.int32),
    )
    fused.rms_norm_triton(x, None, weight, 1e-5)
    fused.rms_norm_triton(x, x.clone(), weight, 1e-5)
    fused.gated_rms_norm_triton(x.view(10, 18, 128), x.view(10, 18, 128), weight[:128], 1e-5)
    fused.swiglu_triton(x, None)
    fused.swiglu_triton(x, torch.ones(10))
    fused.scatter_rows_triton(x, torch.ones(10, 8), places)
    fused.combine_rows_triton(torch.randn(80, 2304).to(dtype), places, x, x)
    fused.combine_rows_triton(torch.randn(80, 2304).to(dtype), places, None, None)
    conv, state = torch.randn(5, 96, 3).to(dtype), torch.randn(5, 2, 128, 128)
    for read in (True, False):
        fused.move_states_triton(conv, state, conv[:3].clone(), state[:3].clone(), ids, read)
    cache, table = torch.randn(6, 16, 576).to(dtype), torch.zeros(2, 4, dtype=torch.int32)
    fused.store_latents_triton(x[:, :512], x[:, 512:576], weight[:512], 1e-5, cache, torch.arange(10))
    fused.context_latents_triton(cache, table, ints, [7, 3])
    if dtype != F32:
        q, kv = torch.randn(10, 4, 192).to(dtype), torch.randn(10, 4, 256).to(dtype)
        fused.latent_attention(q, kv, x[:, :64], cu_q=ints, cu_k=ints, max_query_len=7, scale=0.1)
        fused.paged_attention(torch.randn(2, 4, 576).to(dtype), cache, table, ints[1:], 64, 512, 0.1)
        for gated in (True, False):
            rows, ends = x[:, :256].contiguous(), torch.full((8,), 10, dtype=torch.int32)
            for tiles in {each[0 if gated else 1] for each in fused.GROUPED_TILES.values()} - {None}:
                fused.grouped_triton(
                    rows, torch.randn(8, 256, 256).to(dtype), ends, torch.ones(10) if gated else None, tiles
                )


def kda_kernels(dtype: torch.dtype, heads: int, head_dim: int, safe: bool, checkpoints: bool, initial: bool) -> None:
    """Prefill, convolution, store and decode."""
    triton_kda._check_kinds = lambda *args, **kwargs: None  # which would ask for a GPU
    triton_kda._multiprocessors = lambda device: (132, True)
    x = random_inputs([100, 70], heads, head_dim, "mixed", dtype=dtype)
    if not safe:
        x["lower_bound"] = None
    if not initial:
        x["initial_state"] = None
    offsets = torch.tensor([37, 0], dtype=torch.int32) if checkpoints else None
    backend, C = triton_kda.TritonBackend(), 3 * heads * head_dim
    backend.prefill(**x, checkpoint_offsets=offsets)
    windows, tokens = torch.randn(2, C, 3).to(dtype) if initial else None, torch.randn(170, C).to(dtype)
    weight, gates = torch.randn(C, 4).to(dtype), {n: x[n] for n in ("A_log", "dt_bias", "lower_bound")}
    backend.conv_prefill(tokens, weight, cu_seqlens=x["cu_seqlens"], initial_windows=windows)
    conv, state = torch.zeros(4, C, 3).to(dtype), torch.zeros(4, heads, head_dim, head_dim)
    if checkpoints:
        backend.store_cache_checkpoints(
            conv_cache=conv, state_cache=state, x=tokens, initial_windows=windows, cu_seqlens=x["cu_seqlens"],
            checkpoint_offsets=offsets, checkpoint_state=torch.zeros(2, *state.shape[1:]), state_indices=ids[:2],
        )  # fmt: skip
    backend.decode(tokens[:3], x["g"][:3], x["beta"][:3], weight=weight, **gates, conv_cache=conv, state_cache=state,
                   load_slots=ids, store_slots=ids.new_tensor([1, 2, 3]))  # fmt: skip


def main() -> None:
    for dtype in (BF16, F32):
        fused_kernels(dtype)
    logits = torch.randn(40, 256)
    fused.choose_experts_triton(logits, torch.zeros(256), 8, 2.0)
    for tokens in (20, 40):
        fused.sort_by_expert_triton(torch.zeros(tokens, 8, dtype=torch.int64), 256)
    kda_kernels(BF16, 32, 128, safe=True, checkpoints=True, initial=True)
    kda_kernels(F32, 3, 64, safe=False, checkpoints=False, initial=False)
    kernels = {
        name
        for module in (fused, triton_kda)
        for name, each in vars(module).items()
        if isinstance(each, JITFunction) and "tl.program_id" in each.src
    }
    missing = kernels - set(compiled)
    if missing:
        sys.exit(f"not compiled: {', '.join(sorted(missing))}")
    print(f"{len(compiled)} kernels compiled")


if __name__ == "__main__":
    main()
