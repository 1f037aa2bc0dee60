"""Shadow states over small worlds: a minute's worth of what tools/prove.py does at length."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kda_ckpt import shadow as shadow_module
from kda_ckpt.manager import KVCacheManager
from kda_ckpt.scheduler import Request, mamba_block_aligned_split
from kda_ckpt.shadow import (
    Count,
    ExactDigest,
    ShadowWorld,
    Traffic,
    WordDigest,
    World,
    explore,
    host_metadata,
    random_world,
    small_worlds,
)


@pytest.fixture(autouse=True, scope="module")
def plain_metadata():
    with host_metadata():
        yield


@pytest.mark.parametrize("total", range(2, 5))
def test_every_world_to_four_tokens(total):
    count = sum((explore(*world) for world in small_worlds(total)), Count())
    assert count.worlds > 300 and count.steps >= count.worlds
    print(total, count)


@pytest.mark.parametrize("total, number", [(5, 900), (6, 300), (8, 150), (10, 80), (12, 40), (14, 15), (18, 4)])
@pytest.mark.parametrize("failures", [0, 1])
def test_sampled_worlds(total, number, failures):
    rng = random.Random(total)
    worlds = rng.sample(list(small_worlds(total)), number // (1 + 3 * failures))
    assert sum((explore(*world, failures=failures) for world in worlds), Count()).steps


def test_three_requests():
    for size, extra, partial in product((2, 4), range(3), (False, True)):
        world = World(size, 1 if partial else size, 1 if partial else size, partial_hits=partial, step_tokens=12)
        for prompts in (((0, 0, 0), (0, 0, 0, 1), (1, 1, 1, 1)), ((0,) * 4, (0,) * 4, (0,) * 4)):
            explore(replace(world, num_blocks=world.smallest_pool(5) + extra), prompts)


# I5: what the split way makes reusable is reusable the internal way


def saved(spec_of, world, **at):
    """Where one chunk leaves states that the cache keeps, and its end."""
    spec = spec_of(world)
    n = mamba_block_aligned_split(
        spec, checkpoints=bool(spec.num_prefill_checkpoint_blocks), whole_blocks=world.whole_blocks, **at
    )
    end, tail = at["start"] + n, at["num_prompt_tokens"] // world.hash_block_size * world.hash_block_size
    places = {end} if n and (end % world.block_size == 0 or (world.partial_hits and end == tail)) else set()
    plan = spec.plan_checkpoint(at["start"], end) if n else None
    return places | ({plan.position} if plan else set()), end


@pytest.mark.parametrize("size, alignment", [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2)])
def test_a_chunk_saves_what_the_split_would_have(size, alignment):
    """From any position and with any budget: the states that the split way's chunk keeps, the internal way keeps too by the same token."""
    mamba = lambda world: world.specs()[1]  # noqa: E731
    checked = 0
    for step in [d for d in range(1, size + 1) if size % d == 0]:
        for partial, whole in product({False, step < size}, (False, True)):
            on = World(size, step, step, alignment, True, partial, whole_blocks=whole)
            off = replace(on, checkpoints=False, alignment=1)
            for prompt, extra in product(range(1, 13), range(3)):
                length = prompt + extra
                for start, junction in product(range(length), range(0, prompt, step)):
                    for n, limit in product(range(1, length - start + 1), (size - 1, size, 100)):
                        if n > limit or not limit:
                            continue
                        at = {
                            "start": start, "num_new_tokens": n, "num_prompt_tokens": prompt, "num_tokens": length,
                            "max_step_tokens": limit, "junction": junction, "partial_hits": partial,
                            "hash_block_size": step,
                        }  # fmt: skip
                        split, split_end = saved(mamba, off, **at)
                        internal, end = saved(mamba, on, **at)
                        while start < end < split_end:  # it stopped earlier, at a boundary: go on from there
                            at |= {"start": end, "num_new_tokens": split_end - end}
                            more, end = saved(mamba, on, **at)
                            internal |= more
                        assert split <= internal, (on, at, split, internal)
                        checked += 1
    assert checked


def resend_hits(shadow, prompts):
    """How much of each prompt a later request that continues it would find."""
    probes = [Request(f"probe{i}", [*prompt, 2]) for i, prompt in enumerate(prompts)]
    return tuple(shadow.manager.lookup(probe).length for probe in probes)


def ends(world, prompts, max_tokens):
    """What resends would find, over all histories."""
    found = set()
    explore(world, prompts, max_tokens, at_end=lambda shadow: found.add(resend_hits(shadow, prompts)))
    return found


