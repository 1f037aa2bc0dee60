"""FlashKDA in CUDA against float64 on the GPU: every path, and what must not happen."""

import itertools

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from kda_ckpt.backends import TorchBackend, get_backend  # noqa: E402
from kda_ckpt.cuda_kda import FORGOTTEN, PROBE, flashkda_prefill, plan, workspace_bytes  # noqa: E402

D, DEV = 128, "cuda"
OUT_LIMIT, STATE_LIMIT = 6.7e-3, 5.8e-3


def inputs(lens, heads, regime="mixed", seed=0):
    """Raw inputs of packed rows, in the gate regimes of the peers' benchmark and at the gate's extremes."""
    gen = torch.Generator(DEV).manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, device=DEV, generator=gen)

    T, N = sum(lens), len(lens)
    q, k, v, g = (randn(T, heads, D).bfloat16() for _ in range(4))
    A_log, dt_bias = torch.zeros(heads, device=DEV), randn(heads, D) * 0.1
    beta, h0 = randn(T, heads).bfloat16(), randn(N, heads, D, D) * 0.1
    if regime == "fast":
        A_log = randn(heads) * 0.5
    elif regime == "slow":
        g, dt_bias = g * 0.5, dt_bias - 6
    elif regime == "mixed":
        dt_bias = dt_bias + torch.linspace(-8, 1, heads, device=DEV)[:, None]
    elif regime == "gate -5":
        g = torch.full_like(g, 100.0)
    elif regime == "gate -1e-4":
        g, dt_bias = torch.zeros_like(g), torch.full_like(dt_bias, -10.82)
    elif regime == "logits 1e3":
        q, k, g, beta = q * 1e3, k * 1e3, g * 1e3, beta * 1e3
    cu = torch.tensor([0, *itertools.accumulate(lens)], device=DEV, dtype=torch.int32)
    gates = dict(A_log=A_log, dt_bias=dt_bias, lower_bound=-5.0, cu_seqlens=cu)
    return dict(q=q, k=k, v=v, g=g, beta=beta), gates, h0


def truth(x, gates, h0, offsets=None):
    def double(d):
        return {n: t.double() if torch.is_tensor(t) and t.is_floating_point() else t for n, t in d.items()}

    return TorchBackend().prefill(
        **double(x), **double(gates), initial_state=None if h0 is None else h0.double(), checkpoint_offsets=offsets
    )


def error(a, ref):
    e = ((a.double() - ref).norm() / ref.norm()).item()
    return e if e == e else float("inf")


@pytest.mark.parametrize("segments", [None, 1, 2, 3, 5, 9])
@pytest.mark.parametrize("regime", ["fast", "slow", "mixed"])
def test_regimes_and_forced_segments(regime, segments):
    x, gates, h0 = inputs([700], 4, regime)
    ref, got = truth(x, gates, h0), flashkda_prefill(**x, **gates, initial_state=h0, segments=segments)
    assert error(got.out, ref.out) < OUT_LIMIT and error(got.final_state, ref.final_state) < STATE_LIMIT


@pytest.mark.parametrize("segments", [1, 3])
def test_halves_of_v_are_bitwise_the_whole(segments):
    x, gates, h0 = inputs([130, 40], 3)
    offsets = torch.tensor([[100], [7]], device=DEV)
    one, two = (
        flashkda_prefill(**x, **gates, initial_state=h0, checkpoint_offsets=offsets, segments=segments, v_parts=parts)
        for parts in (1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(one, two))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 1500])
@pytest.mark.parametrize("regime", ["mixed", "gate -5", "gate -1e-4", "logits 1e3"])
def test_lengths_and_gate_extremes(regime, length):
    x, gates, h0 = inputs([length], 3, regime)
    ref, got = truth(x, gates, h0), flashkda_prefill(**x, **gates, initial_state=h0)
    assert error(got.out, ref.out) < OUT_LIMIT and error(got.final_state, ref.final_state) < STATE_LIMIT


