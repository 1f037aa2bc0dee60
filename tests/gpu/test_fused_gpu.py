"""The fused kernels on a GPU, against their plain forms in float64 on the CPU."""

from __future__ import annotations

import pytest
import torch

from kda_ckpt import fused

pytestmark = pytest.mark.gpu
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 6e-3}


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().cpu(), b.double().cpu()
    return float((a - b).norm() / b.norm())


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """The same random numbers on the GPU, in dtype, and on the CPU, in float64."""
    x = torch.randn(*shape, device="cuda").to(dtype)
    return x, x.cpu().double()


def no_sync(function, *args, **kwargs):
    """Call a function; waiting for the GPU inside is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        return function(*args, **kwargs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check(function, pairs: list, *rest, dtype: torch.dtype) -> None:
    """The function's results on the first of each pair against those on the second."""
    out = no_sync(function, *[gpu for gpu, _ in pairs], *rest)
    expected = function(*[cpu for _, cpu in pairs], *rest)
    for a, b in zip(out, expected) if isinstance(out, tuple) else [(out, expected)]:
        assert a.dtype == dtype and a.shape == b.shape and difference(a, b) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("tokens, width", [(1, 2304), (777, 2304), (50, 72), (3, 9216)])
def test_norms(tokens, width, dtype):
    x, y, weight = rand(tokens, width, dtype=dtype), rand(tokens, width, dtype=dtype), rand(width, dtype=dtype)
    check(fused.rms_norm, [x, weight], 1e-5, dtype=dtype)
    check(fused.add_rms_norm, [x, y, weight], 1e-5, dtype=dtype)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("shape", [(1, 1, 128), (301, 32, 128), (5, 3, 24)])
def test_gated_norm(shape, dtype):
    x, gate, weight = rand(*shape, dtype=dtype), rand(*shape, dtype=dtype), rand(shape[2], dtype=dtype)
    check(fused.gated_rms_norm, [x, gate, weight], 1e-5, dtype=dtype)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("rows, width", [(1, 1024), (2501, 1024), (7, 9216), (33, 40)])
def test_swiglu(rows, width, dtype):
    check(fused.swiglu, [rand(rows, 2 * width, dtype=dtype)], dtype=dtype)
    check(fused.swiglu, [rand(rows, 2 * width, dtype=dtype), rand(rows)], dtype=dtype)


@pytest.mark.parametrize("tokens", [1, 9, 64, 65, 320, 8000, 16384])
@pytest.mark.parametrize("num_experts, top_k", [(256, 8), (16, 4), (24, 3)])
def test_router_and_sort(tokens, num_experts, top_k):
    logits, bias = torch.randn(tokens, num_experts, device="cuda"), torch.randn(num_experts, device="cuda")
    experts, weights = no_sync(fused.choose_experts, logits, bias, top_k, 2.5)
    plain, kept = fused.choose_experts(logits.cpu(), bias.cpu(), top_k, 2.5)
    dense, dense2 = (torch.zeros(tokens, num_experts) for _ in range(2))
    dense.scatter_(1, experts.cpu(), weights.cpu()), dense2.scatter_(1, plain, kept)
    assert ((dense - dense2).abs().amax(1) > 1e-4).sum() <= 2  # tokens whose k-th and next score differ in the last bit
    places, ends = no_sync(fused.sort_by_expert, experts, num_experts)
    places2, ends2 = fused.sort_by_expert(experts.cpu(), num_experts)
    assert torch.equal(places.cpu(), places2) and torch.equal(ends.cpu(), ends2)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("tokens, width", [(1, 2304), (500, 2304), (70, 40)])
def test_there_and_back(tokens, width, dtype):
    experts = torch.rand(tokens, 64).topk(8).indices
    places, _ = fused.sort_by_expert(experts, 64)
    (x, x64), (w, w64) = rand(tokens, width, dtype=dtype), rand(tokens, 8)
    rows, scale = no_sync(fused.scatter_rows, x, w, places.cuda())
    rows64, scale64 = fused.scatter_rows(x64, w64, places)
    assert torch.equal(rows.cpu().double(), rows64) and torch.equal(scale.cpu().double(), scale64)
    extra = [rand(tokens, width, dtype=dtype) for _ in range(2)]
    for n in range(3):
        out = no_sync(fused.combine_rows, rows, places.cuda(), *[gpu for gpu, _ in extra[:n]])
        assert difference(out, fused.combine_rows(rows64, places, *[cpu for _, cpu in extra[:n]])) < LIMITS[dtype]


@pytest.mark.parametrize("tokens", [1, 30, 320, 2000, 5000])
@pytest.mark.parametrize("hidden, width", [(256, 192), (72, 40)])
def test_grouped(tokens, hidden, width):
    weight, down = (rand(32, *shape, dtype=torch.bfloat16)[0] for shape in ((2 * width, hidden), (hidden, width)))
    (x, _), scale = rand(tokens * 4, hidden, dtype=torch.bfloat16), torch.rand(tokens * 4, device="cuda")
    chosen = torch.rand(tokens, 32, device="cuda").topk(4).indices
    chosen[chosen == 7] = 8  # one group is empty, one has twice its share
    ends = torch.bincount(chosen.flatten(), minlength=32).cumsum(0).int()
    groups = [rows.double() for rows in x.tensor_split(ends.cpu().long()[:-1])]
    expected = torch.cat([rows @ w.double().T for rows, w in zip(groups, weight)])
    out = no_sync(fused.grouped_triton, x, weight, ends, scale)
    assert difference(out, fused.swiglu(expected.cpu(), scale.cpu().double())) < 6e-3
    groups = [rows.double() for rows in out.tensor_split(ends.cpu().long()[:-1])]
    expected = torch.cat([rows @ w.double().T for rows, w in zip(groups, down)])
    assert difference(no_sync(fused.grouped_triton, out, down, ends), expected) < 6e-3


