"""Where the time of a forward goes: prefills, and decode steps, by kind of kernel, beside what they could not do without.

    python tools/profile_model.py --preset kimi_linear_48b --backend cuda [--ways fused plain] [--out nbs/results/profile_h200.json]

Times are medians of whole engine steps; the kinds' shares come from torch's profiler in a separate run, the experts' tokens
from another. "plain" is the same model with the kernels of `kda_ckpt.fused` switched off.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bounds import bound, expert_statistics, operations, traffic
from gpu_machine import machine, write

from kda_ckpt import fused, layers
from kda_ckpt.engine import LLM, SamplingParams, build_model
from kda_ckpt.metadata import Row

KINDS = {
    "attention": ("flash", "fmha", "sdpa", "latent_attention", "paged_attention", "join_splits"),
    "experts": (
        "grouped",
        "group_gemm",
        "device_kernelin2at4cuda6detail",
        "cutlass::device_kernel<at::cuda::detail::enable",
    ),
    "matrix products": ("gemm", "nvjet", "cublas", "cutlass", "gemv", "splitk"),
    "sort and topk": ("sort", "topk", "radix", "searchsorted", "bitonic", "_choose", "_count", "_place"),
    "copies, gathers": ("copy", "index", "gather", "scatter", "memcpy", "memset", "cat", "rows", "latents", "states"),
    "norms, reductions": ("norm", "reduce", "softmax"),
    "elementwise": ("elementwise", "vectorized", "swiglu"),
    "KDA": (
        "kda",
        "prefill",
        "table_kernel",
        "prepare_kernel",
        "segments",
        "chain",
        "stitch",
        "tile",
        "conv",
        "store_",
        "decode",
    ),
}
CASES = (
    ("prefill", [8000]),
    ("prefill", [7680]),
    ("prefill", [320]),
    ("prefill", [512] * 16),
    ("decode", [512] * 16),
    ("decode", [8000] * 16),
    ("decode", [8000]),
)
DECODES_A_REPEAT, PROFILED_DECODES = 4, 8
MEANING = {
    "copy_gbs": "bytes read and written in a second by a copy on the device, in 10^9",
    "matmul_tflops": "bf16 matrix product of 8192 x 8192, 10^12 operations a second",
    "lengths": "prompt tokens of each row",
    "prefill_ms, decode_ms": "median of the whole engine step, from scheduling to the token on the host",
    "range_ms": "shortest and longest of the timed steps",
    "launches, kinds_ms, top": "kernels and copies of one step on the device; top: ms, launches, name of the largest",
    "device_ms": "sum of kinds_ms: the time in which the device worked",
    "gap_ms": "step minus device_ms: host time that nothing on the device hides",
    "operations": "floating point operations of the step: active weights, attention, recurrence",
    "bytes": "bytes the step has to move: weights it touches and caches, each once, no activations",
    "compute_ms, memory_ms": "operations at matmul_tflops, bytes at copy_gbs",
    "bound_ms, bound_by": "the larger of the two, and which",
    "step_over_bound": "step / bound_ms",
    "tflops, matmul_share, gbs": "operations a second that the step reached, as a share of matmul_tflops; bytes a second",
    "experts": "how the step's tokens fell on the routed experts; touched: at least one token; uniform_touched: if even",
}


def kind_of(name: str) -> str:
    """The first kind one of whose words is in the kernel's name."""
    low = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in low for word in words)), "other")


def begin(llm: LLM, lengths: Sequence[int], max_tokens: int) -> None:
    """Forget everything and queue random prompts of these lengths, the same ones every time."""
    rng, vocabulary = random.Random(0), range(llm.model.config.vocab_size)
    llm.reset()
    for n in lengths:
        llm.add_request(rng.choices(vocabulary, k=n), SamplingParams(max_tokens))


