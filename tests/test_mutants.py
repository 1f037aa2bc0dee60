"""Deliberate faults, one at a time, in the real classes: the shadow states must catch every one of them.

A test that no fault can fail is not a test. Each mutant names the invariants that it may break first; an exception that
the code under test raises by itself (it too has guards) counts where it is listed.
"""

from __future__ import annotations

import random
from dataclasses import replace
from hashlib import blake2b
from itertools import product

import pytest

from kda_ckpt import manager as manager_module
from kda_ckpt import scheduler as scheduler_module
from kda_ckpt.blocks import NULL_BLOCK, BlockPool
from kda_ckpt.manager import BlockCopy, KVCacheManager, MambaManager
from kda_ckpt.metadata import AttentionMetadataBuilder, KDAMetadataBuilder
from kda_ckpt.scheduler import Scheduler, mamba_block_aligned_split
from kda_ckpt.shadow import ShadowWorld, Violation, World, explore, host_metadata, small_worlds
from kda_ckpt.spec import MambaSpec

plan_checkpoint = MambaSpec.plan_checkpoint
allocate_new_blocks = MambaManager.allocate_new_blocks


def some_worlds():
    """A fixed sample of small worlds of growing size; the same for every mutant."""
    rng = random.Random(0)
    for total in range(3, 13):
        yield from rng.sample(list(small_worlds(total)), 60)
    for size, step, extra in product((2, 4), (1, 2), range(3)):  # three requests: one leaves, two start in one step
        if step < size:
            world = World(size, step, step, partial_hits=True, step_tokens=12)
            prompts = ((0,) * 3, (0,) * 3 + (1,), (1,) * 4)
            yield replace(world, num_blocks=world.smallest_pool(5) + extra), prompts, 1


WORLDS = list(some_worlds())


def hunt(make=ShadowWorld, failures=0):
    """The violation that the sample of worlds shows first, or None."""
    with host_metadata():
        for world, prompts, max_tokens in WORLDS:
            if make is not ShadowWorld and not world.partial_hits:
                continue
            try:
                explore(world, prompts, max_tokens, failures=failures, make=make)
            except Violation as violation:
                return violation
    return None


MUTANTS = []


def mutant(*invariants, failures=0):
    """Register a fault: a function that plants it with monkeypatch (and may return how to build the engine)."""

    def register(plant):
        MUTANTS.append(pytest.param(plant, invariants, failures, id=plant.__name__))
        return plant

    return register


@mutant("I1", "I2", "IndexError", "RuntimeError")
def column_off_by_one(patch):
    def plan(spec, start, end):
        right = plan_checkpoint(spec, start, end)
        return right and right._replace(column=right.column - 1)

    patch.setattr(MambaSpec, "plan_checkpoint", plan)


@mutant("I1", "I2")
def offset_off_by_one(patch):
    def plan(spec, start, end):
        right = plan_checkpoint(spec, start, end)
        return right and right._replace(offset=right.offset - 1 or right.offset + 1)

    patch.setattr(MambaSpec, "plan_checkpoint", plan)


@mutant("I2", "I5")
def originals_rules_above_alignment_one(patch):
    """Scheduler and manager know nothing of the alignment, the metadata does: what the original does."""
    naive = lambda spec: replace(spec, checkpoint_alignment=1)  # noqa: E731
    patch.setattr(
        scheduler_module, "mamba_block_aligned_split", lambda spec, **at: mamba_block_aligned_split(naive(spec), **at)
    )
    patch.setattr(
        MambaManager, "_needs_internal_checkpoint", lambda m, start, end: naive(m.spec).plan_checkpoint(start, end)
    )


@mutant("I5")
def scheduler_ignores_the_alignment(patch):
    naive = lambda spec: replace(spec, checkpoint_alignment=1)  # noqa: E731
    patch.setattr(
        scheduler_module, "mamba_block_aligned_split", lambda spec, **at: mamba_block_aligned_split(naive(spec), **at)
    )


@mutant("I2", "RuntimeError")
def manager_reserves_no_checkpoint(patch):
    patch.setattr(MambaManager, "_needs_internal_checkpoint", lambda m, start, end: None)


@mutant("I2")
def metadata_forgets_the_checkpoint(patch):
    patch.setattr(KDAMetadataBuilder, "build_checkpoint", lambda builder, rows, table: None)


@mutant("I1", "I2", "I3", "I4")
def running_block_not_last(patch):
    def allocate(self, chunk, hit):
        copies, row = allocate_new_blocks(self, chunk, hit), self.rows[chunk.request_id]
        plan = self.spec.plan_checkpoint(chunk.start, chunk.end)
        if plan:
            row[plan.column], row[-1] = row[-1], row[plan.column]
        return copies

    patch.setattr(MambaManager, "allocate_new_blocks", allocate)


