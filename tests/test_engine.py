"""The engine as its users meet it: equal tokens whichever way a prompt is cut, errors that harm nobody, failed steps."""

from __future__ import annotations

import random
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from kda_ckpt.engine import LLM, DecodeGraphs, GraphShape, PrefillGraphs, SamplingParams, build_model
from kda_ckpt.metadata import AttentionMetadataBuilder, BatchMetadata, KDAMetadataBuilder, Row
from kda_ckpt.model import get_preset
from kda_ckpt.spec import MambaSpec, MLAAttentionSpec

GREEDY = SamplingParams(max_tokens=6)


@pytest.fixture(scope="module")
def model():
    return build_model("tiny", "torch", "cpu", torch.float32)


def engine(model, way: str, **kwargs) -> LLM:
    defaults = dict(block_size=16, max_num_scheduled_tokens=8192, max_model_len=512, max_num_seqs=8)
    return LLM(model, prefix_caching=way, **(defaults | kwargs))


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def tokens(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def truth(model, prompts, params=GREEDY, **kwargs) -> list[list[int]]:
    """Each prompt alone, in one forward, without any cache."""
    return [tokens(engine(model, "off", **kwargs).generate([p], params))[0] for p in prompts]


LENGTHS = {B: [1, B - 1, B, B + 1, 2 * B - 1, 5 * B + B // 4] for B in (4, 16, 24)}


@pytest.mark.parametrize("block_size", LENGTHS)
@pytest.mark.parametrize("way", ["split", "internal"])
def test_cold_and_hit_give_the_same_tokens_as_no_cache(model, way, block_size):
    prompts = [prompt(n, n) for n in LENGTHS[block_size]]
    expected = truth(model, prompts)
    llm = engine(model, way, block_size=block_size)
    for p, want in zip(prompts, expected):
        assert tokens(llm.generate([p], GREEDY)) == [want]
        [again] = llm.generate([p], GREEDY)
        assert again.token_ids == want
        assert again.metrics.num_cached_tokens == (len(p) - 1) // block_size * block_size
    for p in prompts:
        changed = [*p[:-1], (p[-1] + 1) % 256, 7, 9]
        assert tokens(llm.generate([changed], GREEDY)) == truth(model, [changed])


def test_full_size_block(model):
    B = 1536
    p = prompt(0, 5 * B + 320)
    kwargs = dict(block_size=B, max_model_len=9000)
    [want] = truth(model, [p], **kwargs)
    for way, forwards in (("split", 2), ("internal", 1)):
        llm = engine(model, way, **kwargs)
        [cold] = llm.generate([p], GREEDY)
        assert (cold.token_ids, cold.metrics.num_prefill_forwards) == (want, forwards)
        [hit] = llm.generate([p], GREEDY)
        assert (hit.token_ids, hit.metrics.num_cached_tokens) == (want, 7680)


@pytest.mark.parametrize("budget", [1, 3, 7, 16, 17, 40, 100])
@pytest.mark.parametrize("way", ["split", "internal"])
def test_any_budget(model, way, budget):
    prompts = [prompt(n, n) for n in (1, 15, 33, 90)]
    llm = engine(model, way, max_num_scheduled_tokens=budget)
    assert tokens(llm.generate(prompts, GREEDY)) == truth(model, prompts)
    assert tokens(llm.generate(prompts, GREEDY)) == truth(model, prompts)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize("partial_hits", [False, True])
def test_many_requests_with_shared_prefixes(model, count, partial_hits):
    common = prompt(1, 70)
    prompts = [common[: 40 + 5 * n] + prompt(n, 11) for n in range(count)]
    expected = truth(model, prompts)
    for way in ("split", "internal"):
        llm = engine(
            model,
            way,
            partial_hits=partial_hits,
            attention_block_size=4,
            max_num_scheduled_tokens=64,
            max_num_seqs=count,
        )
        assert tokens(llm.generate(prompts, GREEDY)) == expected
        second = llm.generate(prompts, GREEDY)
        assert tokens(second) == expected
        assert all(output.metrics.num_cached_tokens >= 32 for output in second)


def test_identical_requests_in_one_step(model):
    p = prompt(3, 50)
    expected = truth(model, [p])
    for way in ("split", "internal"):
        llm = engine(model, way)
        assert tokens(llm.generate([p] * 4, GREEDY)) == expected * 4


@pytest.mark.parametrize("way", ["split", "internal"])
@pytest.mark.parametrize("partial_hits", [False, True])
def test_tiny_pool_preempts_and_evicts(model, way, partial_hits):
    prompts = [prompt(n % 5, 30 + n) for n in range(8)]
    params = SamplingParams(max_tokens=20)
    llm = engine(model, way, partial_hits=partial_hits, attention_block_size=8, num_blocks=14, max_model_len=60)
    outputs = llm.generate(prompts, params)
    assert tokens(outputs) == truth(model, prompts, params)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert llm.manager.pool.evictions > 0
    assert llm.manager.pool.num_free == 13


def test_checkpoints_are_what_saves_the_forward(model):
    p = prompt(5, 5 * 16 + 5)
    llm = engine(model, "internal")
    llm.generate([p], SamplingParams(max_tokens=1))
    assert [step.num_tokens for step in llm.steps] == [85] and llm.steps[0].num_checkpoints == 1
    llm.reset(prefix_caching="split")
    llm.generate([p], SamplingParams(max_tokens=1))
    assert [step.num_tokens for step in llm.steps] == [80, 5]


def test_coarse_alignment_falls_back_to_the_split(model, monkeypatch):
    monkeypatch.setattr(model.backend, "alignment", 16, raising=False)
    p = prompt(6, 80)
    llm = engine(model, "internal", block_size=24)
    assert next(s.checkpoint_alignment for s in llm.scheduler.specs if isinstance(s, MambaSpec)) == 16
    assert tokens(llm.generate([p], GREEDY)) == truth(model, [p])
    assert [step.num_tokens for step in llm.steps][:2] == [72, 8]
    [hit] = llm.generate([p[:75]], GREEDY)
    assert hit.metrics.num_cached_tokens == 72 and [hit.token_ids] == truth(model, [p[:75]])


def test_two_engines_share_one_model(model):
    a, b = engine(model, "split"), engine(model, "internal")
    p, q = prompt(7, 40), prompt(8, 40)
    a.add_request(p, GREEDY)
    b.add_request(q, GREEDY)
    done = []
    while a.has_unfinished or b.has_unfinished:
        done += a.step() + b.step()
    assert sorted(tokens(done)) == sorted(truth(model, [p, q]))


def test_failed_forward_leaves_nothing_behind(model, monkeypatch):
    p = prompt(9, 50)
    llm = engine(model, "internal")
    llm.add_request(p, GREEDY, "a")
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        llm.step()
    assert not llm.manager.pool.cached_blocks(0) and not llm.manager.pool.cached_blocks(1)
    monkeypatch.setattr(model, "forward", forward)
    assert tokens(llm.generate([p[:33]], GREEDY)) == truth(model, [p[:33]])
    assert llm.manager.pool.num_free == llm.manager.pool.num_blocks - 1


def test_abort_frees_everything_and_others_go_on(model):
    llm = engine(model, "internal", max_num_scheduled_tokens=20)
    llm.add_request(prompt(10, 60), GREEDY, "a")
    llm.add_request(prompt(11, 60), GREEDY, "b")
    llm.step()
    llm.abort("a")
    [output] = [o for _ in range(20) for o in llm.step()]
    assert output.request_id == "b" and [output.token_ids] == truth(model, [prompt(11, 60)])
    assert llm.manager.pool.num_free == llm.manager.pool.num_blocks - 1
    with pytest.raises(KeyError, match="'a'"):
        llm.abort("a")


def test_sampling_is_repeatable(model):
    warm = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    first, second = (tokens(engine(model, "internal").generate([prompt(0, 20)], warm)) for _ in range(2))
    other = tokens(engine(model, "internal").generate([prompt(0, 20)], SamplingParams(12, 1.0, seed=4)))
    assert first == second != other


def test_stop_token(model):
    [[a, b, *_]] = truth(model, [prompt(12, 20)])
    [output] = engine(model, "internal").generate([prompt(12, 20)], SamplingParams(max_tokens=6, stop_token_id=b))
    assert output.token_ids in ([a, b], [b])


BAD_REQUESTS = [
    ([], GREEDY, ValueError, "token_ids is empty"),
    ([1, 256], GREEDY, ValueError, "256 at position 1"),
    ([1, -1], GREEDY, ValueError, "-1 at position 1"),
    ([1, 2.5], GREEDY, TypeError, "2.5 at position 1"),
    (["x"], GREEDY, TypeError, "'x' at position 0"),
    ([1] * 600, GREEDY, ValueError, "max_model_len = 512"),
]


@pytest.mark.parametrize("bad, params, kind, message", BAD_REQUESTS)
def test_refused_request_harms_no_other(model, bad, params, kind, message):
    llm = engine(model, "internal")
    llm.add_request(prompt(13, 40), GREEDY, "good")
    llm.step()
    with pytest.raises(kind, match=message):
        llm.add_request(bad, params)
    with pytest.raises(kind, match=message):
        llm.generate([prompt(14, 20), bad], params)
    assert list(llm.scheduler.requests) == ["good"]
    [output] = [o for _ in range(10) for o in llm.step()]
    assert [output.token_ids] == truth(model, [prompt(13, 40)])


def test_duplicate_request_id(model):
    llm = engine(model, "internal")
    llm.add_request([1, 2], GREEDY, "a")
    with pytest.raises(ValueError, match="request_id is 'a'"):
        llm.add_request([3], GREEDY, "a")


def test_prompt_longer_than_the_pool(model):
    llm = engine(model, "internal", num_blocks=8, attention_block_size=8)
    with pytest.raises(ValueError, match="blocks at once and the cache has 7"):
        llm.add_request([1] * 100, GREEDY)


BAD_ENGINES = [
    (dict(block_size=0), "block_size is 0"),
    (dict(prefix_caching="maybe"), "off, split, internal"),
    (dict(max_num_scheduled_tokens=0), "max_num_scheduled_tokens is 0"),
    (dict(max_num_seqs=0), "max_num_seqs is 0"),
    (dict(num_blocks=1), "num_blocks is 1"),
    (dict(cache_memory_bytes=10), "memory_bytes is 10"),
    (dict(attention_block_size=5), "must divide"),
    (dict(hash_block_size=5), "must divide"),
    (dict(hash_block_size=0), "hash_block_size is 0"),
    (dict(attention_block_size=-8), "attention_block_size is -8"),
    (dict(num_blocks=30, cache_memory_bytes=10**9), "only one of them"),
    (dict(partial_hits=True, attention_block_size=8, hash_block_size=4), "must divide 4"),
]


@pytest.mark.parametrize("kwargs, message", BAD_ENGINES)
def test_bad_engine_arguments(model, kwargs, message):
    with pytest.raises(ValueError, match=message):
        LLM(model, **(dict(block_size=16) | kwargs))


def test_unknown_preset_and_backend():
    with pytest.raises(ValueError, match="preset is 'huge'; it must be one of tiny"):
        LLM("huge")
    with pytest.raises(ValueError, match="torch"):
        LLM("tiny", backend="fast")
    with pytest.raises(ValueError, match="backend 'torch' cannot|backend is 'torch'|dtype"):
        LLM(get_preset("tiny"), backend="torch", dtype=torch.int32)


def test_abort_inside_generate(model):
    llm = engine(model, "internal")
    a, b = prompt(20, 30), prompt(21, 30)

    def stop_first(_):
        if len(llm.steps) == 3:
            llm.abort(min(llm.scheduler.requests))

    first, second = llm.generate([a, b], GREEDY, on_step=stop_first)
    assert (first.finish_reason, len(first.token_ids)) == ("abort", 3)
    assert second.finish_reason == "length" and [second.token_ids] == truth(model, [b])


def test_reset_inside_generate(model):
    llm = engine(model, "internal")
    [output] = llm.generate([prompt(22, 30)], GREEDY, on_step=lambda _: llm.reset())
    assert output.finish_reason == "abort" and not llm.has_unfinished


def test_generate_leaves_others_in_flight_alone(model):
    llm = engine(model, "internal")
    llm.add_request(prompt(23, 20), SamplingParams(max_tokens=2), "other")
    [mine] = llm.generate([prompt(24, 20)], GREEDY)
    assert [mine.token_ids] == truth(model, [prompt(24, 20)]) and llm.has_unfinished
    [other] = llm.step()
    assert other.request_id == "other" and len(other.token_ids) == 2 and not llm.has_unfinished


def test_interrupted_generate_leaves_nothing_behind(model):
    llm = engine(model, "internal")

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt(25, 30)] * 2, GREEDY, on_step=interrupt)
    assert not llm.has_unfinished and llm.manager.pool.num_free == llm.manager.pool.num_blocks - 1


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-3])
def test_tiny_temperatures_are_greedy(model, temperature):
    params = SamplingParams(max_tokens=6, temperature=temperature)
    assert tokens(engine(model, "internal").generate([prompt(26, 20)], params)) == truth(model, [prompt(26, 20)])


