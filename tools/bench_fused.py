"""Each fused operation against its plain form, and the experts' products against PyTorch's, on the GPU here.

    python tools/bench_fused.py [--out nbs/results/fused_ops_h200.json]

Shapes of kimi_linear_48b, bf16; mean device time of back-to-back calls, queued while the device is still busy, so that
launching them does not count. `floor_us` is what it takes to read every input and write every output once, or for products
also their arithmetic, at the rates of --bandwidth and --flops: by default those of a copy and a matrix product in this run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gpu_machine import machine, write

from kda_ckpt import fused
from kda_ckpt.layers import decode_attention
from kda_ckpt.model import get_preset

SHAPE = get_preset("kimi_linear_48b")
TOP_K, EXPERTS = SHAPE.num_experts_per_token, SHAPE.num_experts
HIDDEN, WIDTH = SHAPE.hidden_size, SHAPE.moe_intermediate_size


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


@cache
def filler() -> torch.Tensor:
    """4 GiB; zeroing them takes the device about a millisecond."""
    return torch.empty(4 << 30, dtype=torch.uint8, device="cuda")


def microseconds(function: Callable, repeats: int = 10) -> float:
    """Mean device time of a call, after two. The device has something else to do while the host launches them."""
    function(), function()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(8):
        filler().zero_()
    begin.record()
    for _ in range(repeats):
        function()
    end.record()
    torch.cuda.synchronize()
    return round(begin.elapsed_time(end) * 1e3 / repeats, 1)


def operations(tokens: int) -> dict[str, tuple[Callable, int]]:
    """By name: the operation, and the bytes it must move."""
    x, y, z = (rand(tokens, HIDDEN) for _ in range(3))
    logits, bias = rand(tokens, EXPERTS, dtype=torch.float32), torch.zeros(EXPERTS, device="cuda")
    experts, weights = fused.choose_experts(logits, bias, TOP_K, 2.446)
    places, _ = fused.sort_by_expert(experts, EXPERTS)
    rows, scale = fused.scatter_rows(x, weights, places)
    heads, gate = (rand(tokens, SHAPE.num_heads, SHAPE.head_dim) for _ in range(2))
    wide, norm, narrow = rand(tokens * TOP_K, 2 * WIDTH), rand(HIDDEN), rand(SHAPE.head_dim)
    row, chosen = 2 * x.numel(), 12 * experts.numel()  # bytes
    return {
        "add, norm": (lambda: fused.add_rms_norm(x, y, norm, 1e-5), 4 * row),
        "gated norm": (lambda: fused.gated_rms_norm(heads, gate, narrow, 1e-5), 3 * 2 * heads.numel()),
        "SwiGLU × weight": (lambda: fused.swiglu(wide, scale), 3 * wide.numel()),
        "choose experts": (lambda: fused.choose_experts(logits, bias, TOP_K, 2.446), 4 * logits.numel() + chosen),
        "sort by expert": (lambda: fused.sort_by_expert(experts, EXPERTS), chosen),
        "rows to experts": (lambda: fused.scatter_rows(x, weights, places), (1 + TOP_K) * row),
        "rows back": (lambda: fused.combine_rows(rows, places, y, z), (3 + TOP_K) * row),
    }


def attention(tokens: int, batch: int) -> dict[str, tuple[Callable, int]]:
    """Decoding `batch` rows with `tokens` cached each, through the layer's own choice of kernel."""
    rank, rope, page = SHAPE.kv_lora_rank, SHAPE.qk_rope_head_dim, 1536
    columns = -(-tokens // page)
    cache, q = rand(batch * columns + 1, page, rank + rope), rand(batch, SHAPE.num_heads, rank + rope)
    table = torch.arange(1, batch * columns + 1, dtype=torch.int32, device="cuda").view(batch, columns)
    lens = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
    call = lambda: decode_attention(q, cache, table, lens, columns * page, rank, 0.07)  # noqa: E731
    return {f"decode attention, {batch} × {tokens}": (call, 2 * batch * tokens * (rank + rope))}


def products(tokens: int, bandwidth: float, flops: float) -> dict:
    """The experts' two products: PyTorch's grouped one with SwiGLU after it, the kernel with SwiGLU inside, the floor."""
    gate_up, down = rand(EXPERTS, 2 * WIDTH, HIDDEN), rand(EXPERTS, HIDDEN, WIDTH)
    x, logits = rand(tokens, HIDDEN), rand(tokens, EXPERTS, dtype=torch.float32)
    experts, weights = fused.choose_experts(logits, torch.zeros(EXPERTS, device="cuda"), TOP_K, 2.446)
    places, ends = fused.sort_by_expert(experts, EXPERTS)
    rows, scale = fused.scatter_rows(x, weights, places)
    hidden, touched = fused.grouped_triton(rows, gate_up, ends, scale), len(experts.unique())
    calls = {
        "torch_us": (
            lambda: fused.swiglu(torch._grouped_mm(rows, gate_up.mT, offs=ends), scale),
            lambda: torch._grouped_mm(hidden, down.mT, offs=ends),
        ),
        "fused_us": (
            lambda: fused.grouped_triton(rows, gate_up, ends, scale),
            lambda: fused.grouped_triton(hidden, down, ends),
        ),
    }
    floor = [
        max(touched * n * HIDDEN * WIDTH * 2 / bandwidth, 2 * n * HIDDEN * WIDTH * len(rows) / flops) * 1e6
        for n in (2, 1)
    ]
    result = {name: [microseconds(call) for call in pair] for name, pair in calls.items()}
    return {"tokens": tokens, "experts": touched, **result, "floor_us": [round(us, 1) for us in floor]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--bandwidth", type=float, help="bytes a second (default: as a copy reaches here)")
    parser.add_argument(
        "--flops", type=float, help="bf16 operations a second (default: as a matrix product reaches here)"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = machine() | {"tokens": args.tokens}
    bandwidth, flops = args.bandwidth or result["copy_gbs"] * 1e9, args.flops or result["matmul_tflops"] * 1e12
    result |= {"bandwidth": bandwidth, "flops": flops, "operations": [], "products": []}
    print(json.dumps(result), flush=True)

    def keep(kind: str, line: dict) -> None:
        result[kind].append(line)
        print(json.dumps(line), flush=True)
        if args.out:
            write(args.out, result)

    with torch.inference_mode():
        for name, (call, size) in (operations(args.tokens) | attention(8500, 16)).items():
            line = {"name": name, "floor_us": round(size / bandwidth * 1e6, 1)}
            for way in ("plain", "fused"):
                fused.USE_KERNELS = way == "fused"
                line[f"{way}_us"] = microseconds(call)
            keep("operations", line)
        for tokens in (16, 320, 2048, args.tokens):
            keep("products", products(tokens, bandwidth, flops))


if __name__ == "__main__":
    main()
