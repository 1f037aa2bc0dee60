"""The engine as its users meet it: equal tokens whichever way a prompt is cut, errors that harm nobody, failed steps."""

from __future__ import annotations

import random

import pytest
import torch

from kda_ckpt.engine import LLM, SamplingParams, build_model
from kda_ckpt.model import get_preset
from kda_ckpt.spec import MambaSpec

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
