"""The command line: output for people and for programs, exit codes, one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kda_ckpt import __version__, cli
from kda_ckpt.explain import Case, explain

SMALL = ["--concurrency", "1,2", "--prompt-len", "200", "--block-size", "48", "--output-len", "2", "--budget", "256",
         "--repeats", "1", "--device", "cpu"]  # fmt: skip


@pytest.fixture
def run(capsys):
    """Run a command line in this process: (exit code, standard output, standard error)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return stop.value.code, captured.out, captured.err

    return call


def in_new_process(*arguments: str, code: str = "from kda_ckpt.cli import main; main()") -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("command", [(), ("ttft",), ("explain",), ("conformance",), ("backends",)])
def test_help_is_quick(command: tuple[str, ...]) -> None:
    """--help works and imports neither torch nor matplotlib."""
    code = """
import sys
from kda_ckpt.cli import main
try:
    main()
finally:
    heavy = {"torch", "triton", "matplotlib", "numpy"} & set(sys.modules)
    assert not heavy, heavy
"""
    done = in_new_process(*command, "--help", code=code)
    assert done.returncode == 0, done.stderr
    assert "Usage: kda-ckpt" in done.stdout


def test_version(run) -> None:
    assert run("--version") == (0, f"kda-ckpt {__version__}\n", "")


def test_no_command_shows_help(run) -> None:
    code, out, err = run()
    assert code == 2 and "explain" in out + err


def test_explain_prints_both_ways(run) -> None:
    code, out, err = run("explain", 8000)
    assert code == 0 and err == ""
    assert "split: 2 forwards" in out and "internal: 1 forward" in out
    assert "0 to 7680" in out and "7680 (offset 7680) to column 4" in out
    assert "#7 state 7680 | #8 running" in out
    assert out.count("7680 tokens come from the cache") == 2


