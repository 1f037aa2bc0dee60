"""The fused kernels in Triton's interpreter, against their plain forms. The interpreter wants a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

CHECK = """
import torch
from kda_ckpt import fused

def difference(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())

def same(a, b):
    return all(difference(x, y) < LIMIT for x, y in zip(a, b))

torch.manual_seed(0)
DTYPE, LIMIT = getattr(torch, "{dtype}"), {limit}
rand = lambda *shape: torch.randn(*shape).to(DTYPE)
for tokens, width in ((1, 16), (5, 72), (3, 300)):
    x, y, w = rand(tokens, width), rand(tokens, width), rand(width)
    assert same(fused.rms_norm_triton(x, y, w, 1e-5), fused.add_rms_norm(x, y, w, 1e-5))
    z = rand(tokens, 2 * width)
    scale = torch.rand(tokens)
    assert same([fused.swiglu_triton(z, None), fused.swiglu_triton(z, scale)], [fused.swiglu(z), fused.swiglu(z, scale)])
for shape in ((1, 1, 16), (7, 3, 24), (17, 1, 32)):
    x, gate, w = rand(*shape), rand(*shape), rand(shape[2])
    assert same([fused.gated_rms_norm_triton(x, gate, w, 1e-5)], [fused.gated_rms_norm(x, gate, w, 1e-5)])
for tokens, num_experts, top_k in ((1, 4, 1), (20, 5, 5), (65, 24, 3), (130, 256, 8)):
    logits, bias = torch.randn(tokens, num_experts), torch.randn(num_experts)
    experts, weights = fused.choose_experts_triton(logits, bias, top_k, 2.5)
    plain, kept = fused.choose_experts(logits, bias, top_k, 2.5)
    dense = torch.zeros(2, tokens, num_experts)
    dense[0].scatter_(1, experts, weights), dense[1].scatter_(1, plain, kept)
    assert difference(*dense) < 1e-5
    places, ends = fused.sort_by_expert(experts, num_experts)
    assert all(torch.equal(*pair) for pair in zip(fused.sort_by_expert_triton(experts, num_experts), (places, ends)))
    x, shared, residual = rand(3, tokens, 40)
    rows, scale = fused.scatter_rows(x, weights, places)
    assert all(torch.equal(*pair) for pair in zip(fused.scatter_rows_triton(x, weights, places), (rows, scale)))
    for extra in ((None, None), (shared, None), (None, residual), (shared, residual)):
        assert difference(fused.combine_rows_triton(rows, places, *extra), fused.combine_rows(rows, places, *extra)) < LIMIT
"""


@pytest.mark.parametrize("dtype, limit", [("float32", 1e-5), ("float16", 2e-3)])
def test_interpreted(dtype, limit):
    code = CHECK.replace("{dtype}", dtype).replace("{limit}", str(limit))
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