def test_sampling_does_not_depend_on_company_or_preemption(model):
    warm, p = SamplingParams(max_tokens=20, temperature=1.0, seed=5), prompt(27, 33)
    alone = tokens(engine(model, "internal").generate([p], warm))
    crowd = [prompt(n, 30 + n) for n in range(7)]
    llm = engine(model, "internal", attention_block_size=8, num_blocks=14, max_model_len=60)
    outputs = llm.generate([*crowd, p], [SamplingParams(max_tokens=20)] * 7 + [warm])
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert tokens(outputs[-1:]) == alone


BAD_PARAMS = [
    (dict(max_tokens=0), "max_tokens is 0"),
    (dict(temperature=-1), "temperature is -1"),
    (dict(temperature=float("nan")), "temperature is nan"),
    (dict(temperature="1"), "temperature is '1'"),
    (dict(seed=1.5), "seed is 1.5"),
    (dict(seed=2**63), "it must be below"),
    (dict(stop_token_id="x"), "stop_token_id is 'x'"),
    (dict(return_logits=1), "return_logits is 1"),
]


@pytest.mark.parametrize("kwargs, message", BAD_PARAMS)
def test_bad_sampling_params(kwargs, message):
    with pytest.raises((TypeError, ValueError), match=message):
        SamplingParams(**kwargs)