def test_a_finished_prompt_is_reusable_to_its_last_boundary_either_way():
    """After every history of every budget: what can be reused of the prompts is the same, and the most there can be."""
    rng = random.Random(5)
    for total in (*range(2, 11), 12, 14):
        everything = [w for w in small_worlds(total) if w[0].num_blocks > 2 + w[0].smallest_pool(12)]
        for world, prompts, max_tokens in rng.sample(everything, min(12, len(everything))):
            step = world.hash_block_size if world.partial_hits else world.block_size
            most = tuple(len(prompt) // step * step for prompt in prompts)
            for checkpoints in (False, True):
                found = ends(replace(world, checkpoints=checkpoints), prompts, max_tokens)
                reached = tuple(map(min, zip(*found)))
                assert all(a >= b for a, b in zip(reached, most)), (world, prompts, found, most)


# random life


class Life(RuleBasedStateMachine):
    """Hypothesis chooses what happens; Traffic makes it happen on the real classes and shadow states check it."""

    lengths, outputs, whatever = st.integers(1, 60), st.integers(1, 4), st.integers(0, 1 << 16)

    @initialize(seed=st.integers(0, 1 << 30))
    def begin(self, seed):
        self.traffic = Traffic(random_world(random.Random(seed)), seed)

    @rule(length=lengths, max_tokens=outputs)
    def send_new(self, length, max_tokens):
        self.traffic.send_new(length, max_tokens)

    @rule(which=whatever, keep=whatever, new=st.integers(0, 5), max_tokens=outputs)
    def resend(self, which, keep, new, max_tokens):
        self.traffic.resend(which, keep, new, max_tokens)

    @rule(which=whatever, max_tokens=outputs)
    def twins(self, which, max_tokens):
        self.traffic.twins(which, 2, max_tokens)

    @rule(budget=whatever)
    def step(self, budget):
        self.traffic.step(budget)

    @rule()
    def whole_step(self):
        self.traffic.step(-1)

    @rule(budget=whatever)
    def failed_step(self, budget):
        self.traffic.step(budget, fails=True)

    @rule(which=whatever)
    def abort(self, which):
        self.traffic.abort(which)

    @rule()
    def drain(self):
        self.traffic.drain()

    @rule(count=st.integers(1, 40))
    def burst(self, count):
        self.traffic.burst(count)

    @invariant()
    def everything_is_what_it_claims(self):
        if hasattr(self, "traffic"):
            self.traffic.shadow.check_pool()


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def test_burst():
    for seed in range(12):
        traffic = Traffic(random_world(random.Random(seed)), seed)
        traffic.burst(200)
        traffic.drain()


# the shadows themselves


def test_digests_agree_with_token_by_token():
    rng = random.Random(0)
    for digest in (ExactDigest(), WordDigest(100)):
        tokens = [rng.randrange(3) for _ in range(30)]
        prefix = digest.extend(digest.extend([0], tokens[:7]), tokens[7:])
        for start, end in ((0, 30), (3, 4), (7, 29)):
            assert digest.absorb(int(prefix[start]), prefix, start, end) == prefix[end]
            assert digest.absorb(int(prefix[start]) + 1, prefix, start, end) != prefix[end]
        other = digest.extend([0], [*tokens[:10], 1 - tokens[10] % 2, *tokens[11:]])
        assert prefix[10] == other[10] and all(prefix[i] != other[i] for i in range(11, 31))


def test_both_digests_see_the_same_world():
    world = World(4, 2, 4, num_blocks=60, step_tokens=9)
    chunks = []
    for digest in (ExactDigest(), WordDigest(100)):
        engine = ShadowWorld(world, digest=digest)
        engine.add("a", [0] * 11, 2)
        engine.add("b", [0] * 9 + [1] * 8, 3)
        done = []
        while engine.scheduler.requests:
            done.append([(c.request.request_id, c.start, c.end) for c in engine.step().chunks])
            engine.check_pool()
        chunks.append(done)
    assert chunks[0] == chunks[1]


def test_snapshot_is_complete():
    """A restored engine goes on exactly as the one it was taken from."""
    for seed in range(6):
        traffic = Traffic(random_world(random.Random(seed)), seed)
        traffic.burst(60)
        shadow = traffic.shadow
        before, key = shadow.snapshot(), shadow.key()
        futures = []
        for _ in range(2):
            shadow.restore(before)
            assert shadow.key() == key
            future = []
            while shadow.scheduler.requests:
                future.append([(c.request.request_id, c.start, c.end) for c in shadow.step(sample=lambda r: 1).chunks])
            futures.append((future, shadow.key()))
        assert futures[0] == futures[1]


def test_module_uses_the_real_classes():
    assert shadow_module.KVCacheManager is KVCacheManager and ShadowWorld(World()).pool.num_free == 99
