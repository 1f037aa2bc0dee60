"""Each fused operation against its plain form, and the experts' products against PyTorch's, on the GPU here.

    python tools/bench_fused.py [--out nbs/results/fused_ops_h200.json]

Shapes of kimi_linear_48b, bf16; mean device time of back-to-back calls. `floor_us` is what it takes to read every input
and write every output once, or for products also their arithmetic, at the rates of --bandwidth and --flops.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch

from kda_ckpt import fused
from kda_ckpt.model import get_preset

SHAPE = get_preset("kimi_linear_48b")
TOP_K, EXPERTS = SHAPE.num_experts_per_token, SHAPE.num_experts
HIDDEN, WIDTH = SHAPE.hidden_size, SHAPE.moe_intermediate_size


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def microseconds(function: Callable, repeats: int = 5) -> float:
    """Mean device time of a call, after two."""
    function(), function()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        function()
    end.record()
    torch.cuda.synchronize()
    return round(begin.elapsed_time(end) * 1e3 / repeats, 1)


def operations(tokens: int) -> dict[str, tuple[Callable, int]]:
    """By name: the operation, and the bytes it must move."""
    x, logits, bias = rand(tokens, HIDDEN), rand(tokens, EXPERTS, dtype=torch.float32), torch.zeros(EXPERTS).cuda()
    experts, weights = fused.choose_experts(logits, bias, TOP_K, 2.446)
    places, _ = fused.sort_by_expert(experts, EXPERTS)
    rows, scale = fused.scatter_rows(x, weights, places)
    heads, wide, ones = rand(tokens, SHAPE.num_heads, SHAPE.head_dim), rand(tokens * TOP_K, 2 * WIDTH), rand(HIDDEN)
    row, chosen, narrow = 2 * x.numel(), 12 * experts.numel(), rand(SHAPE.head_dim)
    return {
        "add, norm": (lambda: fused.add_rms_norm(x, x, ones, 1e-5), 4 * row),
        "gated norm": (lambda: fused.gated_rms_norm(heads, heads, narrow, 1e-5), 3 * 2 * heads.numel()),
        "SwiGLU × weight": (lambda: fused.swiglu(wide, scale), 3 * wide.numel()),
        "choose experts": (lambda: fused.choose_experts(logits, bias, TOP_K, 2.446), 4 * logits.numel() + chosen),
        "sort by expert": (lambda: fused.sort_by_expert(experts, EXPERTS), chosen),
        "rows to experts": (lambda: fused.scatter_rows(x, weights, places), (1 + TOP_K) * row),
        "rows back": (lambda: fused.combine_rows(rows, places, x, x), (3 + TOP_K) * row),
    }


def attention(tokens: int, batch: int) -> dict[str, tuple[Callable, int]]:
    """Decoding `batch` rows with `tokens` cached each, through the layer's own choice of kernel."""
    from kda_ckpt.layers import decode_attention

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
    experts, weights = fused.choose_experts(logits, torch.zeros(EXPERTS).cuda(), TOP_K, 2.446)
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
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes a second")
    parser.add_argument("--flops", type=float, default=790e12, help="bf16 operations a second")
    parser.add_argument("--out")
    args = parser.parse_args()
    result = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "tokens": args.tokens}
    result |= {"bandwidth": args.bandwidth, "flops": args.flops, "operations": [], "products": []}
    with torch.inference_mode():
        for name, (call, size) in (operations(args.tokens) | attention(8500, 16)).items():
            line = {"name": name, "floor_us": round(size / args.bandwidth * 1e6, 1)}
            for way in ("plain", "fused"):
                fused.USE_KERNELS = way == "fused"
                line[f"{way}_us"] = microseconds(call)
            result["operations"].append(line)
            print(json.dumps(line), flush=True)
        for tokens in (16, 320, 2048, args.tokens):
            result["products"].append(products(tokens, args.bandwidth, args.flops))
            print(json.dumps(result["products"][-1]), flush=True)
    if args.out:
        with open(args.out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