BAD_CALLS = [
    (lambda llm: llm.add_request(5), "prompt_token_ids is a int"),
    (lambda llm: llm.add_request({1, 2}), "prompt_token_ids is a set"),
    (lambda llm: llm.add_request("abc"), "prompt_token_ids is a str"),
    (lambda llm: llm.add_request([True]), "True at position 0"),
    (lambda llm: llm.add_request([1], dict(max_tokens=3)), "it must be a SamplingParams"),
    (lambda llm: llm.add_request([1], GREEDY, ""), "request_id is ''"),
    (lambda llm: llm.add_request([1], GREEDY, 7), "request_id is 7"),
    (lambda llm: llm.add_request([1], SamplingParams(stop_token_id=1000)), "stop_token_id is 1000"),
    (lambda llm: llm.generate([1, 2, 3]), "prompt_token_ids is a int"),
    (lambda llm: llm.generate([[1]], [None]), "params is None"),
    (lambda llm: llm.generate([[1]], [GREEDY] * 2), "params has 2 entries"),
]


@pytest.mark.parametrize("call, message", BAD_CALLS)
def test_bad_calls(model, call, message):
    llm = engine(model, "internal")
    with pytest.raises((TypeError, ValueError), match=message):
        call(llm)
    assert not llm.has_unfinished


