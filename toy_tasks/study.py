"""The README's measured comparison: every credit at a learning rate of its own, on several seeds.

    python -m toy_tasks.study                  hours; stop it at will, the same command goes on
    python -m toy_tasks.study --report_only    train nothing, write the results of what is there

A setting is a task at a difficulty. In each, every credit first tries the learning rates on seeds
that are used for nothing else, and is judged on validation problems. The best rate is then trained
on the seeds that are reported, and only these runs see the test problems. Each run is a process of
its own with one thread. The results are written anew after each run.
"""

import argparse
import itertools
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np
from tqdm import tqdm

from . import make_task, report
from .report import curve_points, first_crossing, markdown_table
from .runs import write_json


@dataclass(frozen=True)
class Setting:
    """A task at a difficulty, and the budget of a run on it."""

    task: str
    difficulty: int
    steps: int

    @property
    def name(self):
        return f"{self.task}-{self.difficulty}"


SETTINGS = (
    Setting("carry_chain", 5, 30),
    Setting("carry_chain", 7, 40),
    Setting("carry_chain", 9, 60),
    Setting("worksheet", 4, 40),
)
CREDITS = ("grpo", "ibpo", "ibpo-lean", "repair-rows", "resample", "shuffled")
BASELINE = "grpo"
LEARNING_RATES = (1e-4, 2e-4, 4e-4)
GRID_SEEDS = (10, 11)  # for the choice of the learning rate only
SEEDS = (0, 1, 2, 3, 4)
THRESHOLD = 0.5
TRAINER = Path(__file__).resolve().parent.parent / "ibpo_minimal.py"
TRAINING = ("sample", "revise", "score", "credit", "update")  # the seconds/... that training took
POLL = 0.5  # seconds between looks at the running processes


# ---- which runs there are, and which come next ---------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One training run. A run of the grid is spared the test problems."""

    setting: Setting
    credit: str
    learning_rate: float
    seed: int
    grid: bool

    @property
    def name(self):
        """Its folder below the study's."""
        stage, rate = "grid" if self.grid else "final", f"{self.learning_rate:.0e}"
        return f"{self.setting.name}/{stage}/{self.credit}-lr{rate}-seed{self.seed}"

    def options(self):
        """What the trainer is told, and what a finished run must have been told to count."""
        own = {"credit": self.credit, "seed": self.seed, "learning_rate": self.learning_rate}
        return asdict(self.setting) | own | ({"test_problems": 0} if self.grid else {})


class Study:
    """The runs of a study and what is finished of them, all read from its folder."""

    def __init__(self, folder, settings=SETTINGS, credits=CREDITS, seeds=SEEDS):
        self.folder, self.settings = Path(folder), settings
        self.credits, self.seeds = credits, seeds
        self.known = {}  # finished runs that were read already
        self.total = len(settings) * len(credits)
        self.total *= len(LEARNING_RATES) * len(GRID_SEEDS) + len(seeds)

    def run(self, cell):
        """Credit, seed, summary and metrics rows of a finished run, else None."""
        if cell not in self.known:
            folder = self.folder / cell.name
            if not (summary := finished(folder, cell.options())):
                return None
            rows = report.read_metrics(folder / "metrics.jsonl")
            run = {"credit": cell.credit, "seed": cell.seed, "summary": summary, "rows": rows}
            self.known[cell] = run
        return self.known[cell]

    def grid(self, setting, credit):
        pairs = itertools.product(LEARNING_RATES, GRID_SEEDS)
        return [Cell(setting, credit, rate, seed, grid=True) for rate, seed in pairs]

    def scores(self, setting, credit):
        """Learning rate -> area under the validation curve, mean over the grid's seeds, or None."""
        scores = {}
        for rate in LEARNING_RATES:
            runs = [self.run(c) for c in self.grid(setting, credit) if c.learning_rate == rate]
            curves = [curve_points(run["rows"], "steps") for run in runs if run]
            areas = [np.mean([accuracy for _, accuracy in curve]) for curve in curves]
            scores[rate] = float(np.mean(areas)) if all(runs) else None
        return scores

    def learning_rate(self, setting, credit):
        """The rate with the largest score, ties to the lower; None until the grid is complete."""
        scores = self.scores(setting, credit)
        return None if None in scores.values() else max(scores, key=lambda r: (scores[r], -r))

    def final(self, setting, credit):
        """The runs that are reported; none before the learning rate is chosen."""
        rate = self.learning_rate(setting, credit)
        seeds = self.seeds if rate else ()
        return [Cell(setting, credit, rate, seed, grid=False) for seed in seeds]

    def cells(self):
        """All runs that can be named by now, in their order."""
        for setting in self.settings:
            for stage in (self.grid, self.final):
                for credit in self.credits:
                    yield from stage(setting, credit)

    def final_runs(self, setting):
        """Credit -> its finished final runs, for the credits that have some."""
        found = {c: [self.run(cell) for cell in self.final(setting, c)] for c in self.credits}
        found = {c: [run for run in runs if run] for c, runs in found.items()}
        return {c: runs for c, runs in found.items() if runs}


