"""The Triton backend in Triton's interpreter, on the CPU, against the float64 recurrence and the torch backend."""

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("the kernels are tested on the GPU (tests/gpu)", allow_module_level=True)

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kda_ckpt.backends import TorchBackend
from kda_ckpt.reference import kda_recurrent, random_inputs, relative_error
from kda_ckpt.triton_kda import TritonBackend, workspace_size

pytestmark = pytest.mark.filterwarnings("ignore")
BF16 = torch.bfloat16
OUT, STATE = 6e-3, 5e-3  # bf16 operands: about 4e-3 and 3e-3 are usual


@pytest.fixture(scope="module")
def backend():
    return TritonBackend()


def inputs(lens, heads=1, head_dim=64, regime="mixed", dtype=BF16, **change):
    return random_inputs(lens, heads, head_dim, regime, dtype=dtype) | change


def check(result, exact, out=OUT, state=STATE):
    assert relative_error(result.out, exact.out) < out
    assert relative_error(result.final_state, exact.final_state) < state


@pytest.mark.parametrize(
    ("head_dim", "regime", "lower_bound"),
    [(64, "fast", -5.0), (64, "slow", -5.0), (128, "mixed", -5.0), (64, "mixed", -0.5), (64, "mixed", None)],
)
def test_rows_of_any_length(backend, head_dim, regime, lower_bound):
    x = inputs([70, 0, 1, 15, 17], heads=2, head_dim=head_dim, regime=regime, lower_bound=lower_bound)
    if lower_bound is None:
        x["dt_bias"] = x["dt_bias"] + 1  # keep the softplus gate busy
    check(backend.prefill(**x), kda_recurrent(**x))


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("logit", [-1e3, 1e3, 0.0])
def test_extreme_gates_and_logits(backend, lower_bound, logit):
    x = inputs([65])
    x["g"] = torch.full_like(x["g"], logit) + x["g"]
    x["beta"] = torch.where(x["beta"] > 0, 1e3, -1e3).to(BF16)
    x["lower_bound"] = lower_bound
    result, exact = backend.prefill(**x), kda_recurrent(**x)
    assert result.out.isfinite().all() and result.final_state.isfinite().all()
    check(result, exact)


def test_gates_alike_and_huge_leave_the_last_token_whole(backend):
    x = inputs([64], lower_bound=None)
    x["g"] = torch.full_like(x["g"], 1e3)
    check(backend.prefill(**x), kda_recurrent(**x))


def test_a_gate_that_jumps_inside_a_tile(backend):
    x = inputs([40], lower_bound=None)
    x["g"][19] = 900.0  # one token that forgets everything, between tokens that forget nothing
    x["g"][:19] = x["g"][20:] = -9.0
    check(backend.prefill(**x), kda_recurrent(**x))


def test_equal_keys_do_not_blow_up_the_inverse(backend):
    x = inputs([64], regime="slow")
    x["k"] = x["k"][:1].expand_as(x["k"]).contiguous()
    x["beta"] = torch.full_like(x["beta"], 8.0)
    check(backend.prefill(**x), kda_recurrent(**x), out=2e-2, state=2e-2)


def test_leading_one_no_initial_state_and_given_outputs(backend):
    x = inputs([20, 9], initial_state=None)
    exact = kda_recurrent(**x)
    lead = x | {name: x[name][None] for name in ("q", "k", "v", "g", "beta")}
    out = torch.full_like(lead["v"], float("nan"))
    final = torch.full((2, 1, 64, 64), float("nan"), dtype=BF16)
    space = torch.full((workspace_size(29, 2, 1, 64) + 16,), 255, dtype=torch.uint8)
    result = backend.prefill(**lead, out=out, final_state=final, workspace=space)
    assert result.out is out and result.final_state is final and result.checkpoint_state is None
    assert relative_error(out[0], exact.out) < OUT and relative_error(final, exact.final_state) < STATE
    assert (space[-16:] == 255).all()


