"""Pictures, tables, terminal text: right numbers, whole files, no control character let out."""

import io
import json
import re

import matplotlib.image
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toy_tasks import report

OURS = re.compile(r"\x1b\[(?:0|1|38;5;16;(?:4;)?48;5;\d+)m")
HOSTILE = st.text(
    st.one_of(st.characters(), st.sampled_from("\x1b\x07\r\b\t\n\x9b\x00\u202e\u2028|["))
)
TOKENS = st.lists(st.tuples(HOSTILE, st.floats(allow_nan=False, allow_infinity=False)))


def unzip(tokens):
    return [text for text, _ in tokens], [credit for _, credit in tokens]


def rows_of(seed, steps=20, every=5):
    rows = [{"step": 0, "validation/sampled": 0.1, "validation/greedy": 0.1}]
    for step in range(1, steps + 1):
        row = {"step": step, "tokens/sampled": 100 + seed, "tokens/revision": 10}
        row["reward/mean"] = step / steps
        if step % every == 0:
            row |= {"validation/sampled": step / steps, "validation/greedy": 0.9}
        rows.append(row)
    return rows


def summary(credit, seed, sampled, **more):
    def accuracy(value):
        low, high = report.wilson(100 * value, 100)
        return {
            **{"greedy": value, "sampled": value, "problems": 100},
            **{"greedy_interval": [low, high], "sampled_interval": [low, high]},
        }

    return {
        **{"task": "t", "difficulty": 1, "credit": credit, "seed": seed, "steps": 40},
        **{"accuracy_before": accuracy(0.25), "accuracy_after": accuracy(sampled)},
        **{"sampled_tokens": 200_000, "revision_tokens": 50_000, "processed_tokens": 900_000},
        **{"seconds": 30.0, "stopped": False},
        **more,
    }


# ---- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_wilson_agrees_with_published_values(successes, n, low, high):
    assert report.wilson(successes, n) == pytest.approx((low, high), abs=1e-4)


@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_stays_in_the_unit_interval_and_holds_the_proportion(case):
    low, high = report.wilson(*case)
    assert 0 <= low <= case[0] / case[1] + 1e-12 and case[0] / case[1] - 1e-12 <= high <= 1


@pytest.mark.parametrize("torn", ['{"step": 2, "re', '{"step": 2, "name": "é'])
def test_a_torn_last_row_is_left_out_and_mentioned_once(tmp_path, capsys, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1, "text": "\xe2\x80\xa8"}\n' + torn.encode()[:-1])
    assert [row["step"] for row in report.read_metrics(path)] == [0, 1]
    assert capsys.readouterr().err.count("cut off") == 1


def test_a_whole_file_is_read_in_silence_with_or_without_the_last_line_break(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    for end in ("", "\n"):
        path.write_text("\n".join(json.dumps(row) for row in rows_of(0)) + end)
        assert report.read_metrics(path) == rows_of(0)
    assert capsys.readouterr().err == ""


def test_a_broken_row_in_the_middle_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(ValueError, match="row 2"):
        report.read_metrics(path)


@pytest.mark.parametrize(
    ("accuracies", "crossing"),
    [
        ([], None),
        ([0.9, 0.9], None),
        ([0.5, 0.5, 0.5], 0),
        ([0.9, 0.9, 0.4, 0.9, 0.9], None),
        ([0.4, 0.9, 0.4, 0.6, 0.5, 0.7, 0.8], 3),
    ],
)
def test_crossing_is_the_first_of_three_in_a_row(accuracies, crossing):
    assert report.first_crossing(list(enumerate(accuracies)), 0.5) == crossing


def test_tokens_accumulate_over_the_steps_that_were_not_evaluated():
    assert report.curve_points(rows_of(0), "tokens")[:3] == [
        (0, 0.1),
        (550, 0.25),
        (1100, 0.5),
    ]


def test_the_mean_curve_never_goes_past_the_shortest_run():
    curves = [[(0, 0.0), (10, 0.5), (20, 1.0)], [(0, 0.2), (10, 0.7)]]
    assert [x for x, _ in report._mean_curve(curves, "steps")] == [0, 10]
    assert [y for _, y in report._mean_curve(curves, "steps")] == pytest.approx([0.1, 0.6])
    on_tokens = report._mean_curve(curves, "tokens")
    assert on_tokens[50] == pytest.approx((5, 0.35)) and on_tokens[-1] == pytest.approx((10, 0.6))


# ---- the picture -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "runs",
    [
        [],
        [{"credit": "ibpo", "seed": 0, "rows": []}],
        [{"credit": "my_$credit", "seed": 0, "rows": rows_of(0)}],
        [{"credit": "ibpo", "seed": s, "rows": rows_of(s, steps=10 + 10 * s)} for s in (0, 1)]
        + [{"credit": "grpo", "seed": s, "rows": rows_of(s)} for s in (0, 1)],
    ],
    ids=["no run", "no row", "one run", "two credits"],
)
def test_the_picture_is_a_whole_png_and_nothing_else_is_left(tmp_path, runs):
    path = tmp_path / "curves.png"
    path.write_bytes(b"an older picture")
    report.learning_curves(runs, path, "not $x_$ mathematics")
    height, width, _ = matplotlib.image.imread(path).shape
    assert width >= 1000 and height >= 500
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("against", ["steps", "tokens"])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_an_overview_is_whole_with_any_number_of_panels_also_empty_ones(tmp_path, against, count):
    runs = [{"credit": "ibpo", "seed": s, "rows": rows_of(s)} for s in (0, 1)]
    panels = {f"panel {number}": runs if number else [] for number in range(count)}
    report.overview(panels, tmp_path / "all.png", against)
    assert matplotlib.image.imread(tmp_path / "all.png").shape[1] >= 1000


