"""The layers and the model, more broadly than their chapters check them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F

from kda_ckpt.backends import TorchBackend
from kda_ckpt.layers import (
    KDACache,
    KDALayer,
    MLACache,
    MLALayer,
    ModelConfig,
    MoE,
    SeededWeights,
    expert_mlp,
    matmul_float32,
    parameter_shapes,
    prefill_attention,
    rms_norm,
    route,
    row_attention,
    spread_gates,
    swiglu,
    time_constants,
)
from kda_ckpt.metadata import AttentionMetadataBuilder, BatchMetadata, KDAMetadataBuilder, Row
from kda_ckpt.model import PRESETS, KimiLinear, allocate_caches, get_preset
from kda_ckpt.reference import causal_conv1d_reference, kda_recurrent

TINY = get_preset("tiny")
MICRO = replace(TINY, hidden_size=48, num_heads=3, head_dim=16, moe_intermediate_size=24, vocab_size=97)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def tokens(count: int, seed: int = 0, vocab: int = 97) -> torch.Tensor:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed))


class Bench:
    """A model with caches of its own, and rows by hand: each request has its running block and its pages."""

    def __init__(self, config: ModelConfig = MICRO, block_size: int = 16, dtype=torch.float32, seed: int = 0) -> None:
        self.model = KimiLinear(config, backend=TorchBackend(), dtype=dtype, device="cpu", seed=seed)
        self.specs = self.model.kv_cache_specs(
            block_size=block_size, mamba_cache_mode="align", internal_checkpoints=True, attention_block_size=8
        )
        self.model.bind_caches(allocate_caches(self.specs, 128, "cpu"))
        self.block_size = block_size
        kda = next(spec for name, spec in self.specs.items() if name.endswith("kda"))
        mla = next((spec for name, spec in self.specs.items() if name.endswith("mla")), None)
        self.plain = KDAMetadataBuilder(replace(kda, num_prefill_checkpoint_blocks=0))
        self.exporting = KDAMetadataBuilder(kda)
        self.attention = AttentionMetadataBuilder(mla)

    def run(
        self, chunks: list[tuple[int, torch.Tensor, int, int]], saved: dict[int, int] | None = None
    ) -> torch.Tensor:
        """chunks: (request, its tokens, start, end). saved: block for a request's checkpoint or the state it starts from."""
        saved = saved or {}
        rows = [Row(start, end) for _, _, start, end in chunks]
        states, pages = [], []
        for request, _, start, end in chunks:
            table = [1 + request] * -(-end // self.block_size)
            if request in saved:
                column = start // self.block_size if start else end // self.block_size
                table[column - 1] = saved[request]
            states.append(table)
            pages.append([1 + request * 12 + page for page in range(12)])
        builder = (
            self.exporting if any(rows[i].start == 0 for i in range(len(rows)) if chunks[i][0] in saved) else self.plain
        )
        meta = BatchMetadata(builder.build(rows, states), self.attention.build(rows, pages))
        return self.model(torch.cat([ids[start:end] for _, ids, start, end in chunks]), meta)


# ---- configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", [f for f, v in asdict(TINY).items() if isinstance(v, int)])
@pytest.mark.parametrize("value", [-1, "4", 2.0, True, None])
def test_integer_fields_refuse(field, value):
    with pytest.raises((ValueError, TypeError), match=f"{field} is {value!r}"):
        replace(TINY, **{field: value})


@pytest.mark.parametrize(
    "field, value, allowed",
    [
        ("lower_bound", 0.0, "None or in"),
        ("lower_bound", -5.1, "None or in"),
        ("lower_bound", math.nan, "None or in"),
        ("lower_bound", "low", "a number"),
        ("routed_scaling_factor", 0.0, "positive and finite"),
        ("routed_scaling_factor", math.inf, "positive and finite"),
        ("rms_norm_eps", 0.0, "between 0 and 1"),
        ("rms_norm_eps", None, "a number"),
        ("num_experts_per_token", 9, "at most num_experts = 8"),
        ("first_dense_layers", 5, "at most num_layers = 4"),
        ("full_attention_layers", (0,), "from 1 to"),
        ("full_attention_layers", (5,), "from 1 to"),
        ("full_attention_layers", (4, 4), "increasing"),
        ("full_attention_layers", (4, 2), "increasing"),
        ("full_attention_layers", [4], "a tuple of integers"),
        ("full_attention_layers", ("4",), "a tuple of integers"),
        ("conv_width", 1, "at least 2"),
    ],
)
def test_other_fields_refuse(field, value, allowed):
    with pytest.raises((ValueError, TypeError), match=f"(?s){field} is .*{allowed}"):
        replace(TINY, **{field: value})


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_a_file(tmp_path, name):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(asdict(PRESETS[name])))
    assert ModelConfig.from_file(path) == ModelConfig.from_file(str(path)) == PRESETS[name]


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "must hold JSON"),
        ("[1]", "one JSON object, not a list"),
        (json.dumps({"hidden": 3}), "unknown fields hidden"),
        (json.dumps({"hidden_size": 3}), "lacks the fields first_dense_layers"),
        (json.dumps({**asdict(TINY), "num_heads": 0}), "num_heads is 0"),
    ],
)
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_file(path)