@pytest.mark.parametrize(
    "options, case",
    [
        ([], {}),
        (["--budget", 2048], {"budget": 2048}),
        (["--cached", 7000], {"cached": 7000}),
        (["--start", 1700], {"start": 1700}),
        (["--block-size", 24, "--alignment", 16], {"block_size": 24, "alignment": 16}),
        (["--partial-hits", "--hash-block-size", 64], {"partial_hits": True, "hash_block_size": 64}),
        (["--attention-block-size", 64], {"attention_block_size": 64}),
        (["--long-prefill-token-threshold", 3000], {"long_prefill_token_threshold": 3000}),
    ],
)
def test_explain_json_is_what_the_library_says(run, options: list, case: dict) -> None:
    code, out, err = run("explain", 8000, *options, "--json")
    assert code == 0 and err == ""
    data, expected = json.loads(out), explain(Case(prompt_len=8000, **case))
    for way, told in expected.ways.items():
        steps = data["ways"][way]["steps"]
        assert [(step["start"], step["end"]) for step in steps] == [(step.start, step.end) for step in told.steps]
        assert [step["row"] for step in steps] == [list(step.row) for step in told.steps]
        assert data["ways"][way]["reusable"] == told.reusable and data["ways"][way]["hit"] == told.hit
        assert told.steps[-1].end == 8000
        for step in told.steps:
            assert len(step.row) == -(-step.end // expected.case.block_size)
            assert step.kinds[-1] == "running" and step.row[-1] != 0
            assert step.checkpoint is None or way == "internal"


def test_explain_draws(run, tmp_path) -> None:
    for suffix in ("png", "svg"):
        code, _, err = run("explain", 100, "--block-size", 16, "--out", tmp_path / f"x.{suffix}")
        assert code == 0 and "wrote" in err
        assert (tmp_path / f"x.{suffix}").stat().st_size > 1000


def test_start_continues_a_request() -> None:
    told = explain(Case(prompt_len=8000, start=1700))
    assert [(step.start, step.end) for step in told.ways["internal"].steps] == [(1700, 3072), (3072, 8000)]
    assert [(step.start, step.end) for step in told.ways["split"].steps] == [(1700, 3072), (3072, 7680), (7680, 8000)]


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["explain", "0"], "prompt_len"),
        (["explain", "many"], "PROMPT_LEN is 'many'; it must be a whole number"),
        (["explain", "1e3"], "PROMPT_LEN is '1e3'; it must be a whole number"),
        (["explain", ""], "PROMPT_LEN is ''; it must be a whole number"),
        (["explain", "10", "--out", ""], "--out is ''"),
        (["ttft", "--out", ""], "--out is ''"),
        (["ttft", "--config", ""], "--config is ''"),
        (["ttft", "--prompts", "x" * 5000], "--prompts is 'xxx"),
        (["ttft", "--device", ""], "--device is ''"),
        (["ttft", "--concurrency", "1,,4"], "--concurrency is '1,,4'"),
        (["ttft", "--output-len", "9" * 3000], "--output-len is 999"),
        (["ttft", "--waves", "999999999", "--device", "cpu"], "--waves is 999999999; it must be lower"),
        (["conformance", ""], "FILES is ''; it must be a file"),
        (["conformance", "no/such/file"], "FILES is 'no/such/file'; it must be a file"),
        (["explain", "10", "--block-size", "0"], "--block-size"),
        (["explain", "10", "--budget", "0"], "--budget"),
        (["explain", "10", "--start", "10"], "--start is 10; it must be less than PROMPT_LEN = 10"),
        (["explain", "10", "--cached", "11"], "--cached is 11"),
        (["explain", "10", "--cached", "1", "--start", "1"], "--start is 1 and --cached is 1"),
        (["explain", "10", "--alignment", "0"], "--alignment"),
        (["explain", "10", "--attention-block-size", "7"], "--attention-block-size is 7"),
        (["explain", "10", "--hash-block-size", "7"], "--hash-block-size is 7"),
        (["explain", "10", "--out", "picture.txt"], "--out is 'picture.txt'"),
        (["explain", "10", "--out", "no/such/directory/x.png"], "--out is"),
        (["explain"], "PROMPT_LEN"),
        (["explain", "10", "--frobnicate"], "--frobnicate"),
        (["frobnicate"], "frobnicate"),
        (["ttft", "--preset", "huge"], "--preset is 'huge'"),
        (["ttft", "--backend", "abacus"], "--backend is 'abacus'"),
        (["ttft", "--device", "abacus"], "--device is 'abacus'"),
        (["ttft", "--device", "cuda:99"], "--device is 'cuda:99'"),
        (["ttft", "--dtype", "int8"], "--dtype is 'int8'"),
        (["ttft", "--token-check", "hope"], "--token-check is 'hope'"),
        (["ttft", "--concurrency", "1,x"], "--concurrency is '1,x'"),
        (["ttft", "--concurrency", "0"], "--concurrency is '0'"),
        (["ttft", "--prompt-len", ""], "--prompt-len is ''"),
        (["ttft", "--budget", "0"], "--budget"),
        (["ttft", "--block-size", "-1"], "--block-size"),
        (["ttft", "--repeats", "0"], "--repeats"),
        (["ttft", "--prompts", "no/such/file"], "--prompts is 'no/such/file'"),
        (["ttft", "--config", "no/such/file"], "--config is 'no/such/file'"),
        (["conformance"], "FILES"),
    ],
)
def test_bad_input_is_one_line_and_2(run, monkeypatch, arguments: list[str], named: str) -> None:
    monkeypatch.setattr("kda_ckpt.ttft.make_llm", lambda config: pytest.fail("work was begun"))
    code, out, err = run(*arguments)
    assert code == 2 and out == ""
    assert err.startswith("kda-ckpt: error: ") and err.count("\n") == 1
    assert named.lower() in err.lower()


@pytest.mark.parametrize("value", ["word", "1e3", "1.5", "", " ", "1,,4", "nan", "9" * 5000])
@pytest.mark.parametrize(
    "command, options",
    [
        (
            ("explain", "10"),
            "--block-size --budget --start --cached --attention-block-size --alignment --hash-block-size "
            "--long-prefill-token-threshold",
        ),
        (("ttft",), "--output-len --block-size --budget --repeats --warmup --waves --seed"),
    ],
)
def test_what_is_no_number_is_named(run, command: tuple[str, ...], options: str, value: str) -> None:
    for option in options.split():
        code, out, err = run(*command, f"{option}={value}")
        assert (code, out) == (2, "")
        assert err == f"kda-ckpt: error: {option} is {value!r}; it must be a whole number, as in 1536\n"


