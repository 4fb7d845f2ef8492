"""Properties of the toy tasks: problems, verifiers on hostile text, the student and the oracle."""

import random
import re
import string
from fractions import Fraction
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from toy_tasks import TASKS, Problem, make_task
from toy_tasks import expression as expression_task
from toy_tasks.base import MAX_TEXT, SPLITS
from toy_tasks.numbers import evaluate, final_expression, final_list, final_number
from toy_tasks.worksheet import parse as parse_worksheet

NAMES = sorted(TASKS)
DIFFICULTIES = [
    (name, d)
    for name in NAMES
    for d in sorted(
        {min(TASKS[name].difficulties), TASKS[name].difficulty, max(TASKS[name].difficulties)}
    )
]
USUAL = [(name, d) for name, d in DIFFICULTIES if d <= TASKS[name].difficulty]
ALPHABET = set(string.printable[:95] + "\n") - {"|"}  # what the tiny policy can write

each_task = pytest.mark.parametrize("name", NAMES)
each_difficulty = pytest.mark.parametrize("name, difficulty", DIFFICULTIES)
each_usual_difficulty = pytest.mark.parametrize("name, difficulty", USUAL)
quick = settings(max_examples=60, deadline=None, derandomize=True)


@cache
def demonstrations(name, difficulty, n=150):
    """n times (problem, careful solution, sloppy solution, verdict on the sloppy one)."""
    task, rng = make_task(name, difficulty), random.Random(f"{name}/{difficulty}")
    rows = []
    for index in range(n):
        problem = task.problem(seed=0, index=index)
        careful, sloppy = (
            task.demonstrate(problem, rng, careful=True),
            task.demonstrate(problem, rng),
        )
        rows.append((problem, careful, sloppy, task.verify(problem, sloppy).reward == 1.0))
    return rows


@cache
def revisions(name, difficulty):
    """Per failed demonstration: (problem, attempt, a fresh careful solution, the revision of the
    attempt with that solution as its reference, the revision with none)."""
    task, rng = make_task(name, difficulty), random.Random(f"revise/{name}/{difficulty}")
    return [
        (
            problem,
            attempt,
            careful,
            task.demonstrate_revision(problem, attempt, careful, rng),
            task.demonstrate_revision(problem, attempt, None, rng),
        )
        for problem, careful, attempt, solved in demonstrations(name, difficulty)
        if not solved
    ]


def rate(task, pairs):
    pairs = list(pairs)
    return sum(task.verify(problem, text).reward for problem, text in pairs) / len(pairs)


# ---- problems --------------------------------------------------------------------------------
@each_difficulty
def test_a_problem_is_a_pure_function_of_seed_index_and_split(name, difficulty):
    keys = [(seed, index, split) for seed in (0, 1) for index in range(8) for split in SPLITS]
    forwards = {key: make_task(name, difficulty).problem(*key) for key in keys}
    task = make_task(name, difficulty, words=True)
    random.seed(5)  # the global generator has no say
    assert forwards == {key: task.problem(*key) for key in reversed(keys)}
    assert len({problem.prompt for problem in forwards.values()}) > len(keys) // 2


@each_difficulty
def test_splits_share_no_problem(name, difficulty):
    task = make_task(name, difficulty)
    prompts = {
        split: {task.problem(seed, i, split).prompt for seed in (0, 1) for i in range(100)}
        for split in SPLITS
    }
    assert not prompts["train"] & prompts["validation"]
    assert not prompts["train"] & prompts["test"]
    assert not prompts["validation"] & prompts["test"]


@each_task
def test_wrong_settings_are_refused_in_one_line_that_names_what_is_allowed(name):
    for make in (
        lambda: make_task(name + "?"),
        lambda: make_task(name, max(TASKS[name].difficulties) + 1),
        lambda: make_task(name, 0),
        lambda: make_task(name).problem(0, 0, split="dev"),
    ):
        with pytest.raises(ValueError, match="^[^\n]*allowed: [^\n]*$"):
            make()


@each_difficulty
def test_prompts_and_demonstrations_are_writable_by_the_tiny_policy_within_max_tokens(
    name, difficulty
):
    task = make_task(name, difficulty)
    for problem, careful, sloppy, _ in demonstrations(name, difficulty):
        assert set(task.prompt(problem) + careful + sloppy) <= ALPHABET
        assert max(len(careful), len(sloppy)) < task.max_tokens  # an end token follows