def profiled(llm: LLM, steps: int, top: int) -> dict:
    """Device milliseconds and launches of one of the next `steps` steps, by kind and for the largest kernels."""
    if llm.device.type != "cuda":
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            llm.step()
        torch.cuda.synchronize()
    kinds, kernels = defaultdict(float), []
    for event in profile.key_averages():
        if event.device_time_total:
            ms = event.self_device_time_total / 1e3 / steps
            kinds[kind_of(event.key)] += ms
            kernels.append((round(ms, 3), event.count // steps, event.key[:110]))
    return {
        "launches": sum(kernel[1] for kernel in kernels),
        "kinds_ms": {k: round(v, 2) for k, v in sorted(kinds.items(), key=lambda kv: -kv[1])},
        "device_ms": round(sum(kinds.values()), 3),
        "top": sorted(kernels)[::-1][:top],
    }


@contextmanager
def watched_experts() -> Iterator[list[torch.Tensor]]:
    """The experts [T, k] that every MoE layer chooses in the forwards of this context, in a list."""
    found, choose = [], layers.choose_experts

    def choose_and_keep(*args):
        experts, weights = choose(*args)
        found.append(experts)
        return experts, weights

    layers.choose_experts = choose_and_keep
    try:
        yield found
    finally:
        layers.choose_experts = choose


def expert_counts(llm: LLM) -> torch.Tensor:
    """Tokens [layers, experts] that each expert gets in the next step, which runs without CUDA graphs."""
    graphs, llm.decode_graphs, llm.prefill_graphs = (llm.decode_graphs, llm.prefill_graphs), None, None
    try:
        with watched_experts() as found:
            llm.step()
    finally:
        llm.decode_graphs, llm.prefill_graphs = graphs
    number = llm.model.config.num_experts
    return torch.stack([torch.bincount(experts.cpu().flatten(), minlength=number) for experts in found])


def measure_prefill(llm: LLM, case: dict, repeats: int, top: int) -> tuple[list[Row], list[float], torch.Tensor]:
    """Rows, seconds and expert counts of a prefill in one step; its device times go into `case`."""
    lengths, seconds = case["lengths"], []
    for _ in range(1 + repeats):  # the first one compiles what it needs
        begin(llm, lengths, 1)
        llm.step()
        seconds.append(llm.steps[-1].seconds)
        if llm.has_unfinished:
            raise RuntimeError(f"a prefill of {lengths} takes more than one step here")
    begin(llm, lengths, 1)
    case |= profiled(llm, 1, top)
    begin(llm, lengths, 1)
    return [Row(0, n) for n in lengths], seconds[1:], expert_counts(llm)


def measure_decode(llm: LLM, case: dict, repeats: int, top: int) -> tuple[list[Row], list[float], torch.Tensor]:
    """The same of steps in which all rows decode, after one prefill of all prompts."""
    lengths, steps = case["lengths"], DECODES_A_REPEAT * repeats
    begin(llm, lengths, 2 * len(lengths) + steps + PROFILED_DECODES + 4)
    while not (llm.steps and llm.steps[-1].num_decode_rows == len(lengths)):  # the first such step records the graph
        if not llm.has_unfinished:
            raise RuntimeError(f"prompts of {lengths} never decode all at once here")
        llm.step()
    llm.step()
    rows = [Row(at, at + 1) for at in (request.num_computed_tokens + steps // 2 for request in llm.scheduler.running)]
    before = len(llm.steps)
    for _ in range(steps):
        llm.step()
    seconds = [step.seconds for step in llm.steps[before:]]
    case |= profiled(llm, PROFILED_DECODES, top)
    counts = expert_counts(llm)
    if any(step.num_decode_rows != len(lengths) for step in llm.steps[before:]):
        raise RuntimeError(f"not all rows of {lengths} decoded to the end")
    return rows, seconds, counts


def measure(llm: LLM, case: dict, rates: dict, repeats: int, top: int) -> None:
    """Fill in a case that has its step ("prefill" or "decode") and lengths. rates: with copy_gbs and matmul_tflops"""
    config, kind = llm.model.config, case["step"]
    rows, seconds, counts = (measure_prefill if kind == "prefill" else measure_decode)(llm, case, repeats, top)
    step_ms = 1e3 * statistics.median(seconds)
    experts = expert_statistics(counts, config.num_experts_per_token)
    checkpoints = llm.steps[-1].num_checkpoints
    flops = operations(config, rows)
    moved = traffic(config, rows, sum(experts["touched_by_layer"]), checkpoints, llm.model.dtype.itemsize)
    case |= {
        "tokens": sum(row.query_len for row in rows),
        "checkpoints": checkpoints,
        f"{kind}_ms": round(step_ms, 4),
        "range_ms": [round(1e3 * min(seconds), 4), round(1e3 * max(seconds), 4)],
        "operations": flops,
        "bytes": moved,
        **bound(sum(flops.values()), sum(moved.values()), step_ms, rates["copy_gbs"], rates["matmul_tflops"]),
        "experts": experts,
    }
    if "device_ms" in case:
        case["gap_ms"] = round(step_ms - case["device_ms"], 3)


def show(case: dict) -> None:
    """A few lines of progress."""
    keys = (
        "prefill_ms",
        "decode_ms",
        "device_ms",
        "gap_ms",
        "bound_ms",
        "bound_by",
        "step_over_bound",
        "tflops",
        "gbs",
    )
    print("  ", {key: case[key] for key in keys if key in case}, flush=True)
    print("  ", "experts", {key: case["experts"][key] for key in ("touched", "uniform_touched", "busiest")}, flush=True)
    if "launches" in case:
        print("  ", case["launches"], "launches", json.dumps(case["kinds_ms"]), flush=True)
        for line in case["top"][:8]:
            print("      ", *line, flush=True)


def measured(llm: LLM, cases: Sequence, result: dict, way: str, repeats: int, top: int, save: Callable) -> bool:
    """All cases of one way, put into `result` and saved one by one. False if any of them failed: its error is in its place."""
    fused.USE_KERNELS = way == "fused"
    if llm.decode_graphs is not None:  # graphs of the other way
        llm.renew_graphs()
    done = result["ways"][way] = []
    for kind, lengths in cases:
        name = f"{kind}, {lengths[0]} tokens" + (f", {len(lengths)} rows" if len(lengths) > 1 else "")
        print(f"{way}: {name}", flush=True)
        done.append({"name": name, "step": kind, "lengths": lengths})
        try:
            measure(llm, done[-1], result, repeats, top)
            show(done[-1])
        except Exception as error:  # the others may still work
            traceback.print_exc()
            done[-1]["error"] = f"{type(error).__name__}: {error}"[:300]
        save()
    return not any("error" in case for case in done)


def describe(llm: LLM, preset: str) -> dict:
    """Backend, model and engine."""
    model, config = llm.model, llm.model.config
    return {
        "backend": model.backend.name,
        "model": {
            "preset": preset,
            "dtype": str(model.dtype).removeprefix("torch."),
            "parameters": config.num_parameters(),
            "active_parameters": config.active_parameters(),
            "kda_layers": config.num_layers - sum(config.is_full_attention),
            "mla_layers": sum(config.is_full_attention),
            "moe_layers": config.num_layers - config.first_dense_layers,
            "experts": config.num_experts,
            "experts_per_token": config.num_experts_per_token,
        },
        "engine": {
            "prefix_caching": llm.prefix_caching,
            "block_size": llm.block_size,
            "attention_block_size": llm.attention_block_size,
            "num_blocks": llm.cache.config.num_blocks,
            "max_num_scheduled_tokens": llm.scheduler_config.max_num_scheduled_tokens,
            "cuda_graphs": llm.decode_graphs is not None,
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="kimi_linear_48b")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--top", type=int, default=25)
    parser.add_argument("--ways", nargs="+", default=["fused"], choices=["fused", "plain"])
    parser.add_argument("--cache-gb", type=float, default=10.0, help="cache memory; 16 rows of 8000 tokens take 6.3")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    result = machine() | {"repeats": args.repeats, "meaning": MEANING, "ways": {}}
    print(json.dumps({key: value for key, value in result.items() if key not in ("meaning", "ways")}), flush=True)
    model = build_model(args.preset, args.backend, "cuda", torch.bfloat16)
    torch.cuda.synchronize()
    llm = LLM(
        model, max_num_scheduled_tokens=16384, max_model_len=16384, max_num_seqs=16,
        cache_memory_bytes=int(args.cache_gb * 1e9),
    )  # fmt: skip
    result |= describe(llm, args.preset)
    print(f"ready after {time.perf_counter() - start:.1f} s, backend {model.backend.name}", flush=True)

    def save() -> None:
        result["seconds"] = round(time.perf_counter() - start, 1)
        print(f"   {result['seconds']} s so far", flush=True)
        if args.out:
            write(args.out, result)

    good = [measured(llm, CASES, result, way, args.repeats, args.top, save) for way in args.ways]
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