def test_initial_state_in_bf16_and_strided_tokens(backend):
    x = inputs([33], heads=2)
    fused = torch.cat([x[n].flatten(1) for n in ("q", "k", "v")], 1)
    q, k, v = (part.view(33, 2, 64) for part in fused.split(128, 1))
    x |= dict(q=q, k=k, v=v, initial_state=x["initial_state"].to(BF16))
    check(backend.prefill(**x), kda_recurrent(**x))


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_checkpoints_at_any_offset(data):
    lens = data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=2))
    columns = data.draw(st.integers(1, 3))
    offsets = [[data.draw(st.integers(0, max(n - 1, 0))) for _ in range(columns)] for n in lens]
    wanted = torch.tensor(offsets, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
    x = inputs(lens)
    saved = torch.full((len(lens), columns, 1, 64, 64), 7.0)
    result = TritonBackend().prefill(**x, checkpoint_offsets=wanted, checkpoint_state=saved)
    exact = kda_recurrent(**x, checkpoint_offsets=wanted)
    check(result, exact)
    for n, row in enumerate(offsets):
        for c, offset in enumerate(row):
            if offset:
                assert relative_error(saved[n, c], exact.checkpoint_state[n, c]) < STATE
            else:
                assert (saved[n, c] == 7).all()


def test_flat_offsets_and_their_shape(backend):
    x = inputs([20, 30])
    result = backend.prefill(**x, checkpoint_offsets=torch.tensor([0, 21]))
    exact = kda_recurrent(**x, checkpoint_offsets=torch.tensor([0, 21]))
    assert result.checkpoint_state.shape == (2, 1, 64, 64) and (result.checkpoint_state[0] == 0).all()
    assert relative_error(result.checkpoint_state[1], exact.checkpoint_state[1]) < STATE


def test_a_call_cut_in_two_gives_the_same_state(backend):
    x = inputs([90])
    for cut in (1, 33, 64):
        parts = []
        for a, b in ((0, cut), (cut, 90)):
            part = {n: t[a:b] if n in ("q", "k", "v", "g", "beta") else t for n, t in x.items()}
            parts.append(part | dict(cu_seqlens=torch.tensor([0, b - a], dtype=torch.int32)))
        middle = backend.prefill(**parts[0]).final_state
        whole = backend.prefill(**x, checkpoint_offsets=torch.tensor([cut]))
        assert torch.equal(whole.checkpoint_state, middle)
        assert torch.equal(backend.prefill(**parts[1] | dict(initial_state=middle)).final_state, whole.final_state)


def test_a_nan_stays_in_its_row(backend):
    x = inputs([20, 20, 20])
    clean = backend.prefill(**x)
    x["v"][25, 0, 3] = float("nan")
    x["k"][30] = float("nan")
    result = backend.prefill(**x)
    keep = torch.arange(60) // 20 != 1
    assert torch.equal(result.out[keep], clean.out[keep])
    assert torch.equal(result.final_state[[0, 2]], clean.final_state[[0, 2]])
    assert result.final_state[1].isnan().any()


@pytest.mark.parametrize("initial", [False, True])
def test_convolution(backend, initial):
    rng = torch.Generator().manual_seed(0)
    lens, C = [5, 0, 1, 40, 2], 150
    cu = torch.tensor([0, 5, 5, 6, 46, 48], dtype=torch.int32)
    x, weight = torch.randn(sum(lens), C, generator=rng), torch.randn(C, 4, generator=rng)
    windows = torch.randn(5, C, 3, generator=rng) if initial else None
    ours = backend.conv_prefill(x, weight, cu_seqlens=cu, initial_windows=windows)
    theirs = TorchBackend().conv_prefill(x, weight, cu_seqlens=cu, initial_windows=windows)
    assert torch.allclose(ours[0], theirs[0], atol=1e-5) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("layout", ["channels", "window"])
@pytest.mark.parametrize("columns", [None, 2])
def test_store_cache_checkpoints(backend, layout, columns):
    rng = torch.Generator().manual_seed(1)
    N, H, D, slots = 3, 2, 64, 9
    C = 3 * H * D
    cu = torch.tensor([0, 6, 6, 20], dtype=torch.int32)
    offsets, where = torch.tensor([[2, 5], [0, 0], [13, 1]]), torch.tensor([[3, 0], [4, 5], [8, 6]])
    if columns is None:
        offsets, where = offsets[:, 0].contiguous(), where[:, 0].contiguous()
    x, windows = torch.randn(20, C, generator=rng), torch.randn(N, C, 3, generator=rng)
    saved = torch.randn(*offsets.shape, H, D, D, generator=rng)
    caches = []
    for backend_ in (backend, TorchBackend()):
        pages = torch.full((slots, H * D * D + 3 * C + 5), -1.0)  # one page holds both: neither cache is contiguous
        conv, state = pages[:, : 3 * C], pages[:, 3 * C : 3 * C + H * D * D].view(slots, H, D, D)
        conv = conv.view(slots, C, 3) if layout == "channels" else conv.view(slots, 3, C).transpose(1, 2)
        backend_.store_cache_checkpoints(conv_cache=conv, state_cache=state, x=x, initial_windows=windows, cu_seqlens=cu,
                                         checkpoint_offsets=offsets, checkpoint_state=saved, state_indices=where)  # fmt: skip
        caches.append(pages)
    assert torch.equal(*caches) and (caches[0][0] == -1).all()


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_decode(backend, lower_bound):
    rng = torch.Generator().manual_seed(2)
    B, H, D, slots = 3, 2, 64, 6
    x, weight = torch.randn(B, 3 * H * D, generator=rng), torch.randn(3 * H * D, 4, generator=rng)
    gates = inputs([B], H, D, dtype=torch.float32)
    gates = {n: gates[n] for n in ("g", "beta", "A_log", "dt_bias")} | dict(lower_bound=lower_bound)
    load, store = torch.tensor([2, 0, 5]), torch.tensor([2, 3, 4])
    caches = torch.randn(slots, 3 * H * D, 3, generator=rng), torch.randn(slots, H, D, D, generator=rng)
    results = []
    for backend_ in (backend, TorchBackend()):
        conv, state = (cache.clone() for cache in caches)
        out = backend_.decode(
            x, **gates, weight=weight, conv_cache=conv, state_cache=state, load_slots=load, store_slots=store
        )
        results.append((out, conv, state))
    for ours, theirs in zip(*results):
        assert torch.allclose(ours, theirs, atol=2e-5, rtol=1e-4)


WRONG = {
    "a k of another shape": dict(k=torch.zeros(8, 1, 32, dtype=BF16)),
    "head_dim of no kernel": {n: torch.zeros(8, 1, 32, dtype=BF16) for n in ("q", "k", "v", "g")}
    | dict(dt_bias=torch.zeros(1, 32), initial_state=None),
    "a v of another dtype": dict(v=torch.zeros(8, 1, 64)),
    "float64 activations": {n: torch.zeros(8, 1, 64, dtype=torch.float64) for n in ("q", "k", "v", "g")},
    "a float64 state": dict(initial_state=torch.zeros(1, 1, 64, 64, dtype=torch.float64)),
    "non-monotone cu_seqlens": dict(cu_seqlens=torch.tensor([0, 9, 8]), initial_state=None),
    "cu_seqlens short of T": dict(cu_seqlens=torch.tensor([0, 7])),
    "an offset at the end": dict(checkpoint_offsets=torch.tensor([8])),
    "a negative offset": dict(checkpoint_offsets=torch.tensor([-1])),
    "offsets of another row count": dict(checkpoint_offsets=torch.tensor([1, 2])),
    "offsets in floats": dict(checkpoint_offsets=torch.tensor([1.0])),
    "a state without offsets": dict(checkpoint_state=torch.zeros(1, 1, 64, 64)),
    "a positive bound": dict(lower_bound=1.0),
    "a bound below -5": dict(lower_bound=-6.0),
    "a bound that is no number": dict(lower_bound=float("nan")),
    "an out of another shape": dict(out=torch.zeros(9, 1, 64, dtype=BF16)),
    "a strided final state": dict(final_state=torch.zeros(1, 1, 64, 128)[..., ::2]),
    "a small workspace": dict(workspace=torch.zeros(100, dtype=torch.uint8)),
    "a workspace of floats": dict(workspace=torch.zeros(10**6)),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_wrong_calls_are_refused_before_anything_is_written(backend, change):
    x = inputs([8])
    final = torch.full((1, 1, 64, 64), 7.0)
    with pytest.raises(ValueError, match=r"\w"):
        backend.prefill(**dict(final_state=final) | x | change)
    assert (final == 7).all()


def test_what_is_supported(backend):
    ask = dict(head_dim=128, dtype=BF16, state_dtype=torch.float32, safe_gate=True)
    assert backend.supports(**ask) == (True, "") and backend.alignment == 1 and backend.name == "triton"
    for wrong in (dict(head_dim=96), dict(dtype=torch.int8), dict(state_dtype=torch.float64)):
        ok, why = backend.supports(**ask | wrong)
        assert not ok and why