@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ragged_rows_checkpoints_and_guard_bands(dtype, segments):
    lens = [130, 0, 17, 547, 1, 300]
    offsets = torch.tensor([[0, 5], [0, 0], [16, 1], [543, 300], [0, 0], [299, 128]], device=DEV)
    x, gates, h0 = inputs(lens, 3)
    N, H = len(lens), 3
    ref = truth(x, gates, h0.to(dtype), offsets)
    sizes = dict(out=x["v"].numel(), final_state=N * H * D * D, checkpoint_state=N * 2 * H * D * D)
    dtypes = dict(out=torch.bfloat16, final_state=dtype, checkpoint_state=dtype)
    shapes = dict(out=x["v"].shape, final_state=(N, H, D, D), checkpoint_state=(N, 2, H, D, D))
    bands = {name: torch.full((n + 2048,), 7.0, device=DEV, dtype=dtypes[name]) for name, n in sizes.items()}
    inner = {name: bands[name][1024:-1024].view(shapes[name]) for name in bands}
    flashkda_prefill(**x, **gates, initial_state=h0.to(dtype), checkpoint_offsets=offsets, segments=segments, **inner)
    limits = dict(out=OUT_LIMIT, final_state=STATE_LIMIT, checkpoint_state=STATE_LIMIT)
    wanted = offsets > 0
    assert error(inner["out"], ref.out) < limits["out"]
    assert error(inner["final_state"], ref.final_state) < limits["final_state"]
    assert error(inner["checkpoint_state"][wanted], ref.checkpoint_state[wanted]) < limits["checkpoint_state"]
    assert (inner["checkpoint_state"][~wanted] == 7).all()
    for band in bands.values():
        assert (band[:1024] == 7).all() and (band[-1024:] == 7).all()


@pytest.mark.parametrize("cut", [1, 15, 16, 47, 64, 99])
def test_one_call_equals_two(cut):
    x, gates, h0 = inputs([100], 2)

    def cu(n):
        return torch.tensor([0, n], device=DEV, dtype=torch.int32)

    def part(tokens):
        return {n: t[tokens].contiguous() for n, t in x.items()}

    whole = flashkda_prefill(**x, **gates, initial_state=h0, checkpoint_offsets=torch.tensor([cut], device=DEV))
    first = flashkda_prefill(**part(slice(0, cut)), **{**gates, "cu_seqlens": cu(cut)}, initial_state=h0)
    second = flashkda_prefill(
        **part(slice(cut, None)), **{**gates, "cu_seqlens": cu(100 - cut)}, initial_state=first.final_state
    )
    assert torch.equal(whole.checkpoint_state, first.final_state)
    assert torch.equal(whole.final_state, second.final_state)
    assert torch.equal(whole.out, torch.cat([first.out, second.out]))


def test_a_forgotten_segment_is_bounded():
    """At the edge of the skip, dropping what came before must stay below bf16's rounding of the output."""
    worst = 0.0
    for bias in torch.linspace(-4.0, 0.0, 9).tolist():
        x, gates, h0 = inputs([512], 2, "plain", seed=3)
        gates["dt_bias"] = torch.full_like(gates["dt_bias"], bias)
        x["g"] = x["g"] * 0
        one, two = (flashkda_prefill(**x, **gates, initial_state=h0 * 30, segments=s) for s in (1, 2))
        ref = truth(x, gates, h0 * 30)
        worst = max(worst, abs(error(two.out, ref.out) - error(one.out, ref.out)))
    assert PROBE == 32 and FORGOTTEN == 2.0**-16
    assert worst < 2.0**-9 / 4


def test_nan_stays_in_its_row():
    x, gates, h0 = inputs([40, 50, 60], 2)
    clean = flashkda_prefill(**x, **gates, initial_state=h0)
    for name in ("q", "k", "v", "g", "beta"):
        x[name][40:90] = float("nan")
    dirty = flashkda_prefill(**x, **gates, initial_state=h0)
    keep = torch.arange(150, device=DEV)
    keep = (keep < 40) | (keep >= 90)
    assert torch.equal(dirty.out[keep], clean.out[keep]) and not torch.isfinite(dirty.out[40:90].float()).all()
    assert torch.equal(dirty.final_state[[0, 2]], clean.final_state[[0, 2]])


def test_views_leading_dimension_and_float32_beta():
    x, gates, h0 = inputs([90], 2)
    plain = flashkda_prefill(**x, **gates, initial_state=h0)
    fused = torch.cat([x["q"], x["k"], x["v"]], dim=-1).view(90, 2, 3, D).permute(0, 2, 1, 3).contiguous()
    views = dict(zip("qkv", fused.unbind(1)))
    assert not views["q"].is_contiguous()
    again = flashkda_prefill(**{**x, **views, "beta": x["beta"].float()}, **gates, initial_state=h0)
    lead = flashkda_prefill(**{n: t[None] for n, t in x.items()}, **gates, initial_state=h0)
    assert torch.equal(again.out, plain.out) and torch.equal(lead.out[0], plain.out)


