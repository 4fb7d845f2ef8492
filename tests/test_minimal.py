"""Whole runs of ibpo_minimal.py: what they write, how they stop, what they refuse."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ibpo_minimal as ibpo
from toy_tasks import Verdict

ROOT = Path(__file__).parent.parent
SMALL = {
    "difficulty": 3, "steps": 2, "problems_per_step": 3, "group_size": 4, "eval_every": 1,
    "validation_problems": 6, "test_problems": 8,
}  # fmt: skip


def command(**options):
    given = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, str(ROOT / "ibpo_minimal.py"), *given]


def run(**options):
    return subprocess.run(command(**options), capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    result = run(**SMALL, compare="grpo,ibpo", seeds="0,1", output_dir=folder)
    assert result.returncode == 0, result.stderr
    return folder, result


def test_a_comparison_writes_metrics_summaries_models_and_a_picture(compared):
    folder, result = compared
    runs = json.loads((folder / "summary.json").read_text())["runs"]
    assert [(r["credit"], r["seed"]) for r in runs] == [
        ("grpo", 0), ("ibpo", 0), ("grpo", 1), ("ibpo", 1),
    ]  # fmt: skip
    for summary in runs:
        own = folder / f"{summary['credit']}-seed{summary['seed']}"
        rows = [json.loads(line) for line in (own / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [0, 1, 2]
        assert all("validation/sampled" in row for row in rows)
        for name in ("sampled", "revision", "processed"):
            total = sum(row.get(f"tokens/{name}", 0) for row in rows)
            assert summary[f"{name}_tokens"] == total
        assert summary["accuracy_after"]["problems"] == 8
        assert json.loads((own / "config.json").read_text())["credit"] == summary["credit"]
    assert matplotlib.image.imread(folder / "curves.png").shape[1] > 500
    assert "| ibpo " in result.stdout and "curves.png" in result.stdout


def test_credits_of_one_seed_see_the_same_first_attempts(compared):
    folder, _ = compared
    first = [
        json.loads((folder / f"{credit}-seed0/metrics.jsonl").read_text().splitlines()[1])
        for credit in ("grpo", "ibpo")
    ]
    for name in ("reward/mean", "tokens/sampled", "completions/mean_length"):
        assert first[0][name] == first[1][name]
    assert first[0]["revisions/made"] == 0 < first[1]["revisions/made"]


def test_a_comparison_does_not_run_again_what_has_finished(compared):
    folder, _ = compared
    before = (folder / "ibpo-seed1/metrics.jsonl").stat().st_mtime_ns
    again = run(**SMALL, compare="grpo,ibpo", seeds="0,1", output_dir=folder)
    assert again.returncode == 0
    assert (folder / "ibpo-seed1/metrics.jsonl").stat().st_mtime_ns == before


def test_a_saved_model_loads_with_automodel_and_gives_the_same_logits(tmp_path):
    config = ibpo.Config(**SMALL, output_dir=str(tmp_path))
    policy = ibpo.Policy(config, ibpo.make_task("carry_chain"))
    policy.save(tmp_path / "final")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "final").encode("47+38\n")])
    assert ids.tolist() == [policy.encode("47+38\n")]
    torch.testing.assert_close(model(ids).logits, policy.model(ids).logits)


def test_a_saved_folder_goes_on_as_the_model_of_another_run(compared, tmp_path):
    folder, _ = compared
    result = run(**SMALL, model=folder / "ibpo-seed0/final", output_dir=tmp_path)
    assert result.returncode == 0, result.stderr
    after = json.loads((folder / "ibpo-seed0/summary.json").read_text())["accuracy_after"]
    assert json.loads((tmp_path / "summary.json").read_text())["accuracy_before"] == after


def test_the_same_seed_gives_the_same_run(compared, tmp_path):
    folder, _ = compared
    assert run(**SMALL, credit="ibpo", seed=1, output_dir=tmp_path).returncode == 0

    def numbers(path):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in rows]

    assert numbers(tmp_path / "metrics.jsonl") == numbers(folder / "ibpo-seed1/metrics.jsonl")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_model_metrics_and_picture(tmp_path, number):
    process = subprocess.Popen(
        command(**SMALL | {"steps": 100_000}, output_dir=tmp_path),
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    seen = ""
    while " 1/100000" not in seen:  # the first step is done
        character = process.stderr.read(1)
        assert character, seen
        seen += character
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "stopping after this step" in err
    summary = json.loads((tmp_path / "summary.json").read_text())
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert summary["stopped"] and summary["steps"] == len(rows) - 1 >= 1
    AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert (tmp_path / "curves.png").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"group_size": 1}, "group_size = 1; allowed"),
        ({"steps": -1}, "steps = -1; allowed"),
        ({"temperature": 0}, "temperature = 0.0; allowed"),
        ({"learning_rate": "nan"}, "learning_rate = nan; allowed"),
        ({"credit": "ipbo"}, "credit = 'ipbo'; allowed: grpo"),
        ({"compare": "grpo,ibop"}, "credit = 'ibop'; allowed: grpo"),
        ({"task": "chess"}, "unknown task 'chess'; allowed: carry_chain"),
        ({"difficulty": 99}, "difficulty = 99; allowed: 2 to 12"),
        ({"objective": "ppo"}, "objective = 'ppo'; allowed: dapo, gspo"),
        ({"minibatches": 17}, "minibatches = 17; allowed: at most problems_per_step = 16"),
        ({"switches": "refs=3"}, "switch = 'refs'; allowed: counterfactuals"),
        ({"switches": "references=9"}, "references = 9; allowed: at most group_size = 8"),
        ({"switches": "mask_solved=yes"}, "mask_solved = 'yes'; allowed: true, false"),
        ({"switches": "repair_bonus=x"}, "repair_bonus = 'x'; allowed: a number"),
        ({"switches": "repair_bonus=-1"}, "repair_bonus = -1; allowed"),
        ({"switches": "revised_failures_per_group=some"}, "'some'; allowed: all, or 0 and more"),
        ({"switches": "revision_rows=best"}, "revision_rows = 'best'; allowed: none, plain"),
        ({"credit": "shuffled", "problems_per_step": 1, "minibatches": 1}, "allowed: at least 2"),
        ({"clip_low": 1.2}, "clip_low = 1.2; allowed: between 0 and 1"),
        ({"device": "tpu"}, "device = 'tpu'; allowed: auto"),
        ({"seeds": "a"}, "'a'; allowed: whole numbers"),
        ({"model": "/no/such/folder"}, "/no/such/folder"),
        ({"output_dir": "/proc/nowhere"}, "/proc/nowhere"),
    ],
)
def test_wrong_input_stops_with_one_line_that_names_the_value(options, said, capsys, tmp_path):
    arguments = {"output_dir": tmp_path} | options
    with pytest.raises(SystemExit) as stopped:
        ibpo.main([f"--{name}={value}" for name, value in arguments.items()])
    message = str(stopped.value.code) if stopped.value.code != 2 else capsys.readouterr().err
    assert said in message.splitlines()[-1]


def test_help_explains_every_option():
    result = subprocess.run([*command(), "--help"], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0
    for field in ibpo.dataclasses.fields(ibpo.Config):
        assert f"--{field.name} " in result.stdout


def test_a_step_in_which_every_group_is_flat_changes_no_weight():
    config = ibpo.Config(**SMALL, credit="grpo")
    task = ibpo.make_task("carry_chain", 3)
    policy = ibpo.Policy(config, task)
    task.grade = lambda problem, text: Verdict(0.0, "1", "always wrong")
    before = [p.clone() for p in policy.model.parameters()]
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=0.1, weight_decay=0.1)
    row, _, _ = ibpo.train_step(policy, optimizer, task, ibpo.CREDITS["grpo"], config, 0)
    assert row["frac_reward_zero_std"] == 1.0 and row["updates"] == 0
    for old, new in zip(before, policy.model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_metrics_are_finite_and_add_up(compared):
    folder, _ = compared
    for line in (folder / "ibpo-seed0/metrics.jsonl").read_text().splitlines()[1:]:
        row = json.loads(line)
        assert all(math.isfinite(value) for value in row.values())
        assert row["tokens/processed"] >= row["tokens/sampled"] + row["tokens/revision"]
        assert 0 <= row["groups/all_wrong"] <= row["frac_reward_zero_std"] + 1


@pytest.mark.smollm
def test_a_pretrained_chat_model_trains_for_a_few_steps(tmp_path):
    path = os.environ["SMOLLM"]  # the .gguf file
    options = SMALL | {
        "model": path, "credit": "ibpo-lean", "difficulty": 2, "group_size": 2, "eval_every": 0,
        "test_problems": 2, "learning_rate": 1e-5, "max_new_tokens": 24, "output_dir": tmp_path,
    }  # fmt: skip
    result = run(**options)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(row.get("revisions/made", 0) for row in rows) > 0