@mutant("I6")
def null_block_hashed(patch):
    def cache(pool, block, group, block_hash):
        pool._key_of[block] = (group, block_hash)
        pool._cached[group].setdefault(block_hash, []).append(block)

    def allocate(self, chunk, hit):
        copies = allocate_new_blocks(self, chunk, hit)
        for column in range(chunk.start // self.block_size, chunk.end // self.block_size):
            if self.rows[chunk.request_id][column] == NULL_BLOCK:
                self.cache(NULL_BLOCK, chunk.hashes, (column + 1) * self.block_size)
        return copies

    patch.setattr(BlockPool, "cache", cache)
    patch.setattr(MambaManager, "allocate_new_blocks", allocate)


@mutant("I6")
def null_block_handed_out(patch):
    init = BlockPool.__init__

    def with_null(pool, *sizes):
        init(pool, *sizes)
        pool._free[NULL_BLOCK] = None
        pool._free.move_to_end(NULL_BLOCK, last=False)

    patch.setattr(BlockPool, "__init__", with_null)


@mutant("I7", "RuntimeError")
def checkpoint_not_forgotten_on_free(patch):
    patch.setattr(MambaManager, "pop_blocks_for_free", lambda m, name: m.rows.pop(name, [])[-1:])


@mutant("I7", "I2", "I3", "ValueError", "RuntimeError")
def row_not_forgotten_on_free(patch):
    patch.setattr(MambaManager, "pop_blocks_for_free", lambda m, name: m.rows.get(name, [])[::-1])


@mutant("I4", "I1", "I3")
def running_block_shared_with_a_hit(patch):
    def allocate(self, chunk, hit):
        copies, row = allocate_new_blocks(self, chunk, hit), self.rows[chunk.request_id]
        if hit and chunk.start % self.block_size == 0 and row[-1] != hit[-1]:
            self.pool.release([row[-1]])
            self.pool.share(hit[-1])
            row[-1] = hit[-1]
        return copies

    patch.setattr(MambaManager, "allocate_new_blocks", allocate)


@mutant("I9", "I1", "I4")
def copy_source_not_held(patch):
    """The hit of a copy-on-write is given back at once, so that the same step can hand it out again."""

    def begin(self, row, start, hit):
        if start % self.block_size == 0:
            row += [NULL_BLOCK] * (start // self.block_size - 1) + ([hit[-1]] if start else [])
            return []
        row += [NULL_BLOCK] * (start // self.block_size)
        self.pool.release([hit[-1]])
        row += self.pool.take(1)
        return [BlockCopy(self.group, hit[-1], row[-1])]

    patch.setattr(MambaManager, "_begin_row", begin)


@mutant("I1", "I9", "I4")
def state_of_this_very_step_served(patch):
    patch.setattr(KVCacheManager, "_is_pending", lambda m, block_hash: False)


@mutant("I1", "I4")
def hash_not_moved_before_the_state_is_overwritten(patch):
    patch.setattr(MambaManager, "_move_hash_away", lambda m, running: [])


@mutant("I1", failures=1)
def rollback_missing(patch):
    patch.setattr(KVCacheManager, "rollback_step", KVCacheManager.begin_step)


@mutant("RuntimeError", "I7")
def checkpoint_not_counted(patch):
    count = MambaManager.get_num_blocks_to_allocate

    def short(self, chunk, hit):
        return count(self, chunk, hit) - (self.spec.plan_checkpoint(chunk.start, chunk.end) is not None)

    patch.setattr(MambaManager, "get_num_blocks_to_allocate", short)


@mutant("I7", "I2")
def passed_blocks_kept(patch):
    patch.setattr(MambaManager, "release_passed_blocks", lambda m, name: None)
    patch.setattr(MambaManager, "num_blocks_released", lambda m, name: 0)


@mutant("I1", "I3", "I4", "I6", "RuntimeError")
def continued_state_released_too_early(patch):
    def release(self, name):
        row = self.rows.get(name, [])
        if row and len(row) * self.block_size == self.ends.get(name):
            self.pool.release(row)
            row[:] = [NULL_BLOCK] * len(row)

    def allocate(self, chunk, hit):
        self.ends[chunk.request_id] = chunk.end
        return allocate_new_blocks(self, chunk, hit)

    patch.setattr(MambaManager, "ends", {}, raising=False)
    patch.setattr(MambaManager, "release_passed_blocks", release)
    patch.setattr(MambaManager, "allocate_new_blocks", allocate)


@mutant("I1", "I4", "IndexError", "I3")
def loads_from_the_next_column(patch):
    def load(builder, row, blocks):
        return blocks[min(row.start // builder.spec.block_size, len(blocks) - 1)] if row.start else NULL_BLOCK

    patch.setattr(KDAMetadataBuilder, "load_slot", load)


@mutant("I1", "I4", "I6")
def attention_entries_one_slot_late(patch):
    slots = AttentionMetadataBuilder.slot_mapping
    patch.setattr(AttentionMetadataBuilder, "slot_mapping", lambda b, rows, table: slots(b, rows, table) + 1)


@mutant("I1")
def unfinished_block_hashed(patch):
    def allocate(self, chunk, hit):
        copies = allocate_new_blocks(self, chunk, hit)
        if chunk.end % self.block_size and chunk.end > self.block_size:
            self.cache(self.rows[chunk.request_id][-1], chunk.hashes, chunk.end - chunk.end % self.block_size)
        return copies

    patch.setattr(MambaManager, "allocate_new_blocks", allocate)


@mutant("I8", "ValueError")
def lookup_covers_the_last_token(patch):
    lookup = KVCacheManager.lookup

    class Longer(list):
        def __len__(self):
            return super().__len__() + 1

    def whole(self, request):
        tokens, request.token_ids = request.token_ids, Longer(request.token_ids)
        hit = lookup(self, request)
        request.token_ids = tokens
        return hit

    patch.setattr(KVCacheManager, "lookup", whole)


@mutant("I7", "I4", "I1", "KeyError", "I9")
def revived_block_stays_free(patch):
    def share_all(pool, blocks):
        for block in blocks:
            pool.ref_counts[block] += 1

    patch.setattr(BlockPool, "share_all", share_all)


@mutant("I1", "I9", "I4")
def copies_dropped(patch):
    take = KVCacheManager.take_copies
    patch.setattr(KVCacheManager, "take_copies", lambda m: take(m)[:0])


@mutant("I9", "I1", "I3")
def copies_run_after_the_kernels(patch):
    class Late(ShadowWorld):
        def run_copies(self, copies):
            self.late = copies

        def check_rows(self, chunks, tables):
            super().run_copies(self.late)
            super().check_rows(chunks, tables)

    return Late


@mutant("I8")
def waits_for_ever(patch):
    def wait(spec, *, start, **at):
        return 0 if start % spec.block_size else mamba_block_aligned_split(spec, start=start, **at)

    patch.setattr(scheduler_module, "mamba_block_aligned_split", wait)


@mutant("I1")
def hashes_not_chained(patch):
    def extend(hashes, token_ids, size):
        for start in range(len(hashes) * size, len(token_ids) - size + 1, size):
            hashes.append(blake2b(bytes(token_ids[start : start + size]), digest_size=16).digest())

    patch.setattr(manager_module, "extend_hashes", extend)


@mutant("I5")
def checkpoint_not_hashed(patch):
    def allocate(self, chunk, hit):
        copies, plan = allocate_new_blocks(self, chunk, hit), self.spec.plan_checkpoint(chunk.start, chunk.end)
        if plan:
            self.pool.uncache(self.rows[chunk.request_id][plan.column])
        return copies

    patch.setattr(MambaManager, "allocate_new_blocks", allocate)


@mutant("I1", "I2", "I3", failures=1)
def requests_go_on_after_a_failed_step(patch):
    patch.setattr(Scheduler, "undo_step", lambda scheduler, output: scheduler.manager.rollback_step())


@pytest.mark.parametrize("plant, invariants, failures", MUTANTS)
def test_caught(plant, invariants, failures, monkeypatch):
    make = plant(monkeypatch) or ShadowWorld
    violation = hunt(make, failures)
    assert violation is not None, "no world of the sample shows the fault"
    assert violation.invariant in invariants, str(violation)
    print(f"{plant.__name__}: {str(violation)[:160]}")


def test_none_without_a_fault():
    assert hunt() is None


def test_the_originals_rules_at_block_size_24():
    """What the original does at B = 24 and alignment 16: scheduler and manager plan at 72, the metadata refuses it."""
    world = World(block_size=24, hash_block_size=24, attention_block_size=24, alignment=16, num_blocks=20)
    with pytest.MonkeyPatch.context() as patch, host_metadata():
        originals_rules_above_alignment_one(patch)
        engine = ShadowWorld(world)
        engine.add("first", [1] * 80)
        with pytest.raises(Violation, match="I2: "):
            engine.step()
