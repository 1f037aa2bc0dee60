"""Where the time of a forward goes: one prefill, its tail, and a decode step, by kind of kernel.

    python tools/profile_model.py --preset kimi_linear_48b --backend cuda [--out nbs/results/profile_h200.json]

Times are medians of device events around `LLM._forward` alone; shares come from torch's profiler in a separate run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict

import torch

from kda_ckpt.engine import LLM, SamplingParams, build_model

KINDS = {
    "attention": ("flash", "fmha", "sdpa"),
    "experts": ("grouped", "group_gemm", "cutlass::device_kernel<at::cuda::detail::enable"),
    "KDA": ("kda", "chain", "stitch", "tile", "conv", "store_", "decode_kernel"),
    "matrix products": ("gemm", "nvjet", "cublas", "cutlass", "gemv", "splitk"),
    "sort and topk": ("sort", "topk", "radix", "searchsorted", "bitonic", "gathertopk"),
    "copies, gathers": ("copy", "index", "gather", "scatter", "memcpy", "memset", "cat"),
    "norms, reductions": ("norm", "reduce", "softmax"),
    "elementwise": ("elementwise", "vectorized"),
}


def kind_of(name: str) -> str:
    """The first kind one of whose words is in the kernel's name."""
    low = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in low for word in words)), "other")


def steps(llm: LLM, lengths: list[int], decode: int) -> None:
    """One prefill of each length at once, then `decode` single-token steps."""
    llm.generate([random.choices(range(llm.model.config.vocab_size), k=n) for n in lengths], SamplingParams(decode))


def timed(llm: LLM, lengths: list[int], decode: int, repeats: int) -> dict:
    """Median seconds of the prefill step and of the decode steps."""
    prefill, decodes = [], []
    for _ in range(repeats):
        llm.reset()
        steps(llm, lengths, decode)
        prefill.append(sum(step.seconds for step in llm.steps if step.num_prefill_rows))
        decodes += [step.seconds for step in llm.steps if not step.num_prefill_rows]
    result = {"lengths": lengths, "prefill_ms": 1e3 * statistics.median(prefill)}
    if decodes:
        result["decode_ms"] = 1e3 * statistics.median(decodes)
    return result


def profiled(llm: LLM, lengths: list[int], decode: int, top: int) -> dict:
    """Device milliseconds by kind, and the largest kernels, of one such run."""
    llm.reset()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        steps(llm, lengths, decode)
        torch.cuda.synchronize()
    kinds, kernels = defaultdict(float), []
    for event in profile.key_averages():
        if event.device_time_total:
            kinds[kind_of(event.key)] += event.self_device_time_total / 1e3
            kernels.append((round(event.self_device_time_total / 1e3, 2), event.count, event.key[:110]))
    return {
        "kinds_ms": {k: round(v, 2) for k, v in sorted(kinds.items(), key=lambda kv: -kv[1])},
        "top": sorted(kernels)[::-1][:top],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="kimi_linear_48b")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--top", type=int, default=25)
    parser.add_argument("--out")
    args = parser.parse_args()
    start = time.perf_counter()
    model = build_model(args.preset, args.backend, "cuda", torch.bfloat16)
    torch.cuda.synchronize()
    print(f"weights in {time.perf_counter() - start:.1f} s, backend {model.backend.name}", flush=True)
    llm = LLM(
        model, max_num_scheduled_tokens=16384, max_model_len=16384, max_num_seqs=16, cache_memory_bytes=20 * 10**9
    )
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "backend": model.backend.name,
        "cases": [],
    }
    for lengths, decode in (([8000], 1), ([7680], 1), ([320], 1), ([512] * 16, 9)):
        case = timed(llm, lengths, decode, args.repeats)
        print(json.dumps(case), flush=True)
        result["cases"].append(case)
    for lengths, decode in (([8000], 1), ([320], 1), ([512] * 16, 9)):
        profile = profiled(llm, lengths, decode, args.top)
        print(lengths[0], len(lengths), json.dumps(profile["kinds_ms"]))
        for line in profile["top"]:
            print("   ", *line)
        result["cases"].append({"lengths": lengths, "decode": decode} | profile)
    if args.out:
        with open(args.out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
