"""The long proofs: small worlds without end, random life, and a real trace, all with shadow states.

    python tools/prove.py [--seconds 300] [--random-steps 1000000] [--jobs 1] [--trace FILE] [--only worlds random trace]

Prints what was looked at and writes it to nbs/results/proof.json; phases that are left out keep their stored numbers.
Exit code 1 at the first violation, with the history that leads to it.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import hypothesis
import numpy
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kda_ckpt.shadow import (
    Count,
    ShadowEngine,
    Traffic,
    Violation,
    WordDigest,
    World,
    explore,
    host_metadata,
    random_world,
    small_prompts,
    small_systems,
    small_worlds,
)

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "nbs/results/proof.json"
TRACE = ROOT.parent / "shared/data/mooncake_conversation_trace.jsonl"
LARGEST = 28  # two prompts of 12 tokens and two outputs of 2


def stride(total: int, part: int, parts: int, deadline: float) -> tuple[Count, int, bool]:
    """Every `parts`-th world of `total` tokens: what was looked at, worlds there are in this share, whether all were seen."""
    count, listed, complete = Count(), 0, True
    with host_metadata():
        for index, (world, prompts, max_tokens) in enumerate(small_worlds(total)):
            if index % parts != part:
                continue
            listed += 1
            if time.time() > deadline:
                complete = False
            else:
                count += explore(world, prompts, max_tokens)
    return count, listed, complete


def sample(seed: int, deadline: float) -> tuple[Count, int]:
    """Random worlds of every size, with one step that may fail, until the deadline: what was looked at, tokens of the largest."""
    rng, count, largest = random.Random(seed), Count(), 0
    known = {total: (list(small_prompts(total)), list(small_systems(total))) for total in range(6, 19)}
    with host_metadata():
        while time.time() < deadline:
            total = rng.choice(list(known))
            (prompts, max_tokens), world = map(rng.choice, known[total])
            smallest = world.smallest_pool(max(map(len, prompts)) + max_tokens)
            count += explore(
                replace(world, num_blocks=smallest + rng.choice((0, 1, 2, 40))), prompts, max_tokens, failures=1
            )
            largest = max(largest, total)
    return count, largest


def prove_worlds(seconds: float, jobs: int) -> dict:
    """All small worlds in the order of their size for three quarters of the time, then a sample of the larger ones."""
    began, rows, space = time.time(), [], 0
    with ProcessPoolExecutor(jobs) as pool:
        for total in range(2, LARGEST + 1):
            deadline = began + 0.75 * seconds
            parts = list(pool.map(stride, [total] * jobs, range(jobs), [jobs] * jobs, [deadline] * jobs))
            count, listed = sum((part[0] for part in parts), Count()), sum(part[1] for part in parts)
            space += listed
            if count.worlds:
                rows.append({"tokens": total, "in_space": listed, **asdict(count), "complete": count.worlds == listed})
                print(
                    f"  {total:2} tokens: {count.worlds:,} of {listed:,} worlds, {count.states:,} states, {count.steps:,} forwards",
                    flush=True,
                )
        sampled = list(pool.map(sample, range(jobs), [began + seconds] * jobs))
    extra = sum((part[0] for part in sampled), Count())
    print(
        f"  sampled, with a step that fails: {extra.worlds:,} worlds, {extra.states:,} states, {extra.steps:,} forwards"
    )
    print(f"  the whole space, to {LARGEST} tokens: {space:,} worlds")
    total = sum((Count(row["worlds"], row["states"], row["steps"], row["finished"]) for row in rows), Count())
    return {
        "space": space, "complete_to_tokens": max((r["tokens"] for r in rows if r["complete"]), default=0), "by_tokens": rows,
        "exhaustive": asdict(total), "sampled_with_failures": asdict(extra), "largest_sampled_tokens": max(p[1] for p in sampled),
        "violations": 0, "seconds": round(time.time() - began, 1), "jobs": jobs,
    }  # fmt: skip


def prove_random(steps: int) -> dict:
    """Hypothesis over worlds and seeds, each a long random life, until so many forwards have been checked."""
    done = {"worlds": 0, "forwards": 0, "checkpoints": 0, "copies": 0, "evictions": 0, "preemptions": 0}
    began = time.time()

    class LongLife(RuleBasedStateMachine):
        @initialize(seed=st.integers(0, 1 << 40))
        def begin(self, seed):
            self.seed, self.counts, self.failed = seed, [], False
            self.traffic = Traffic(random_world(random.Random(seed)), seed)

        @rule(count=st.integers(100, 400))
        def burst(self, count):
            if done["forwards"] < steps:
                before = self.traffic.shadow.num_steps
                self.counts.append(count)
                try:
                    self.traffic.burst(count)
                except Violation as violation:
                    self.failed = True
                    where = f"seed {self.seed}, bursts {self.counts}, {self.traffic.world}"
                    raise Violation(violation.invariant, f"{violation.message}; {where}") from None
                done["forwards"] += self.traffic.shadow.num_steps - before

        def teardown(self):
            if hasattr(self, "traffic") and self.traffic.shadow.num_steps and not self.failed:
                self.traffic.drain()
                shadow = self.traffic.shadow
                done["worlds"] += 1
                done["checkpoints"] += shadow.num_checkpoints
                done["copies"] += shadow.num_copies
                done["evictions"] += shadow.pool.evictions
                done["preemptions"] += self.traffic.preemptions

    rounds = settings(
        max_examples=100, stateful_step_count=10, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    with host_metadata():
        while done["forwards"] < steps:
            run_state_machine_as_test(LongLife, settings=rounds)
            print(f"  {done['forwards']:,} forwards, {time.time() - began:.0f} s", flush=True)
    return {**done, "violations": 0, "seconds": round(time.time() - began, 1)}


def read_trace(path: Path, limit: int | None) -> Iterator[tuple[numpy.ndarray, int]]:
    """Prompts and output lengths of a Mooncake trace: token j of block i is made from the block's id, 512 tokens each."""
    inside = numpy.arange(512, dtype=numpy.int64)
    for index, line in enumerate(path.open()):
        if index == limit:
            return
        record = json.loads(line)
        tokens = (numpy.array(record["hash_ids"], dtype=numpy.int64)[:, None] * 512 + inside).ravel()
        yield tokens[: record["input_length"]], record["output_length"]