@each_task
def test_the_worded_prompt_has_the_instruction_and_the_problem(name):
    task = make_task(name, words=True)
    problem = task.problem(0, 0)
    assert task.instruction in task.prompt(problem) and problem.prompt in task.prompt(problem)


# ---- the student -----------------------------------------------------------------------------
@each_difficulty
def test_careful_demonstrations_are_solved(name, difficulty):
    task = make_task(name, difficulty)
    assert (
        rate(task, ((p, careful) for p, careful, _, _ in demonstrations(name, difficulty))) == 1.0
    )


@each_usual_difficulty
def test_sloppy_demonstrations_are_solved_sometimes_but_not_always(name, difficulty):
    solved = [row[3] for row in demonstrations(name, difficulty)]
    assert 0.03 < sum(solved) / len(solved) < 0.9


@pytest.mark.parametrize("difficulty", [4, 5])
def test_worksheets_are_solved_in_10_to_25_percent_of_sloppy_attempts(difficulty):
    task, rng = make_task("worksheet", difficulty), random.Random(0)
    problems = [task.problem(1, i) for i in range(600)]
    assert 0.10 < rate(task, ((p, task.demonstrate(p, rng)) for p in problems)) < 0.25


@each_difficulty
def test_scores_are_ordered_careful_then_revised_with_help_then_revised_alone(name, difficulty):
    task, rows = make_task(name, difficulty), revisions(name, difficulty)
    helped = rate(task, ((p, with_reference) for p, _, _, with_reference, _ in rows))
    alone = rate(task, ((p, without) for p, _, _, _, without in rows))
    assert 1.0 >= helped > 0.8 and alone < helped - 0.2


@each_difficulty
def test_a_revision_is_closer_to_the_attempt_than_a_fresh_careful_solution(name, difficulty):
    rows = revisions(name, difficulty)
    revised = sum(Levenshtein.distance(attempt, text) for _, attempt, _, text, _ in rows)
    fresh = sum(Levenshtein.distance(attempt, careful) for _, attempt, careful, _, _ in rows)
    assert revised < fresh


def test_a_revision_keeps_the_order_of_a_worksheet():
    for _, attempt, _, helped, alone in revisions("worksheet", 4):
        order = [line.terms for line in parse_worksheet(attempt)]
        assert order == [line.terms for line in parse_worksheet(helped)]
        assert order == [line.terms for line in parse_worksheet(alone)]


def test_a_revision_keeps_the_order_of_a_carry_chain():
    for _, attempt, _, helped, alone in revisions("carry_chain", 5):
        orders = [re.sub(r"\^?=[0-9]+", "", text) for text in (attempt, helped, alone)]
        assert orders[0] == orders[1] == orders[2]


def test_a_revision_keeps_the_order_of_an_expression():
    for problem, attempt, _, helped, alone in revisions("expression", 5):
        steps = [
            [step.index for step in expression_task.parse(problem.prompt, text)[0]]
            for text in (attempt, helped, alone)
        ]
        assert steps[0] == steps[1] == steps[2]


@each_task
def test_a_solved_attempt_is_left_as_it_is(name):
    task, rng = make_task(name), random.Random(0)
    for problem, careful, _, _ in demonstrations(name, task.difficulty)[:40]:
        other = task.demonstrate(problem, rng, careful=True)
        assert task.demonstrate_revision(problem, careful, None, rng) == careful
        assert task.demonstrate_revision(problem, careful, other, rng) == careful


@each_task
def test_a_reference_of_another_problem_helps_no_more_than_none(name):
    task, rng = make_task(name), random.Random(0)
    rows = revisions(name, task.difficulty)
    strangers = [careful for _, _, careful, _, _ in rows[1:] + rows[:1]]
    revised = [
        (p, task.demonstrate_revision(p, attempt, stranger, rng))
        for (p, attempt, _, _, _), stranger in zip(rows, strangers, strict=True)
    ]
    alone = rate(task, ((p, without) for p, _, _, _, without in rows))
    assert abs(rate(task, revised) - alone) < 0.15