def test_own_names_do_not_collide_with_a_callers(model):
    llm = engine(model, "internal")
    llm.add_request([1, 2, 3], GREEDY, "request-0")
    [output] = llm.generate(iter([[4, 5]]), GREEDY)
    assert output.request_id != "request-0"


def test_interrupt_while_scheduling_leaves_no_promise(model, monkeypatch):
    a, b = prompt(30, 50), prompt(31, 50)
    llm = engine(model, "internal")
    llm.add_request(a, GREEDY, "a")
    llm.add_request(b, GREEDY, "b")
    allocate, calls = llm.manager.allocate, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return allocate(*args)

    monkeypatch.setattr(llm.manager, "allocate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    monkeypatch.setattr(llm.manager, "allocate", allocate)
    longer = [*a, 1, 2]
    [output] = llm.generate([longer], GREEDY)
    assert [output.token_ids] == truth(model, [longer])
    done = {o.request_id: o.token_ids for _ in range(20) for o in llm.step()}
    assert [done["a"], done["b"]] == truth(model, [a, b])


def test_interrupt_while_booking_a_step(model, monkeypatch):
    p = prompt(32, 40)
    llm = engine(model, "internal")
    llm.add_request(p, GREEDY, "a")
    record = llm._record

    def interrupted(*_):
        raise KeyboardInterrupt

    llm.step()
    monkeypatch.setattr(llm, "_record", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    monkeypatch.setattr(llm, "_record", record)
    [output] = [o for _ in range(20) for o in llm.step()]
    assert [output.token_ids] == truth(model, [p])
    assert llm.manager.pool.num_free == llm.manager.pool.num_blocks - 1


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (dict(model=123), "model is 123"),
        (dict(backend=None), "backend is None"),
        (dict(device="tpu"), "device is 'tpu'"),
        (dict(dtype="float32"), "dtype is 'float32'"),
    ],
)
def test_bad_model_arguments(kwargs, message):
    with pytest.raises((TypeError, ValueError), match=message):
        LLM(**(dict(model="tiny", device="cpu") | kwargs))