def run_trace(path: Path, world: World, limit: int | None, outputs: int = 4) -> dict:
    """One pass over the trace in arrival order, with shadow states; outputs are cut to `outputs` tokens."""
    engine = ShadowEngine(world, digest=WordDigest())
    engine.recheck = False
    requests = read_trace(path, limit)
    numbers = dict.fromkeys(
        ("requests", "prompt_tokens", "hit_tokens", "prefill_forwards", "preemptions", "skipped"), 0
    )
    more, name, began = True, 0, time.time()
    while True:
        while more and len(engine.scheduler.waiting) < 4:
            record = next(requests, None)
            more = record is not None
            if record is None:
                break
            tokens, output = record
            name += 1
            try:
                engine.add(str(name), tokens.tolist(), max(1, min(output, outputs)))
            except ValueError:
                numbers["skipped"] += 1  # too long for this pool
        if not engine.scheduler.has_unfinished:
            break
        output = engine.step(sample=lambda request: (1 << 31) + int(request.request_id))
        if not output.chunks:
            raise Violation("I8", "a step with the whole budget runs nothing")
        if engine.num_steps % 2000 == 0:
            engine.check_pool()
        for request in engine.finished:
            engine.truths.pop(request.request_id)
            numbers["requests"] += 1
            numbers["prompt_tokens"] += request.num_prompt_tokens
            numbers["hit_tokens"] += request.num_cached_tokens
            numbers["prefill_forwards"] += request.num_prefill_forwards
            numbers["preemptions"] += request.num_preemptions
    engine.check_pool()
    return {
        "block_size": world.block_size, "checkpoints": world.checkpoints, "num_blocks": world.num_blocks, **numbers,
        "hit_rate": round(numbers["hit_tokens"] / numbers["prompt_tokens"], 4),
        "forwards_per_request": round(numbers["prefill_forwards"] / numbers["requests"], 3),
        "forwards": engine.num_steps, "exported": engine.num_checkpoints, "evictions": engine.pool.evictions,
        "us_per_step": round(1e6 * engine.seconds / engine.num_steps, 1), "seconds": round(time.time() - began, 1),
    }  # fmt: skip


