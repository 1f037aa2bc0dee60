"""What the bookkeeping of a step costs on the host, ours beside vLLM's managers where vLLM can be imported.

    python tools/bench_bookkeeping.py [--running 1 16 256] [--steps 40]

A step: one new prompt of 8000 tokens (hash, lookup, split, allocate), one decode token for each running request (allocate),
and the oldest request leaves (free). Every other prompt shares its first 6144 tokens. Mamba blocks of 1536 tokens with a
checkpoint, attention blocks of 16. Processor time in µs, medians over steps. Written to nbs/results/bookkeeping.json.
"""

from __future__ import annotations

import argparse
import gc
import importlib.abc
import importlib.machinery
import json
import platform
import random
import statistics
import sys
import time
import types
from collections import deque
from pathlib import Path

import torch

from kda_ckpt.blocks import extend_hashes
from kda_ckpt.manager import KVCacheManager
from kda_ckpt.scheduler import Request, mamba_block_aligned_split
from kda_ckpt.spec import MambaSpec, MLAAttentionSpec

RESULT = Path(__file__).resolve().parent.parent / "nbs/results/bookkeeping.json"
PROMPT, SHARED, BLOCK, ATTENTION_BLOCK, BUDGET = 8000, 6144, 1536, 16, 8192


def pool_blocks(running: int) -> int:
    """Enough for all running requests, and some to be found again."""
    return (running + 8) * (PROMPT // ATTENTION_BLOCK + 24)


class Ours:
    """kda-ckpt's managers."""

    name = "kda-ckpt"

    def __init__(self, running: int) -> None:
        self.mamba = MambaSpec(
            block_size=BLOCK, shapes=((12, 128, 128),), dtypes=(torch.float32,), num_prefill_checkpoint_blocks=1
        )  # fmt: skip
        attention = MLAAttentionSpec(block_size=ATTENTION_BLOCK, head_size=576, dtype=torch.bfloat16)
        self.manager = KVCacheManager([attention, self.mamba], pool_blocks(running))

    def create(self, name: str, tokens: list[int]) -> Request:
        request = Request(name, tokens, max_tokens=1 << 20)
        extend_hashes(request.block_hashes, request.token_ids, ATTENTION_BLOCK)
        return request

    def begin_step(self) -> None:
        self.manager.begin_step()

    def start(self, request: Request) -> int:
        hit = self.manager.lookup(request)
        request.num_computed_tokens = hit.length
        while request.num_computed_tokens < PROMPT:
            tokens = mamba_block_aligned_split(
                self.mamba, start=request.num_computed_tokens, num_new_tokens=PROMPT - request.num_computed_tokens,
                num_prompt_tokens=PROMPT, num_tokens=PROMPT, max_step_tokens=BUDGET, checkpoints=True,
                junction=hit.junction, hash_block_size=ATTENTION_BLOCK,
            )  # fmt: skip
            assert self.manager.allocate(request, tokens, hit)
            request.num_computed_tokens += tokens
        return hit.length

    def decode(self, request: Request) -> None:
        request.token_ids.append(7)
        assert self.manager.allocate(request, 1)
        request.num_computed_tokens += 1

    def end_step(self) -> None:
        self.manager.take_copies()

    def free(self, request: Request) -> None:
        self.manager.free(request)


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules for optional packages that vLLM imports and its managers do not use."""

    names = ("xgrammar", "llguidance", "outlines_core")

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda attribute: type(attribute, (), {})
        return module

    def exec_module(self, module):
        pass


class Vllm:
    """vLLM's managers and its split."""

    name = "vLLM"

    def __init__(self, running: int) -> None:
        sys.meta_path.append(StandIns())
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
        from vllm.v1.request import Request

        kv_cache_utils.init_none_hash(sha256)
        self.hasher = kv_cache_utils.get_request_block_hasher(ATTENTION_BLOCK, sha256)
        self.request_class, self.params = Request, SamplingParams(max_tokens=1 << 20)
        mamba = MambaSpec(
            block_size=BLOCK, shapes=((12, 128, 128),), dtypes=(torch.float32,), mamba_cache_mode="align",
            num_prefill_checkpoint_blocks=1,
        )  # fmt: skip
        attention = FullAttentionSpec(block_size=ATTENTION_BLOCK, num_kv_heads=1, head_size=288, dtype=torch.bfloat16)
        config = KVCacheConfig(
            num_blocks=pool_blocks(running), kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["attention"], attention), KVCacheGroupSpec(["kda"], mamba)],
        )  # fmt: skip
        self.manager = KVCacheManager(
            config, max_model_len=1 << 15, scheduler_block_size=BLOCK, hash_block_size=ATTENTION_BLOCK,
            max_in_flight_tokens=BUDGET,
        )  # fmt: skip
        self.split = Scheduler._mamba_block_aligned_split
        self.scheduler = types.SimpleNamespace(
            cache_config=types.SimpleNamespace(block_size=BLOCK), block_size=BLOCK, hash_block_size=ATTENTION_BLOCK,
            scheduler_config=types.SimpleNamespace(long_prefill_token_threshold=0), max_num_scheduled_tokens=BUDGET,
            mamba_has_prefill_checkpoint_blocks=True, mamba_prefill_checkpoint_alignment=1, mamba_partial_cache_hit=False,
            mamba_shared_prefix_checkpoint=False, use_eagle_block_drop=False, num_hash_lookahead_tokens=0,
        )  # fmt: skip

    def create(self, name: str, tokens: list[int]):
        return self.request_class(name, tokens, self.params, None, block_hasher=self.hasher)

    def begin_step(self) -> None:
        self.manager.new_step_starts()

    def start(self, request) -> int:
        blocks, hit, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
        found, new = hit, (hit, blocks)
        while found < PROMPT:
            tokens = self.split(self.scheduler, request, PROMPT - found, found - request.num_computed_tokens)
            assert self.manager.allocate_slots(request, tokens, *new) is not None
            found = request.num_computed_tokens = found + tokens
            new = ()
        return hit

    def decode(self, request) -> None:
        request.append_output_token_ids(7)
        assert self.manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1

    def end_step(self) -> None:
        take = getattr(self.manager, "take_new_block_ids", None)
        if take:
            take()

    def free(self, request) -> None:
        self.manager.free(request)


