"""The branches of the model that only a GPU takes: flash attention, grouped products, no host sync, CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kda_ckpt.backends import TorchBackend, get_backend
from kda_ckpt.engine import LLM, SamplingParams
from kda_ckpt.layers import decode_attention, expert_mlp, grouped_matmul, matmul_float32, prefill_attention, route
from kda_ckpt.metadata import AttentionMetadataBuilder, BatchMetadata, KDAMetadataBuilder, Row
from kda_ckpt.model import KimiLinear, allocate_caches, get_preset

pytestmark = pytest.mark.gpu
SMALL = replace(get_preset("small"), num_layers=4, full_attention_layers=(4,))


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().cpu(), b.double().cpu()
    return float((a - b).norm() / b.norm())


def build(model: KimiLinear, rows: list[Row], block_size: int = 256) -> BatchMetadata:
    """Caches for the model, and a batch in which request i runs in block 1 + i; its pages are those of block 1 + i too."""
    specs = model.kv_cache_specs(
        block_size=block_size, mamba_cache_mode="align", internal_checkpoints=False, attention_block_size=block_size
    )
    if model.layers[0].mixer.cache is None:
        model.bind_caches(allocate_caches(specs, 64, model.device))
    kda, mla = (next(spec for name, spec in specs.items() if name.endswith(kind)) for kind in ("kda", "mla"))
    states = [[1 + i] * -(-row.end // block_size) for i, row in enumerate(rows)]
    pages = [[1 + i * 8 + page for page in range(8)] for i in range(len(rows))]
    return BatchMetadata(
        KDAMetadataBuilder(kda, model.device).build(rows, states),
        AttentionMetadataBuilder(mla, model.device).build(rows, pages),
    )


def fast_backend():
    backend = get_backend("auto", "cuda")
    if backend.name == "torch":
        pytest.skip("no fast backend here")
    return backend


def test_float32_is_the_cpu():
    ids = torch.randint(8192, (700,), generator=torch.Generator().manual_seed(0))
    cpu = KimiLinear(SMALL, backend=TorchBackend(), dtype=torch.float32, device="cpu")
    gpu = KimiLinear(SMALL, backend=TorchBackend(), dtype=torch.float32, device="cuda")
    gpu.load_state_dict(cpu.state_dict())
    for rows in ([Row(0, 400)], [Row(400, 699)], [Row(699, 700)]):
        chunk = ids[rows[0].start : rows[0].end]
        assert difference(gpu(chunk.cuda(), build(gpu, rows)), cpu(chunk, build(cpu, rows))) < 1e-4


@pytest.mark.parametrize("lens_q, lens_k", [([300], [300]), ([1, 77, 200], [50, 77, 900]), ([5], [2000])])
@pytest.mark.parametrize("widths", [(192, 128), (128, 128)])
def test_flash_attention_aligns_at_the_end(lens_q, lens_k, widths):
    q, k, v = (
        torch.randn(sum(lens), 4, width)
        for lens, width in zip((lens_q, lens_k, lens_k), (widths[0], widths[0], widths[1]))
    )
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0).int() for lens in (lens_q, lens_k))
    shape = {"lens_q": lens_q, "lens_k": lens_k, "scale": 0.07}
    expected = prefill_attention(q, k, v, cu_q=cu_q, cu_k=cu_k, **shape)
    half = [x.cuda().bfloat16() for x in (q, k, v)]
    assert difference(prefill_attention(*half, cu_q=cu_q.cuda(), cu_k=cu_k.cuda(), **shape), expected) < 1e-2


def test_decode_attention():
    q, cache = torch.randn(3, 4, 576), torch.randn(9, 64, 576)
    table, lens = torch.tensor([[3, 1], [2, 0], [7, 8]], dtype=torch.int32), torch.tensor([100, 1, 128]).int()
    expected = decode_attention(q, cache, table, lens, 128, 512, 0.04)
    out = decode_attention(q.cuda().bfloat16(), cache.cuda().bfloat16(), table.cuda(), lens.cuda(), 128, 512, 0.04)
    assert difference(out, expected) < 1e-2


@pytest.mark.parametrize("count", [1, 16, 1000])
def test_grouped_experts(count):
    gen = torch.Generator().manual_seed(0)
    x, router = torch.randn(count, 128, generator=gen).bfloat16(), torch.randn(64, 128, generator=gen).bfloat16()
    gate_up, down = torch.randn(64, 128, 128, generator=gen) / 11, torch.randn(64, 128, 64, generator=gen) / 8
    chosen, weights = route(x, router, torch.zeros(64), 8, 2.0)
    expected = expert_mlp(x.float(), chosen, weights, gate_up, down)
    args = [chosen.cuda(), weights.cuda()]
    half = expert_mlp(x.cuda(), *args, gate_up.cuda().bfloat16(), down.cuda().bfloat16())
    assert difference(half, expected) < 2e-2
    assert difference(expert_mlp(x.cuda().float(), *args, gate_up.cuda(), down.cuda()), expected) < 1e-5
    assert difference(matmul_float32(x.cuda(), router.cuda().T), x.float() @ router.float().T) < 1e-5
    ends = torch.full((64,), count, dtype=torch.int32)
    ends[:7] = 0  # empty groups in front and behind
    assert difference(grouped_matmul(x.cuda(), gate_up.cuda().bfloat16(), ends.cuda()), x.float() @ gate_up[7].T) < 1e-2


def test_a_forward_never_waits_for_the_device():
    model = KimiLinear(SMALL, backend=fast_backend(), dtype=torch.bfloat16, device="cuda")
    rows = [Row(100, 101), Row(64, 200), Row(0, 300)]
    meta, ids = build(model, rows), torch.zeros(1 + 136 + 300, dtype=torch.int64, device="cuda")
    model(ids, meta)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        logits = model(ids, meta)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert logits.shape == (3, SMALL.vocab_size) and logits.isfinite().all()


def test_decode_runs_as_a_cuda_graph():
    model = KimiLinear(SMALL, backend=fast_backend(), dtype=torch.bfloat16, device="cuda")
    prompts = torch.randint(8192, (4, 100), device="cuda")
    model(prompts.flatten(), build(model, [Row(0, 100)] * 4))
    meta, ids = build(model, [Row(100, 101)] * 4), torch.tensor([1, 2, 3, 4], device="cuda")
    states = [layer.mixer.cache for layer in model.layers[:3]]
    before = [(cache.conv.clone(), cache.state.clone()) for cache in states]

    def restore():
        for cache, (conv, state) in zip(states, before):
            cache.conv.copy_(conv)
            cache.state.copy_(state)

    expected = model(ids, meta).clone()
    restore()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model(ids, meta)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(ids, meta)
    restore()
    graph.replay()
    assert difference(logits, expected) < 1e-2
    ids.copy_(torch.tensor([5, 6, 7, 8]))
    restore()
    graph.replay()
    replayed = logits.clone()
    restore()
    assert difference(replayed, model(ids, meta)) < 1e-2


def test_short_prefills_run_as_cuda_graphs():
    every = replace(SMALL, num_experts_per_token=SMALL.num_experts)  # no routing that a rounding could tip over
    model = KimiLinear(every, backend=fast_backend(), dtype=torch.bfloat16, device="cuda")
    sizes = dict(block_size=256, max_num_seqs=8, max_model_len=2048, num_blocks=200)
    plain, graphs = LLM(model, **sizes, cuda_graphs=False), LLM(model, **sizes)
    assert graphs.prefill_graphs is not None
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(8192, (4, 2000), generator=random).tolist()
    want = SamplingParams(3, return_logits=True)
    batches = [
        [tokens[0][:300]],
        [tokens[0][:256] + tokens[1][:50]],  # a hit with a tail
        [tokens[1][:511]],
        [tokens[0][:256] + tokens[2][:37]],  # the same shape, replayed with other lengths
        [tokens[2][:70], tokens[3][:90]],
        [tokens[0][:256] + tokens[3][:9], tokens[1][:400]],
        [tokens[1][:1], tokens[2][:64], tokens[3][:63]],
        [tokens[2][:1024] + tokens[1][:30]],
        [tokens[2][:1024] + tokens[0][:20]],  # a long context
        [tokens[0][:310]],
    ]
    for prompts in batches * 2:
        for ours, theirs in zip(graphs.generate(prompts, want), plain.generate(prompts, want)):
            assert ours.metrics.num_cached_tokens == theirs.metrics.num_cached_tokens
            assert difference(ours.logits[0], theirs.logits[0]) < 3e-2
    assert 3 < len(graphs.prefill_graphs._graphs) < sum(step.num_prefill_rows > 0 for step in graphs.steps)
    assert not any(lane[0].any() for lane in graphs.cache.lanes)  # nobody's row left nothing in the null block