def test_missing_file_and_preset(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.json.* must be a readable JSON file"):
        ModelConfig.from_file(tmp_path / "nowhere.json")
    with pytest.raises(ValueError, match="preset is 'big'; it must be one of tiny, small, kimi_linear_48b"):
        get_preset("big")


def test_published_shape():
    big = get_preset("kimi_linear_48b")
    assert big.num_layers == 27 and sum(big.is_full_attention) == 7 and big.is_full_attention[26]
    assert 48e9 < big.num_parameters() < 50e9 and 3e9 < big.active_parameters() < 3.2e9


# ---- weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_depend_on_the_seed_alone(dtype):
    one, two = (KimiLinear(MICRO, backend=TorchBackend(), dtype=dtype, device="cpu", seed=3) for _ in range(2))
    other = KimiLinear(MICRO, backend=TorchBackend(), dtype=dtype, device="cpu", seed=4)
    shapes = parameter_shapes(MICRO)
    assert {name: tuple(p.shape) for name, p in one.named_parameters()} == shapes
    for name, p in one.named_parameters():
        assert torch.equal(p, dict(two.named_parameters())[name]), name
        assert name.endswith("norm") or not torch.equal(p, dict(other.named_parameters())[name]), name
        assert p.isfinite().all() and not p.requires_grad


@pytest.mark.parametrize("bound", [-5.0, -0.5, -0.01, None])
@pytest.mark.parametrize("heads", [1, 2, 32])
def test_gates_span_fast_to_slow(bound, heads):
    A_log, dt_bias = spread_gates(heads, 64, bound, torch.Generator().manual_seed(1))
    tau = time_constants(A_log, dt_bias, torch.zeros(heads, 64), bound)
    assert tau.isfinite().all() and (tau > 0).all()
    median = tau.median(1).values
    if heads > 1:
        assert median.max() > 2000
        assert median.min() < (2 if bound is None or bound == -5 else 1.3 / -bound + 2)


# ---- the KDA layer -----------------------------------------------------------------------------------------------


def kda_layer(config=MICRO, block_size=8, backend=None, strided=False):
    layer = KDALayer(config, "layers.0.kda", SeededWeights(0, torch.float32, "cpu"), backend or TorchBackend())
    spec = layer.get_kv_cache_spec(block_size=block_size, mamba_cache_mode="align", internal_checkpoints=True)
    if strided:  # two layers' caches side by side in one pool, and junk where nothing was written
        sizes = [math.prod(shape) for shape in spec.shapes]
        pool = torch.full((20, sum(sizes) + 5), math.nan)
        conv, state, _ = pool.split([*sizes, 5], dim=1)
        layer.cache = KDACache(conv.unflatten(1, spec.shapes[0]), state.unflatten(1, spec.shapes[1]))
    else:
        layer.cache = KDACache(*(torch.zeros(20, *shape) for shape in spec.shapes))
    return layer, KDAMetadataBuilder(spec)


def oracle(layer: KDALayer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, final window and final state of one sequence in float64, from the reference's token-by-token recurrence."""
    w, config = {name: p.double() for name, p in layer.named_parameters()}, layer.config
    heads, dim, cu = config.num_heads, config.head_dim, torch.tensor([0, len(x)])
    qkv, f, g, beta = F.linear(x.double(), w["in_proj"]).split(layer.sizes, -1)
    y, window = causal_conv1d_reference(qkv, w["conv_weight"], cu_seqlens=cu)
    q, k, v = y.double().view(-1, 3, heads, dim).unbind(1)
    gate = F.linear(f, w["f_b"]).view(-1, heads, dim)
    out = kda_recurrent(
        q, k, v, gate, beta, A_log=w["A_log"], dt_bias=w["dt_bias"], lower_bound=config.lower_bound, cu_seqlens=cu
    )
    normed = F.rms_norm(out.out, (dim,), w["o_norm"], config.rms_norm_eps)
    gated = normed * F.linear(g, w["g_b"]).view(-1, heads, dim).sigmoid()
    return F.linear(gated.flatten(1), w["o_proj"]), window[0], out.final_state[0]


@pytest.mark.parametrize("bound", [-5.0, -1.0, None])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 40])
def test_kda_layer_is_the_reference(bound, length):
    layer, builder = kda_layer(replace(MICRO, lower_bound=bound), strided=True)
    x = torch.randn(length, MICRO.hidden_size, generator=torch.Generator().manual_seed(0))
    pages = -(-length // 8)
    out = layer(x, builder.build([Row(0, length)], [[2] * (pages - 1) + [1]]))
    expected, window, state = oracle(layer, x)
    assert difference(out, expected) < 1e-5
    assert difference(layer.cache.conv[1], window) < 1e-6 and difference(layer.cache.state[1], state) < 1e-5


@pytest.mark.parametrize("length, block_size", [(9, 8), (15, 8), (20, 16), (17, 16), (50, 32), (50, 1), (11, 3)])
def test_checkpoint_is_the_state_of_stopping_there(length, block_size):
    layer, builder = kda_layer(block_size=block_size, strided=True)
    x = torch.randn(length, MICRO.hidden_size, generator=torch.Generator().manual_seed(1))
    at = length - length % block_size
    columns = -(-length // block_size)
    table = [0] * columns
    table[-1] = 1
    if at < length:
        table[-2] = 7
    untouched = layer.cache.state.clone()
    layer(x, builder.build([Row(0, length)], [table]))
    written = {1} if at == length else {1, 7}
    changed = {slot for slot in range(20) if not torch.equal(layer.cache.state[slot].isnan(), untouched[slot].isnan())}
    assert changed == written
    _, window, state = oracle(layer, x[:at])
    slot = 1 if at == length else 7
    assert difference(layer.cache.conv[slot], window) < 1e-6 and difference(layer.cache.state[slot], state) < 1e-5


def test_mixed_batch_is_each_row_alone():
    layer, builder = kda_layer(strided=True)
    xs = [torch.randn(30, MICRO.hidden_size, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    for i, end in ((0, 11), (1, 16), (2, 5)):  # three sequences have a past, in blocks 1, 2, 3
        layer(xs[i][:end], builder.build([Row(0, end)], [[10 + i] * (-(-end // 8) - 1) + [1 + i]]))
    rows = [Row(11, 12), Row(16, 17), Row(5, 22), Row(0, 30)]
    tables = [[10, 4], [0, 2, 5], [3, 8, 6], [0, 0, 9, 7]]
    tables[0] = [0, 1]  # in place
    out = layer(torch.cat([xs[0][11:12], xs[1][16:17], xs[2][5:22], xs[3]]), builder.build(rows, tables))
    for i, (row, part) in enumerate(zip(rows, out.split([1, 1, 17, 30]))):
        expected, window, state = oracle(layer, xs[i][: row.end])
        assert difference(part, expected[row.start :]) < 1e-5
        running = tables[i][-1]
        assert difference(layer.cache.conv[running], window) < 1e-6
        assert difference(layer.cache.state[running], state) < 1e-5
    assert difference(layer.cache.state[8], oracle(layer, xs[2][:16])[2]) < 1e-5  # checkpoint at 16
    assert difference(layer.cache.state[9], oracle(layer, xs[3][:24])[2]) < 1e-5  # checkpoint at 24
    assert layer.cache.state[0].isnan().all()  # the null block was read as zeros and never written


def test_capability_follows_the_backend():
    class Tiled(TorchBackend):
        alignment = 16

    class Closed(TorchBackend):
        exports_checkpoints = False

    def spec(backend, mode="align", wanted=True):
        layer = KDALayer(MICRO, "x", SeededWeights(0, torch.float32, "cpu"), backend)
        spec = layer.get_kv_cache_spec(block_size=64, mamba_cache_mode=mode, internal_checkpoints=wanted)
        return spec.num_prefill_checkpoint_blocks, spec.checkpoint_alignment

    assert spec(TorchBackend()) == (1, 1) and spec(Tiled()) == (1, 16) and spec(Closed()) == (0, 1)
    assert spec(Tiled(), wanted=False) == (0, 1) and spec(Tiled(), mode="none") == (0, 1)


# ---- the MLA layer -----------------------------------------------------------------------------------------------


def test_mla_absorbed_expanded_and_mixed():
    layer = MLALayer(MICRO, "x", SeededWeights(0, torch.float32, "cpu"))
    builder = AttentionMetadataBuilder(layer.get_kv_cache_spec(block_size=5))
    xs = [torch.randn(30, MICRO.hidden_size, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    tables = [[9, 2, 11, 4, 5, 6], [12, 8, 1, 10, 3, 7], [18, 17, 16, 15, 14, 13], [19, 20, 21, 22, 23, 24]]
    layer.cache = MLACache(torch.full((25, 5, 72), math.nan))
    whole = [layer(x, builder.build([Row(0, 30)], [table])) for x, table in zip(xs, tables)]
    assert not any(out.isnan().any() for out in whole)
    layer.cache = MLACache(torch.full((25, 5, 72), math.nan))
    layer(xs[0][:29], builder.build([Row(0, 29)], tables[:1]))
    layer(xs[1][:7], builder.build([Row(0, 7)], tables[1:2]))
    layer(xs[2][:12], builder.build([Row(0, 12)], tables[2:3]))
    rows = [Row(29, 30), Row(7, 8), Row(12, 30), Row(0, 6)]
    x = torch.cat([part[row.start : row.end] for part, row in zip(xs, rows)])
    parts = layer(x, builder.build(rows, tables)).split([1, 1, 18, 6])
    for row, part, out in zip(rows, parts, whole):
        assert difference(part, out[row.start : row.end]) < 1e-5


@pytest.mark.parametrize("n, m, step", [(1, 1, 512), (1, 9, 512), (9, 9, 4), (7, 20, 3), (8, 20, 4), (20, 21, 512)])
@pytest.mark.parametrize("widths", [(16, 16), (24, 16), (16, 24)])
def test_attention_aligns_at_the_end(n, m, step, widths):
    q, k, v = torch.randn(n, 2, widths[0]), torch.randn(m, 2, widths[0]), torch.randn(m, 2, widths[1])
    mask = torch.ones(n, m, dtype=torch.bool).tril(m - n)
    scores = torch.einsum("nhd,mhd->hnm", q.double(), k.double()) * 0.3
    expected = torch.einsum("hnm,mhd->nhd", scores.masked_fill(~mask, -math.inf).softmax(-1), v.double())
    cu = [torch.tensor([0, size], dtype=torch.int32) for size in (n, m)]
    out = prefill_attention(q, k, v, cu_q=cu[0], cu_k=cu[1], lens_q=[n], lens_k=[m], scale=0.3)
    assert difference(out, expected) < 1e-5
    if widths[0] == widths[1]:
        assert difference(row_attention(q, k, v, 0.3, step=step), expected) < 1e-5


# ---- the experts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count, experts, top_k", [(1, 4, 1), (1, 64, 8), (33, 5, 5), (50, 8, 2), (3, 256, 8)])
def test_experts_are_the_naive_loop(count, experts, top_k):
    gen = torch.Generator().manual_seed(count)
    x, router = torch.randn(count, 16, generator=gen), torch.randn(experts, 16, generator=gen)
    gate_up, down = torch.randn(experts, 24, 16, generator=gen), torch.randn(experts, 16, 12, generator=gen)
    chosen, weights = route(x, router, torch.zeros(experts), top_k, 2.5)
    assert torch.allclose(weights.sum(-1), torch.full((count,), 2.5)) and weights.dtype == torch.float32
    assert all(len(set(row)) == top_k for row in chosen.tolist())
    naive = torch.stack(
        [
            sum(w * (down[e] @ swiglu(gate_up[e] @ token)) for e, w in zip(es, ws))
            for token, es, ws in zip(x, chosen, weights)
        ]
    )
    assert difference(expert_mlp(x, chosen, weights, gate_up, down), naive) < 1e-5


def test_router_bias_chooses_but_does_not_weigh():
    x, router = torch.randn(20, 8), torch.randn(6, 8)
    bias = torch.tensor([0, 0, 0, 5.0, 0, 0])
    chosen, weights = route(x, router, bias, 2, 1.0)
    assert (chosen == 3).any(1).all()
    scores = matmul_float32(x, router.T).sigmoid().gather(1, chosen)
    assert torch.allclose(weights, scores / scores.sum(1, keepdim=True))


def test_no_shared_expert():
    config = replace(MICRO, num_shared_experts=0)
    moe = MoE(config, "x", SeededWeights(0, torch.float32, "cpu"))
    assert moe.shared is None and moe(torch.randn(3, config.hidden_size)).shape == (3, config.hidden_size)
    model = KimiLinear(config, backend=TorchBackend(), dtype=torch.float32, device="cpu")
    assert sum(p.numel() for p in model.parameters()) == config.num_parameters()


# ---- the model ---------------------------------------------------------------------------------------------------


def dense_logits(model: KimiLinear, ids: torch.Tensor) -> torch.Tensor:
    """Logits of every position in float64, without caches: an independent reading of the architecture."""
    config, w = model.config, {name: p.double() for name, p in model.named_parameters()}
    norm = lambda x, name: F.rms_norm(x, (config.hidden_size,), w[name], config.rms_norm_eps)  # noqa: E731
    x = w["embedding"][ids]
    for i, layer in enumerate(model.layers):
        name, h = f"layers.{i}.", norm(x, f"layers.{i}.mixer_norm")
        if not config.is_full_attention[i]:
            x = x + oracle(layer.mixer, h)[0]
        else:
            heads, nope, rank = config.num_heads, config.qk_nope_head_dim, config.kv_lora_rank
            q, latent, shared = F.linear(h, w[name + "mixer.in_proj"]).split(layer.mixer.sizes, -1)
            latent = F.rms_norm(latent, (rank,), w[name + "mixer.latent_norm"], config.rms_norm_eps)
            kv = F.linear(latent, w[name + "mixer.kv_b"]).view(len(ids), heads, -1)
            k = torch.cat([kv[..., :nope], shared[:, None].expand(-1, heads, -1)], -1)
            scores = torch.einsum("nhd,mhd->hnm", q.view(len(ids), heads, -1), k) * k.shape[-1] ** -0.5
            scores = scores.masked_fill(~torch.ones(len(ids), len(ids)).tril().bool(), -math.inf)
            mixed = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), kv[..., nope:]).flatten(1)
            x = x + F.linear(mixed, w[name + "mixer.o_proj"])
        h, ffn = norm(x, name + "ffn_norm"), name + "ffn."
        mlp = lambda h, up, down: F.linear(swiglu(F.linear(h, up)), down)  # noqa: E731
        if i < config.first_dense_layers:
            x = x + mlp(h, w[ffn + "gate_up"], w[ffn + "down"])
        else:
            scores = F.linear(h, w[ffn + "router"]).sigmoid()
            best = (scores + w[ffn + "router_bias"]).argsort(1, descending=True)[:, : config.num_experts_per_token]
            kept = torch.zeros_like(scores).scatter(1, best, scores.gather(1, best))
            kept = kept * config.routed_scaling_factor / kept.sum(1, keepdim=True)
            each = [mlp(h, w[ffn + "gate_up"][e], w[ffn + "down"][e]) for e in range(config.num_experts)]
            x = x + torch.einsum("te,eth->th", kept, torch.stack(each))
            x = x + mlp(h, w[ffn + "shared.gate_up"], w[ffn + "shared.down"])
    return F.linear(norm(x, "final_norm"), w["lm_head"])


@pytest.mark.parametrize("bound", [-5.0, None])
def test_model_is_the_dense_oracle(bound):
    bench, ids = Bench(replace(MICRO, lower_bound=bound)), tokens(60)
    expected = dense_logits(bench.model, ids)
    for end in (1, 2, 17, 60):
        assert difference(bench.run([(0, ids, 0, end)])[0], expected[end - 1]) < 1e-4
    logits = torch.cat([bench.run([(0, ids, t, t + 1)]) for t in range(60)])
    assert logits.dtype == torch.float32 and difference(logits, expected) < 1e-4


@pytest.mark.parametrize("cut", range(1, 40))
def test_cut_anywhere(cut):
    bench = BENCH
    ids = tokens(40)
    whole = bench.run([(0, ids, 0, 40)])[0]
    bench.run([(1, ids, 0, cut)])
    assert difference(bench.run([(1, ids, cut, 40)])[0], whole) < 1e-5


BENCH = Bench()


@pytest.mark.parametrize("length, block_size", [(40, 16), (33, 16), (17, 16), (47, 16), (11, 10), (90, 32)])
def test_resume_from_an_internal_checkpoint(length, block_size):
    bench, ids = Bench(block_size=block_size), tokens(length)
    at = length - length % block_size
    bench.run([(0, ids, 0, length)], saved={0: 100})
    other = torch.cat([ids[:at], tokens(20, seed=5)])
    expected = bench.run([(1, other, 0, at + 20)])[0]
    assert difference(bench.run([(0, other, at, at + 20)], saved={0: 100})[0], expected) < 1e-5


def test_rows_of_a_batch_do_not_touch_each_other():
    bench = Bench()
    requests = [tokens(50, seed) for seed in range(5)]
    alone = [bench.run([(i, ids, 0, end)])[0] for i, (ids, end) in enumerate(zip(requests, (50, 1, 33, 20, 8)))]
    for i, start in ((0, 49), (2, 5), (3, 19)):
        bench.run([(i, requests[i], 0, start)])
    rows = [(0, 49, 50), (3, 19, 20), (1, 0, 1), (2, 5, 33), (4, 0, 8)]
    logits = bench.run([(i, requests[i], start, end) for i, start, end in rows])
    for row, (i, _, _) in zip(logits, rows):
        assert difference(row, alone[i]) < 1e-5


def test_greedy_output_depends_on_the_prompt_and_on_the_state():
    bench = Bench()
    outputs = set()
    for seed in range(8):
        ids = tokens(30, seed)
        logits = bench.run([(0, ids, 0, 30)])
        for _ in range(12):
            ids = torch.cat([ids, logits.argmax(-1)])
            logits = bench.run([(0, ids, len(ids) - 1, len(ids))])
        outputs.add(tuple(ids[30:].tolist()))
    assert len(outputs) == 8 and max(len(set(out)) for out in outputs) > 6
    ids = tokens(60)
    right = bench.run([(0, ids, 0, 60)])[0]
    bench.run([(0, ids, 0, 40)])
    bench.model.layers[1].mixer.cache.state[1] = 0  # a state that nothing wrote
    assert difference(bench.run([(0, ids, 40, 60)])[0], right) > 0.02


def test_bfloat16_follows_float32():
    ids = tokens(50)
    half, full = Bench(dtype=torch.bfloat16), Bench()
    for (name, p), q in zip(full.model.named_parameters(), half.model.parameters()):
        p.copy_(q.float()), name
    assert difference(half.run([(0, ids, 0, 50)]), full.run([(0, ids, 0, 50)])) < 0.15
    half.run([(1, ids, 0, 30)])
    assert half.run([(1, ids, 30, 50)]).isfinite().all()


@pytest.mark.parametrize("layers", [(), (1, 2, 3, 4), (1, 3)])
def test_other_stacks(layers):
    config = replace(MICRO, full_attention_layers=layers, first_dense_layers=4)
    model = KimiLinear(config, backend=TorchBackend(), dtype=torch.float32, device="cpu")
    assert [name.split(".")[2] for name in model.mixers] == ["mla" if i + 1 in layers else "kda" for i in range(4)]
    assert sum(p.numel() for p in model.parameters()) == config.num_parameters() == config.active_parameters() + 97 * 48


# ---- wrong arguments ---------------------------------------------------------------------------------------------


def test_refusals():
    class Narrow(TorchBackend):
        name = "narrow"

        def supports(self, *, head_dim, dtype, state_dtype, safe_gate):
            return (head_dim == 128, "" if head_dim == 128 else f"head_dim is {head_dim}; must be 128")

    with pytest.raises(ValueError, match=r"backend is 'narrow'.*head_dim is 16; must be 128"):
        KimiLinear(MICRO, backend=Narrow(), dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match=r"dtype is torch\.int8; it must be torch\.float32"):
        KimiLinear(MICRO, backend=TorchBackend(), dtype=torch.int8, device="cpu")
    model, ids = KimiLinear(MICRO, backend=TorchBackend(), dtype=torch.float32, device="cpu"), tokens(4)
    specs = model.kv_cache_specs(
        block_size=16, mamba_cache_mode="align", internal_checkpoints=False, attention_block_size=8
    )
    meta = BatchMetadata(
        KDAMetadataBuilder(specs["layers.0.kda"]).build([Row(0, 4)], [[1]]),
        AttentionMetadataBuilder(specs["layers.3.mla"]).build([Row(0, 4)], [[1]]),
    )
    with pytest.raises(RuntimeError, match="bind_caches must be called"):
        model(ids, meta)
    caches = allocate_caches(specs, 4, "cpu")
    bad = {
        "must have layers.0.kda": {name: cache for name, cache in caches.items() if name != "layers.3.mla"},
        "must be a MLACache": {**caches, "layers.3.mla": caches["layers.0.kda"]},
        r"layers.1.kda'\].state has shape": {
            **caches,
            "layers.1.kda": KDACache(caches["layers.1.kda"].conv, torch.zeros(4, 2, 16, 16)),
        },
        r"conv is torch.bfloat16 on cpu; it must be torch.float32": {
            **caches,
            "layers.1.kda": KDACache(caches["layers.1.kda"].conv.bfloat16(), caches["layers.1.kda"].state),
        },
        "latent has shape": {**caches, "layers.3.mla": MLACache(torch.zeros(4, 72))},
    }
    for message, wrong in bad.items():
        with pytest.raises(ValueError, match=message):
            model.bind_caches(wrong)
        assert model.layers[0].mixer.cache is None
    with pytest.raises(ValueError, match="num_blocks is 1"):
        allocate_caches(specs, 1, "cpu")
    model.bind_caches(caches)
    assert model(ids, meta).shape == (1, 97)


def test_norms():
    x = torch.randn(5, 6)
    assert torch.allclose(
        rms_norm(x, torch.full((6,), 2.0), 1e-6), 2 * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    )