def test_interrupt_while_booking_the_last_token(model, monkeypatch):
    p = prompt(33, 40)
    llm = engine(model, "internal")
    llm.add_request(p, SamplingParams(max_tokens=2), "a")
    llm.step()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "_record", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    [output] = llm.step()
    assert [output.token_ids] == truth(model, [p], SamplingParams(max_tokens=2)) and output.finish_reason == "length"
    assert not llm.has_unfinished


LOGITS = SamplingParams(max_tokens=20, return_logits=True)


def assert_logits_are_the_tokens(output) -> None:
    """One vector for each token, and each token is its vector's largest entry."""
    assert [int(logits.argmax()) for logits in output.logits] == output.token_ids
    for logits in output.logits:
        assert logits.shape == (256,) and logits.dtype == torch.float32 and logits.device.type == "cpu"
        assert logits.untyped_storage().nbytes() == 4 * 256  # a copy, not a view of the batch's


def test_logits_are_those_the_tokens_were_drawn_from(model):
    p = prompt(40, 50)
    llm = engine(model, "internal")
    with_logits, without = llm.generate([p, prompt(41, 20)], [LOGITS, GREEDY])
    assert_logits_are_the_tokens(with_logits)
    assert without.logits == []
    for i in range(3):
        [again] = engine(model, "off").generate(
            [p + with_logits.token_ids[:i]], SamplingParams(max_tokens=1, return_logits=True)
        )
        torch.testing.assert_close(again.logits[0], with_logits.logits[i], rtol=1e-4, atol=1e-4)


def test_logits_are_not_touched_by_the_temperature(model):
    warm = SamplingParams(max_tokens=3, temperature=0.7, seed=1, return_logits=True)
    [drawn], [greedy] = (engine(model, "internal").generate([prompt(42, 30)], params) for params in (warm, LOGITS))
    assert len(drawn.logits) == 3 and torch.equal(drawn.logits[0], greedy.logits[0])


def test_logits_with_preemption(model):
    prompts = [prompt(n, 30 + n) for n in range(8)]
    llm = engine(model, "internal", attention_block_size=8, num_blocks=14, max_model_len=60)
    outputs = llm.generate(prompts, LOGITS)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for output in outputs:
        assert len(output.logits) == 20
        assert_logits_are_the_tokens(output)


