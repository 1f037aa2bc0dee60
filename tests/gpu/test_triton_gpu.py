"""The Triton backend on a GPU: full shapes, guard bands, graphs, streams, cuts at every offset."""

# ruff: noqa: E402 (the interpreter and the GPU are looked for before the imports)

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kda_ckpt.backends import TorchBackend, get_backend
from kda_ckpt.reference import kda_recurrent, random_inputs, relative_error
from kda_ckpt.triton_kda import TritonBackend, workspace_size

BF16 = torch.bfloat16
OUT, STATE = 5.1e-3, 4.2e-3  # fla's chunk_kda on the same kind of input
PACKED = ("q", "k", "v", "g", "beta")


@pytest.fixture(scope="module")
def backend():
    return TritonBackend()


def inputs(lens, heads=4, head_dim=128, regime="mixed", dtype=BF16, seed=0, **change):
    return random_inputs(lens, heads, head_dim, regime, seed=seed, dtype=dtype, device="cuda") | change


def check(result, exact, out=OUT, state=STATE):
    assert relative_error(result.out, exact.out) < out
    assert relative_error(result.final_state, exact.final_state) < state


def test_the_registry_knows_it():
    assert get_backend("triton").name == "triton"


@pytest.mark.parametrize("regime", ["fast", "slow", "mixed"])
@pytest.mark.parametrize(("head_dim", "heads"), [(128, 4), (64, 3), (128, 40)])
def test_lengths(backend, regime, head_dim, heads):
    x = inputs([1, 15, 16, 17, 1500, 0, 64, 65], heads, head_dim, regime)
    check(backend.prefill(**x), kda_recurrent(**x))


@pytest.mark.parametrize("pairs", [1, 16, 40, 130, 300])
def test_every_split_of_the_value_rows(backend, pairs):
    x = inputs([130], pairs, regime="slow")
    check(backend.prefill(**x), kda_recurrent(**x))


def test_a_long_row(backend):
    x = inputs([8192], 2, regime="slow")
    check(backend.prefill(**x), kda_recurrent(**x))


@pytest.mark.parametrize("logit", [-1e3, 1e3])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_extreme_logits(backend, logit, lower_bound):
    x = inputs([1, 15, 16, 17, 300], lower_bound=lower_bound)
    x["g"] = torch.full_like(x["g"], logit)
    x["beta"] = torch.where(x["beta"] > 0, 1e3, -1e3).to(BF16)
    result, exact = backend.prefill(**x), kda_recurrent(**x)
    assert result.out.isfinite().all()
    check(result, exact, out=6e-3, state=6e-3)


@pytest.mark.parametrize("gate", [-5.0, -1e-4])
def test_every_gate_alike(backend, gate):
    x = inputs([1, 15, 16, 17, 1500], A_log=torch.zeros(4, device="cuda"), dt_bias=torch.zeros(4, 128, device="cuda"))
    level = 40.0 if gate == -5 else torch.logit(torch.tensor(gate / -5)).item()
    x["g"] = torch.full_like(x["g"], level)
    check(backend.prefill(**x), kda_recurrent(**x))


def test_softplus_gates(backend):
    x = inputs([1, 15, 16, 17, 700], lower_bound=None)
    check(backend.prefill(**x), kda_recurrent(**x))


def test_the_outputs_stay_in_their_bounds(backend):
    x = inputs([100, 37])
    T, H, D, N, guard = 137, 4, 128, 2, 1024

    def fenced(shape, dtype):
        size = torch.Size(shape).numel()
        whole = torch.full((size + 2 * guard,), 77.0 if dtype.is_floating_point else 77, device="cuda", dtype=dtype)
        return whole, whole[guard : guard + size].view(shape)

    fences = dict(out=fenced((T, H, D), BF16), final_state=fenced((N, H, D, D), torch.float32),
                  checkpoint_state=fenced((N, 2, H, D, D), torch.float32),
                  workspace=fenced((workspace_size(T, N, H, D, 2),), torch.uint8))  # fmt: skip
    offsets = torch.tensor([[50, 0], [17, 36]], device="cuda")
    result = backend.prefill(**x, checkpoint_offsets=offsets, **{n: view for n, (_, view) in fences.items()})
    exact = kda_recurrent(**x, checkpoint_offsets=offsets)
    check(result, exact)
    for whole, _ in fences.values():
        assert (whole[:guard] == 77).all() and (whole[-guard:] == 77).all()
    assert (result.checkpoint_state[0, 1] == 77).all()
    for n, c in ((0, 0), (1, 0), (1, 1)):
        assert relative_error(result.checkpoint_state[n, c], exact.checkpoint_state[n, c]) < STATE


