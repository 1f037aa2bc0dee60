"""The golden cases: a sample that lies here, and the complete set where it lies beside the checkout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kda_ckpt.conformance import BadFile, main, run_file, run_files

HERE = Path(__file__).resolve().parent
SAMPLE = sorted((HERE / "golden").glob("*.jsonl"))
COMPLETE = sorted((HERE.parent.parent / "shared/conformance").glob("*.jsonl"))


@pytest.mark.parametrize("path", SAMPLE + COMPLETE, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_no_mismatch(path):
    report = run_file(path)
    assert report.ok and report.num_cases, str(report.mismatches[:1])


def test_the_sample_has_every_kind():
    assert {report.kind for report in run_files(SAMPLE)} == {"split", "manager", "metadata"}


def test_the_name_does_not_matter(tmp_path):
    for path in SAMPLE:
        copy = tmp_path / "split.jsonl"
        copy.write_bytes(path.read_bytes())
        assert run_file(copy).kind == run_file(path).kind and run_file(copy).ok


@pytest.mark.parametrize("path", SAMPLE, ids=lambda path: path.stem)
def test_every_answer_is_compared(path, tmp_path):
    """Change one recorded answer in each case: every single one is noticed."""
    wrong = []
    for line in path.read_text().splitlines():
        case = json.loads(line)
        if "ops" in case:
            answered = [op for op in case["ops"] if {"hit", "expect", "free"} & set(op)]
            op = answered[len(wrong) % len(answered)]
            key = next(key for key in ("hit", "expect", "free") if key in op)
            op[key] += 1
        elif "rows" in case:
            case["rows"][-1]["offset"] += 16
        else:
            case["expect"] += 1
        wrong.append(json.dumps(case))
    copy = tmp_path / "wrong.jsonl"
    copy.write_text("\n".join(wrong))
    report = run_file(copy)
    assert len(report.mismatches) == report.num_cases == len(wrong)
    assert main([str(copy)]) == 1


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "no cases"),
        ("{", "no JSON"),
        ("[1]", "no golden case"),
        ('{"block_size": 4}', "no golden case"),
        ('{"num_new_tokens": 4}', "lacks"),
        ('{"rows": [{"seq_len": 3, "query_len": 9}], "block_size": 4}', "cannot be run"),
        ('{"ops": [{"op": "dance"}], "block_size": 4, "checkpoint_blocks": 0, "full_block_size": 4, "num_blocks": 9, '
         '"hash_block_size": 4, "partial_hits": false}', "'dance'"),
    ],
)  # fmt: skip
def test_bad_files_are_refused(text, reason, tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(BadFile, match=reason):
        run_file(path)
    assert main([str(path)]) == 2 and reason in capsys.readouterr().err
    assert main([str(tmp_path / "missing.jsonl")]) == 2 and main([str(tmp_path)]) == 2 and main([]) == 2


def test_command_line():
    run = subprocess.run(
        [sys.executable, "-m", "kda_ckpt.conformance", *map(str, SAMPLE)], capture_output=True, text=True
    )
    assert run.returncode == 0 and run.stdout.count("0 mismatches") == len(SAMPLE), run.stdout + run.stderr