@pytest.mark.parametrize("where", ["_sample", "_record", "finish_step", "_draw"])
@pytest.mark.parametrize("at", [0, 1, 5, 19])
def test_logits_after_a_failure(model, monkeypatch, where, at):
    """Whatever the step that is interrupted has done by then: a token has one vector, its own."""
    llm = engine(model, "internal")
    params = SamplingParams(max_tokens=20, temperature=1e-3, return_logits=True)  # greedy, and through `_draw`
    for n in (43, 44):
        llm.add_request(prompt(n, 40), params, str(n))
    for _ in range(at):
        llm.step()
    owner = llm.scheduler if where == "finish_step" else llm
    real, calls = getattr(owner, where), []

    def interrupted(*args):
        calls.append(args)
        if where != "_draw" or len(calls) == 2:  # the first of two requests has been drawn for
            if where != "_record":
                real(*args)
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(owner, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    monkeypatch.setattr(owner, where, real)
    outputs = [output for _ in range(60) for output in llm.step()]
    assert len(outputs) == 2 and all(len(output.token_ids) == 20 for output in outputs)
    for output in outputs:
        assert_logits_are_the_tokens(output)


def test_logits_of_an_aborted_request(model, monkeypatch):
    """A vector whose token was lost with its step is not part of the output."""
    llm = engine(model, "internal")
    llm.add_request(prompt(45, 40), LOGITS, "a")
    llm.step()
    sample = llm._sample

    def interrupted(*args):
        sample(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "_sample", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    output = llm.abort("a")
    assert len(output.token_ids) == 1
    assert_logits_are_the_tokens(output)


class Tape:
    """A model that sums each row's tokens, positions and slots, and what torch.cuda needs to record it without a GPU."""

    def __init__(self, monkeypatch):
        self.calls = 0
        monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
        monkeypatch.setattr(torch.cuda, "graph", self.graph)

    def __call__(self, ids, meta):
        self.calls += 1
        self.last, attention, kda = (ids, meta), meta.attention, meta.kda
        bounds, n = attention.query_start_loc.tolist(), attention.num_decodes
        assert [n + each for each in kda.cu_seqlens.tolist()] == bounds[n:]
        assert attention.seq_lens[n:].sum() == sum(attention.seq_lens_cpu[n:])
        if 0 in attention.query_lens_cpu:  # bounds: the last row is nobody's
            assert (attention.slot_mapping[bounds[-2] :] == -1).all() and kda.store_slots[-1] == 0
        rows = [(ids[a:b].sum(), attention.slot_mapping[a:b].clamp(min=0).sum()) for a, b in pairwise(bounds)]
        marks = torch.zeros(len(rows), 2, dtype=torch.int64)
        if kda.checkpoint is not None:
            marks[n:] = torch.stack([kda.checkpoint.checkpoint_offsets, kda.checkpoint.state_indices], 1)
        pages = [
            line[: -(-length // 16)].sum() for line, length in zip(attention.block_table, attention.seq_lens.tolist())
        ]
        columns = [kda.load_slots, kda.store_slots, attention.seq_lens, torch.stack(pages)]
        self.result = torch.cat([torch.tensor(rows), marks, torch.stack(columns, 1)], 1)
        return self.result

    @contextmanager
    def graph(self, graph, pool=None):
        yield
        call, result = self.last, self.result
        graph.replay = lambda: result.copy_(self(*call))


def test_recorded_prefills_are_replayed_for_other_prompts(monkeypatch):
    tape, size = Tape(monkeypatch), {"attention": 16, "mamba": 32}
    mamba = MambaSpec(
        block_size=32,
        shapes=((1,),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=1,
    )
    attention = MLAAttentionSpec(block_size=16, head_size=8, dtype=torch.float32)
    graphs, plain = PrefillGraphs(tape, 16, most=4), Tape(monkeypatch)
    monkeypatch.setattr(torch.cuda, "graph", tape.graph)

    def batch(*rows):
        first = 1 + rows[0][1]  # other blocks for other prompts
        tables = {
            kind: [list(range(first + i, first + i - (-end // n))) for i, (_, end) in enumerate(rows)]
            for kind, n in size.items()
        }
        rows = [Row(start, end) for start, end in rows]
        return BatchMetadata(
            KDAMetadataBuilder(mamba).build(rows, tables["mamba"]),
            AttentionMetadataBuilder(attention).build(rows, tables["attention"]),
        )

    batches = [
        [(0, 20)], [(0, 33)], [(0, 50)], [(32, 60)], [(64, 80)], [(96, 150)], [(40, 41), (0, 30)], [(99, 100), (0, 44)],
        [(7, 8), (32, 70), (0, 40)], [(0, 20)], [(0, 10), (0, 5)],
    ]  # fmt: skip
    for rows in batches * 2:
        meta = batch(*rows)
        ids = torch.randint(100, (sum(end - start for start, end in rows),))
        if graphs.takes(meta):
            assert torch.equal(graphs(ids, meta)[: len(rows)], plain(ids, meta))
    shapes = {GraphShape.of(batch(*rows)) for rows in batches}
    assert len(graphs._graphs) == 4 < len(shapes) < len(batches)  # as many as may be, and some fit several batches
    assert not graphs.takes(batch((0, 600)))
    decodes = DecodeGraphs(tape, 16)
    for rows in [[(40, 41)], [(99, 100)], [(7, 8), (1030, 1031)], [(33, 34), (1999, 2000)]] * 2:
        meta, ids = batch(*rows), torch.randint(100, (len(rows),))
        assert torch.equal(decodes(ids, meta), plain(ids, meta))
    assert len(decodes._graphs) == 2