def test_two_worksheets_wrong_in_different_places_make_a_right_one():
    task = make_task("worksheet", 2)
    problem = Problem("47+38,25+19", "85,44", ((47, 38), (25, 19)))
    attempt, sibling = "25+19=44\n47+38=75\n75,44", "47+38=85\n25+19=34\n85,34"
    revised = [
        task.demonstrate_revision(problem, attempt, sibling, random.Random(seed))
        for seed in range(200)
    ]
    assert set(revised) == {"25+19=44\n47+38=85\n85,44", attempt}
    assert 0.9 < rate(task, ((problem, text) for text in revised)) < 1.0


def test_where_two_worksheets_agree_nothing_is_mended():
    task = make_task("worksheet", 2)
    problem = Problem("47+38,25+19", "85,44", ((47, 38), (25, 19)))
    attempt, sibling = "25+19=34\n47+38=85\n85,34", "47+38=75\n25+19=34\n75,34"
    for seed in range(50):
        assert task.demonstrate_revision(problem, attempt, sibling, random.Random(seed)) == attempt


@each_task
@quick
@given(attempt=st.text(max_size=80), reference=st.none() | st.text(max_size=80))
def test_a_garbage_attempt_is_revised_into_a_whole_solution(name, attempt, reference):
    task, rng = make_task(name), random.Random(0)
    problem = task.problem(0, 0)
    text = task.demonstrate_revision(problem, attempt, reference, rng)
    assert set(text) <= ALPHABET and task.verify(problem, text).parsed is not None


# ---- the oracle ------------------------------------------------------------------------------
def assert_spans_are_in_order(spans, text):
    """In order, non-empty, without overlap, within the text."""
    bounds = [0, *(bound for span in spans for bound in span), len(text)]
    assert bounds == sorted(bounds) and all(start < end for start, end in spans)


@each_difficulty
def test_a_careful_demonstration_has_no_error_and_a_failed_one_has_some(name, difficulty):
    task = make_task(name, difficulty)
    for problem, careful, sloppy, solved in demonstrations(name, difficulty):
        assert task.error_spans(problem, careful) == []
        spans = task.error_spans(problem, sloppy)
        assert_spans_are_in_order(spans, sloppy)
        if not solved:
            assert spans
        elif name == "expression":
            assert len(spans) != 1  # two slips may cancel out, one never does
        else:
            assert not spans


@each_difficulty
def test_a_helped_revision_has_fewer_errors_than_the_attempt(name, difficulty):
    task, rows = make_task(name, difficulty), revisions(name, difficulty)
    before = sum(len(task.error_spans(p, attempt)) for p, attempt, _, _, _ in rows)
    after = sum(len(task.error_spans(p, helped)) for p, _, _, helped, _ in rows)
    assert after < before / 3


@pytest.mark.parametrize(
    "name, problem, text, wrong",
    [
        # inherited consequences are no errors
        ("carry_chain", ("47+38+25", "110", (47, 38, 25)), "38+25=53\n+47^=100", ["=53"]),
        ("carry_chain", ("47+38+25", "110", (47, 38, 25)), "38+25=63\n+48=111", ["48"]),
        (
            "worksheet",
            ("47+38,25+19", "85,44", ((47, 38), (25, 19))),
            "25+19=44\n47+38=75\n75,44",
            ["75"],
        ),
        # a result repeated wrongly, a sum that is not asked for, a list that is too long
        (
            "worksheet",
            ("47+38,25+19", "85,44", ((47, 38), (25, 19))),
            "25+19=44\n47+38=85\n85,45",
            ["45"],
        ),
        ("worksheet", ("47+38,25+19", "85,44", ((47, 38), (25, 19))), "25+18=43\n85,44", ["25+18"]),
        ("worksheet", ("47+38,25+19", "85,44", ((47, 38), (25, 19))), "85,44,9", ["9"]),
        ("worksheet", ("47+38,25+19", "85,44", ((47, 38), (25, 19))), "47+38=75", ["75"]),
        ("column_addition", ("78+56", "134", ((8, 6), (7, 5))), "8+6=14\n7+5+0=12\n=124", ["0"]),
        ("column_addition", ("78+56", "134", ((8, 6), (7, 5))), "8+6=14\n7+5=12\n=124", ["12"]),
        ("column_addition", ("78+56", "134", ((8, 6), (7, 5))), "8+6=13\n7+5+1=13\n=133", ["13"]),
        ("column_addition", ("78+56", "134", ((8, 6), (7, 5))), "8+6=14\n7+3+1=11\n=114", ["3"]),
        ("column_addition", ("78+56", "134", ((8, 6), (7, 5))), "8+6=14\n7+5+1=13\n=144", ["144"]),
        ("column_addition", ("78+56", "134", ((8, 6), (7, 5))), "=135", ["135"]),
        ("expression", ("(7+5)*2", "24"), "=2*2\n=4", ["2"]),
        ("expression", ("(7+5)*2", "24"), "=12*3\n=36", ["12*3"]),
        ("expression", ("(7+5)*2", "24"), "=24", []),  # two operations at once, rightly
        ("expression", ("(7+5)*2", "24"), "=25", ["25"]),
        ("countdown", ("25,3,7:29", "29", ((25, 3, 7), None)), "25+7=32\n32-7=29\n(25+7)-7", ["7"]),
        (
            "countdown",
            ("25,3,7:29", "29", ((25, 3, 7), None)),
            "25+7=31\n31-3=28\n(25+7)-3",
            ["31"],
        ),
        ("countdown", ("25,3,7:29", "29", ((25, 3, 7), None)), "25+7=32\n32-3=29\n(25+7)-7", ["7"]),
        ("countdown", ("25,3,7:29", "29", ((25, 3, 7), None)), "(25+3)-7", ["(25+3)-7"]),
        ("countdown", ("25,3,7:29", "29", ((25, 3, 7), None)), "7/0=7\n", ["0"]),
    ],
)
def test_the_oracle_marks_what_is_truly_wrong_and_no_consequence_of_it(name, problem, text, wrong):
    spans = make_task(name).error_spans(Problem(*problem), text)
    assert [text[start:end] for start, end in spans] == wrong