def finished(folder, options):
    """The summary of the run in `folder` if it ended by itself and had these options, else None.

    >>> finished(Path("no such folder"), {})
    """
    try:
        config, summary = (
            json.loads((folder / name).read_text()) for name in ("config.json", "summary.json")
        )
    except (OSError, ValueError):
        return None
    return summary if options.items() <= config.items() and not summary["stopped"] else None


# ---- running them --------------------------------------------------------------------------------


class Runner:
    """Runs the cells of a study, `workers` processes at a time.

    A signal is passed on to every run, once: they are in sessions of their own, where Ctrl-C in a
    terminal does not reach them a second time (a second signal means: stop at once).
    """

    def __init__(self, study, workers):
        self.study, self.workers = study, workers
        self.running, self.started, self.failed, self.asked = {}, set(), [], False

    def catch_signals(self):
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # no SIGHUP on Windows
            if number and signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self.stop)

    def stop(self, number=None, frame=None):
        self.asked = True
        for process in list(self.running):
            process.terminate()

    def run(self):
        done = sum(self.study.run(cell) is not None for cell in self.study.cells())
        every = 1 if sys.stderr.isatty() else 60  # a log file needs no line a second
        bar = tqdm(None, "study", self.study.total, unit="run", initial=done, smoothing=0,
                   mininterval=every, miniters=0)  # fmt: skip
        try:
            while True:
                self.fill()
                if not self.running:
                    break
                time.sleep(POLL)
                for process in [p for p in self.running if p.poll() is not None]:
                    bar.update(self.collect(process))
                bar.update(0)  # the time goes on
        finally:  # also after an error: no run is left behind
            if self.running:
                self.stop()
            for process in self.running:
                process.wait()
            bar.close()

    def fill(self):
        """Start runs until all workers are busy or none is left that can start by now."""
        while not self.asked and len(self.running) < self.workers:
            ready = (c for c in self.study.cells() if c not in self.started)
            cell = next((c for c in ready if self.study.run(c) is None), None)
            if cell is None:
                return
            folder = self.study.folder / cell.name
            folder.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, str(TRAINER), f"--output_dir={folder}"]
            command += [f"--{name}={value}" for name, value in cell.options().items()]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}  # two runs must not fight for cores
            with open(folder / "log.txt", "w") as log:
                process = subprocess.Popen(
                    command, env=environment, start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )  # fmt: skip
            self.started.add(cell)
            self.running[process] = cell
            if self.asked:  # the signal came while this one was being started
                process.terminate()

    def collect(self, process):
        """Take note of a run that ended: 1 if it finished, else 0."""
        cell = self.running.pop(process)
        if self.study.run(cell) is None:
            if not self.asked:
                self.failed.append(cell)
                tail = last_lines(self.study.folder / cell.name / "log.txt")
                tqdm.write(f"\n{cell.name} failed ({process.returncode}):\n{tail}", file=sys.stderr)
            return 0
        write_results(self.study)
        if not cell.grid:
            draw(self.study, [cell.setting])
        return 1


def last_lines(path, count=5):
    """The end of a log; of a progress bar, which rewrites its line, only what was left to see."""
    lines = path.read_bytes().decode(errors="replace").split("\n")
    lines = [line.rpartition("\r")[2] for line in lines]
    return "\n".join(f"  {line}" for line in [line for line in lines if line.strip()][-count:])


def warm_starts(study):
    """Make sure that the tiny policies are there; else every run would train its own at once."""
    from .policy import tiny_policy  # here, because it needs torch and a report does not

    for setting in study.settings:
        tiny_policy(make_task(setting.task, setting.difficulty))


# ---- numbers -------------------------------------------------------------------------------------

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # by degrees of freedom


