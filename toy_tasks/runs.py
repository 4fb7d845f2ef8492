"""Starting, stopping, resuming and showing training runs: what is around a trainer, not in it."""

import argparse
import dataclasses
import inspect
import json
import re
import signal
import sys
from pathlib import Path

from .report import comparison_table, learning_curves, read_metrics, repair_story, use_color


class Stop:
    """Ctrl-C or SIGTERM ends a run after the step in progress (`asked`); a second one at once."""

    asked = False

    def listen(self):
        """From here on; before the first step there is nothing to save, and Ctrl-C acts at once."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not inside a host's own
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.ask)

    def ask(self, number, frame):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("\nstopping after this step (again: at once, without saving)", file=sys.stderr)


def need(ok, name, value, allowed):
    """Raise the one-line ValueError of a wrong value unless `ok`.

    >>> need(False, "steps", -1, "0 and more")
    Traceback (most recent call last):
    ValueError: steps = -1; allowed: 0 and more
    """
    if not ok:
        raise ValueError(f"{name} = {value!r}; allowed: {allowed}")


def with_switches(preset, text):
    """A copy of the dataclass `preset` with fields changed as in "name=value,name=value"."""
    changes, names = {}, [field.name for field in dataclasses.fields(preset)]
    for item in filter(None, text.split(",")):
        name, _, value = (part.strip() for part in item.partition("="))
        need(name in names, "switch", name, ", ".join(names))
        kind = type(getattr(preset, name))
        if kind is bool:
            need(value in ("true", "false"), name, value, "true, false")
            changes[name] = value == "true"
        else:  # numbers as numbers, so that a cap may be "all" or 2
            whole = re.fullmatch(r"-?\d+", value)
            try:
                changes[name] = int(value) if whole else float(value)
            except ValueError:
                need(kind is str or (kind is int and value == "all"), name, value, "a number")
                changes[name] = value
    return dataclasses.replace(preset, **changes)


def write_json(path, value):
    """Write a small JSON file in one step."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    part.replace(path)


def parse_arguments(config_class, description, arguments=None):
    """(config, credits, seeds) from the command line: one option for each field of a dataclass.

    The comment behind a field is its help. A single run has one credit and one seed.
    """
    parser = argparse.ArgumentParser(
        prog="ibpo_minimal.py",
        description=description.partition("\n\n")[0],
        epilog="README.md says what each metric means.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=99),
    )
    source = inspect.getsource(config_class)
    helps = dict(re.findall(r"^    (\w+): [^#\n]*  # (.+)$", source, re.MULTILINE))
    for field in dataclasses.fields(config_class):
        kind = int if "int" in str(field.type) else type(field.default)
        shown = "" if field.default in (None, "") else f" (default: {field.default})"
        text = (helps[field.name] + shown).replace("%", "%%")
        parser.add_argument(
            f"--{field.name}", type=kind, default=field.default, metavar="X", help=text
        )
    parser.add_argument(
        "--compare",
        nargs="?",
        const="grpo,ibpo,ibpo-lean",
        metavar="A,B,...",
        help="train each of these credits (default: grpo,ibpo,ibpo-lean) on the same problems; a "
        "comparison that was interrupted goes on where it stopped",
    )
    parser.add_argument("--seeds", metavar="0,1,...", help="train with each of these seeds")
    given = vars(parser.parse_args(arguments))
    compared, seeds = given.pop("compare"), given.pop("seeds")
    config = config_class(**given)
    credits = compared.split(",") if compared else [config.credit]
    try:
        seeds = [int(seed) for seed in seeds.split(",")] if seeds else [config.seed]
    except ValueError:
        parser.error(f"--seeds {seeds!r}; allowed: whole numbers with commas between")
    if not config.output_dir:
        last = "compare" if compared or len(seeds) > 1 else f"{config.credit}-seed{config.seed}"
        config.output_dir = f"runs/{config.task}-{last}"
    return config, credits, seeds


def run_all(configs, folder, train, stop):
    """Call train(config, stop, label) for each config and return the summaries.

    Several runs have a folder each, below `folder`; one that finished with the same settings is
    not run again. The picture and the summary of what there is so far are written after each run.
    """
    folder, summaries = Path(folder), []
    for number, config in enumerate(configs, 1):
        label = f"{config.credit}, seed {config.seed}"
        if len(configs) > 1:
            own = str(folder / f"{config.credit}-seed{config.seed}")
            config = dataclasses.replace(config, output_dir=own)
            label = f"run {number} of {len(configs)}: {label}"
        own = Path(config.output_dir)
        summary = finished(own, config) if len(configs) > 1 else None
        if summary is None and not stop.asked:
            own.mkdir(parents=True, exist_ok=True)
            (own / "summary.json").unlink(missing_ok=True)  # of a run with other settings
            write_json(own / "config.json", dataclasses.asdict(config))
            summary = train(config, stop, label)
            write_json(own / "summary.json", summary)
        if summary is not None:
            summaries.append(summary | {"folder": str(own)})
            if len(configs) > 1:
                write_json(folder / "summary.json", {"runs": summaries})
            draw(summaries, folder)
    return summaries


def finished(folder, config):
    """The summary of a finished run with exactly this config, or None.

    >>> finished(Path("no such folder"), None)
    """
    try:
        same = json.loads((folder / "config.json").read_text()) == dataclasses.asdict(config)
        summary = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        return None
    return summary if same and not summary["stopped"] else None


def draw(summaries, folder):
    """The learning curves of finished runs, as folder/curves.png."""
    curves = [
        {
            "credit": summary["credit"],
            "seed": summary["seed"],
            "rows": read_metrics(Path(summary["folder"]) / "metrics.jsonl"),
        }
        for summary in summaries
    ]
    first = summaries[0]
    title = f"{first['task']}, difficulty {first['difficulty']}: accuracy on validation problems"
    learning_curves(curves, folder / "curves.png", title)


def story_of(groups, credited, repairs_of, decode):
    """The first failed attempt that has credit and a repair, as `show` prints it; None if none.

    credited: the rows of each group, those of its trajectories first, in order.
    """
    for group, rows in zip(groups, credited, strict=True):
        for i, revision in repairs_of(group).items():
            ids = revision.trajectory.token_ids
            repair = next((row for row in rows if row.token_ids is ids), None)
            if repair and any(rows[i].advantages):
                attempt, repaired = (
                    ([decode([token]) for token in row.token_ids], row.advantages)
                    for row in (rows[i], repair)
                )
                return {
                    "problem": group.problem.prompt,
                    "attempt": attempt,
                    "reference": revision.reference,
                    "repair": repaired,
                }
    return None


def show(summaries, folder):
    """Print the table, one repair with its credit, and where everything is."""
    if not summaries:
        return
    if all(summary["accuracy_after"] for summary in summaries):
        print("\n" + comparison_table(summaries))
    story = next((s["story"] for s in reversed(summaries) if s["story"]), None)
    if story:
        values = [story[key] for key in ("problem", "attempt", "reference", "repair")]
        print("\n" + repair_story(*values, use_color(sys.stdout)))
    print(f"\npicture: {Path(folder) / 'curves.png'}   metrics, summaries and models: {folder}")
