"""Where the time of a forward goes: one prefill, its tail, and decode steps, by kind of kernel, plain and fused.

    python tools/profile_model.py --preset kimi_linear_48b --backend cuda [--out nbs/results/profile_h200.json]

Times are medians of whole engine steps; the kinds' shares come from torch's profiler in a separate run. "plain" is the
same model with the kernels of `kda_ckpt.fused` switched off.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict

import torch

from kda_ckpt import fused
from kda_ckpt.engine import LLM, SamplingParams, build_model
from kda_ckpt.model import KimiLinear

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
    """Device milliseconds and launches of one step, by kind and for the largest kernels: of the prefill, or of decoding."""
    llm.reset()
    for n in lengths:
        llm.add_request(random.choices(range(llm.model.config.vocab_size), k=n), SamplingParams(decode))
    while decode > 1 and not (llm.steps and llm.steps[-1].num_prefill_rows == 0):
        llm.step()
    before = len(llm.steps)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        while llm.has_unfinished:
            llm.step()
        torch.cuda.synchronize()
    steps = len(llm.steps) - before
    kinds, kernels = defaultdict(float), []
    for event in profile.key_averages():
        if event.device_time_total:
            ms = event.self_device_time_total / 1e3 / steps
            kinds[kind_of(event.key)] += ms
            kernels.append((round(ms, 3), event.count // steps, event.key[:110]))
    return {
        "launches": sum(kernel[1] for kernel in kernels),
        "kinds_ms": {k: round(v, 2) for k, v in sorted(kinds.items(), key=lambda kv: -kv[1])},
        "top": sorted(kernels)[::-1][:top],
    }


def measured(model: KimiLinear, repeats: int, top: int) -> list[dict]:
    """All cases, first timed, then profiled."""
    llm = LLM(model, max_num_scheduled_tokens=16384, max_model_len=16384, max_num_seqs=16, cache_memory_bytes=6 * 10**9)
    cases = []
    for lengths, decode in (([8000], 1), ([7680], 1), ([320], 1), ([512] * 16, 9)):
        timed(llm, lengths, decode, 1)  # compiles and records what it needs
        case = timed(llm, lengths, decode, repeats)
        print(json.dumps(case), flush=True)
        if lengths != [7680]:
            case |= profiled(llm, lengths, decode, top)
            print("   ", case["launches"], "launches", json.dumps(case["kinds_ms"]))
            for line in case["top"]:
                print("   ", *line)
        cases.append(case)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="kimi_linear_48b")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--top", type=int, default=25)
    parser.add_argument("--ways", nargs="+", default=["plain", "fused"], choices=["plain", "fused"])
    parser.add_argument("--out")
    args = parser.parse_args()
    start = time.perf_counter()
    model = build_model(args.preset, args.backend, "cuda", torch.bfloat16)
    torch.cuda.synchronize()
    print(f"weights in {time.perf_counter() - start:.1f} s, backend {model.backend.name}", flush=True)
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "backend": model.backend.name,
        "ways": {},
    }
    for way in args.ways:
        fused.USE_KERNELS = way == "fused"
        print(way, flush=True)
        result["ways"][way] = measured(model, args.repeats, args.top)
    if args.out:
        with open(args.out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