@pytest.mark.parametrize("dtype", LIMITS)
def test_states(dtype):
    pages = torch.zeros(9, 3000, device="cuda")  # strided slots, as the engine's lanes have them
    state = pages[:, :2048].view(9, 2, 32, 32).normal_()
    conv = pages.view(dtype)[:, -100:-40].view(9, 20, 3).normal_()
    slots = torch.tensor([4, 0, 7], device="cuda")
    windows, states = no_sync(fused.read_states, conv, state, slots)
    assert not windows[1].any() and not states[1].any()
    assert torch.equal(windows[::2], conv[[4, 7]]) and torch.equal(states[::2], state[[4, 7]])
    before = pages.clone()
    no_sync(fused.write_states, conv, state, windows + 1, states + 1, torch.tensor([1, 2, 3], device="cuda"))
    assert torch.equal(conv[1:4], windows + 1) and torch.equal(state[1:4], states + 1)
    assert torch.equal(pages[4:], before[4:]) and torch.equal(pages[0], before[0])


@pytest.mark.parametrize("dtype", LIMITS)
def test_latents(dtype):
    wide, wide64 = rand(300, 700, dtype=dtype)
    weight, weight64 = rand(512, dtype=dtype)
    pages = torch.zeros(8, 64 * 576 + 64, device="cuda", dtype=dtype)
    cache, cache64 = pages[:, : 64 * 576].view(8, 64, 576), torch.zeros(8, 64, 576, dtype=torch.float64)
    slots = torch.randperm(7 * 64)[:300] + 64
    out = no_sync(fused.store_latents, wide[:, 60:572], wide[:, 572:636], weight, 1e-5, cache, slots.cuda())
    expected = fused.store_latents(wide64[:, 60:572], wide64[:, 572:636], weight64, 1e-5, cache64, slots)
    assert difference(out, expected) < LIMITS[dtype] and difference(cache, cache64) < LIMITS[dtype]
    table, lens = torch.tensor([[3, 1, 2], [7, 0, 0], [5, 6, 0]], dtype=torch.int32), [150, 1, 128]
    cu = torch.tensor([0, *lens]).cumsum(0).int()
    packed = no_sync(fused.context_latents, cache, table.cuda(), cu.cuda(), lens)
    assert torch.equal(packed.cpu(), fused.context_latents(cache.cpu(), table, cu, lens))


def attention(q, k, v, scale):
    """Masked softmax attention in float64."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril(k.shape[1] - q.shape[1])
    return ((q @ k.mT * scale).masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize(
    "lens_q, lens_k", [([300], [300]), ([1, 77, 200], [50, 77, 900]), ([5], [2000]), ([130], [257])]
)
@pytest.mark.parametrize("nope, rope, v", [(128, 64, 128), (32, 16, 64)])
def test_latent_attention(lens_q, lens_k, nope, rope, v):
    heads, (tq, tk) = 4, (sum(lens_q), sum(lens_k))
    wide = torch.randn(tq, heads * (nope + rope) + 64, device="cuda").bfloat16()
    q = wide[:, :-64].view(tq, heads, nope + rope)
    kv, latents = rand(tk, heads, nope + v, dtype=torch.bfloat16)[0], rand(tk, 512 + rope, dtype=torch.bfloat16)[0]
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0).int().cuda() for lens in (lens_q, lens_k))
    starts = {"cu_q": cu_q, "cu_k": cu_k, "max_query_len": max(lens_q), "scale": 0.07}
    out = no_sync(fused.latent_attention, q, kv, latents[:, 512:], **starts)
    k = torch.cat([kv[..., :nope], latents[:, None, 512:].expand(-1, heads, -1)], -1)
    rows = zip(q.split(lens_q), k.split(lens_k), kv[..., nope:].split(lens_k))
    assert difference(out, torch.cat([attention(*row, 0.07) for row in rows])) < 6e-3


@pytest.mark.parametrize("heads, lens", [(32, [150, 1, 192]), (4, [7]), (32, [1] * 40 + [190])])
def test_paged_attention(heads, lens):
    cache, q = rand(60, 64, 576, dtype=torch.bfloat16)[0], rand(len(lens), heads, 576, dtype=torch.bfloat16)[0]
    table = torch.randint(1, 60, (len(lens), 3), dtype=torch.int32, device="cuda")
    seq_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    for longest in (192, 5000):  # the longest sequence is only a bound
        out = no_sync(fused.paged_attention, q, cache, table, seq_lens, longest, 512, 0.04)
        for i, length in enumerate(lens):
            latents = cache[table[i].long()].flatten(0, 1)[:length]
            assert difference(out[i], attention(q[i : i + 1], *[latents[:, None]] * 2, 0.04)[0, :, :512]) < 6e-3