def mean_interval(values):
    """[mean, low, high]: Student's 95% interval of a mean over seeds; one seed has no interval.

    mean -+ t s / sqrt(n), with s the standard deviation (ddof 1) and t the 97.5% point at n - 1.

    >>> [round(value, 2) for value in mean_interval([30, 40, 50])]
    [40.0, 15.16, 64.84]
    """
    n, mean = len(values), float(np.mean(values))
    if n < 2:
        return [mean, None, None]
    t = T_975[n - 2] if n - 2 < len(T_975) else 1.96 + 2.37 / (n - 1) + 2.8 / (n - 1) ** 2
    half = float(t * np.std(values, ddof=1) / n**0.5)
    return [mean, mean - half, mean + half]


def paired_ratio(values, base):
    """[ratio, low, high]: the geometric mean of values[i] / base[i] with Student's 95% interval.

    The interval is that of the mean log ratio. values[i] and base[i] have the same seed, so what
    makes a seed hard for both cancels. None where nothing can be divided by.

    >>> [round(value, 6) for value in paired_ratio([10, 30, 20], [20, 60, 40])]
    [0.5, 0.5, 0.5]
    """
    if not len(base) or min(base) <= 0 or min(values) <= 0:
        return None
    logs = np.log(np.asarray(values, float) / np.asarray(base, float))
    return [None if x is None else float(np.exp(x)) for x in mean_interval(logs)]


def measures(run, budget):
    """Every number of one final run; budget: the sampled tokens at which credits are compared.

    Costs are what it spent up to the first of three validations in a row at or above THRESHOLD; a
    run that never gets there spent all that it had.
    """
    rows, after = run["rows"], run["summary"]["accuracy_after"]
    crossing = first_crossing(curve_points(rows, "steps"), THRESHOLD)
    steps = rows[-1]["step"] if crossing is None else crossing
    spent = [row for row in rows if row["step"] <= steps]
    found = {"seed": run["seed"], "reached": crossing is not None, "steps": steps}
    for name in ("sampled", "revision", "processed"):
        found[name] = sum(row.get(f"tokens/{name}", 0) for row in spent)
    found["tokens"] = found["sampled"] + found["revision"]
    found["seconds"] = sum(row.get(f"seconds/{name}", 0) for row in spent for name in TRAINING)
    entropies = [row["entropy"] for row in rows if "entropy" in row]  # none in an all-flat step
    return found | {
        "test_sampled": after["sampled"],
        "test_greedy": after["greedy"],
        "at_equal_tokens": float(np.interp(budget, *np.transpose(curve_points(rows, "tokens")))),
        "entropy": float(np.mean(entropies[-5:])) if entropies else None,
        "all_wrong": float(np.mean([row["groups/all_wrong"] for row in rows[1:6]])),
    }


def over_seeds(runs, baseline):
    """The line of a credit: its measures over seeds, and the ratios to the baseline's."""
    line = {"reached": sum(run["reached"] for run in runs)}
    for key in list(runs[0])[2:]:  # all but the seed and whether it got there
        values = [run[key] for run in runs if run[key] is not None]
        if key.startswith("test_"):
            line[key] = [float(np.mean(values)), min(values), max(values)]
        else:
            line[key] = mean_interval(values) if values else None
    base = {run["seed"]: run for run in baseline}
    both = [(run, base[run["seed"]]) for run in runs if run["seed"] in base]
    for key in ("steps", "tokens"):
        line[f"{key}_ratio"] = paired_ratio(
            [run[key] for run, _ in both], [b[key] for _, b in both]
        )
    return line


def setting_results(study, setting):
    """The results of a setting, as they stand in results.json."""
    runs = study.final_runs(setting)
    ends = [curve_points(r["rows"], "tokens")[-1][0] for rs in runs.values() for r in rs]
    budget, credits = min(ends, default=0), {}
    measured = {credit: [measures(run, budget) for run in rs] for credit, rs in runs.items()}
    for credit, ms in measured.items():
        line = {"learning_rate": study.learning_rate(setting, credit)}
        credits[credit] = line | over_seeds(ms, measured.get(BASELINE, [])) | {"runs": ms}
    grid = {
        credit: {f"{rate:.0e}": score for rate, score in study.scores(setting, credit).items()}
        for credit in study.credits
    }
    return asdict(setting) | {"equal_tokens": budget, "grid": grid, "credits": credits}


# ---- what is written -----------------------------------------------------------------------------