def prove_trace(path: Path, limit: int | None) -> dict:
    """The trace at B = 512 and 1536, split and internal: 32 requests at once in an ample and a scarce pool, and one by one."""
    runs = []
    cases = [(512, "ample", 32), (512, "scarce", 32), (1536, "ample", 32), (1536, "scarce", 32), (1536, "ample", 1)]
    for size, pool, at_once in cases:
        for way in ("split", "internal", "internal, whole blocks")[: 3 if pool == "ample" else 2]:
            world = World(
                size, 512, 512, 16, way != "split", num_blocks=300_000 if pool == "ample" else 800,
                step_tokens=8192, max_num_seqs=at_once, max_model_len=1 << 18, whole_blocks=way != "internal",
            )  # fmt: skip
            with host_metadata():
                row = {"pool": pool, "way": way, "at_once": at_once, **run_trace(path, world, limit)}
            runs.append(row)
            print(
                f"  B={size:4} {pool:6} {at_once:2} {way:22}: {row['requests']:,} requests, hit rate {row['hit_rate']:.1%}, "
                f"{row['forwards_per_request']:.2f} forwards a prompt, {row['forwards']:,} forwards, {row['exported']:,} exported, "
                f"{row['evictions']:,} evictions, {row['preemptions']} preemptions, {row['us_per_step']:.0f} µs/step "
                f"({row['seconds']:.0f} s)", flush=True
            )  # fmt: skip
    return {"runs": runs, "violations": 0, "seconds": round(sum(run["seconds"] for run in runs), 1)}


def commit() -> str:
    """The commit that was proved, "+" if the tree has changes."""
    git = lambda *a: subprocess.run(["git", *a], cwd=ROOT, capture_output=True, text=True).stdout.strip()  # noqa: E731
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (
        "+" if git("status", "--porcelain", "-uno", ":!nbs/results") else ""
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300, help="for the small worlds")
    parser.add_argument("--random-steps", type=int, default=1_000_000, help="forwards of random life")
    parser.add_argument("--jobs", type=int, default=1, help="processes for the small worlds")
    parser.add_argument("--trace", type=Path, default=TRACE, help="Mooncake trace (JSON lines)")
    parser.add_argument("--trace-requests", type=int, default=None, help="only so many of them")
    parser.add_argument(
        "--only", nargs="+", choices=("worlds", "random", "trace"), default=("worlds", "random", "trace")
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    proved = commit()
    phases = {
        "worlds": lambda: prove_worlds(args.seconds, args.jobs),
        "random": lambda: prove_random(args.random_steps),
        "trace": lambda: prove_trace(args.trace, args.trace_requests),
    }
    for phase in args.only:
        if phase == "trace" and not args.trace.exists():
            print(f"trace: skipped, {args.trace.name} is not there")
            continue
        print(f"{phase}:", flush=True)
        try:
            found = phases[phase]()
        except Violation as violation:
            print(f"VIOLATION {violation}", file=sys.stderr)
            return 1
        found |= {
            "commit": proved, "date": time.strftime("%Y-%m-%d"), "python": platform.python_version(),
            "torch": torch.__version__, "numpy": numpy.__version__, "hypothesis": hypothesis.__version__,
        }  # fmt: skip
        RESULT.parent.mkdir(exist_ok=True)
        result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        RESULT.write_text(json.dumps(result | {phase: found}, indent=1) + "\n")
    print("0 violations")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