@each_task
@quick
@given(data=st.data())
def test_the_oracle_survives_any_text_and_marks_well_formed_spans(name, data):
    task = make_task(name)
    problem, careful, sloppy, _ = data.draw(st.sampled_from(demonstrations(name, task.difficulty)))
    # Near misses find more than noise does: a demonstration with a stretch replaced.
    text, stretch = data.draw(st.sampled_from([careful, sloppy])), st.integers(0, len(sloppy))
    start, end = sorted((data.draw(stretch), data.draw(stretch)))
    noise = st.text("0123456789+-*/=(), \n", max_size=12) | st.text(max_size=12)
    text = text[:start] + data.draw(noise) + text[end:]
    assert_spans_are_in_order(task.error_spans(problem, text), text)


# ---- verifiers -------------------------------------------------------------------------------
ENDLESS = [
    unit * (MAX_TEXT // len(unit))
    for unit in ("9", "=", "-", " ", "\n", "(", ")", "1 ", "1,", "1+")
]
ENDLESS += [
    unit * (MAX_TEXT // len(unit)) for unit in ("=1\n", "(1", "1)", "9**", "answer is ", "1 234 ")
]
ENDLESS += [
    "answer" + " " * MAX_TEXT,
    "= " + "9" * MAX_TEXT,
    "=1" + " 234" * 5000 + "x",
    "1" + " " * MAX_TEXT,
]
ENDLESS += [
    "(" * 9999 + "1" + ")" * 9999,
    "=(1+1)" * 3333,
    "1+1=2\n" * 3333,
    "1+1+1=3\n" * 2500,
    "=1e" * 6666,
]


@each_task
@pytest.mark.parametrize("text", ENDLESS, ids=lambda text: repr(text[:8]))
def test_texts_of_20000_characters_are_judged_marked_and_revised(name, text):
    task = make_task(name)
    problem = task.problem(0, 0)
    assert task.verify(problem, text).reward == 0.0
    assert_spans_are_in_order(task.error_spans(problem, text), text)
    assert task.demonstrate_revision(problem, text, text, random.Random(0))


@each_task
@quick
@given(text=st.text() | st.text("0123456789+-*/=()., \n\u2212\u00b2\u0663"))
def test_verifying_never_raises_and_any_text_is_worth_0_or_1(name, text):
    task = make_task(name)
    assert task.verify(task.problem(0, 0), text).reward in (0.0, 1.0)


@each_task
@pytest.mark.parametrize("text", [None, b"85", 85, ["85"]], ids=repr)
def test_what_is_no_text_is_worth_nothing(name, text):
    task = make_task(name)
    assert task.verify(task.problem(0, 0), text).reward == 0.0


@each_task
def test_the_last_answer_counts(name):
    task = make_task(name)
    for problem, careful, sloppy, solved in demonstrations(name, task.difficulty)[:60]:
        if not solved:
            assert task.verify(problem, f"{careful}\n\n{sloppy}").reward == 0.0
            assert task.verify(problem, f"{sloppy}\n\n{careful}").reward == 1.0


@each_task
def test_a_solution_cut_off_before_its_last_line_is_not_solved(name):
    task = make_task(name)
    for problem, careful, _, _ in demonstrations(name, task.difficulty)[:60]:
        assert task.verify(problem, careful[: careful.rfind("\n") + 1]).reward == 0.0


NUMBERS = {
    # markers and what follows them
    "12+34=46\n+50=96": "96",
    "12+34=46\n+50=": None,
    "The answer is 85 (=80+5).": "85",
    "answer: 85": "85",
    "Answer is: **85**": "85",
    "A: 5": "5",
    "The total is 85 and I used 4 numbers": "85",
    "= 247 which is the sum of 6 numbers": "247",
    "the answer is the sum of 6 numbers, 247": "247",
    "40+45=85, so the final answer is therefore 86": "86",
    "x = 3 + 5 which is 8": "8",
    "85 = 80 + 5": "85",
    "\\boxed{247}": "247",
    "so $\\boxed{ -7 }$.": "-7",
    "= 3 \\times 5": None,
    "=>85": "85",
    # no marker
    "85": "85",
    "I get 84, no, 85!": "85",
    "85 apples, 3 \u20ac": "3",
    "12+34": None,
    # signs
    "+5": "5",
    "-0": "0",
    "= - 5": "-5",
    "=\u22127": "-7",
    "-$5": "-5",
    "total - 5": "5",
    "(a)-5": "5",
    # forms of a number
    "007": "7",
    "247.0": "247",
    "=2.50": "2.5",
    "=.5": "0.5",
    "The answer is 85.": "85",
    "85...": "85",
    "= 1,234": "1234",
    "= 1'234'567": "1234567",
    "= 1_234": "1234",
    "= 1\u202f234\u00a0kg": "1234",
    "= 1 234.": "1234",
    "= 12 34": "12",
    "85 123 44": "44",
    "$1,234.50": "1234.5",
    "85kg": "85",
    # no person could tell
    "1.234,50": None,
    "12,34": None,
    "1.2.3": None,
    "1e5": None,
    "= 1e-5": None,
    "0x1F": None,
    "9**9**9": None,
    "10\u00b2": None,
    "= \u0668\u0665": None,
    "\uff18\uff15": None,
    "= \u2467": None,
    "8\u0665": None,
    "NaN": None,
    "= inf": None,
    "-Infinity": None,
    "": None,
    "\0": None,
    "=\0 85": "85",
    "\U0001f600 85 \U0001f600": "85",
    "__import__('os').system('true')": None,
    "= __import__": None,
    "eval(85)": "85",
    "9" * 40: "9" * 40,
    "9" * 41: None,
    "= 85\n\n= " + "9" * 5000: None,
    "1" + "0" * 20 + "." + "0" * 19: "1" + "0" * 20,
    "(" * 500 + "85" + ")" * 500: "85",
    "<answer>85</answer>": "85",
    "{'answer': 85}": "85",
    "null": None,
    "= =": None,
    "\\boxed{": None,
    "\r\n= 85\r\n": "85",
}


@pytest.mark.parametrize("text, number", NUMBERS.items(), ids=lambda value: repr(value)[:40])
def test_the_final_number_is_the_one_that_a_person_reads(text, number):
    assert final_number(text) == number


@quick
@given(
    n=st.integers(-(10**12), 10**12), form=st.sampled_from(["{}", "{:,}", "{:_}", "{}.0", "{:+}"])
)
def test_a_whole_number_is_read_back_however_it_is_written(n, form):
    for frame in ("{}", "= {}", "The answer is {}.", "1+2=3\nanswer: {} apples", "\\boxed{{{}}}"):
        assert final_number(frame.format(form.format(n))) == str(n)


LISTS = {
    "85,44,118": ["85", "44", "118"],
    "85, 44, 118": ["85", "44", "118"],
    "85 44 118": ["85", "44", "118"],
    "85;44;118": ["85", "44", "118"],
    "85 ; 44 ; 118.": ["85", "44", "118"],
    "85, 44 and 118": ["85", "44", "118"],
    "85, 44, and 118": ["85", "44", "118"],
    "[85, 44, 118]": ["85", "44", "118"],
    "(85,44)": ["85", "44"],
    "\\boxed{85, 44}": ["85", "44"],
    "Answer: 85, 44": ["85", "44"],
    "= 85, 44": ["85", "44"],
    "- 85, 44": ["85", "44"],
    "**85, 44**": ["85", "44"],
    "85,\t44": ["85", "44"],
    "85, 44 (2 sums)": ["85", "44"],
    "The 2 results: 85, 44": ["85", "44"],
    "47+38=85\n25+19=44\n85,44": ["85", "44"],
    "85,44\n": ["85", "44"],
    "85,44\nThat is all.": ["85", "44"],
    "1,2\n85,44": ["85", "44"],
    "85,44\n1": ["1"],
    "1,2 or 85,44": ["85", "44"],
    "85.0, 044": ["85", "44"],
    "2.5, 44": ["2.5", "44"],
    "-85, 44": ["-85", "44"],
    "85, 44+1": ["85", "44"],
    "85-44": ["44"],
    "85,,44": ["44"],
    "85": ["85"],
    "47+38=85": ["85"],
    "": [],
    "none": [],
    "NaN, inf": [],
    "1e5, 3": ["3"],
    "\u0668\u0665, \u00b2": [],
    "85\u00b2, 44": ["44"],
    "\0": [],
    "85\0,44": ["44"],
    "\U0001f600 85, 44 \U0001f600": ["85", "44"],
    "__import__('os')": [],
    "9**9**9": ["9"],
    "[" * 500 + "85, 44": ["85", "44"],
    "9" * 41 + ", 44": [None, "44"],
    "9" * 5000: [None],
    ",": [],
    "85, forty-four": ["85"],
    "{'a': 85, 'b': 44}": ["44"],
}


@pytest.mark.parametrize("text, numbers", LISTS.items(), ids=lambda value: repr(value)[:40])
def test_the_final_list_is_the_one_that_a_person_reads(text, numbers):
    assert final_list(text) == numbers


EXPRESSIONS = {  # -> the expression that is read (None: none), and its value (None: refused)
    "(25+50)+7": ("(25+50)+7", 82),
    "25+50=75\n75+7=82\n(25+50)+7": ("(25+50)+7", 82),
    "(25 + 50) + 7 = 82.": ("(25 + 50) + 7", 82),
    "82 = 25+50+7": ("25+50+7", 82),
    "Answer: 3*4": ("3*4", 12),
    "The answer is 3*4, using 2 numbers.": ("3*4", 12),
    "`3*4`": ("3*4", 12),
    "**3*4**": ("3*4", 12),
    "\\boxed{3*4}": ("3*4", 12),
    "$3*4$": ("3*4", 12),
    "- 3*4": ("3*4", 12),
    "3*4 (=12)": ("3*4", 12),
    "3\u00d74\u00f72\u22121": ("3*4/2-1", 5),
    "3*4\nDone!": ("3*4", 12),
    "1/3": ("1/3", Fraction(1, 3)),
    "2-5": ("2-5", -3),
    "2+3*4-6/2": ("2+3*4-6/2", 11),
    "8/4/2": ("8/4/2", 1),
    "9-4-2": ("9-4-2", 3),
    "((3))+(((4)))": ("((3))+(((4)))", 7),
    "007+1": ("007+1", 8),
    "": (None, None),
    "82": (None, None),
    "no idea": (None, None),
    "NaN+inf": (None, None),
    "__import__('os').system('x')": (None, None),
    "\0": (None, None),
    "\U0001f600+\U0001f600": (None, None),
    "\u0668+\u0665": (None, None),
    "-3+10": ("-3+10", None),
    "3*-4": ("3*-4", None),
    "9**9**9": ("9**9**9", None),
    "2^9": ("2^9", None),
    "9//2": ("9//2", None),
    "2.5*4": ("2.5*4", None),
    "1,000+1": ("1,000+1", None),
    "1e5+1": (None, None),
    "3 4+1": ("3 4+1", None),
    "3(4)+1": ("3(4)+1", None),
    "()+1": ("()+1", None),
    "(3+4": ("(3+4", None),
    "3+4)": ("3+4)", None),
    "3)+(4": ("3)+(4", None),
    "1/0": ("1/0", None),
    "1/(2-2)": ("1/(2-2)", None),
    "9999999999+1": ("9999999999+1", None),
    "+".join("1" * 101): ("+".join("1" * 101), None),
    "+".join("1" * 100): ("+".join("1" * 100), 100),
    "(" * 98 + "1+1" + ")" * 98: ("(" * 98 + "1+1" + ")" * 98, 2),
    "(" * 9000 + "1+1" + ")" * 9000: ("(" * 9000 + "1+1" + ")" * 9000, None),
    "*".join(["999999999"] * 20): ("*".join(["999999999"] * 20), 999999999**20),
}


@pytest.mark.parametrize("text, reading", EXPRESSIONS.items(), ids=lambda value: repr(value)[:40])
def test_the_final_expression_is_the_one_that_a_person_reads_and_is_worked_out_safely(
    text, reading
):
    expression, value = reading
    assert final_expression(text) == expression
    if value is not None:
        assert evaluate(expression)[0] == value
    elif expression is not None:
        with pytest.raises(ValueError, match="^[^\n]{1,100}$"):
            evaluate(expression)


@st.composite
def trees(draw, depth=4):
    """(text, value, numbers) of an expression, built from its parts."""
    if depth == 0 or draw(st.booleans()):
        number = draw(st.integers(0, 99))
        return str(number), Fraction(number), (number,)
    (a, x, m), (b, y, n) = draw(trees(depth - 1)), draw(trees(depth - 1))
    symbol = draw(st.sampled_from("+-*/" if y else "+-*"))
    value = {"+": x + y, "-": x - y, "*": x * y, "/": x / y if y else None}[symbol]
    return f"({a}{symbol}{b})", value, m + n


@quick
@given(tree=trees())
def test_evaluate_gives_the_value_and_the_numbers_of_any_expression(tree):
    text, value, numbers = tree
    if len(text) <= 200:
        assert evaluate(text) == (value, numbers)


@quick
@given(text=st.text() | st.text("0123456789+-*/() "))
def test_evaluate_gives_a_value_or_a_reason_in_one_line(text):
    try:
        value, _ = evaluate(text)
    except ValueError as error:
        assert str(error) and "\n" not in str(error)
    else:
        assert isinstance(value, Fraction)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("(25-3)+7", "right"),
        ("7 + 25 - 3 = 29", "right"),
        ("(25/1+7)-3", "not the numbers given"),
        ("25+7", "not the numbers given"),
        ("25+7-3-3+3", "not the numbers given"),
        ("257-3", "not the numbers given"),
        ("(25+3)-7", "not the target"),
        ("25/(7-7)-3", "division by zero"),
        ("29", "no expression"),
    ],
)
def test_countdown_accepts_any_expression_of_the_very_numbers_that_hits_the_target(text, reason):
    verdict = make_task("countdown", 3).verify(Problem("25,3,7:29", "29", ((25, 3, 7), None)), text)
    assert verdict.reason == reason and verdict.reward == float(reason == "right")