def test_alternating_lengths_and_dtypes(backend):
    for seed in range(3):
        for lens, dtype, state_dtype in (
            ([700, 3], BF16, torch.float32),
            ([20], torch.float16, BF16),
            ([65] * 5, torch.float32, BF16),
        ):
            x = inputs(lens, dtype=dtype, seed=seed)
            x["initial_state"] = x["initial_state"].to(state_dtype)
            check(backend.prefill(**x), kda_recurrent(**x))


def test_one_call_or_two_at_every_offset(backend):
    x = inputs([150], 2)
    for cut in range(1, 150):
        first = x | {n: x[n][:cut] for n in PACKED} | dict(cu_seqlens=torch.tensor([0, cut], device="cuda"))
        rest = x | {n: x[n][cut:] for n in PACKED} | dict(cu_seqlens=torch.tensor([0, 150 - cut], device="cuda"))
        whole = backend.prefill(**x, checkpoint_offsets=torch.tensor([cut], device="cuda"))
        a = backend.prefill(**first)
        b = backend.prefill(**rest | dict(initial_state=a.final_state))
        assert torch.equal(whole.checkpoint_state, a.final_state)
        assert torch.equal(whole.final_state, b.final_state)
        assert torch.equal(whole.out, torch.cat([a.out, b.out]))


def test_a_nan_stays_in_its_row(backend):
    x = inputs([100, 100, 100])
    clean = backend.prefill(**x)
    for name in ("q", "k", "v", "g"):
        x[name][150, 1] = float("nan")
    result = backend.prefill(**x)
    keep = torch.arange(300, device="cuda") // 100 != 1
    assert torch.equal(result.out[keep], clean.out[keep])
    assert torch.equal(result.final_state[[0, 2]], clean.final_state[[0, 2]])
    assert torch.equal(result.final_state[1, [0, 2, 3]], clean.final_state[1, [0, 2, 3]])


def test_two_streams(backend):
    xs = [inputs([900, 70], seed=seed) for seed in (0, 1)]
    alone = [backend.prefill(**x) for x in xs]
    torch.cuda.synchronize()
    streams, together = [torch.cuda.Stream() for _ in xs], []
    for _ in range(5):
        together.clear()
        for x, stream in zip(xs, streams):
            with torch.cuda.stream(stream):
                together.append(backend.prefill(**x))
        torch.cuda.synchronize()
        for a, b in zip(alone, together):
            assert torch.equal(a.out, b.out) and torch.equal(a.final_state, b.final_state)