def test_no_place_to_write_is_found_before(run, monkeypatch, tmp_path) -> None:
    """A directory where a file must go, a file where a directory must go: known before the work, and nothing is left."""
    monkeypatch.setattr("kda_ckpt.ttft.run_ttft", lambda *args, **kwargs: pytest.fail("work was begun"))
    monkeypatch.setattr("kda_ckpt.explain.explain", lambda *args: pytest.fail("work was begun"))
    for name in ("ttft.json", "ttft.png"):
        out = tmp_path / name.replace(".", "_")
        (out / name).mkdir(parents=True)
        code, _, err = run("ttft", *SMALL, "--out", out)
        assert code == 2 and f"--out is '{out}'; it must be a directory in which {name} can be written" in err
        assert [path.name for path in out.iterdir()] == [name]
    (tmp_path / "file").write_text("kept")
    code, _, err = run("ttft", *SMALL, "--out", tmp_path / "file")
    assert code == 2 and "it must be a directory that can be written" in err
    (tmp_path / "x.png").mkdir()
    for picture in (tmp_path / "x.png", tmp_path / "file" / "x.png", tmp_path / ("x" * 300 + ".png")):
        code, out, err = run("explain", "10", "--out", picture)
        assert (code, out) == (2, "") and f"--out is '{picture}'; it must be a file that can be written" in err
    assert (tmp_path / "file").read_text() == "kept"


def test_bad_files_are_one_line_and_2(run, tmp_path) -> None:
    path = tmp_path / "model.json"
    for content in ("no json", "[]", "{}", '{"vocab_size": 5, "wings": 2}'):
        path.write_text(content)
        code, out, err = run("ttft", "--config", path)
        assert code == 2 and out == "" and err.count("\n") == 1
        assert err.startswith("kda-ckpt: error: ") and "model.json" in err
    path.write_text("")
    code, _, err = run("ttft", "--prompts", path, "--device", "cpu")
    assert code == 2 and "--prompts is" in err
    code, _, err = run("ttft", "--out", path, "--device", "cpu")
    assert code == 2 and "--out is" in err


def test_ttft_for_people(run, tmp_path) -> None:
    code, out, err = run("ttft", *SMALL, "--out", tmp_path / "a" / "b")
    assert code == 0
    assert "200 x 1" in out and "200 x 2" in out and "internal" in out and "change" in out
    assert out.count("passed") == 7 and "FAILED" not in out
    assert "passed  on an internal hit the same first-token logits as with caching off (3 requests" in out
    assert "Prompts of 200 tokens at concurrency 2" in out.replace("\n", " ")
    assert "running 200 tokens x 1" in err and "wrote" in err
    assert json.loads((tmp_path / "a" / "b" / "ttft.json").read_text())["ok"]
    assert (tmp_path / "a" / "b" / "ttft.png").stat().st_size > 1000


def test_ttft_for_programs(run, tmp_path) -> None:
    code, out, err = run("ttft", *SMALL, "--out", tmp_path, "--json")
    data = json.loads(out)
    assert code == 0 and data["ok"] and "change" in err
    assert data == json.loads((tmp_path / "ttft.json").read_text())
    assert data["points"][0]["ways"]["split"]["forwards_per_prefill"] == 2
    assert data["points"][0]["ways"]["internal"]["forwards_per_prefill"] == 1
    assert data["points"][0]["resend"]["ways"]["internal"]["cached_tokens"] == 192


def test_ttft_takes_a_config_file(run, tmp_path) -> None:
    from dataclasses import asdict

    from kda_ckpt.model import get_preset

    path = tmp_path / "model.json"
    path.write_text(json.dumps(asdict(get_preset("tiny")) | {"num_layers": 3, "full_attention_layers": [2]}))
    code, out, _ = run("ttft", *SMALL, "--config", path, "--out", tmp_path, "--json")
    assert code == 0 and json.loads(out)["config"]["config"] == str(path)


@pytest.mark.parametrize("error, code", [(KeyboardInterrupt(), 130), (RuntimeError("[no] such kernel\nat all"), 1)])
def test_complete_points_are_shown_and_written(run, monkeypatch, tmp_path, error: BaseException, code: int) -> None:
    from kda_ckpt.ttft import Experiment

    run_point = Experiment.run_point

    def stops(self, length: int, concurrency: int):
        if concurrency == 2:
            raise error
        return run_point(self, length, concurrency)

    monkeypatch.setattr(Experiment, "run_point", stops)
    found, out, err = run("ttft", *SMALL, "--out", tmp_path)
    assert found == code and "200 x 1" in out and "200 x 2" not in out and "wrote" in err
    assert "Incomplete: the experiment ended after 1 of its 2 points: " in out
    assert ("interrupted" if code == 130 else "[no] such kernel at all") in out
    stored = json.loads((tmp_path / "ttft.json").read_text())
    assert stored["complete"] is False and [point["concurrency"] for point in stored["points"]] == [1]
    assert (tmp_path / "ttft.png").stat().st_size > 1000


def test_without_a_complete_point_nothing_is_written(run, monkeypatch, tmp_path) -> None:
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("kda_ckpt.ttft.Experiment.run_point", interrupted)
    code, out, err = run("ttft", *SMALL, "--out", tmp_path)
    assert code == 130 and out == "" and err.endswith("kda-ckpt: error: interrupted\n")
    assert not list(tmp_path.iterdir())


