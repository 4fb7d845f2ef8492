"""Pictures and tables of training runs, and the story of one repair for the terminal.

Everything here reads plain dicts and lists (rows of `metrics.jsonl`, summaries of runs, token texts
with their credits) and knows nothing of the trainer that wrote them. The picture is drawn on a
Figure of its own, without pyplot, so a caller's backend and open figures stay as they are.
"""

import json
import math
import os
import re
import sys
import textwrap
import unicodedata
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

# One look per credit, the same in every picture: a colour that survives colour blindness (Okabe and
# Ito's palette, yellow darkened), a line style and marker that survive black-and-white print.
STYLES = {
    "grpo": ("#444444", "-", "o"),
    "ibpo": ("#0072B2", "-", "s"),
    "ibpo-lean": ("#D55E00", "-", "^"),
    "ibpo-shaping": ("#009E73", "--", "v"),
    "ibpo-mask": ("#CC79A7", "--", "D"),
    "ibpo-siblings": ("#56B4E9", "--", "<"),
    "repair-rows": ("#E69F00", "-.", ">"),
    "resample": ("#8C6D1F", "-.", "P"),
    "shuffled": ("#7A3B8F", ":", "X"),
}
AXES = {"steps": "update steps", "tokens": "tokens sampled for training, attempts + revisions"}
END_TOKENS = {"<end>", "<|im_end|>", "<|endoftext|>"}
END, LINE_BREAK = "∎", "↵"
# Backgrounds of the 256-colour cube, pale to strong; black text is readable on all of them.
GREENS, REDS = (194, 157, 120, 83), (224, 217, 210, 203)


# ---- numbers -----------------------------------------------------------------------------------


def wilson(successes, n):
    """The 95% Wilson interval (low, high) of a proportion p = successes / n, with z = 1.96.

    (p + z^2/2n -+ z sqrt(p (1 - p) / n + z^2/4n^2)) / (1 + z^2/n)

    >>> [round(bound, 3) for bound in wilson(8, 10)]
    [0.49, 0.943]
    >>> wilson(0, 0)
    (0.0, 1.0)
    """
    if n == 0:
        return 0.0, 1.0
    z, p = 1.959964, successes / n
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def read_metrics(path):
    """The rows of a metrics.jsonl, one dict a line.

    A killed run can leave half a last line: it is left out, with a word on stderr. An unreadable
    line anywhere else is an error, since nothing that this project does would leave one there.
    """
    # Bytes, because the tear may go through a character; str.splitlines would also split at U+2028.
    lines = [line for line in Path(path).read_bytes().split(b"\n") if line.strip()]
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"{path}: row {number} is not JSON: {line[:60]!r}") from error
            print(f"{path}: left out the last row, which was cut off", file=sys.stderr)
    return rows


def curve_points(rows, against, key="validation/sampled"):
    """[(x, row[key])] of the rows that have the key; x = update "steps" or sampled "tokens".

    Tokens are cumulative and count everything sampled for training, attempts and revisions: the
    axis on which a method pays for what it adds.

    >>> rows = [{"step": 0, "validation/sampled": 0.2}, {"step": 1, "tokens/sampled": 50},
    ...         {"step": 2, "tokens/sampled": 40, "tokens/revision": 9, "validation/sampled": 0.5}]
    >>> curve_points(rows, "steps"), curve_points(rows, "tokens")
    ([(0, 0.2), (2, 0.5)], [(0, 0.2), (99, 0.5)])
    """
    points, tokens = [], 0
    for row in rows:
        tokens += row.get("tokens/sampled", 0) + row.get("tokens/revision", 0)
        if key in row:
            points.append(({"steps": row["step"], "tokens": tokens}[against], row[key]))
    return points


def first_crossing(points, threshold):
    """x of the first of three evaluations in a row at or above `threshold`; None: there are none.

    Three, because with noise the first evaluation above a threshold comes early by luck.

    >>> first_crossing([(0, 0.1), (10, 0.6), (20, 0.4), (30, 0.5), (40, 0.7), (50, 0.6)], 0.5)
    30
    """
    for three in zip(points, points[1:], points[2:], strict=False):
        if all(accuracy >= threshold for _, accuracy in three):
            return three[0][0]
    return None