def test_alternating_calls_and_two_streams():
    cases = [inputs([n], 2, regime, seed=n) for n, regime in ((33, "slow"), (700, "mixed"), (16, "fast"))]
    first = [flashkda_prefill(**x, **gates, initial_state=h0) for x, gates, h0 in cases]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for i in range(12):
        x, gates, h0 = cases[i % 3]
        with torch.cuda.stream(streams[i % 2]):
            got = flashkda_prefill(**x, **gates, initial_state=h0, segments=None)
        torch.cuda.synchronize() if i % 5 == 4 else streams[i % 2].synchronize()
        assert torch.equal(got.out, first[i % 3].out) and torch.equal(got.final_state, first[i % 3].final_state)


def test_graph_capture_and_replay():
    x, gates, h0 = inputs([2048], 2, "slow")
    chosen = plan(2048, 1, 2, torch.cuda.get_device_properties(0).multi_processor_count)
    assert chosen.units > 1
    given = dict(
        out=torch.empty_like(x["v"]),
        final_state=torch.empty_like(h0),
        workspace=torch.empty(workspace_bytes(chosen, 2), dtype=torch.uint8, device=DEV),
    )
    eager = flashkda_prefill(**x, **gates, initial_state=h0)
    flashkda_prefill(**x, **gates, initial_state=h0, **given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flashkda_prefill(**x, **gates, initial_state=h0, **given)
    given["out"].fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(given["out"], eager.out) and torch.equal(given["final_state"], eager.final_state)


def test_operator_is_registered_right():
    x, gates, h0 = inputs([64], 2)
    out, final = torch.empty_like(x["v"]), torch.empty_like(h0)
    args = (*x.values(), gates["A_log"], gates["dt_bias"], -5.0, gates["cu_seqlens"], h0, None, None, out, final, None)
    torch.library.opcheck(
        torch.ops.kda_ckpt.flashkda_prefill, (*args, 0, 0, False, 1), test_utils=("test_schema", "test_faketensor")
    )


def test_bad_calls_are_refused_before_any_launch():
    x, gates, h0 = inputs([40], 2)
    wrong = [
        (dict(lower_bound=None), "lower_bound"),
        (dict(lower_bound=float("nan")), "lower_bound"),
        (dict(lower_bound=0.5), "lower_bound"),
        (dict(q=x["q"].float()), "k"),
        (dict(v=x["v"][:-1]), "v"),
        (dict(beta=x["beta"][:, :1]), "beta"),
        (dict(cu_seqlens=gates["cu_seqlens"].cpu()), "cu_seqlens"),
        (dict(initial_state=h0[:, :1]), "initial_state"),
        (dict(initial_state=h0.double()), "initial_state"),
        (dict(checkpoint_offsets=torch.zeros(3, dtype=torch.int32, device=DEV)), "checkpoint_offsets"),
        (dict(checkpoint_state=h0), "checkpoint_offsets"),
        (dict(out=x["v"].float()), "out"),
        (dict(final_state=h0.transpose(2, 3)), "final_state"),
        (dict(workspace=torch.empty(8, dtype=torch.uint8, device=DEV), segments=2), "workspace"),
    ]
    for change, name in wrong:
        with pytest.raises(ValueError, match=name):
            flashkda_prefill(**{**x, **gates, "initial_state": h0, **change})


def test_backend_in_the_registry():
    backend = get_backend("cuda")
    assert backend.name == "cuda" and backend.alignment == 1 and get_backend("auto", "cuda").name == "cuda"
    x, gates, h0 = inputs([100, 20], 2)
    offsets = torch.tensor([33, 0], device=DEV, dtype=torch.int32)
    got, ref = backend.prefill(**x, **gates, initial_state=h0, checkpoint_offsets=offsets), truth(x, gates, h0, offsets)
    assert error(got.out, ref.out) < OUT_LIMIT
    assert error(got.checkpoint_state[0], ref.checkpoint_state[0]) < STATE_LIMIT and not got.checkpoint_state[1].any()