def test_graph_capture_and_replay(backend):
    x = inputs([300, 80])
    offsets = torch.tensor([128, 33], device="cuda", dtype=torch.int32)
    space = torch.empty(workspace_size(380, 2, 4, 128, 1), dtype=torch.uint8, device="cuda")
    out, final = torch.empty_like(x["v"]), torch.empty_like(x["initial_state"])
    saved = torch.zeros_like(final)
    args = dict(x, checkpoint_offsets=offsets, checkpoint_state=saved, out=out, final_state=final, workspace=space)
    backend.prefill(**args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.prefill(**args)
    other = inputs([200, 180], seed=5)  # other rows, other cuts, the same graph
    for name, tensor in other.items():
        if isinstance(tensor, torch.Tensor):
            x[name].copy_(tensor)
    offsets.copy_(torch.tensor([17, 100]))
    out.zero_(), final.zero_()
    graph.replay()
    torch.cuda.synchronize()
    fresh = backend.prefill(**other, checkpoint_offsets=offsets)
    assert torch.equal(out, fresh.out) and torch.equal(final, fresh.final_state)
    assert torch.equal(saved, fresh.checkpoint_state)


def serving(H=6, D=128, B=33, slots=80, dtype=BF16, seed=0):
    rng = torch.Generator("cuda").manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=rng, device="cuda")  # noqa: E731
    C = 3 * H * D
    gates = random_inputs([B], H, D, "mixed", seed=seed, dtype=dtype, device="cuda")
    args = {n: gates[n] for n in ("g", "beta", "A_log", "dt_bias", "lower_bound")}
    args |= dict(x=normal(B, C).to(dtype), weight=normal(C, 4).to(dtype))
    pages = normal(slots, 3 * C + H * D * D)
    pages[:, : 3 * C] = pages[:, : 3 * C].to(
        dtype
    )  # what a convolution cache holds has been rounded to the model's dtype
    order = torch.randperm(slots - 1, generator=rng, device="cuda") + 1
    load, store = order[:B].clone(), order[:B].clone()
    store[: B // 2] = order[B : B + B // 2]  # half of the rows move to another slot
    load[-2:] = 0  # two start afresh
    return args | dict(load_slots=load, store_slots=store), pages, (H, D, C)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_decode_in_place_and_elsewhere(backend, lower_bound):
    args, pages, (H, D, C) = serving()
    results = []
    for each in (backend, TorchBackend()):
        page = pages.clone()
        conv, state = page[:, : 3 * C].view(-1, 3, C).transpose(1, 2), page[:, 3 * C :].view(-1, H, D, D)
        out = each.decode(**args | dict(lower_bound=lower_bound), conv_cache=conv, state_cache=state)
        results.append((out, page))
    assert relative_error(results[0][0], results[1][0]) < 2e-3
    assert relative_error(results[0][1], results[1][1]) < 1e-3
    untouched = torch.ones(len(pages), dtype=torch.bool, device="cuda")
    untouched[args["store_slots"]] = False
    assert torch.equal(results[0][1][untouched], pages[untouched])


@pytest.mark.parametrize("offset", [1000, 1008, 1015, 1023])
def test_a_short_slab_takes_the_form_of_a_tile(backend, offset):
    x = inputs([1024, 1030, 9], heads=3)
    offsets = torch.tensor([offset, offset, 4], device="cuda", dtype=torch.int32)
    result, exact = backend.prefill(**x, checkpoint_offsets=offsets), kda_recurrent(**x, checkpoint_offsets=offsets)
    check(result, exact)
    assert relative_error(result.checkpoint_state, exact.checkpoint_state) < STATE


def test_store_beyond_two_gigabytes(backend):
    H, D, slots = 96, 128, 400  # 2.5 GB of states
    C = 3 * H * D
    state = torch.zeros(slots, H, D, D, device="cuda")
    conv = torch.zeros(slots, C, 3, device="cuda", dtype=BF16)
    x, saved = torch.randn(40, C, device="cuda").to(BF16), torch.randn(2, H, D, D, device="cuda")
    cu, offsets = torch.tensor([0, 20, 40], device="cuda"), torch.tensor([19, 2], device="cuda")
    backend.store_cache_checkpoints(conv_cache=conv, state_cache=state, x=x, initial_windows=None, cu_seqlens=cu,
                                    checkpoint_offsets=offsets, checkpoint_state=saved,
                                    state_indices=torch.tensor([slots - 1, 0], device="cuda"))  # fmt: skip
    assert torch.equal(state[-1], saved[0]) and torch.equal(conv[-1], x[16:19].T)
    assert not state[:-1].any() and not conv[:-1].any()


def test_convolution(backend):
    lens = [1, 2, 3, 0, 500, 77]
    cu = torch.tensor([0, 1, 3, 6, 6, 506, 583], device="cuda", dtype=torch.int32)
    x, weight = torch.randn(sum(lens), 1000, device="cuda").to(BF16), torch.randn(1000, 4, device="cuda").to(BF16)
    windows = torch.randn(6, 1000, 3, device="cuda").to(BF16)
    ours = backend.conv_prefill(x, weight, cu_seqlens=cu, initial_windows=windows)
    theirs = TorchBackend().conv_prefill(x, weight, cu_seqlens=cu, initial_windows=windows)
    assert relative_error(ours[0], theirs[0]) < 1e-3 and torch.equal(ours[1], theirs[1])


def test_wrong_devices_are_refused(backend):
    x = inputs([8])
    with pytest.raises(ValueError, match="cu_seqlens"):
        backend.prefill(**x | dict(cu_seqlens=x["cu_seqlens"].cpu()))
    with pytest.raises(ValueError, match="workspace"):
        backend.prefill(**x, workspace=torch.empty(1 << 24, dtype=torch.uint8))
    cpu = {n: t.cpu() if isinstance(t, torch.Tensor) else t for n, t in x.items()}
    with pytest.raises(ValueError, match="device"):
        backend.prefill(**cpu)
