"""The TTFT experiment: its prompts, its numbers, its prediction, and that its checks find what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kda_ckpt.backends import TorchBackend
from kda_ckpt.engine import StepStats
from kda_ckpt.explain import WAYS
from kda_ckpt.plots import draw_cost, draw_ttft
from kda_ckpt.ttft import (
    LOGIT_CHECKS,
    Experiment,
    ForwardCost,
    Plan,
    Point,
    TTFTConfig,
    change,
    check_logits,
    check_memory,
    check_points,
    cut_prompts,
    fit_cost,
    free_memory,
    git_commit,
    judge_logits,
    judge_shares,
    make_llm,
    memory_needed,
    point_prompts,
    predict,
    predict_changes,
    resend_prompt,
    resolve,
    run_ttft,
    short_resend,
    total_tokens,
)

SMALL = TTFTConfig(
    concurrency=(1, 3),
    prompt_len=(200,),
    output_len=3,
    block_size=48,
    budget=256,
    repeats=2,
    device="cpu",
    backend="torch",
)


@pytest.fixture(scope="module")
def small_result():
    counted: list[int] = []
    result = run_ttft(SMALL, progress=lambda tokens, label: counted.append(tokens))
    return result, sum(counted)


def test_small_experiment(small_result) -> None:
    result, _ = small_result
    assert result.ok and result.failures == []
    alone, together = result.points
    assert alone["ways"]["split"]["forwards_per_prefill"] == 2
    assert alone["ways"]["internal"]["forwards_per_prefill"] == 1
    assert alone["ways"]["split"]["tokens_per_forward"] == 100
    for point in (alone, together):
        assert set(point["ways"]) == set(point["resend"]["ways"]) == set(WAYS)
        for way in WAYS:
            assert point["ways"][way]["cached_tokens"] == 0
            assert point["resend"]["ways"][way]["cached_tokens"] == 192
            assert point["ways"][way]["preemptions"] == point["resend"]["ways"][way]["preemptions"] == 0
            numbers = point["ways"][way]["ttft"]
            assert 0 < numbers["median"] <= numbers["p95"]
            assert len(point["ways"][way]["runs"]) == 2
        for change_of in point["changes"].values():
            assert change_of["low"] <= change_of["percent"] <= change_of["high"]
    assert result.checks["policy"] == "exact"
    assert result.checks["cold"] == {"share": 0.0, "limit": 0.0, "requests": 8, "ok": True}
    assert result.checks["resend_against_off"]["requests"] == 2 * (1 + 2)
    assert set(result.checks["logits"]) == {"natural", *LOGIT_CHECKS} and result.checks["logits"]["natural"] is None
    for name in LOGIT_CHECKS:
        check = result.checks["logits"][name]
        assert check["ok"] and check["requests"] == 1 + 2 and check["mean"] <= check["largest"] < 1e-3 < check["limit"]


def test_result_is_json_and_can_be_drawn(small_result, tmp_path) -> None:
    result, _ = small_result
    result.save(tmp_path / "ttft.json")
    stored = json.loads((tmp_path / "ttft.json").read_text())
    assert stored["ok"] and stored["config"]["prompt_len"] == [200]
    assert stored["machine"]["cpu"] and stored["machine"]["versions"]["torch"] and stored["machine"]["date"]
    assert stored["engine"]["backend"] == "torch" and stored["seconds"] > 0
    for figure in (draw_ttft(stored), draw_cost(stored)):
        figure.savefig(tmp_path / "picture.png")
        assert (tmp_path / "picture.png").stat().st_size > 1000


def test_progress_adds_up(small_result) -> None:
    _, counted = small_result
    assert 0.85 < counted / total_tokens(resolve(SMALL)) < 1.15


def test_measured_forwards_are_the_replayed_ones(small_result) -> None:
    """What the prediction replays is what the engine does, forward by forward."""
    result, _ = small_result
    for point in result.points:
        measured = {way: point["ways"][way]["forwards_per_prefill"] for way in WAYS}
        percent = 100 * (measured["internal"] / measured["split"] - 1)
        assert point["predicted"]["forwards_per_prefill"] == pytest.approx(percent)


@pytest.mark.parametrize("budget, waves, length", [(64, 1, 200), (256, 2, 150), (100, 1, 96), (256, 1, 40)])
def test_other_shapes(budget: int, waves: int, length: int) -> None:
    """Budgets below the prompt, a prompt on a boundary, one shorter than a block, and more prompts than in flight."""
    result = run_ttft(
        replace(SMALL, concurrency=(2,), prompt_len=(length,), budget=budget, waves=waves, repeats=1, check_requests=3)
    )
    assert result.ok, result.failures
    [point] = result.points
    assert (point["resend"] is None) == (length < 48)
    assert len(point["ways"]["split"]["runs"]) == 1
    measured = {way: point["ways"][way]["forwards_per_prefill"] for way in WAYS}
    assert point["predicted"]["forwards_per_prefill"] == pytest.approx(
        100 * (measured["internal"] / measured["split"] - 1)
    )


def stopping(after: int, error: BaseException):
    """An `Experiment.run_point` that raises once `after` points are complete."""
    done, run_point = [], Experiment.run_point

    def run_or_stop(self, length: int, concurrency: int) -> Point:
        if len(done) == after:
            raise error
        done.append(run_point(self, length, concurrency))
        return done[-1]

    return run_or_stop


@pytest.mark.parametrize(
    "error, stopped",
    [
        (KeyboardInterrupt(), "interrupted"),
        (RuntimeError("no such kernel"), "no such kernel"),
        (torch.OutOfMemoryError("out of memory"), "out of memory"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_complete_points_are_kept(monkeypatch, error: BaseException, stopped: str) -> None:
    """An interrupt or an error in the second point gives a whole result of the first; in the first it is raised."""
    config = replace(SMALL, repeats=1)
    monkeypatch.setattr(Experiment, "run_point", stopping(1, error))
    result = run_ttft(config)
    assert [point["concurrency"] for point in result.points] == [1] and len(result.sentences) == 1
    assert result.stopped == stopped and not result.complete and not result.ok and not result.failures
    stored = json.loads(json.dumps(result.to_dict()))
    assert stored["complete"] is False and stored["ok"] is False and stored["stopped"] == stopped
    assert draw_ttft(stored) and draw_cost(stored)
    monkeypatch.setattr(Experiment, "run_point", stopping(0, error))
    with pytest.raises(type(error)):
        run_ttft(config)


def test_a_bug_is_no_early_end(monkeypatch) -> None:
    monkeypatch.setattr(Experiment, "run_point", stopping(1, KeyError("a bug")))
    with pytest.raises(KeyError, match="a bug"):
        run_ttft(replace(SMALL, repeats=1))


@pytest.mark.parametrize("preset", ["tiny", "small"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_size, length", [(1536, 3000), (48, 200), (7, 50)])
def test_memory_is_known_before(preset: str, dtype: str, block_size: int, length: int) -> None:
    config = resolve(replace(SMALL, preset=preset, dtype=dtype, block_size=block_size, prompt_len=(length,)))
    llm, (weights, caches) = make_llm(config), memory_needed(config)
    assert caches == llm.cache.config.memory_bytes
    assert weights == pytest.approx(sum(w.numel() * w.itemsize for w in llm.model.parameters()), rel=0.01)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"concurrency": (1, 1000)}, "concurrency is 1000"),
        ({"waves": 1000}, "waves is 1000"),
        ({"prompt_len": (8000, 10**6)}, "prompt_len is 1000000"),
        ({"output_len": 10**6}, "output_len is 1000000"),
        ({"block_size": 10**7}, "block_size is 10000000"),
        ({"preset": "kimi_linear_48b"}, "preset is 'kimi_linear_48b'"),
    ],
)
def test_what_does_not_fit_is_not_begun(monkeypatch, changes: dict, named: str) -> None:
    """The error names the field to lower, what is needed and what is there, before even a prompt is cut."""
    usual = replace(SMALL, prompt_len=(8000,), block_size=1536)
    check_memory(resolve(usual))
    for begun in ("point_prompts", "make_llm"):
        monkeypatch.setattr(f"kda_ckpt.ttft.{begun}", lambda *args: pytest.fail("work was begun"))
    monkeypatch.setattr("kda_ckpt.ttft.free_memory", lambda device: 2**28)
    config = resolve(replace(usual, **changes))
    weights, caches = memory_needed(config)
    needed = weights if "preset" in changes else weights + caches
    with pytest.raises(ValueError, match=f"^{named}; it must be") as raised:
        run_ttft(config)
    assert f" {needed / 2**30:.2f} GiB" in str(raised.value) and "0.25 GiB are free on cpu" in str(raised.value)


def test_memory_that_nobody_knows_is_enough(monkeypatch) -> None:
    assert 2**20 < free_memory("cpu") < 2**50
    monkeypatch.setattr("kda_ckpt.ttft.free_memory", lambda device: None)
    check_memory(resolve(replace(SMALL, concurrency=(1024,), prompt_len=(2**20,))))


def test_free_memory_of_a_gpu(monkeypatch) -> None:
    """What the driver has, and what torch keeps without using it."""
    for name, found in (("mem_get_info", (500, 1000)), ("memory_reserved", 300), ("memory_allocated", 100)):
        monkeypatch.setattr(torch.cuda, name, lambda device, found=found: found)
    assert free_memory("cuda:1") == 500 + 300 - 100


def test_the_commit_can_be_given(monkeypatch) -> None:
    found = git_commit()
    monkeypatch.setenv("KDA_CKPT_COMMIT", "abc123")
    assert git_commit() == "abc123"
    monkeypatch.setenv("KDA_CKPT_COMMIT", "")
    assert git_commit() == found or found == "abc123"


def test_one_engine_for_several_experiments() -> None:
    config = resolve(replace(SMALL, repeats=1))
    llm = make_llm(config)
    first, second = run_ttft(config, llm=llm), run_ttft(replace(config, concurrency=(2,)), llm=llm)
    assert first.ok and second.ok and len(second.points) == 1


def test_unwritten_checkpoints_are_found(monkeypatch) -> None:
    """If the kernel does not write the states it was asked for, the experiment must not pass."""
    monkeypatch.setattr(TorchBackend, "store_cache_checkpoints", lambda self, **kwargs: None)
    result = run_ttft(replace(SMALL, repeats=1, output_len=8))
    assert not result.ok
    assert any("caching off" in line for line in result.failures)
    assert not result.checks["resend_against_off"]["ok"] and result.checks["cold"]["ok"]


def zeroed(states):
    return states * 0


def of_the_next_row(states):
    return states.roll(1, 0)


@pytest.mark.parametrize("how", [zeroed, of_the_next_row, None])
@pytest.mark.parametrize(
    "preset, dtype, length, block_size",
    [
        ("tiny", "float32", 200, 48),
        ("tiny", "bfloat16", 200, 48),
        ("tiny", "float32", 700, 384),
        ("small", "float32", 70, 32),
    ],
)
def test_logits_have_the_power_to_find_a_wrong_state(monkeypatch, how, preset, dtype, length, block_size) -> None:
    """Whatever the precision and the tail, a wrong state gives logits far beyond the limit, in every request.

    how: what is done to the states before they are stored; None: nothing is stored
    """
    config = resolve(
        replace(SMALL, preset=preset, dtype=dtype, token_check="share", prompt_len=(length,), block_size=block_size,
                budget=4096, concurrency=(3,), check_requests=3, repeats=1)
    )  # fmt: skip
    experiment, prompts = Experiment(config, make_llm(config)), point_prompts(config, length, 3)

    def compared():
        point = Point(length, 3, prompts[:-1])
        experiment.compare_logits(point, prompts[-1])
        return point

    right = compared()
    assert all(check_logits([right])[name]["ok"] for name in LOGIT_CHECKS)
    assert max(right.logits["natural"]) < 0.7
    store = TorchBackend.store_cache_checkpoints

    def spoiled(self, **kwargs):
        if how:
            store(self, **(kwargs | {"checkpoint_state": how(kwargs["checkpoint_state"])}))

    monkeypatch.setattr(TorchBackend, "store_cache_checkpoints", spoiled)
    wrong = compared()
    found = check_logits([wrong])
    assert {name for name in LOGIT_CHECKS if found[name]["ok"] is False} == {"hit", "internal_against_off"}
    assert min(wrong.logits["internal_against_off"]) > 0.8 and wrong.logits["natural"] == right.logits["natural"]
    _, failures = check_points([wrong], config)
    assert any("first-token logits, an internal hit against caching off" in line for line in failures)


def test_one_wrong_request_is_enough() -> None:
    natural = [0.02, 0.3, 0.02]
    assert judge_logits([0.02, 0.4, 0.1], natural)["ok"]
    assert judge_logits([0.02, 0.02, 0.02, 0.02, 1.1], natural)["ok"] is False
    assert judge_logits([0.02, float("nan")], natural)["ok"] is False
    assert judge_logits([1.1], [0.9])["ok"] is None
    assert judge_logits([], []) == {"mean": 0.0, "largest": 0.0, "limit": 0.7, "requests": 0, "ok": None}


@pytest.mark.parametrize(
    "changes", [{"concurrency": (1,)}, {"budget": 64}, {"prompt_len": (193,)}, {"prompt_len": (192,)}]
)
def test_the_natural_spread_is_of_another_rounding(changes: dict) -> None:
    """Also of a single request, of chunks below the prompt and of resends of one token, the two runs really differ."""
    config = resolve(
        replace(SMALL, dtype="bfloat16", token_check="share", repeats=1, **({"concurrency": (2,)} | changes))
    )
    [length], [concurrency] = config.prompt_len, config.concurrency
    experiment, prompts = Experiment(config, make_llm(config)), point_prompts(config, length, concurrency)
    point = Point(length, concurrency, prompts[:-1])
    experiment.compare_logits(point, prompts[-1])
    assert len(point.logits["natural"]) == concurrency and 0 < max(point.logits["natural"]) < 0.7
    assert {len(found) for found in point.logits.values()} == {concurrency}


def test_no_checks_of_logits_where_none_are_wanted() -> None:
    result = run_ttft(replace(SMALL, concurrency=(1,), repeats=1, check_requests=0))
    assert result.ok and all(result.checks["logits"][name]["requests"] == 0 for name in LOGIT_CHECKS)
    result = run_ttft(replace(SMALL, concurrency=(1,), repeats=1, prompt_len=(40,)))
    assert result.ok and [result.checks["logits"][name]["requests"] for name in LOGIT_CHECKS] == [1, 0, 0, 0]


def test_lost_hits_are_found(monkeypatch) -> None:
    from kda_ckpt.manager import MambaManager

    monkeypatch.setattr(MambaManager, "find_longest_prefix", lambda self, hashes, max_length: (0, 0))
    result = run_ttft(replace(SMALL, concurrency=(1,), repeats=1))
    assert any("a resend found 0 tokens in the cache instead of 192" in line for line in result.failures)


def test_share_policy_in_bfloat16() -> None:
    result = run_ttft(replace(SMALL, concurrency=(4,), repeats=1, dtype="bfloat16", token_check="share", output_len=8))
    assert result.checks["policy"] == "share"
    assert result.checks["baseline_share"] is not None
    assert result.checks["cold"]["requests"] == 4 and result.checks["cold"]["limit"] >= result.checks["baseline_share"]
    logits = result.checks["logits"]
    assert logits["natural"]["requests"] == 4 and 0 < logits["natural"]["largest"] < 0.7
    assert all(logits[name]["ok"] and logits[name]["limit"] == 0.7 for name in LOGIT_CHECKS)


def test_shares_are_judged() -> None:
    assert judge_shares([0.0] * 4, [], "exact")["ok"]
    assert not judge_shares([0.0, 0.01], [0.5, 0.5], "exact")["ok"]
    assert judge_shares([0.3, 0.1], [0.2, 0.2], "share")["ok"]
    assert not judge_shares([0.9] * 8, [0.1] * 8, "share")["ok"]
    assert judge_shares([], [], "share")["ok"] is None
    for wrong, requests in ((1, 80), (3, 80), (3, 16)):
        found = judge_shares([1.0] * wrong + [0.0] * (requests - wrong), [0.0] * requests, "share")
        assert found["ok"] is (wrong == 1)


def test_an_engine_must_be_the_configs():
    llm = make_llm(resolve(replace(SMALL, concurrency=(1,))))
    for other, name in (
        ({"block_size": 96}, "block_size"),
        ({"budget": 100}, "max_num_scheduled_tokens"),
        ({"concurrency": (9,)}, "max_num_seqs"),
        ({"prompt_len": (9000,)}, "max_model_len"),
    ):
        with pytest.raises(ValueError, match=f"llm has {name}"):
            run_ttft(replace(SMALL, **{"concurrency": (1,)} | other), llm=llm)


def test_a_tail_of_one_token_gives_numbers():
    size = SMALL.block_size
    config = replace(SMALL, concurrency=(1,), prompt_len=(1, 2 * size + 1), repeats=1)
    text = json.dumps(run_ttft(config).to_dict(), allow_nan=False)
    assert json.loads(text)["points"][1]["resend"]["tail"] == 1


def test_a_point_at_many_requests_is_replayed_with_as_many():
    plan = Plan(prompt_len=10, output_len=1, concurrency=300, waves=1, block_size=96, attention_block_size=48, budget=200000,
                alignment=1, num_blocks=10000)  # fmt: skip
    assert predict(plan, "internal", lambda tokens: tokens, 1.0)["ttft_mean"] == 3000


def test_defaults_follow_the_device() -> None:
    config = resolve(TTFTConfig(device="cpu"))
    assert (config.output_len, config.repeats, config.warmup, config.token_check) == (8, 3, 0, "exact")
    assert resolve(TTFTConfig(device="cpu", dtype="bfloat16")).token_check == "share"
    assert resolve(TTFTConfig(device="cpu", repeats=7)).repeats == 7


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"concurrency": ()}, "concurrency"),
        ({"concurrency": (1, 0)}, "concurrency"),
        ({"prompt_len": (-5,)}, "prompt_len"),
        ({"output_len": 0}, "output_len"),
        ({"block_size": 0}, "block_size"),
        ({"budget": 0}, "budget"),
        ({"repeats": 0}, "repeats"),
        ({"dtype": "int8"}, "dtype"),
        ({"token_check": "hope"}, "token_check"),
        ({"prompts": "no/such/file"}, "prompts"),
        ({"config": "no/such/file"}, "config"),
        ({"preset": "huge"}, "preset"),
        ({"prompts": "x" * 5000}, "prompts"),
        ({"output_len": 10**3000}, "output_len"),
        ({"block_size": 2**30 + 1}, "block_size"),
        ({"budget": 10**26}, "budget"),
        ({"repeats": 10**26}, "repeats"),
        ({"waves": 2**30}, "waves"),
        ({"device": ""}, "device"),
        ({"device": "abacus"}, "device"),
        ({"device": "cuda:99"}, "device"),
        ({"backend": "abacus"}, "backend"),
    ],
)
def test_bad_config(wrong: dict, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named} (is|has)"):
        run_ttft(TTFTConfig(**{"device": "cpu", **wrong}))


@given(st.integers(1, 300), st.integers(1, 40), st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_resends_share_exactly_the_last_boundary(length: int, block_size: int, pattern: list[int]) -> None:
    prompt = [pattern[i % len(pattern)] for i in range(length)]
    again, boundary = resend_prompt(prompt, block_size), length // block_size * block_size
    if not boundary:
        assert again is None
        return
    assert again[:boundary] == prompt[:boundary] and len(again) > boundary
    assert len(again) == length or boundary == length
    assert boundary == length or again[boundary] != prompt[boundary]
    assert all(token >= 0 for token in again)
    assert short_resend(prompt, block_size) == again[: boundary + 2]


def test_prompts_are_cut_from_a_file(tmp_path) -> None:
    path = tmp_path / "text"
    path.write_bytes(np.random.default_rng(0).bytes(1000))
    result = run_ttft(replace(SMALL, prompts=str(path), concurrency=(1,), repeats=1))
    assert result.ok
    path.write_bytes(b"x" * 1000)
    with pytest.raises(ValueError, match="start alike"):
        run_ttft(replace(SMALL, prompts=str(path)))
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="prompts is .*empty"):
        run_ttft(replace(SMALL, prompts=str(path)))


@given(st.integers(1, 12), st.integers(1, 200))
def test_prompts_are_unique(count: int, length: int) -> None:
    text = np.random.default_rng(1).bytes(700)
    if min(length, 64) < 4:  # so short that two of them may well be the same
        return
    prompts = cut_prompts(text, count, length, 97)
    assert len({tuple(prompt[:64]) for prompt in prompts}) == count
    assert all(len(prompt) == length and max(prompt) < 97 for prompt in prompts)


def test_changes_and_their_intervals() -> None:
    assert change([1.0, 1.0, 1.0], [0.9, 0.8, 5.0])["percent"] == pytest.approx(-10)
    many = change([1.0] * 20, [0.9 + 0.001 * i for i in range(20)])
    assert many["interval"] == "95 % bootstrap" and -10 <= many["low"] < many["percent"] < many["high"] <= -8


@given(st.floats(0, 1), st.floats(1e-6, 1e-2), st.lists(st.integers(2, 20000), min_size=2, max_size=6, unique=True))
def test_costs_are_recovered(fixed: float, per_token: float, sizes: list[int]) -> None:
    cost = fit_cost([StepStats(n, 1, 0, 0, 0, fixed + per_token * n) for n in sizes])
    assert all(cost(n) == pytest.approx(fixed + per_token * n, rel=1e-3) for n in sizes)


def test_prediction_for_one_request_is_the_formula() -> None:
    plan = Plan(prompt_len=8000, output_len=4, concurrency=1, waves=1, block_size=1536, attention_block_size=1536,
                budget=8192, alignment=16, num_blocks=64)  # fmt: skip
    cost = ForwardCost(0.05, 1e-4, 0.02)
    assert predict(plan, "split", cost, cost.decode)["ttft_mean"] == pytest.approx(0.1 + 0.8)
    assert predict(plan, "internal", cost, cost.decode)["ttft_mean"] == pytest.approx(0.05 + 0.8)
    assert predict(plan, "internal", cost, cost.decode)["latency_mean"] == pytest.approx(0.85 + 3 * 0.02)
    assert predict_changes(plan, cost)["ttft_mean"] == pytest.approx(-100 * 0.05 / 0.9)
    assert predict_changes(replace(plan, prompt_len=7680), cost)["ttft_mean"] == 0
