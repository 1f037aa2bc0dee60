"""The arithmetic of tools/profile_model.py by hand, and its measurements on a small model without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import profile_model
from bounds import bound, expert_statistics, operations, traffic
from gpu_machine import facts

from kda_ckpt import fused, layers
from kda_ckpt.engine import LLM
from kda_ckpt.metadata import Row
from kda_ckpt.model import get_preset

TINY = get_preset("tiny")
ROWS = [Row(10, 11), Row(0, 3)]  # one token after ten, and a prompt of three
RATES = {"copy_gbs": 4000.0, "matmul_tflops": 800.0}
# numbers in the tiny preset's weights
KDA = 452 * 128 + 384 * 4 + 2 * 128 * 32 + 4 + 4 * 32 + 32 + 128 * 128
MLA = 200 * 128 + 64 + 4 * (24 + 32) * 64 + 128 * 128
NORMS = 4 * 2 * 128 + 128
DENSE_FFN = 2 * 256 * 128 + 128 * 256
ROUTER_AND_SHARED = 8 * 128 + 8 + 2 * 64 * 128 + 128 * 64
EXPERT = 2 * 64 * 128 + 128 * 64
OUTPUT = 256 * 128
DENSE = 3 * KDA + MLA + NORMS + DENSE_FFN + 3 * ROUTER_AND_SHARED
FLOAT32 = 3 * (4 + 4 * 32 + 8)  # A_log, dt_bias, router_bias


def test_operations_by_hand():
    assert operations(TINY, ROWS) == {
        "weights": 2 * 4 * (DENSE + 3 * 2 * EXPERT) + 2 * 2 * OUTPUT,
        "attention": 2 * 4 * ((64 + 64 + 8) * 11 + (24 + 8 + 32) * (1 + 2 + 3)),
        "recurrence": 4 * 3 * 4 * 3 * 2 * 32 * 32,
    }
    assert sum(operations(TINY, ROWS).values()) == 5191200 + 15040 + 294912


def test_a_continued_chunk_attends_to_what_came_before():
    whole, halves = operations(TINY, [Row(0, 20)]), [operations(TINY, [row]) for row in (Row(0, 12), Row(12, 20))]
    assert whole["attention"] == sum(half["attention"] for half in halves)


def test_traffic_by_hand():
    state, latent = 4 * 32 * 32 * 4 + 384 * 3 * 2, (64 + 8) * 2
    assert traffic(TINY, ROWS, touched=9, checkpoints=1) == {
        "dense_weights": 2 * (DENSE + OUTPUT) + 2 * FLOAT32 + 4 * 128 * 2,
        "expert_weights": 9 * EXPERT * 2,
        "cache_read": 3 * state + 10 * latent,
        "cache_written": (2 + 1) * 3 * state + 4 * latent,
    }
    assert sum(traffic(TINY, ROWS, 9, 1).values()) == 1037520 + 442368 + 57504 + 168768


@pytest.mark.parametrize("itemsize", [2, 4])
def test_with_all_experts_touched_all_weights_are_read(itemsize):
    moved = traffic(TINY, [Row(0, 1)], touched=3 * 8, itemsize=itemsize)
    weights = itemsize * (TINY.num_parameters() - FLOAT32 - OUTPUT) + 4 * FLOAT32  # all but the embedding
    assert moved["dense_weights"] + moved["expert_weights"] == weights + 128 * itemsize


def test_bound_is_the_larger_time():
    found = bound(flops=1_600_000_000, moved=4_000_000, step_ms=0.008, **RATES)
    assert found["compute_ms"] == 0.002 and found["memory_ms"] == 0.001
    assert (found["bound_ms"], found["bound_by"], found["step_over_bound"]) == (0.002, "operations", 4)
    assert (found["tflops"], found["matmul_share"], found["gbs"]) == (200, 0.25, 500)
    found = bound(flops=1_600_000_000, moved=40_000_000, step_ms=0.02, **RATES)
    assert (found["bound_ms"], found["bound_by"], found["step_over_bound"]) == (0.01, "bytes", 2)


def test_expert_statistics_by_hand():
    counts = torch.tensor([[4, 0, 2, 2], [1, 3, 4, 0], [4, 4, 0, 0]])  # four tokens with two experts each
    assert expert_statistics(counts, 2) == {
        "tokens": 4,
        "layers": 3,
        "experts": 4,
        "touched": {"mean": 2.67, "min": 2, "max": 3},
        "uniform_touched": 3.75,
        "tokens_per_expert": 2.0,
        "tokens_per_touched_expert": 3.0,
        "busiest": {"mean": 4, "min": 4, "max": 4},
        "touched_by_layer": [3, 3, 2],
        "busiest_by_layer": [4, 4, 4],
    }


def test_machine_facts_name_the_commit(monkeypatch):
    monkeypatch.setenv("KDA_CKPT_COMMIT", "abc123")
    assert facts()["commit"] == "abc123"
    assert facts().keys() == {"gpu", "torch", "triton", "cuda", "python", "commit", "date"}


def test_experts_are_watched_without_any_graph():
    """Also those of a short prefill, which would replay a graph."""

    def replayed(*args):
        pytest.fail("a graph was replayed")

    replayed.takes = lambda meta: True
    llm = LLM("tiny", device="cpu", backend="torch", block_size=32)
    llm.decode_graphs = llm.prefill_graphs = replayed
    profile_model.begin(llm, [20], 1)
    assert profile_model.expert_counts(llm).sum() == 3 * 20 * 2
    assert llm.decode_graphs is llm.prefill_graphs is replayed


def test_profile_on_the_cpu(monkeypatch):
    monkeypatch.setattr(fused, "USE_KERNELS", fused.USE_KERNELS)
    choose, saved = layers.choose_experts, []
    llm = LLM("tiny", device="cpu", backend="torch", block_size=32, max_num_scheduled_tokens=128, max_num_seqs=4)
    result = RATES | profile_model.describe(llm, "tiny") | {"ways": {}}
    cases = (("prefill", [100]), ("prefill", [20] * 4), ("decode", [90] * 4), ("decode", [50]), ("prefill", [200]))

    def save():
        saved.append(json.loads(json.dumps(result)))

    assert not profile_model.measured(llm, cases, result, "fused", 2, 5, save)
    assert layers.choose_experts is choose
    assert [len(each["ways"]["fused"]) for each in saved] == [1, 2, 3, 4, 5]
    one, four, decode, single, failed = saved[-1]["ways"]["fused"]
    assert "more than one step" in failed["error"]
    assert [case["tokens"] for case in (one, four, decode, single)] == [100, 80, 4, 1]
    assert one["checkpoints"] == 1 and one["prefill_ms"] > 0 and one["experts"]["tokens"] == 100
    assert "prefill_ms" not in decode and decode["decode_ms"] > 0
    assert decode["range_ms"][0] <= decode["decode_ms"] <= decode["range_ms"][1]
    assert single["experts"]["touched"] == {"mean": 2, "min": 2, "max": 2}
    assert sum(single["experts"]["touched_by_layer"]) * EXPERT * 4 == single["bytes"]["expert_weights"]
    assert one["experts"]["layers"] == decode["experts"]["layers"] == 3
    assert four["bytes"]["cache_read"] == 0 < decode["bytes"]["cache_read"]
