"""The study: what runs, in which order, what is chosen by what, and how a run becomes numbers."""

import json
import os
import signal
import subprocess
import sys
import time

import matplotlib.image
import numpy as np
import pytest

from toy_tasks import study as module
from toy_tasks.runs import parse_arguments
from toy_tasks.study import Cell, Runner, Setting, Study

SETTING, OTHER = Setting("carry_chain", 5, 20), Setting("worksheet", 4, 20)

# Stands in for ibpo_minimal.py: the same options and files, no training.
FAKE = """
import json, os, pathlib, signal, sys, time
options = dict(text[2:].split("=", 1) for text in sys.argv[1:])
folder = pathlib.Path(options["output_dir"])
with open(os.environ["CALLS"], "a") as calls:
    calls.write(f"{folder.parent.name} {folder.name} {os.environ['OMP_NUM_THREADS']}\\n")
config = {k: v if k in ("task", "credit", "output_dir") else float(v) for k, v in options.items()}
(folder / "config.json").write_text(json.dumps(config))
if options["credit"] == "broken":
    print("10% of a bar\\r20% of a bar", file=sys.stderr)
    sys.exit("ibpo_minimal: the reason")
stopped = []
if options["credit"] == "slow":
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    (folder / "ready").write_text("")
    while not stopped:
        time.sleep(0.01)
    time.sleep(0.7)
rate, rows = float(options["learning_rate"]), [{"step": 0, "validation/sampled": 0.1}]
for step in range(1, 21):
    rows.append({"step": step, "groups/all_wrong": 0.5, "tokens/sampled": 10})
    if step % 5 == 0:
        rows[-1]["validation/sampled"] = 0.9 if rate == 1e-4 else 0.2
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
after = None if options.get("test_problems") == "0" else {"sampled": 0.8, "greedy": 0.9}
summary = {"accuracy_after": after, "stopped": bool(stopped), "signals": len(stopped)}
(folder / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """A study with the fake trainer; gives what it was called for, in order."""
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(module, "TRAINER", tmp_path / "fake.py")
    monkeypatch.setattr(module, "POLL", 0.01)
    monkeypatch.setattr(module, "warm_starts", lambda study: None)
    monkeypatch.setattr(module, "draw", lambda study, settings: None)  # slow, and tested below
    monkeypatch.setattr(module.Runner, "catch_signals", lambda runner: None)  # they are pytest's
    monkeypatch.setattr(module, "LEARNING_RATES", (1e-4, 2e-4))
    monkeypatch.setattr(module, "SETTINGS", (SETTING, OTHER))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    (tmp_path / "calls").touch()

    def take():
        lines = (tmp_path / "calls").read_text().splitlines()
        (tmp_path / "calls").write_text("")
        return lines

    return take


def rows_of(accuracies, every=5, **more):
    """Metrics of a run with these validations; more: values that stand in each row."""
    rows = [{"step": 0, "validation/sampled": accuracies[0]}]
    for step in range(1, every * (len(accuracies) - 1) + 1):
        row = {"step": step, "tokens/sampled": 100, "tokens/revision": 10, "tokens/processed": 300}
        row |= {f"seconds/{name}": 0.25 for name in module.TRAINING}
        row |= {"seconds/evaluate": 99, "groups/all_wrong": 1.0 if step <= 5 else 0.0} | more
        if step % every == 0:
            row["validation/sampled"] = accuracies[step // every]
        rows.append(row)
    return rows


def run_of(accuracies, seed=0, **more):
    after = {"sampled": 0.7, "greedy": 0.8}
    return {"seed": seed, "summary": {"accuracy_after": after}, "rows": rows_of(accuracies, **more)}


def write_run(study, cell, accuracies, after=None, stopped=False, **more):
    folder = study.folder / cell.name
    folder.mkdir(parents=True)
    rows = "".join(json.dumps(row) + "\n" for row in rows_of(accuracies, **more))
    (folder / "metrics.jsonl").write_text(rows)
    (folder / "config.json").write_text(json.dumps(cell.options() | {"more": [1]}))
    (folder / "summary.json").write_text(json.dumps({"accuracy_after": after, "stopped": stopped}))


def write_study(study, credits=("grpo", "ibpo"), seeds=(0, 1, 2)):
    for credit in credits:
        for cell in study.grid(SETTING, credit):
            write_run(study, cell, [0.1, 0.6 if cell.learning_rate == 1e-4 else 0.3])
        for cell in study.final(SETTING, credit):
            if cell.seed in seeds:
                curve = [0.1, 0.2, *([0.3 + 0.1 * cell.seed] * 3)]
                extra = 0 if credit == "grpo" else 25
                after = {"sampled": 0.7, "greedy": 0.8}
                more = {"tokens/revision": extra, "entropy": 0.5}
                write_run(study, cell, curve, after, **more)


# ---- which runs, in which order ------------------------------------------------------------------


def test_a_setting_is_finished_before_the_next_and_its_grid_before_its_final_runs(tmp_path, calls):
    runner = Runner(Study(tmp_path / "s", [SETTING, OTHER], ["grpo", "ibpo"], [0, 1]), workers=1)
    runner.run()
    stages = [line.split()[0] for line in calls()]
    assert stages == (["grid"] * 8 + ["final"] * 4) * 2
    assert not runner.failed and runner.study.total == len(stages)


def test_a_final_run_starts_while_the_grid_of_another_credit_goes_on(tmp_path):
    study = Study(tmp_path, [SETTING], ["grpo", "ibpo"], [0])
    for cell in study.grid(SETTING, "grpo"):
        write_run(study, cell, [0.1, 0.2])
    ready = [cell for cell in study.cells() if study.run(cell) is None]
    assert [c.credit for c in ready if not c.grid] == ["grpo"]
    assert [c.grid for c in ready] == [True] * 6 + [False]


def test_a_finished_run_is_not_run_again(tmp_path, calls):
    arguments = [f"--output_dir={tmp_path / 's'}", "--settings=carry_chain:5", "--credits=grpo"]
    module.main(arguments)
    assert len(calls()) == 4 + 5
    module.main(arguments)
    assert calls() == []
    module.main([*arguments, "--seeds=0,7"])
    assert [line.split()[1] for line in calls()] == ["grpo-lr1e-04-seed7"]


@pytest.mark.parametrize("spoil", ["stopped", "other steps", "cut off", "gone"])
def test_only_a_run_that_ended_by_itself_with_the_same_settings_counts(tmp_path, spoil):
    study, cell = Study(tmp_path), Cell(SETTING, "grpo", 1e-4, 0, grid=False)
    write_run(study, cell, [0.1, 0.2], stopped=spoil == "stopped")
    summary = tmp_path / cell.name / "summary.json"
    if spoil == "other steps":
        cell = Cell(Setting("carry_chain", 5, 999), "grpo", 1e-4, 0, grid=False)
    if spoil == "cut off":
        summary.write_text(summary.read_text()[:9])
    if spoil == "gone":
        summary.unlink()
    assert study.run(cell) is None


def test_each_run_has_one_thread(tmp_path, calls):
    Runner(Study(tmp_path / "s", [SETTING], ["grpo"], [0]), workers=3).run()
    assert {line.split()[2] for line in calls()} == {"1"}


def test_the_trainer_knows_every_option_and_credit():
    trainer = pytest.importorskip("ibpo_minimal")
    for credit in module.CREDITS:
        cell = Cell(SETTING, credit, 5e-5, 3, grid=True)
        words = [f"--{name}={value}" for name, value in cell.options().items()]
        config, credits, seeds = parse_arguments(trainer.Config, trainer.__doc__, words)
        config.check()
        assert credits == [credit] and seeds == [3]
        assert cell.options().items() <= vars(config).items()


def test_a_failing_run_is_reported_and_the_others_finish(tmp_path, calls, capsys):
    arguments = [f"--output_dir={tmp_path / 's'}", "--credits=broken,grpo", "--seeds=0"]
    with pytest.raises(SystemExit) as end:
        module.main([*arguments, "--settings=carry_chain:5"])
    assert "4 runs failed; the same command tries them again" in str(end.value.code)
    error = capsys.readouterr().err
    assert error.count("ibpo_minimal: the reason") == 4 and "20% of a bar" in error
    assert "10%" not in error and "broken-lr1e-04-seed10 failed (1)" in error
    assert sum("grpo" in line for line in calls()) == 5
    results = json.loads((tmp_path / "s" / "results.json").read_text())
    assert list(results["settings"]["carry_chain-5"]["credits"]) == ["grpo"]


def test_an_error_in_the_study_itself_leaves_no_run_behind(tmp_path, calls, monkeypatch):
    monkeypatch.setattr(module, "write_results", lambda study: 1 / 0)
    runner = Runner(Study(tmp_path / "s", [SETTING], ["grpo", "slow"], [0]), workers=6)
    with pytest.raises(ZeroDivisionError):
        runner.run()
    assert all(process.returncode is not None for process in runner.running)


def test_a_run_that_is_being_started_when_the_signal_comes_is_stopped_too(
    tmp_path, calls, monkeypatch
):
    runner = Runner(Study(tmp_path / "s", [SETTING], ["slow"], [0]), workers=1)
    popen = subprocess.Popen

    def start(*arguments, **keywords):
        process = popen(*arguments, **keywords)
        runner.stop()  # the handler runs before the process is noted
        return process

    monkeypatch.setattr(module.subprocess, "Popen", start)
    runner.run()
    assert runner.asked and not runner.running and not runner.failed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_study_stops_its_runs_once_and_leaves_valid_results(tmp_path, calls, number):
    folder = tmp_path / "s"
    main = (
        "import pathlib, sys; from toy_tasks import study\n"
        f"study.TRAINER = pathlib.Path({str(tmp_path / 'fake.py')!r})\n"
        "study.warm_starts = study.draw = lambda *_: None\n"
        "study.main(sys.argv[1:])"
    )
    arguments = [f"--output_dir={folder}", "--settings=carry_chain:5", "--credits=slow"]
    study = subprocess.Popen(
        [sys.executable, "-c", main, *arguments, "--workers=2"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*/*/*/ready"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(study.pid, number)  # as a terminal does it: to all processes of the group
    error = study.communicate(timeout=60)[1]
    assert study.returncode == 130 and "the same command goes on from here" in error
    assert "failed" not in error
    summaries = [json.loads(path.read_text()) for path in folder.glob("*/*/*/summary.json")]
    assert [(s["stopped"], s["signals"]) for s in summaries] == [(True, 1)] * 2  # waited for
    results = json.loads((folder / "results.json").read_text())
    assert results["settings"]["carry_chain-5"]["credits"] == {}
    assert results["command"].startswith("python -m toy_tasks.study --output_dir")


# ---- the choice of the learning rate -------------------------------------------------------------


def test_the_rate_is_chosen_by_the_area_under_the_sampled_validation_curve_of_the_grid(tmp_path):
    study = Study(tmp_path, [SETTING], ["grpo"], [0])
    for cell in study.grid(SETTING, "grpo"):
        slow = {1e-4: [0.1, 0.5, 0.6], 2e-4: [0.1, 0.0, 0.9], 4e-4: [0.1, 0.1, 0.1]}
        lures = {"validation/greedy": cell.learning_rate, "reward/mean": cell.learning_rate}
        after = {"sampled": cell.learning_rate, "greedy": cell.learning_rate}
        write_run(study, cell, slow[cell.learning_rate], after, **lures)
    assert study.learning_rate(SETTING, "grpo") == 1e-4
    assert study.scores(SETTING, "grpo")[1e-4] == pytest.approx(0.4)
    (cell,) = study.final(SETTING, "grpo")
    write_run(study, cell, [0.0, 0.0, 0.0], {"sampled": 0.0, "greedy": 0.0})
    assert study.learning_rate(SETTING, "grpo") == 1e-4


def test_no_rate_is_chosen_from_an_incomplete_grid_and_ties_go_to_the_lowest(tmp_path):
    study = Study(tmp_path, [SETTING], ["grpo"], [0])
    *most, last = study.grid(SETTING, "grpo")
    for cell in most:
        write_run(study, cell, [0.1, 0.5])
    assert study.learning_rate(SETTING, "grpo") is None and study.final(SETTING, "grpo") == []
    write_run(study, last, [0.1, 0.5])
    assert study.learning_rate(SETTING, "grpo") == 1e-4


def test_the_grid_sees_no_test_problem_and_shares_no_seed_with_the_results(capsys):
    assert Cell(SETTING, "grpo", 1e-4, 10, grid=True).options()["test_problems"] == 0
    assert "test_problems" not in Cell(SETTING, "grpo", 1e-4, 0, grid=False).options()
    with pytest.raises(SystemExit):
        module.parse_arguments(["--seeds=0,10"])
    assert "chosen on them" in capsys.readouterr().err


# ---- numbers -------------------------------------------------------------------------------------


def test_a_run_that_never_gets_there_counts_as_its_whole_budget():
    found = module.measures(run_of([0.1, 0.9, 0.4, 0.9, 0.9]), 0)  # twice in a row only
    assert (found["reached"], found["steps"]) == (False, 20)
    assert (found["sampled"], found["revision"], found["tokens"]) == (2000, 200, 2200)
    assert found["processed"] == 6000


def test_there_is_the_first_of_three_validations_in_a_row_and_evaluation_takes_no_time():
    found = module.measures(run_of([0.1, 0.9, 0.4, 0.5, 0.6, 0.5]), 0)
    assert (found["reached"], found["steps"]) == (True, 15)
    assert (found["tokens"], found["processed"]) == (1650, 4500)
    assert found["seconds"] == pytest.approx(15 * 0.25 * 5)


def test_entropy_is_of_the_last_updates_and_all_wrong_of_the_first_five_steps():
    run = run_of([0.1, 0.2, 0.3])
    for row in run["rows"][1:7]:
        row["entropy"] = row["step"]  # the steps after the sixth were flat: no update
    found = module.measures(run, 0)
    assert (found["entropy"], found["all_wrong"]) == (4.0, 1.0)
    assert module.measures(run_of([0.1, 0.2]), 0)["entropy"] is None


def test_accuracy_at_equal_tokens_is_read_off_the_curve_between_evaluations():
    assert module.measures(run_of([0.1, 0.2, 0.4]), 825)["at_equal_tokens"] == pytest.approx(0.3)


def test_ratios_compare_the_same_seeds_only():
    def run(seed, steps):
        return {"seed": seed, "reached": True, "steps": steps, "tokens": 10 * steps}

    baseline = [run(0, 10), run(1, 40), run(2, 90)]
    line = module.over_seeds([run(2, 45), run(3, 1000), run(0, 5), run(1, 20)], baseline)
    for key in ("steps_ratio", "tokens_ratio"):
        assert line[key] == pytest.approx([0.5, 0.5, 0.5])
    assert module.over_seeds([run(3, 1000)], baseline)["steps_ratio"] is None
    assert module.over_seeds([run(1, 20)], baseline)["steps_ratio"] == [
        pytest.approx(0.5),
        None,
        None,
    ]


def test_a_ratio_to_a_cost_of_nothing_is_not_made_up():
    assert module.paired_ratio([1, 2], [0, 2]) is None


def test_at_five_seeds_the_interval_of_a_paired_ratio_covers_what_its_name_says():
    rng, held, studies = np.random.default_rng(0), 0, 300
    for _ in range(studies):
        seed_effect = rng.normal(0, 0.05, 5)
        values, base = np.exp(seed_effect + rng.normal(0, 0.1, (2, 5)))
        _, low, high = module.paired_ratio(values, base)
        held += low <= 1 <= high
    assert 0.92 < held / studies < 0.98


@pytest.mark.parametrize(
    ("n", "t"), [(2, 12.706), (5, 2.776), (10, 2.262), (11, 2.228), (31, 2.042)]
)
def test_the_interval_of_a_mean_uses_students_t(n, t):
    values = [0.0] * (n - 1) + [1.0]
    mean, low, high = module.mean_interval(values)
    assert mean == pytest.approx(1 / n)
    assert (high - low) / 2 == pytest.approx(t / n, rel=2e-3)  # s / sqrt(n) = 1 / n here


# ---- what is written -----------------------------------------------------------------------------


def test_the_results_hold_a_line_per_credit_and_the_pictures_are_whole(tmp_path):
    study = Study(tmp_path, [SETTING, OTHER], ["grpo", "ibpo"], [0, 1, 2])
    write_study(study)
    module.record_session(study, ["--seeds", "0,1,2"])
    module.write_results(study)
    module.draw(study, study.settings)
    results = json.loads((tmp_path / "results.json").read_text())
    ibpo = results["settings"]["carry_chain-5"]["credits"]["ibpo"]
    assert (ibpo["learning_rate"], ibpo["reached"]) == (1e-4, 1)
    assert ibpo["steps"][0] == pytest.approx((20 + 20 + 10) / 3)
    assert ibpo["tokens_ratio"] == pytest.approx([1.25] * 3) and ibpo["steps_ratio"] == [1, 1, 1]
    assert results["settings"]["carry_chain-5"]["equal_tokens"] == 2000  # all that grpo sampled
    assert results["settings"]["worksheet-4"]["credits"] == {}
    text = (tmp_path / "results.md").read_text()
    assert "`python -m toy_tasks.study --seeds 0,1,2`" in text and "cores, torch" in text
    assert "| ibpo " in text and "1 of 3" in text and "1.25 [1.25, 1.25]" in text
    for name in ("carry_chain-5", "worksheet-4", "overview-steps", "overview-tokens"):
        assert matplotlib.image.imread(tmp_path / f"{name}.png").shape[1] >= 1000


def test_a_report_of_a_part_starts_no_run_and_says_what_is_missing(tmp_path, calls, capsys):
    study = Study(tmp_path / "s", [SETTING], ["ibpo"], [0, 1])
    study.folder.mkdir()
    module.main([f"--output_dir={study.folder}", "--report_only"])
    assert calls() == [] and "| grpo" in capsys.readouterr().out
    write_study(study, ["ibpo"], seeds=[1])  # no baseline, one seed: no ratio, no interval
    module.main([f"--output_dir={study.folder}", "--report_only", "--seeds=0,1"])
    assert calls() == [] and "0 of 1" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no folder"):
        module.main([f"--output_dir={tmp_path / 'typo'}", "--report_only"])


@pytest.mark.parametrize("word", ["--settings=carry_chain:6", "--seeds=one", "--workers=0"])
def test_wrong_input_is_refused_with_what_is_allowed(word, capsys):
    with pytest.raises(SystemExit):
        module.parse_arguments([word])
    assert "allowed: " in capsys.readouterr().err