# Columns of the two tables: header -> (key in results.json, format, unit).
COSTS = {
    "steps": ("steps", ".0f", 1),
    "plain, k": ("sampled", ".0f", 1000),
    "revision, k": ("revision", ".0f", 1000),
    "processed, k": ("processed", ".0f", 1000),
    "seconds": ("seconds", ".0f", 1),
    f"steps / {BASELINE}": ("steps_ratio", ".2f", 1),
    f"tokens / {BASELINE}": ("tokens_ratio", ".2f", 1),
}
ENDS = {
    "test, sampled": ("test_sampled", ".3f", 1),
    "test, greedy": ("test_greedy", ".3f", 1),
    "validation at equal tokens": ("at_equal_tokens", ".3f", 1),
    "entropy": ("entropy", ".2f", 1),
    "all wrong at first": ("all_wrong", ".2f", 1),
}
NOTES = f"""
- a [b, c]: mean over seeds with Student's 95% interval (mean -+ t s / sqrt(n), ddof 1). For the
  test accuracies, b and c are the lowest and highest seed.
- Threshold: the first of three validations in a row with sampled accuracy of at least {THRESHOLD}.
  A run that never gets there counts as its whole budget. "there": how many seeds got there; if not
  all did, the costs are lower bounds.
- Ratios: the geometric mean, over the seeds that both have, of a credit's cost by that of grpo,
  with Student's 95% interval of the mean log ratio.
- Tokens, in thousands: plain = attempts, revision = what a credit samples on top, processed = all
  that went through the model, prompts and scoring passes too. The ratio is of plain + revision.
- Seconds are those of training, without evaluations, one thread a run, several runs at a time.
- Validation at equal tokens: sampled accuracy where a run had sampled as many tokens (plain +
  revision) as the cheapest run had at its end, by linear interpolation.
- Entropy: of the policy's next token, in nats, over the last 5 steps that updated it. All wrong:
  the share of groups without a solved attempt in the first 5 steps.
- Grid: validation accuracy, sampled, mean over a run's evaluations and the grid's seeds. The rate
  with the largest is chosen. The test problems are read by the final runs only.
"""


def record_session(study, arguments):
    """Note who trains, and when: a report may be written elsewhere and later."""
    cpu = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():  # where the model has a name
        cpu = next(iter(re.findall(r"model name\s*: (.+)", info.read_text())), cpu)
    session = {
        "command": shlex.join(["python", "-m", "toy_tasks.study", *arguments]),
        "date": date.today().isoformat(),
        "machine": f"{cpu}, {os.cpu_count()} cores, torch {version('torch')}",
    }
    study.folder.mkdir(parents=True, exist_ok=True)
    write_json(study.folder / "session.json", session)


def write_results(study):
    """results.json and results.md of the runs that are finished."""
    session = study.folder / "session.json"
    results = {
        **(json.loads(session.read_text()) if session.exists() else {}),
        "seeds": study.seeds,
        "grid_seeds": GRID_SEEDS,
        "threshold": THRESHOLD,
        "settings": {setting.name: setting_results(study, setting) for setting in study.settings},
    }
    write_json(study.folder / "results.json", results)
    part = study.folder / "results.md.part"
    part.write_text(results_text(results))
    part.replace(study.folder / "results.md")


def results_text(results):
    """results.json for people, as Markdown."""
    seeds, grid_seeds = (", ".join(map(str, results[key])) for key in ("seeds", "grid_seeds"))
    parts = ["# Results of the study"]
    if "command" in results:
        parts.append("`{command}`, last started {date} on {machine}.".format(**results))
    parts.append(f"Seeds {seeds}; learning rates chosen on seeds {grid_seeds}.")
    for name, setting in results["settings"].items():
        parts.append("## {task}, difficulty {difficulty}, {steps} steps".format(**setting))
        costs, ends, grid = [], [], []
        for credit, line in setting["credits"].items():
            there = f"{line['reached']} of {len(line['runs'])}"
            cells = [shown(line[key], form, unit) for key, form, unit in COSTS.values()]
            costs.append([credit, f"{line['learning_rate']:.0e}", there, *cells])
            ends.append([credit, *(shown(line[key], form) for key, form, _ in ENDS.values())])
        for credit, scores in setting["grid"].items():
            grid.append([credit, *("-" if x is None else f"{x:.3f}" for x in scores.values())])
        if costs:
            parts.append(markdown_table(["to the threshold", "rate", "there", *COSTS], costs))
            parts.append(markdown_table(["in the end", *ENDS], ends))
            equal = setting["equal_tokens"] / 1000
            parts.append(f"Equal tokens: {equal:.0f}k. Picture: `{name}.png`.")
        parts.append(markdown_table(["grid", *(f"{rate:.0e}" for rate in LEARNING_RATES)], grid))
    return "\n\n".join([*parts, "## How to read this", NOTES.strip()]) + "\n"