def measure(side, running: int, steps: int) -> dict:
    """Medians over steps, in µs of processor time: per step, per prompt, per running request."""
    rng, queue, clock = random.Random(0), deque(), time.process_time
    system = side(running)
    shared = [rng.randrange(1 << 17) for _ in range(SHARED)]
    parts: dict[str, list[float]] = {key: [] for key in ("hash", "prompt", "decode", "free", "step")}
    found = []
    gc.collect()
    gc.disable()
    for index in range(max(4, running) + steps):
        start = SHARED if index % 2 else 0
        tokens = shared[:start] + [rng.randrange(1 << 17) for _ in range(PROMPT - start)]
        marks = [clock()]
        request = system.create(str(index), tokens)
        marks.append(clock())
        system.begin_step()
        found.append(system.start(request))
        marks.append(clock())
        for other in queue:
            system.decode(other)
        system.end_step()
        marks.append(clock())
        queue.append(request)
        if len(queue) > running:
            system.free(queue.popleft())
        marks.append(clock())
        if index >= max(4, running):
            for key, a, b in zip(("hash", "prompt", "decode", "free"), marks, marks[1:]):
                parts[key].append(1e6 * (b - a))
            parts["step"].append(1e6 * (marks[-1] - marks[0]))
    gc.enable()
    assert set(found[-2:]) == {0, SHARED}, found
    return {"running": running, **{f"{key}_us": round(statistics.median(values), 1) for key, values in parts.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "ours": [], "vllm": []}
    for side, key in ((Ours, "ours"), (Vllm, "vllm")):
        for running in args.running:
            try:
                row = measure(side, running, args.steps)
            except ImportError as error:
                print(f"{side.name}: skipped, {error}")
                break
            result[key].append(row)
            print(
                f"{side.name:8} {running:4} running: {row['step_us']:9.0f} µs/step = hash {row['hash_us']:.0f} + lookup, split, "
                f"allocate {row['prompt_us']:.0f} + decode {row['decode_us']:.0f} + free {row['free_us']:.0f}", flush=True
            )  # fmt: skip
    for ours, theirs in zip(result["ours"], result["vllm"]):
        print(f"{ours['running']:4} running: {theirs['step_us'] / ours['step_us']:.1f} times less than vLLM")
    if result["vllm"]:
        import vllm

        result["vllm_version"] = vllm.__version__
    if not args.no_write:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