def test_a_failed_write_keeps_the_old_picture_and_leaves_no_part_of_a_new_one(
    tmp_path, monkeypatch
):
    def write_half(figure, path, **_):
        path.write_bytes(b"half")
        raise OSError("disk full")

    path = tmp_path / "curves.png"
    path.write_bytes(b"an older picture")
    monkeypatch.setattr(report.Figure, "savefig", write_half)
    with pytest.raises(OSError, match="disk full"):
        report.learning_curves([], path, "title")
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"an older picture"


def test_every_credit_looks_different_even_in_black_and_white():
    colors, lines, markers = zip(*report.STYLES.values(), strict=True)
    assert len(set(colors)) == len(set(markers)) == len(report.STYLES)


# ---- tables ------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.text("ab|\n"), st.integers(), st.floats())))
def test_the_columns_of_a_table_are_aligned(rows):
    lines = report.markdown_table(["name", "whole", "real"], rows).split("\n")
    assert len(lines) == 2 + len(rows)
    bars = [[m.start() for m in re.finditer(r"(?<!\\)\|", line)] for line in lines]
    assert all(line == bars[0] for line in bars) and len(bars[0]) == 4


def test_numbers_are_right_aligned_and_names_left_aligned():
    lines = report.markdown_table(["a", "n"], [["x", 1], ["long", "-"], ["y", -250]]).split("\n")
    assert lines[1:] == ["| ---- | ---: |", "| x    |    1 |", "| long |    - |", "| y    | -250 |"]


def test_a_comparison_gives_means_with_the_range_of_seeds_or_the_interval_of_one_run():
    table = report.comparison_table(
        [
            summary("grpo", 0, 0.5),
            summary("ibpo", 0, 0.6),
            summary("ibpo", 1, 0.8, sampled_tokens=400_000, stopped=True, steps=7),
        ]
    )
    before, grpo, ibpo = table.split("\n")[2:5]
    assert "|     2 |" in before and "0.250 (0.250 to 0.250)" in before
    assert "0.500 [0.404, 0.596]" in grpo and "200 + 50" in grpo
    assert "0.700 (0.600 to 0.800)" in ibpo and "300 + 50" in ibpo
    assert "7 to 40 (1 stopped early)" in ibpo


def test_a_run_that_was_not_tested_has_no_accuracy_in_the_table():
    untested = {"accuracy_before": None, "accuracy_after": None}
    table = report.comparison_table([summary("grpo", 0, 0.5, **untested)])
    assert [cell.strip() for cell in table.split("\n")[3].split("|")[4:6]] == ["-", "-"]


# ---- text for the terminal ---------------------------------------------------------------------


@given(TOKENS)
def test_without_colour_no_control_character_but_the_line_break_comes_out(tokens):
    text = report.token_credit_text(*unzip(tokens), color=False)
    assert text.replace("\n", "").isprintable()


@given(TOKENS)
def test_with_colour_only_our_own_sequences_come_out_and_each_line_ends_reset(tokens):
    text = report.token_credit_text(*unzip(tokens), color=True)
    assert OURS.sub("", text).replace("\n", "").isprintable()
    for line in text.split("\n"):
        assert not (codes := OURS.findall(line)) or codes[-1] == "\x1b[0m"


@given(HOSTILE, TOKENS, HOSTILE, st.booleans())
def test_a_whole_story_lets_no_foreign_control_character_out(hostile, tokens, reference, color):
    attempt = unzip(tokens)
    text = report.repair_story(hostile, attempt, reference, attempt, color)
    assert OURS.sub("", text).replace("\n", "").isprintable()
    assert color or "\x1b" not in text


def test_marks_stand_under_their_tokens_on_every_line_and_width():
    texts, credits = ["1+\x1b", "\n", "二", "7\n8", "9"], [0.0, 1.0, 0.0, -2.0, 0.5]
    assert report.token_credit_text(texts, credits, color=False).split("\n") == [
        *("1+\\x1b↵", "      +"),
        *("二7↵", "  --"),
        *("89", "-+"),
    ]


def test_a_larger_credit_has_a_stronger_colour_and_none_has_no_colour():
    text = report.token_credit_text(list("abcde"), [1.0, 0.1, 0.0, -0.1, -1.0], color=True)
    g, r = report.GREENS, report.REDS
    assert re.findall(r"48;5;(\d+)m(.)", text) == [
        *((str(g[-1]), "a"), (str(g[0]), "b")),
        *((str(r[0]), "d"), (str(r[-1]), "e")),
    ]
    assert "\x1b[0mc\x1b" in text


def test_marks_that_reorder_or_pile_up_are_escaped():
    assert report.visible("1\u202e2\u0301\u200b") == r"1\u202e2\u0301\u200b"


def test_texts_and_credits_of_different_length_are_refused():
    with pytest.raises(ValueError, match="zip"):
        report.token_credit_text(["1", "2"], [0.0], color=False)


def test_the_story_goes_from_problem_to_repair_and_says_when_there_is_none():
    attempt = (["4", "<end>"], [-1.0, 0.0])
    story = report.repair_story("2+3", attempt, "5", (["5", "<end>"], [1.0, 0.0]), color=False)
    heads = [
        "problem",
        "failed attempt",
        "reference it was compared with",
        "its repair",
        "Marks: +",
    ]
    assert sorted(heads, key=story.index) == heads
    assert "got no correction" in report.repair_story("2+3", attempt, None, None, color=False)


@pytest.mark.parametrize(
    ("variables", "terminal", "expected"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "0"}, False, False),
    ],
)
def test_colour_follows_the_terminal_and_its_variables(monkeypatch, variables, terminal, expected):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    assert report.use_color(stream) is expected