# ---- the picture -------------------------------------------------------------------------------


def learning_curves(runs, path, title):
    """Write a PNG of validation accuracy by update step and by sampled tokens, a colour per credit.

    runs: dicts {"credit": str, "seed": int, "rows": rows of metrics.jsonl}. With several seeds of a
        credit each is a thin line and their mean a thick one. One run alone also shows its reward.
    The file appears complete or not at all, so it can be looked at while a run rewrites it.
    """
    figure = Figure(figsize=(11, 5), dpi=120, layout="constrained")
    figure.suptitle(title, parse_math=False, fontsize="x-large")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, against in zip(axes, ("steps", "tokens"), strict=True):
        if len(runs) == 1:  # drawn first, behind the accuracy
            reward = curve_points(runs[0]["rows"], against, "reward/mean")
            label = "training reward, mean of each step"
            axis.plot(*_xy(reward), color="#AAAAAA", linewidth=0.9, label=label)
        for line, seeds in _draw_accuracy(axis, runs, against).values():
            line.set_label(f"{line.get_label()} ({seeds} seed{'s' if seeds > 1 else ''})")
    share = "accuracy on validation problems\n(share of sampled answers that are right)"
    axes[0].set(title="by training step", xlabel=AXES["steps"], ylabel=share)
    axes[1].set(title="by cost in sampled tokens", xlabel=AXES["tokens"])
    if handles := axes[0].get_legend_handles_labels()[0]:
        several = len(runs) > len({run["credit"] for run in runs})
        note = "thin: one seed, thick: mean over seeds" if several else ""
        _add_legend(figure, handles, note)
    _save(figure, path)


def overview(panels, path, against):
    """Write a PNG with a panel of curves for each setting, two in a row.

    panels: title -> runs as `learning_curves` takes them; against: "steps" or "tokens".
    """
    lines = -(-len(panels) // 2)
    figure = Figure(figsize=(11, 0.8 + 3.8 * lines), dpi=120, layout="constrained")
    axes, handles = figure.subplots(lines, 2, sharey=True, squeeze=False), {}
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, runs) in zip(axes.flat, panels.items(), strict=False):
        for credit, (line, _) in _draw_accuracy(axis, runs, against).items():
            handles.setdefault(credit, line)
        axis.set_title(title if runs else f"{title}: no run yet", parse_math=False)
        axis.set_xlabel(AXES[against])
    for axis in axes[:, 0]:
        axis.set_ylabel("validation accuracy, sampled")
    if handles:
        _add_legend(figure, list(handles.values()), "thin: one seed, thick: mean over seeds")
    _save(figure, path)