# ---- the compare prompt ----------------------------------------------------------------------
FRAGMENTS = [
    "<",
    ">",
    "/",
    " ",
    "\n",
    "|",
    "attempt",
    "other_",
    "ATTEMPT",
    "</attempt>",
    "<attempt>",
    "85",
]
quotable = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


@each_task
@quick
@given(attempt=quotable, reference=st.none() | quotable)
def test_quoted_text_cannot_end_its_own_quotation(name, attempt, reference):
    task = make_task(name)
    problem = task.problem(0, 0)
    assert task.compare_prompt(problem, attempt, reference).count("|") == 3
    worded = make_task(name, words=True).compare_prompt(problem, attempt, reference).lower()
    assert worded.count("<attempt>") == worded.count("</attempt>") == 1
    others = 0 if reference is None else 1
    assert worded.count("<other_attempt>") == worded.count("</other_attempt>") == others


@each_task
@pytest.mark.parametrize("words", [False, True])
def test_the_compare_prompt_has_no_number_but_those_of_prompt_attempt_and_reference(name, words):
    task = make_task(name, words=words)
    numbers = re.compile("[0-9]+")
    for problem, careful, sloppy, _ in demonstrations(name, task.difficulty)[:40]:
        for attempt, reference in ((sloppy, careful), (sloppy, None), ("", ""), ("|1|", "2")):
            known = numbers.findall(f"{task.prompt(problem)} {attempt} {reference}")
            shown = numbers.findall(task.compare_prompt(problem, attempt, reference))
            assert set(shown) <= set(known)
