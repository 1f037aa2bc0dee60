"""The torch backend against the float64 recurrence: any packing, any checkpoint, every extreme gate, every bad argument."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_ckpt import backends
from kda_ckpt.backends import TorchBackend, backend_names, check_prefill_args, get_backend
from kda_ckpt.reference import (
    TILE,
    causal_conv1d_reference,
    conv_window_at,
    cut_tiles,
    kda_recurrent,
    log_decay,
    random_inputs,
    relative_error,
    unit,
)

BACKEND = TorchBackend()
quick = settings(max_examples=25, deadline=None)
lengths = st.lists(st.integers(0, 40), min_size=1, max_size=5)
seeds = st.integers(0, 99)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small tensors only: more threads cost more than they bring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def packed(lens):
    return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)


def assert_close(result, truth, limit=1e-5):
    for name, a, b in zip(truth._fields, result, truth):
        assert (a is None) == (b is None), name
        assert a is None or relative_error(a, b) <= limit, f"{name}: {relative_error(a, b):.1e}"


def row_of(x, n):
    """The arguments of row n alone."""
    start, end = x["cu_seqlens"][n : n + 2].tolist()
    alone = {name: x[name][start:end] for name in ("q", "k", "v", "g", "beta")}
    return x | alone | dict(cu_seqlens=torch.tensor([0, end - start]), initial_state=x["initial_state"][n : n + 1])


# -- accuracy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lower_bound", [-5.0, -0.5, None])
@pytest.mark.parametrize("regime", ["fast", "slow", "mixed"])
@pytest.mark.parametrize("head_dim", [1, 24, 64])
def test_float32_is_within_1e_5_of_float64(regime, lower_bound, head_dim):
    x = random_inputs([1, 15, 16, 17, 100, 0, 33], 2, head_dim, regime) | dict(lower_bound=lower_bound)
    offsets = torch.tensor([0, 14, 15, 16, 57, 0, 32], dtype=torch.int32)
    assert_close(BACKEND.prefill(**x, checkpoint_offsets=offsets), kda_recurrent(**x, checkpoint_offsets=offsets))


@pytest.mark.parametrize("logit", [-1e3, 0.0, 1e3])
@pytest.mark.parametrize("gate", [1e9, 0.0, -10.82, -30.0], ids=["-5", "-2.5", "-1e-4", "0"])
def test_every_gate_and_every_beta_at_its_extreme(gate, logit):
    x = random_inputs([1, 15, 16, 17, 100, 600], 2, 16, "fast")
    x |= dict(A_log=torch.zeros(2), dt_bias=torch.zeros(2, 16), g=torch.full_like(x["g"], gate))
    x |= dict(beta=torch.full_like(x["beta"], logit))
    result, truth = BACKEND.prefill(**x), kda_recurrent(**x)
    assert_close(result, truth)
    for n in range(3):  # by itself, even where e^-75 is all that is left
        assert relative_error(result.final_state[n], truth.final_state[n]) <= 1e-5


def test_repeated_keys_without_forgetting():
    x = random_inputs([50], 2, 16, "slow")
    x |= dict(k=x["k"][:1].expand(50, -1, -1), g=torch.full_like(x["g"], -40.0), beta=torch.full((50, 2), 50.0))
    assert_close(BACKEND.prefill(**x), kda_recurrent(**x))


def test_the_unbounded_gate_may_jump_inside_a_tile():
    x = random_inputs([64], 2, 16, "fast") | dict(lower_bound=None)
    x["g"][::5] = 1e4  # the softplus decay of e^-10000 next to decays near one
    x["g"][1::5] = -9.0
    assert_close(BACKEND.prefill(**x), kda_recurrent(**x))


@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 5e-3), (torch.float16, 5e-4), (torch.float64, 1e-12)])
def test_other_dtypes(dtype, limit):
    x = random_inputs([33, 70], 2, 32, "mixed", dtype=dtype)
    result, truth = BACKEND.prefill(**x), kda_recurrent(**x)
    assert result.out.dtype == dtype
    assert result.final_state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert relative_error(result.out, truth.out) < limit
    assert relative_error(result.final_state, truth.final_state) < min(limit, 1e-5)


def test_against_flash_linear_attention():
    naive = pytest.importorskip("fla.ops.kda.naive")
    gate = pytest.importorskip("fla.ops.kda.gate")
    x = random_inputs([70], 3, 32, "mixed")
    for lower_bound in (-5.0, None):
        x["lower_bound"] = lower_bound
        if lower_bound is None:
            g = gate.naive_kda_gate(x["g"], x["A_log"], x["dt_bias"])
        else:
            g = gate.naive_kda_lowerbound_gate(x["g"], x["A_log"], x["dt_bias"], lower_bound)
        args = (unit(x["q"]), unit(x["k"]), x["v"], g, x["beta"].sigmoid())
        before = x["initial_state"].transpose(2, 3)
        out, state = naive.naive_recurrent_kda(*(y[None] for y in args), initial_state=before, output_final_state=True)
        result = BACKEND.prefill(**x)
        assert relative_error(result.out, out[0]) < 1e-5
        assert relative_error(result.final_state, state.transpose(2, 3)) < 1e-5


def test_a_nan_stays_in_its_row():
    x = random_inputs([40, 20, 20], 2, 16, "mixed")
    clean = BACKEND.prefill(**x)
    for name, at in (("q", 59), ("k", 40), ("v", 59), ("g", 50), ("beta", 45)):
        bad = x | {name: x[name].clone()}
        bad[name][at] = float("nan")
        result = BACKEND.prefill(**bad)
        assert result.out[40:60].isnan().any(), name
        for rows in (slice(0, 40), slice(60, 80)):
            assert torch.equal(result.out[rows], clean.out[rows]), name
        assert torch.equal(result.final_state[::2], clean.final_state[::2]), name


# -- packing, cutting, checkpoints ------------------------------------------------------------------------------------


@quick
@given(lengths, st.data(), seeds)
def test_any_packing_and_any_offsets(lens, data, seed):
    offsets = [[data.draw(st.integers(0, max(n - 1, 0))) for _ in range(3)] for n in lens]
    x = random_inputs(lens, 2, 8, "mixed", seed=seed)
    offsets = torch.tensor(offsets, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
    assert_close(BACKEND.prefill(**x, checkpoint_offsets=offsets), kda_recurrent(**x, checkpoint_offsets=offsets))


@quick
@given(st.integers(2, 70), st.data(), seeds)
def test_one_call_equals_two(tokens, data, seed):
    cut = data.draw(st.integers(1, tokens - 1))
    x = random_inputs([tokens], 2, 8, "mixed", seed=seed)
    whole = BACKEND.prefill(**x, checkpoint_offsets=torch.tensor([cut]))
    acts = ("q", "k", "v", "g", "beta")
    first = BACKEND.prefill(**x | {name: x[name][:cut] for name in acts} | dict(cu_seqlens=packed([cut])))
    rest = {name: x[name][cut:] for name in acts} | dict(cu_seqlens=packed([tokens - cut]))
    second = BACKEND.prefill(**x | rest | dict(initial_state=first.final_state))
    assert relative_error(whole.checkpoint_state, first.final_state) < 1e-6
    assert relative_error(torch.cat([first.out, second.out]), whole.out) < 1e-5
    assert relative_error(second.final_state, whole.final_state) < 1e-5


@quick
@given(lengths, seeds)
def test_rows_do_not_know_each_other(lens, seed):
    x = random_inputs(lens, 2, 8, "mixed", seed=seed)
    together = BACKEND.prefill(**x)
    for n, (start, end) in enumerate(itertools.pairwise(x["cu_seqlens"].tolist())):
        alone = BACKEND.prefill(**row_of(x, n))
        assert relative_error(together.out[start:end], alone.out) < 1e-5
        assert relative_error(together.final_state[n], alone.final_state[0]) < 1e-5


@quick
@given(lengths, st.data())
def test_tiles_hold_every_token_once_and_start_at_the_checkpoints(lens, data):
    offsets = torch.tensor([[data.draw(st.integers(0, max(n - 1, 0))) for _ in range(2)] for n in lens])
    tiles = cut_tiles(packed(lens), offsets)
    real = [tile[:size] for tile, size in zip(tiles.tokens.tolist(), tiles.sizes.tolist())]
    assert sorted(itertools.chain(*real)) == list(range(sum(lens)))
    assert all(0 < len(tile) <= TILE and tile == list(range(tile[0], tile[-1] + 1)) for tile in real)
    assert tiles.steps[-1] == len(real) and sorted(tiles.rows.tolist()) == list(range(len(lens)))
    starts = {real[e][0] for e in tiles.exports.tolist()}
    wanted = {int(packed(lens)[n]) + c for n, cs in enumerate(offsets.tolist()) for c in cs if c}
    assert starts == wanted and len(tiles.exports) == int((offsets > 0).sum())


def test_many_groups_equal_one(monkeypatch):
    x = random_inputs([90, 40, 0, 17], 2, 8, "mixed")
    offsets = torch.tensor([[70, 33], [0, 39], [0, 0], [16, 1]])
    one = BACKEND.prefill(**x, checkpoint_offsets=offsets)
    monkeypatch.setattr(backends, "GROUP", 1)
    assert_close(BACKEND.prefill(**x, checkpoint_offsets=offsets), one, 1e-6)


def test_given_buffers_are_filled_and_the_rest_is_left_alone():
    x = random_inputs([40, 20, 0], 2, 8, "mixed")
    offsets = torch.tensor([[0, 9], [0, 0], [0, 0]])
    x["initial_state"] = x["initial_state"].transpose(0, 3).contiguous().transpose(0, 3)
    truth = kda_recurrent(**x, checkpoint_offsets=offsets)
    out = torch.full((60, 4, 8), 7.0)[:, ::2]  # every buffer a strided view
    final = torch.full((3, 2, 8, 16), 7.0, dtype=torch.bfloat16)[..., ::2]
    saved = torch.full((3, 4, 2, 8, 8), 7.0)[:, ::2]
    result = BACKEND.prefill(**x, checkpoint_offsets=offsets, checkpoint_state=saved, out=out, final_state=final)
    assert result.out is out and result.final_state is final and result.checkpoint_state is saved
    assert relative_error(out, truth.out) < 1e-5 and relative_error(final, truth.final_state) < 5e-3
    assert relative_error(saved[0, 1], truth.checkpoint_state[0, 1]) < 1e-5
    assert bool((saved[1:] == 7).all()) and bool((saved[0, 0] == 7).all())


def test_the_leading_one_and_views_of_a_projection():
    x = random_inputs([40, 20], 2, 8, "mixed")
    plain = BACKEND.prefill(**x)
    qkv = torch.stack([x["q"], x["k"], x["v"]], dim=1)  # [T, 3, H, D], as a projection gives it
    views = {name: qkv[:, i] for i, name in enumerate("qkv")}
    assert torch.equal(BACKEND.prefill(**x | views).out, plain.out)
    led = BACKEND.prefill(**x | {name: x[name][None] for name in ("q", "k", "v", "g", "beta")})
    assert torch.equal(led.out, plain.out[None]) and torch.equal(led.final_state, plain.final_state)


def test_the_final_state_may_overwrite_the_initial_one():
    x = random_inputs([40, 0, 50], 2, 8, "mixed")
    plain = BACKEND.prefill(**x)
    state = x["initial_state"]
    BACKEND.prefill(**x, final_state=state)
    assert torch.equal(state, plain.final_state)


# -- convolution, store, decode ---------------------------------------------------------------------------------------


@quick
@given(lengths, st.booleans(), st.integers(2, 5), seeds)
def test_conv_prefill(lens, fresh, width, seed):
    torch.manual_seed(seed)
    x, weight = torch.randn(sum(lens), 6), torch.randn(6, width)
    windows = None if fresh else torch.randn(len(lens), 6, width - 1)
    args = dict(cu_seqlens=packed(lens), initial_windows=windows)
    y, final = BACKEND.conv_prefill(x, weight, **args)
    truth, last = causal_conv1d_reference(x, weight, **args)
    assert y.dtype == x.dtype and relative_error(y, truth) < 1e-6
    assert torch.equal(final, last)


def test_conv_prefill_keeps_a_nan_in_its_row():
    x, weight, lens = torch.randn(9, 6), torch.randn(6, 4), [3, 2, 4]
    x[4] = float("nan")
    y, final = BACKEND.conv_prefill(x, weight, cu_seqlens=packed(lens))
    assert y[:3].isfinite().all() and y[5:].isfinite().all() and final[::2].isfinite().all()


def caches(slots, H=2, D=8, width=4, dtype=torch.float32):
    """Caches cut from one buffer a slot, as an engine lays them out: strided views."""
    C, W1 = 3 * H * D, width - 1
    pages = torch.randn(slots, C * W1 + H * D * D + 5, dtype=dtype)
    conv = pages[:, : C * W1].view(slots, W1, C).transpose(1, 2)
    return conv, pages[:, C * W1 : C * W1 + H * D * D].view(slots, H, D, D)


@quick
@given(lengths, st.booleans(), st.booleans(), st.data(), seeds)
def test_store_writes_exactly_the_named_slots(lens, two_dims, fresh, data, seed):
    torch.manual_seed(seed)
    N, grid = len(lens), (len(lens), 2) if two_dims else (len(lens),)
    conv, state = caches(2 * N + 2)
    slots = torch.tensor(data.draw(st.permutations(range(2 * N + 2)))[: 2 * N][: torch.Size(grid).numel()]).view(grid)
    offsets = [data.draw(st.integers(0, max(n - 1, 0))) for n in lens for _ in range(grid[-1] if two_dims else 1)]
    offsets = torch.tensor(offsets, dtype=torch.int32).view(grid)
    x, windows = torch.randn(sum(lens), 48), None if fresh else torch.randn(N, 48, 3)
    states, cu = torch.randn(*grid, 2, 8, 8), packed(lens)
    want_conv, want_state = conv.clone(), state.clone()
    for at in itertools.product(*map(range, grid)):
        if offsets[at] > 0 and slots[at] > 0:
            here = torch.zeros(N, dtype=torch.long).index_fill_(0, torch.tensor(at[0]), int(offsets[at]))
            want_conv[slots[at]] = conv_window_at(x, windows, cu_seqlens=cu, offsets=here)[at[0]]
            want_state[slots[at]] = states[at]
    BACKEND.store_cache_checkpoints(
        conv_cache=conv, state_cache=state, x=x, initial_windows=windows, cu_seqlens=cu,
        checkpoint_offsets=offsets, checkpoint_state=states, state_indices=slots,
    )  # fmt: skip
    assert torch.equal(conv, want_conv) and torch.equal(state, want_state)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_prefill_then_decode_equals_a_longer_prefill(lower_bound):
    torch.manual_seed(0)
    T, cut, H, D = 30, 21, 2, 8
    r = random_inputs([T], H, D, "mixed")
    gates = dict(A_log=r["A_log"], dt_bias=r["dt_bias"].flatten(), lower_bound=lower_bound)
    x, weight, conv_state = torch.randn(T, 48), torch.randn(48, 4), caches(5)
    conv, state = conv_state

    def prefill(n):
        y, window = BACKEND.conv_prefill(x[:n], weight, cu_seqlens=packed([n]))
        q, k, v = y.view(n, 3, H, D).unbind(1)
        return window, BACKEND.prefill(q, k, v, r["g"][:n], r["beta"][:n], **gates, cu_seqlens=packed([n]))

    window, result = prefill(cut)
    conv[3], state[3], whole = window[0], result.final_state[0], prefill(T)[1]
    untouched = [c[[0, 1, 2, 3]].clone() for c in (conv, state)]
    for t in range(cut, T):  # the first step moves the row from slot 3 to slot 4, the others work in place
        load = torch.tensor([3 if t == cut else 4])
        out = BACKEND.decode(
            x[t : t + 1], r["g"][t : t + 1], r["beta"][t : t + 1], weight=weight, **gates,
            conv_cache=conv, state_cache=state, load_slots=load, store_slots=torch.tensor([4]),
        )  # fmt: skip
        assert relative_error(out[0], whole.out[t]) < 1e-5
    assert relative_error(state[4], whole.final_state[0]) < 1e-5
    assert all(torch.equal(c[:4], before) for c, before in zip((conv, state), untouched))


def test_decode_from_the_null_slot_starts_from_zero():
    conv, state = caches(4)
    conv[0], state[0] = float("nan"), float("nan")
    r, x, weight = random_inputs([2], 2, 8, "mixed"), torch.randn(2, 48), torch.randn(48, 4)
    gates = dict(A_log=r["A_log"], dt_bias=r["dt_bias"], lower_bound=-5.0)
    out = BACKEND.decode(
        x, r["g"], r["beta"], weight=weight, **gates, conv_cache=conv, state_cache=state,
        load_slots=torch.tensor([0, 0]), store_slots=torch.tensor([2, 1]),
    )  # fmt: skip
    for b, slot in enumerate((2, 1)):
        y, window = BACKEND.conv_prefill(x[b : b + 1], weight, cu_seqlens=packed([1]))
        q, k, v = y.view(1, 3, 2, 8).unbind(1)
        one = BACKEND.prefill(q, k, v, r["g"][b : b + 1], r["beta"][b : b + 1], **gates, cu_seqlens=packed([1]))
        assert relative_error(out[b], one.out[0]) < 1e-5 and relative_error(state[slot], one.final_state[0]) < 1e-5
        assert torch.equal(conv[slot], window[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_same_on_a_gpu():
    lens, offsets = [70, 0, 33, 1], torch.tensor([[41, 16], [0, 0], [32, 5], [0, 0]], dtype=torch.int32)
    x = random_inputs(lens, 2, 8) | dict(checkpoint_offsets=offsets)
    here = {name: y.cuda() if isinstance(y, torch.Tensor) else y for name, y in x.items()}
    assert_close(BACKEND.prefill(**here), kda_recurrent(**x))
    (conv, state), weight, inputs = caches(6), torch.randn(48, 4), torch.randn(sum(lens), 48)
    slots, cu = torch.tensor([[1, 2], [0, 0], [0, 3], [0, 0]]), packed(lens)
    results = []
    for device in ("cpu", "cuda"):
        d = lambda y: y.to(device)  # noqa: B023, E731
        caches_there = dict(conv_cache=d(conv.clone()), state_cache=d(state.clone()))
        y, window = BACKEND.conv_prefill(d(inputs), d(weight), cu_seqlens=d(cu))
        BACKEND.store_cache_checkpoints(
            **caches_there, x=d(inputs), initial_windows=None, cu_seqlens=d(cu), checkpoint_offsets=d(offsets),
            checkpoint_state=d(torch.ones(4, 2, 2, 8, 8)), state_indices=d(slots),
        )  # fmt: skip
        out = BACKEND.decode(
            d(inputs[:2]), d(x["g"][:2]), d(x["beta"][:2]), weight=d(weight), A_log=d(x["A_log"]), dt_bias=d(x["dt_bias"]),
            lower_bound=-5.0, **caches_there, load_slots=d(torch.tensor([0, 4])), store_slots=d(torch.tensor([5, 4])),
        )  # fmt: skip
        results.append([y, window, out, *caches_there.values()])
    assert all(relative_error(b, a) < 1e-5 for a, b in zip(*results))


# -- the registry and bad arguments -----------------------------------------------------------------------------------


def test_registry(monkeypatch):
    assert backend_names() == ("cuda", "triton", "torch")
    assert get_backend("auto", "cpu").name == get_backend("torch").name == "torch"
    with pytest.raises(ValueError, match=r"backend is 'fast'; must be one of auto, cuda, triton, torch"):
        get_backend("fast")
    monkeypatch.setitem(backends._BACKENDS, "cuda", "kda_ckpt.no_such_module:CudaBackend")
    monkeypatch.setitem(backends._BACKENDS, "triton", "kda_ckpt.no_such_module:TritonBackend")
    with pytest.raises(RuntimeError, match=r"backend 'cuda' is not available: ModuleNotFoundError"):
        get_backend("cuda")
    assert get_backend("auto", "cuda").name == "torch"


def test_supports():
    ask = dict(head_dim=37, dtype=torch.bfloat16, state_dtype=torch.float32, safe_gate=False)
    assert BACKEND.available() == (True, "") and BACKEND.supports(**ask) == (True, "")
    assert "dtype is torch.int8" in BACKEND.supports(**ask | dict(dtype=torch.int8))[1]


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


F16 = torch.float16
WRONG = {
    "q is a": dict(q=[[0.0]]),
    "q's shape is (6, 8)": dict(q=torch.randn(6, 8)),
    "q's dtype is torch.int32": dict(q=torch.ones(6, 2, 8, dtype=torch.int32)),
    "k's shape is (6, 2, 4); must be (6, 2, 8)": dict(k=torch.randn(6, 2, 4)),
    "v's dtype is torch.float16; must be torch.float32": dict(v=torch.randn(6, 2, 8, dtype=F16)),
    "k's device is meta": dict(k=torch.empty(6, 2, 8, device="meta")),
    "g's dtype is torch.float16": dict(g=torch.randn(6, 2, 8, dtype=F16)),
    "beta's shape is (6, 2, 1)": dict(beta=torch.randn(6, 2, 1)),
    "A_log's shape is (3,)": dict(A_log=torch.zeros(3)),
    "dt_bias's shape is (8, 2)": dict(dt_bias=torch.zeros(8, 2)),
    "lower_bound is 0.0": dict(lower_bound=0.0),
    "lower_bound is -5.1": dict(lower_bound=-5.1),
    "lower_bound is nan": dict(lower_bound=float("nan")),
    "lower_bound is -inf": dict(lower_bound=float("-inf")),
    "lower_bound is True": dict(lower_bound=True),
    "cu_seqlens's shape is (1,)": dict(cu_seqlens=ints(0)),
    "cu_seqlens's dtype is torch.float32": dict(cu_seqlens=torch.tensor([0.0, 4, 6])),
    "cu_seqlens[0] is 1; must be 0": dict(cu_seqlens=ints(1, 4, 6)),
    "cu_seqlens[-1] is 5; must be 6": dict(cu_seqlens=ints(0, 4, 5)),
    "cu_seqlens is [0, 7, 6]; must be non-decreasing": dict(cu_seqlens=ints(0, 7, 6)),
    "initial_state's shape is (1, 2, 8, 8); must be (2, 2, 8, 8)": dict(initial_state=torch.zeros(1, 2, 8, 8)),
    "checkpoint_offsets's shape is (3,); must be (2,) or (2, C)": dict(checkpoint_offsets=ints(0, 0, 0)),
    "checkpoint_offsets's dtype is torch.float32": dict(checkpoint_offsets=torch.zeros(2)),
    "checkpoint_offsets[0] is 4; must be 0 (none) or 1..3": dict(checkpoint_offsets=ints(4, 0)),
    "checkpoint_offsets[1] is -1": dict(checkpoint_offsets=ints(0, -1)),
    "checkpoint_state's shape is (2, 8, 8)": dict(checkpoint_state=torch.zeros(2, 8, 8)),
    "checkpoint_offsets is None": dict(checkpoint_offsets=None),
    "out's dtype is torch.float16": dict(out=torch.empty(6, 2, 8, dtype=F16)),
    "final_state's shape is (2, 8, 8, 2)": dict(final_state=torch.empty(2, 8, 8, 2)),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_argument_is_named_and_nothing_is_written(message):
    buffers = dict(out=(6, 2, 8), final_state=(2, 2, 8, 8), checkpoint_state=(2, 2, 8, 8))
    buffers = {name: torch.full(shape, 7.0) for name, shape in buffers.items()}
    good = random_inputs([4, 2], 2, 8) | dict(checkpoint_offsets=ints(3, 0)) | buffers
    with pytest.raises(ValueError) as error:
        BACKEND.prefill(**good | WRONG[message])
    assert str(error.value).startswith(message) and "must be" in str(error.value)
    assert all(bool((each == 7).all()) for each in buffers.values())
    BACKEND.prefill(**good)


def test_the_alignment_is_the_backends():
    x = random_inputs([40], 2, 8)
    check_prefill_args(**x, checkpoint_offsets=ints(32), alignment=16)
    with pytest.raises(ValueError, match=r"checkpoint_offsets\[0\] is 33; must be a multiple of 16"):
        check_prefill_args(**x, checkpoint_offsets=ints(33), alignment=16)


def test_device_values_are_checked_only_in_the_cpu_copies():
    x = {name: y.to("meta") if isinstance(y, torch.Tensor) else y for name, y in random_inputs([40], 2, 8).items()}
    offsets = torch.empty(1, dtype=torch.int32, device="meta")
    check_prefill_args(**x, checkpoint_offsets=offsets)  # a meta tensor has no values: reading one would raise
    with pytest.raises(ValueError, match=r"cu_seqlens\[-1\] is 41; must be 40"):
        check_prefill_args(**x, checkpoint_offsets=offsets, host_cu_seqlens=ints(0, 41))
    with pytest.raises(ValueError, match=r"checkpoint_offsets\[0\] is 40"):
        check_prefill_args(**x, checkpoint_offsets=offsets, host_cu_seqlens=ints(0, 40), host_offsets=ints(40))


def decode_args():
    r, (conv, state) = random_inputs([2], 2, 8), caches(4)
    gates = dict(A_log=r["A_log"], dt_bias=r["dt_bias"], lower_bound=-5.0)
    slots = dict(load_slots=torch.tensor([1, 0]), store_slots=torch.tensor([1, 2]))
    acts = dict(x=torch.randn(2, 48), g=r["g"], beta=r["beta"], weight=torch.randn(48, 4))
    return acts | gates | slots | dict(conv_cache=conv, state_cache=state)


WRONG_DECODE = {
    "x is ": dict(x=torch.randn(48)),
    "weight's shape is (48, 3)": dict(weight=torch.randn(48, 3)),
    "g's shape is (1, 2, 8)": dict(g=torch.randn(1, 2, 8)),
    "lower_bound is 1": dict(lower_bound=1),
    "conv_cache's shape is (4, 24, 3)": dict(conv_cache=torch.zeros(4, 24, 3)),
    "state_cache's shape is (4, 2, 8, 4)": dict(state_cache=torch.zeros(4, 2, 8, 4)),
    "load_slots is 1..4; must be 0..3": dict(load_slots=torch.tensor([1, 4])),
    "store_slots is 0..2; must be 1..3": dict(store_slots=torch.tensor([0, 2])),
    "store_slots's dtype is torch.float32": dict(store_slots=torch.ones(2)),
}


@pytest.mark.parametrize("message", WRONG_DECODE)
def test_wrong_arguments_of_decode(message):
    good = decode_args()
    before = [good[name].clone() for name in ("conv_cache", "state_cache")]
    with pytest.raises(ValueError) as error:
        BACKEND.decode(**good | WRONG_DECODE[message])
    assert str(error.value).startswith(message)
    assert all(torch.equal(good[name], b) for name, b in zip(("conv_cache", "state_cache"), before))


WRONG_STORE = {
    "checkpoint_offsets[0] is 4": dict(checkpoint_offsets=ints(4, 0)),
    "state_indices's shape is (1,)": dict(state_indices=torch.tensor([1])),
    "state_indices is 1..9; must be 0..3": dict(state_indices=torch.tensor([1, 9])),
    "checkpoint_state's shape is (2, 8, 8)": dict(checkpoint_state=torch.zeros(2, 8, 8)),
    "initial_windows's shape is (2, 48, 2)": dict(initial_windows=torch.zeros(2, 48, 2)),
    "cu_seqlens[-1] is 5": dict(cu_seqlens=ints(0, 4, 5)),
}


@pytest.mark.parametrize("message", WRONG_STORE)
def test_wrong_arguments_of_store(message):
    conv, state = caches(4)
    good = dict(
        conv_cache=conv, state_cache=state, x=torch.randn(6, 48), initial_windows=torch.zeros(2, 48, 3),
        cu_seqlens=ints(0, 4, 6), checkpoint_offsets=ints(3, 0), checkpoint_state=torch.zeros(2, 2, 8, 8),
        state_indices=torch.tensor([1, 0]),
    )  # fmt: skip
    before = conv.clone(), state.clone()
    with pytest.raises(ValueError) as error:
        BACKEND.store_cache_checkpoints(**good | WRONG_STORE[message])
    assert str(error.value).startswith(message)
    assert torch.equal(conv, before[0]) and torch.equal(state, before[1])
    BACKEND.store_cache_checkpoints(**good)


def test_wrong_arguments_of_conv_prefill():
    x, weight = torch.randn(6, 48), torch.randn(48, 4)
    for message, args in {
        "x's shape is (6, 24)": dict(x=x[:, :24]),
        "weight's shape is (48, 1)": dict(weight=weight[:, :1]),
        "initial_windows's shape": dict(initial_windows=torch.zeros(1, 48, 3)),
        "cu_seqlens[-1] is 7": dict(cu_seqlens=ints(0, 4, 7)),
    }.items():
        with pytest.raises(ValueError) as error:
            BACKEND.conv_prefill(**dict(x=x, weight=weight, cu_seqlens=ints(0, 4, 6)) | args)
        assert str(error.value).startswith(message)


def test_the_safe_gate_stays_within_its_bound():
    g = torch.linspace(-100, 100, 41).view(41, 1, 1)
    safe = log_decay(g, torch.zeros(1), torch.zeros(1, 1), -5.0)
    assert float(safe.min()) >= -5 and float(safe.max()) <= 0
    assert bool((log_decay(g, torch.zeros(1), torch.zeros(1, 1), None) <= 0).all())