def _draw_accuracy(axis, runs, against):
    """Draw the curves of `runs`: credit -> (its thick line, number of seeds)."""
    drawn = {}
    for index, credit in enumerate(dict.fromkeys(run["credit"] for run in runs)):
        curves = [curve_points(run["rows"], against) for run in runs if run["credit"] == credit]
        color, line, marker = STYLES.get(credit, (f"C{index}", (0, (5, 1, 1, 1)), "*"))
        look = {"color": color, "linestyle": line}
        for curve in curves if len(curves) > 1 else []:
            axis.plot(*_xy(curve), **look, linewidth=0.8, alpha=0.4)
        mean = _mean_curve(curves, against)
        look |= {"marker": marker, "markevery": max(1, len(mean) // 10), "linewidth": 2.2}
        drawn[credit] = axis.plot(*_xy(mean), **look, label=credit)[0], len(curves)
    axis.set_ylim(-0.02, 1.02)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if against == "tokens":
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    return drawn


def _add_legend(figure, handles, title):
    where = {"loc": "outside lower center", "ncols": min(4, len(handles))}
    figure.legend(handles=handles, title=title, frameon=False, handlelength=4, **where)


def _save(figure, path):
    unfinished = Path(f"{path}.{os.getpid()}.tmp")
    try:
        figure.savefig(unfinished, format="png")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _mean_curve(curves, against):
    """The mean over seeds, only where every seed has been: never a mean over fewer of them."""
    if len(curves) == 1:
        return curves[0]
    if against == "steps" or not all(curves):
        curves = [dict(curve) for curve in curves]
        common = sorted(set.intersection(*map(set, curves)))
        return [(x, np.mean([curve[x] for curve in curves])) for x in common]
    grid = np.linspace(max(c[0][0] for c in curves), min(c[-1][0] for c in curves), 101)
    return list(zip(grid, np.mean([np.interp(grid, *_xy(c)) for c in curves], axis=0), strict=True))


def _xy(points):
    return np.reshape(points, (-1, 2)).T  # also of no points at all


# ---- tables ------------------------------------------------------------------------------------


def markdown_table(header, rows):
    """A table that reads well as Markdown and as plain text; columns of numbers right-aligned.

    >>> print(markdown_table(["credit", "steps"], [["grpo", 5], ["ibpo", 120]]))
    | credit | steps |
    | ------ | ----: |
    | grpo   |     5 |
    | ibpo   |   120 |
    """
    table = [[str(cell).replace("|", r"\|").replace("\n", " ") for cell in row] for row in rows]
    columns = list(zip(map(str, header), *table, strict=True))
    formats = []
    for column in columns:
        numbers = all(re.match(r"[-+]?\.?\d|-$", cell) for cell in column[1:])
        formats.append((str.rjust if numbers else str.ljust, max(3, *map(len, column))))
    rule = ["-" * (w - 1) + (":" if put is str.rjust else "-") for put, w in formats]
    return "\n".join(
        f"| {' | '.join(put(cell, w) for cell, (put, w) in zip(line, formats, strict=True))} |"
        for line in [list(map(str, header)), rule, *table]
    )


def comparison_table(summaries):
    """The table of a comparison, one line per credit (means over seeds), and how to read it.

    summaries: the summary dicts of runs on one task. `sampled_tokens` are those of plain attempts,
        `revision_tokens` come on top; `processed_tokens` also count prefill and scoring passes.
    """
    header = ["credit", "seeds", "steps", "accuracy, sampled", "accuracy, greedy"]
    header += ["sampled tokens, k", "processed, k", "seconds"]
    starts = list({s["seed"]: s for s in summaries}.values())  # every credit starts from the same
    rows = [["(before training)", len(starts), 0, *_accuracies(starts, "before"), "-", "-", "-"]]
    for credit in dict.fromkeys(s["credit"] for s in summaries):
        runs = [s for s in summaries if s["credit"] == credit]
        low, high = min(s["steps"] for s in runs), max(s["steps"] for s in runs)
        steps = f"{low} to {high}" if low < high else f"{low}"
        if stopped := sum(bool(s["stopped"]) for s in runs):
            steps += f" ({stopped} stopped early)"
        mean = {
            key: sum(s[key] for s in runs) / len(runs)
            for key in ("sampled_tokens", "revision_tokens", "processed_tokens", "seconds")
        }
        row = [credit, len(runs), steps, *_accuracies(runs, "after")]
        row += [f"{mean['sampled_tokens'] / 1000:.0f} + {mean['revision_tokens'] / 1000:.0f}"]
        row += [f"{mean['processed_tokens'] / 1000:.0f}", f"{mean['seconds']:.0f}"]
        rows.append(row)
    return (
        f"{markdown_table(header, rows)}\n\n"
        "Means over seeds. (a to b): lowest and highest seed; [a, b]: 95% Wilson, one run.\n"
        "Tokens in thousands: sampled = plain attempts + revisions; processed = these, and every\n"
        "prefill and scoring pass."
    )


def _accuracies(runs, when):
    cells = []
    if any(run[f"accuracy_{when}"] is None for run in runs):  # with test_problems 0
        return ["-", "-"]
    for kind in ("sampled", "greedy"):
        values = [run[f"accuracy_{when}"][kind] for run in runs]
        spread = f"({min(values):.3f} to {max(values):.3f})"
        if len(runs) == 1:
            low, high = runs[0][f"accuracy_{when}"][f"{kind}_interval"]
            spread = f"[{low:.3f}, {high:.3f}]"
        cells.append(f"{sum(values) / len(values):.3f} {spread}")
    return cells


# ---- text for the terminal ---------------------------------------------------------------------


def use_color(stream):
    """Whether to colour text for `stream`: by NO_COLOR, else FORCE_COLOR, else if a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return os.environ.get("TERM") != "dumb" and stream.isatty()


def visible(text):
    r"""`text` with all that a terminal would obey or hide escaped; only line breaks stay.

    A policy writes whatever it likes; escape sequences could recolour, retitle or overwrite the
    terminal, bidirectional marks reorder what is read, combining marks pile up on their neighbours.

    >>> print(visible("1\x1b[2J\r2"))
    1\x1b[2J\r2
    """
    return "".join(
        char
        if char == "\n" or (char.isprintable() and unicodedata.category(char) not in ("Mn", "Me"))
        else char.encode("unicode_escape").decode()
        for char in text
    )


def token_credit_text(texts, credits, color):
    """The text of a trajectory with the credit of each token shown on it.

    With colour a credited token has a background, green (positive) or red and underlined
    (negative), the stronger the larger |credit| / max |credit|. Without, marks under every line:

    >>> print(token_credit_text(["1", "2", "3", "<end>"], [0.0, -0.5, 0.0, 1.0], color=False))
    123∎
     - +
    """
    largest = max(map(abs, credits), default=0.0)
    lines, marks = [""], [""]
    for text, credit in zip(texts, credits, strict=True):
        pieces = visible(END if text in END_TOKENS else text).split("\n")
        for number, piece in enumerate(pieces):
            if number:
                lines.append("")
                marks.append("")
            if credit and number < len(pieces) - 1:
                piece += LINE_BREAK  # a credited line break must be seen
            lines[-1] += _painted(piece, credit / largest) if color and credit else piece
            columns = sum(1 + (unicodedata.east_asian_width(char) in "WF") for char in piece)
            marks[-1] += ("+" if credit > 0 else "-" if credit < 0 else " ") * columns
    if color:
        return "\n".join(lines)
    return "\n".join(f"{line}\n{mark.rstrip()}" for line, mark in zip(lines, marks, strict=True))


def _painted(text, strength):
    """`text` on green (strength in (0, 1]) or, underlined, on red (strength in [-1, 0))."""
    shade = min(int(abs(strength) * len(GREENS)), len(GREENS) - 1)
    background = f"48;5;{GREENS[shade]}" if strength > 0 else f"4;48;5;{REDS[shade]}"
    return f"\x1b[38;5;16;{background}m{text}\x1b[0m" if text else ""


def repair_story(problem_prompt, attempt, reference, repair, color):
    """One failure and its correction, told to someone who has read nothing else.

    attempt, repair: (token texts, credits) or None; reference: plain text or None.
    """
    found = token_credit_text(*attempt, color) if attempt else "(none: no attempt failed)"
    repaired = "(none: this attempt got no correction that is right)"
    blocks = {
        "problem": visible(problem_prompt),
        "failed attempt, credit per token": found,
        "reference it was compared with": "(none)" if reference is None else visible(reference),
        "its repair, credit per token": token_credit_text(*repair, color) if repair else repaired,
    }
    legend = "Marks: + this token is made more likely, - less likely; no mark: no credit."
    bold, plain = "", ""
    if color:
        legend = "Green: this token is made more likely; red, underlined: less; plain: no credit."
        bold, plain = "\x1b[1m", "\x1b[0m"
    legend += f"\n{END} end of the text, {LINE_BREAK} a line break with credit"
    blocks = {name: textwrap.indent(text.rstrip(), "  ") for name, text in blocks.items()}
    return "\n\n".join([*(f"{bold}{name}{plain}\n{b}" for name, b in blocks.items()), legend])