def shown(value, form, unit=1):
    """[mean, low, high] as text.

    >>> shown([0.5, 0.25, 0.75], ".2f"), shown([4200, None, None], ".1f", 1000), shown(None, ".2f")
    ('0.50 [0.25, 0.75]', '4.2', '-')
    """
    if value is None:
        return "-"
    mean, *interval = (None if v is None else format(v / unit, form) for v in value)
    return mean if None in interval else f"{mean} [{', '.join(interval)}]"


def draw(study, settings):
    """The pictures of these settings, and the two of all."""
    panels = {}
    for setting in study.settings:
        title = f"{setting.task}, difficulty {setting.difficulty}"
        panels[title] = [run for runs in study.final_runs(setting).values() for run in runs]
        if setting in settings:
            path = study.folder / f"{setting.name}.png"
            report.learning_curves(panels[title], path, f"{title}: accuracy on validation problems")
    for against in ("steps", "tokens"):
        report.overview(panels, study.folder / f"overview-{against}.png", against)


# ---- command line --------------------------------------------------------------------------------


def parse_arguments(arguments):
    """(study, workers, report_only)"""
    parser = argparse.ArgumentParser(
        prog="python -m toy_tasks.study",
        description=f"{__doc__.partition(chr(10))[0]} Results: results.md, results.json, pictures.",
    )
    known = {f"{setting.task}:{setting.difficulty}": setting for setting in SETTINGS}
    only = "train and report only these (default: %(default)s)"
    options = {
        "output_dir": {"default": "runs/study", "help": "default: %(default)s"},
        "settings": {"default": ",".join(known), "help": only},
        "credits": {"default": ",".join(CREDITS), "help": only},
        "seeds": {"default": ",".join(map(str, SEEDS)), "help": f"of the final runs; {only}"},
        "workers": {
            "type": int,
            "default": os.cpu_count(),
            "help": "runs at a time (default: %(default)s)",
        },
    }
    for name, keywords in options.items():
        parser.add_argument(f"--{name}", metavar="X", **keywords)
    parser.add_argument(
        "--report_only", action="store_true", help="write the results, train nothing"
    )
    args = parser.parse_args(arguments)
    unknown = [name for name in args.settings.split(",") if name not in known]
    if unknown:
        parser.error(f"--settings {','.join(unknown)}; allowed: {', '.join(known)}")
    try:
        seeds = [int(seed) for seed in dict.fromkeys(args.seeds.split(","))]
    except ValueError:
        parser.error(f"--seeds {args.seeds!r}; allowed: whole numbers with commas between")
    if chosen_on := set(seeds) & set(GRID_SEEDS):
        parser.error(f"--seeds {chosen_on}: the learning rates are chosen on them; allowed: others")
    if args.workers < 1:
        parser.error(f"--workers {args.workers}; allowed: at least 1")
    settings = [known[name] for name in dict.fromkeys(args.settings.split(","))]
    credits = list(dict.fromkeys(args.credits.split(",")))
    return Study(args.output_dir, settings, credits, seeds), args.workers, args.report_only


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    study, workers, report_only = parse_arguments(arguments)
    runner = Runner(study, workers)
    if report_only and not study.folder.is_dir():
        sys.exit(f"study: no folder {study.folder}; allowed: the --output_dir of a study")
    if not report_only and any(study.run(cell) is None for cell in study.cells()):
        try:
            warm_starts(study)
        except KeyboardInterrupt:
            sys.exit(130)
        record_session(study, arguments)
        runner.catch_signals()
        runner.run()
    write_results(study)
    draw(study, study.settings)
    print((study.folder / "results.md").read_text())
    print(f"results.md, results.json and pictures: {study.folder}")
    if runner.asked:
        print("stopped; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    if runner.failed:
        names = "\n".join(f"  {cell.name}/log.txt" for cell in runner.failed)
        sys.exit(f"{len(runner.failed)} runs failed; the same command tries them again:\n{names}")


if __name__ == "__main__":
    main()