def test_a_failed_check_is_1(run, monkeypatch, tmp_path) -> None:
    from kda_ckpt.backends import TorchBackend

    monkeypatch.setattr(TorchBackend, "store_cache_checkpoints", lambda self, **kwargs: None)
    code, out, _ = run("ttft", *SMALL, "--output-len", 8, "--out", tmp_path)
    assert code == 1 and "FAILED" in out
    assert not json.loads((tmp_path / "ttft.json").read_text())["ok"]


def test_wrong_logits_are_printed() -> None:
    from kda_ckpt.ttft import judge_logits

    checks = {"natural": {"mean": 0.1, "largest": 0.3, "requests": 2}, "cold": judge_logits([0.1], [0.3])}
    checks |= {"hit": judge_logits([0.1, 1.2], [0.3]), "internal_against_off": judge_logits([1.2], [1.0])}
    passed, failed, unclear = cli.logit_lines(checks)
    assert "passed" in passed and "at most 0.1, 0.7 may be; 0.3 in other batches" in passed
    assert "FAILED" in failed and "on the hit (2 requests" in failed and "unclear" in unclear


def test_results_from_before_logits_were_compared_can_be_read() -> None:
    stored = sorted((Path(__file__).parent.parent / "nbs" / "results").glob("ttft_*.json"))
    assert stored
    for path in stored:
        result = json.loads(path.read_text())
        result["checks"].pop("logits", None)
        assert len(list(cli.check_lines(result))) == 3


def test_results_from_before_they_could_be_incomplete_can_be_printed(capsys) -> None:
    for path in (Path(__file__).parent.parent / "nbs" / "results").glob("ttft_*.json"):
        result = json.loads(path.read_text())
        for name in ("complete", "stopped"):
            result.pop(name, None)
        cli.print_ttft(cli.consoles(as_json=False)[0], result)
        assert "Incomplete" not in capsys.readouterr().out


def test_a_bug_keeps_its_traceback(monkeypatch) -> None:
    def broken(*args, **kwargs):
        raise KeyError("a bug")

    monkeypatch.setattr("kda_ckpt.explain.explain", broken)
    with pytest.raises(KeyError, match="a bug"):
        cli.main(["explain", "10"])


def test_expected_errors_are_those_raised_here() -> None:
    import torch

    from kda_ckpt.model import get_preset

    def caught(call) -> BaseException:
        try:
            call()
        except Exception as error:
            return error

    assert cli.is_expected(caught(lambda: get_preset("huge")))
    assert cli.is_expected(FileNotFoundError("x"))
    assert not cli.is_expected(caught(lambda: int("x")))
    assert not cli.is_expected(caught(lambda: torch.ones(2) @ torch.ones(3)))


def test_backends(run) -> None:
    code, out, err = run("backends", "--json")
    data = json.loads(out)
    assert code == 0 and err == ""
    by_name = {state["name"]: state for state in data["backends"]}
    assert {"torch", "triton", "cuda"} <= set(by_name)
    assert by_name["torch"]["available"] and by_name[data["auto"]]["available"]
    assert all(state["available"] or state["reason"] for state in data["backends"])
    code, out, _ = run("backends")
    assert code == 0 and "torch" in out and f"auto is {data['auto']}" in out


def test_conformance(run, tmp_path) -> None:
    pytest.importorskip("kda_ckpt.conformance")
    case = {
        "block_size": 1536, "hash_block_size": 1536, "num_prompt_tokens": 8000, "num_tokens": 8000, "start": 0,
        "num_new_tokens": 8000, "use_eagle": False, "checkpoint_blocks": 1, "partial_hits": False,
        "max_num_scheduled_tokens": 8192, "long_prefill_token_threshold": 0, "expect": 8000,
    }  # fmt: skip
    right, wrong = tmp_path / "right.jsonl", tmp_path / "wrong.jsonl"
    right.write_text(json.dumps(case) + "\n")
    wrong.write_text(json.dumps(case | {"expect": 7680}) + "\n")
    code, out, _ = run("conformance", right)
    assert code == 0 and "passed" in out
    code, out, _ = run("conformance", right, wrong, "--json")
    assert code == 1 and [report["mismatches"] for report in json.loads(out)] == [0, 1]
    wrong.write_text("no case\n")
    for unreadable in (wrong, tmp_path / "missing.jsonl"):
        code, out, err = run("conformance", unreadable)
        assert code == 2 and out == "" and err.count("\n") == 1 and unreadable.name in err
