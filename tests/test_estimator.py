"""The credit of IBPO: worked examples by hand, and a slow, obvious second implementation.

`END` is the end token of these examples; a text that ends with it is finished.
"""

import copy
import math
import random
import statistics
from collections import Counter
from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ibpo_minimal
from ibpo_minimal import (
    CREDITS,
    Config,
    Credit,
    CreditedRow,
    Group,
    Policy,
    Revision,
    Trajectory,
    changed_tokens,
    credit_of,
    revise,
)
from toy_tasks import Problem
from toy_tasks.base import Verdict
from toy_tasks.policy import tiny_tokenizer

END = 0
MASK = Credit("revisions", 3, "all", mask_failed=True)  # = the preset ibpo-mask
SIBLINGS = Credit("siblings", mask_failed=True)
BOTH = Credit("both", 3, "all", mask_failed=True)
ROWS = Credit("revisions", 3, "all", mask_failed=True, revision_rows="plain", rows_in_baseline=True)


def text(ids, reward=0.0, name=""):
    """A trajectory with a log-probability of its own at every token."""
    logprobs = [-0.1 * (t + 1) - ids[t] for t in range(len(ids))]
    return Trajectory(list(ids), logprobs, name, ids[-1:] == [END], reward)


def group_of(ys, repairs=()):
    """A group; repairs: pairs (index of the attempt, trajectory)."""
    revisions = [
        Revision(of, None, y, [-0.2 * (t + 1) - k for t in range(len(y.token_ids))])
        for k, (of, y) in enumerate(repairs)
    ]
    return Group(Problem("1+1=", "2"), [7, 7], list(ys), revisions)


def advantages(credit, ys, repairs=()):
    rows, _ = credit(group_of(ys, repairs))
    return [row.advantages for row in rows]


def first_of(rows):
    """The advantage of each row when it is the same on all its tokens."""
    assert all(len(set(row)) == 1 for row in rows)
    return [row[0] for row in rows]


def marked(row):
    return [a != 0 for a in row]


WRONG, RIGHT = [1, 2, 3, END], [1, 5, 3, END]


# ---- The steps, by hand --------------------------------------------------------------------------


def test_group_advantage_is_reward_minus_mean_over_std_with_ddof_1():
    # mean 0.25, std sqrt((0.75^2 + 3 * 0.25^2) / 3) = 0.5; 0.75 / 0.5001 and -0.25 / 0.5001
    ys = [text(RIGHT, 1.0)] + [text(WRONG)] * 3
    found = first_of(advantages(CREDITS["grpo"], ys))
    assert found == pytest.approx([1.4997, -0.4999, -0.4999, -0.4999], abs=1e-5)


def test_shaping_adds_bonus_times_the_mean_of_solved_revisions_before_centring():
    # phi = 0 (solved), 1/2, 1, 0 (not revised); R' = 1, 0.15, 0.3, 0; mean 0.3625;
    # squares 0.40640625 + 0.04515625 + 0.00390625 + 0.13140625 = 0.586875; std sqrt(that / 3)
    # = 0.442295; over 0.442395: 0.6375, -0.2125, -0.0625, -0.3625
    ys = [text(RIGHT, 1.0), text(WRONG), text([1, 2, 4, END]), text([1, 2, 5, END])]
    repairs = [(1, text(RIGHT, 1.0)), (1, text([8, END])), (2, text(RIGHT, 1.0))] * 2
    found = first_of(advantages(CREDITS["ibpo-shaping"], ys, repairs))
    assert found == pytest.approx([1.44102, -0.48034, -0.14128, -0.81940], abs=1e-5)


def test_a_solved_text_has_no_repair_score_and_no_repair_row():
    # should a caller revise one: phi = 0 and R' = 1, 0, mean 0.5, std 0.70711, as without
    ys, repairs = [text(RIGHT, 1.0), text(WRONG)], [(0, text([1, 5, 4, END], 1.0))]
    found = first_of(advantages(CREDITS["ibpo"], ys, repairs))
    assert found == pytest.approx([0.70701, -0.70701], abs=1e-5)


def test_a_repair_that_was_cut_off_or_is_almost_right_does_not_count_as_solved():
    ys = [text(RIGHT, 1.0), text(WRONG), text(WRONG)]
    repairs = [(1, text([1, 5, 3], 1.0)), (2, text(RIGHT, 0.99))]
    rows, counts = CREDITS["ibpo"](group_of(ys, repairs))
    assert counts["revisions_solved"] == 0 and counts["revision_rows"] == 0
    # phi = 0 for both: mean 1/3, std sqrt((4/9 + 2/9) / 2) = 0.57735
    assert [r.advantages[0] for r in rows] == pytest.approx([1.15450, -0.57725, -0.57725], abs=1e-5)


def test_one_repair_among_eight_failures_gets_2_67_and_each_failure_minus_0_33():
    # pool: eight 0 and one 1; mean 1/9, std sqrt((64/81 + 8/81) / 8) = 1/3
    ys = [text(WRONG) for _ in range(8)]
    found = advantages(ROWS, ys, [(2, text(RIGHT, 1.0))])
    assert len(found) == 9
    assert found[8] == pytest.approx([0, 2.67, 0, 0], abs=0.005)  # only its edited token
    assert found[2] == pytest.approx([0, -0.33, 0, 0], abs=0.005)  # only the mistake
    for i in {0, 1, 3, 4, 5, 6, 7}:
        assert found[i] == pytest.approx([-0.33] * 4, abs=0.005)  # nothing known: as in GRPO


def test_without_rows_in_baseline_a_repair_is_scored_against_the_originals_alone():
    # originals 1, 0, 0: mean 1/3, std 0.57735; the repair gets (1 - 1/3) / 0.57745 = 1.15450
    credit = Credit("revisions", 3, "all", revision_rows="plain")
    found = advantages(credit, [text(RIGHT, 1.0), text(WRONG), text(WRONG)], [(1, text(RIGHT, 1))])
    assert [row[1] for row in found] == pytest.approx(
        [1.1545, -0.57725, -0.57725, 1.1545], abs=1e-5
    )


def test_uniform_rows_credit_every_token_of_the_repair():
    # pool 0, 0, 1: as above
    found = advantages(CREDITS["repair-rows"], [text(WRONG)] * 2, [(0, text(RIGHT, 1.0))])
    assert found[2] == pytest.approx([1.1545] * 4, abs=1e-5)
    assert found[0] == pytest.approx([-0.57725] * 4, abs=1e-5)


def test_a_repair_row_stands_under_the_plain_prompt_with_the_plain_log_probabilities():
    group = group_of([text(WRONG), text(WRONG)], [(1, text(RIGHT, 1.0))])
    group.revisions[0].plain_logprobs = [-4.0, -3.0, -2.0, -1.0]
    row = ROWS(group)[0][2]
    assert row.prompt_ids == [7, 7] and row.token_ids == RIGHT
    assert row.old_logprobs == [-4.0, -3.0, -2.0, -1.0] != group.revisions[0].trajectory.logprobs


def test_an_original_row_keeps_its_ids_and_the_log_probabilities_of_its_sampler():
    ys = [text(RIGHT, 1.0), text([4, END])]
    rows, _ = CREDITS["grpo"](group_of(ys))
    assert [row.token_ids for row in rows] == [RIGHT, [4, END]]
    assert [row.old_logprobs for row in rows] == [y.logprobs for y in ys]
    assert all(row.prompt_ids == [7, 7] for row in rows)


@pytest.mark.parametrize(
    "a, b, finished, marks_a, marks_b",
    [
        # replaced: 2 by 5
        ([1, 2, 3, END], [1, 5, 3, END], "ab", [0, 1, 0, 0], [0, 1, 0, 0]),
        # deleted from a, so the token of b that stands there is marked; and the mirror image
        ([1, 2, 3, END], [1, 3, END], "ab", [0, 1, 0, 0], [0, 1, 0]),
        ([1, 3, END], [1, 2, 3, END], "ab", [0, 1, 0], [0, 1, 0, 0]),
        # b is longer: the end token of a stands at the insertion point
        ([1, 2, END], [1, 2, 3, 4, END], "ab", [0, 0, 1], [0, 0, 1, 1, 0]),
        # a strict prefix of b: past the end of a finished text is its end token
        ([1, 2], [1, 2, 3], "ab", [0, 1], [0, 0, 1]),
        ([1, 2], [1, 2, 3], "b", [0, 0], [0, 0, 1]),
        ([1, 2, 3], [1, 2], "ab", [0, 0, 1], [0, 1]),
        ([1, 2, 3], [1, 2], "a", [0, 0, 1], [0, 0]),
        # cut off, and wrong in the middle too
        ([1, 2, 3], [1, 5, 3, 4, END], "b", [0, 1, 0], [0, 1, 0, 1, 1]),
        # a lone end token, nothing at all, and no difference
        ([END], [1, END], "ab", [1], [1, 0]),
        ([], [1, END], "b", [], [1, 1]),
        ([], [1, END], "ab", [], [1, 1]),
        ([], [], "ab", [], []),
        (RIGHT, RIGHT, "ab", [0, 0, 0, 0], [0, 0, 0, 0]),
        # several optimal alignments (2 is also equal to the second 2): the common prefix is kept
        ([1, 2, END], [1, 2, 2, END], "ab", [0, 0, 1], [0, 0, 1, 0]),
        ([4, 4, 4, END], [4, 4, END], "ab", [0, 0, 1, 0], [0, 0, 1]),
    ],
)
def test_changed_tokens_by_hand(a, b, finished, marks_a, marks_b):
    found = changed_tokens(a, b, "a" in finished, "b" in finished)
    assert found == ([bool(m) for m in marks_a], [bool(m) for m in marks_b])


def test_a_failure_is_credited_where_its_own_repair_changed_it():
    ys = [text(RIGHT, 1.0), text([1, 2, 3, 4, END])]
    found = advantages(MASK, ys, [(1, text([1, 2, 9, 4, END], 1.0))])
    # rewards 1, 0: mean 0.5, std 0.70711; -0.5 / 0.70721
    assert found[1] == pytest.approx([0, 0, -0.70701, 0, 0], abs=1e-5)
    assert found[0] == pytest.approx([0.70701] * 4, abs=1e-5)


def test_a_repair_masks_nothing_where_mask_failed_is_off():
    found = advantages(
        CREDITS["ibpo-shaping"], [text(RIGHT, 1.0), text(WRONG)], [(1, text(RIGHT, 1))]
    )
    assert all(marked(found[1]))


def test_the_closest_repair_is_the_counterfactual_and_the_row():
    far, near = text([9, 8, 3, END], 1.0), text([1, 2, 8, END], 1.0)
    group = group_of([text(WRONG), text(WRONG)], [(0, far), (0, near)])
    rows, counts = ROWS(group)
    assert marked(rows[0].advantages) == [False, False, True, False]
    assert len(rows) == 3 and rows[2].token_ids == near.token_ids
    assert rows[2].old_logprobs == group.revisions[1].plain_logprobs
    assert counts["revision_rows"] == 1


def test_the_distance_is_not_normalised_by_length():
    # 1 edit in 2 tokens beats 2 edits in 12, though 2 / 12 < 1 / 2
    y = text([1, END])
    long = text([1, 1, 1, END], 1.0)  # 2 insertions
    short = text([2, END], 1.0)  # 1 replacement
    rows, _ = ROWS(group_of([y, text([3, END])], [(0, long), (0, short)]))
    assert rows[2].token_ids == [2, END]


@pytest.mark.parametrize("credit", [ROWS, SIBLINGS])
def test_ties_go_to_the_lowest_index(credit):
    first, second = text([1, 8, 3, END], 1.0), text([1, 2, 8, END], 1.0)
    for one, other in ((first, second), (second, first)):
        if credit is ROWS:
            group = group_of([text(WRONG), text([6, END])], [(0, one), (0, other)])
        else:
            group = group_of([text(WRONG), one, other])
        rows, _ = credit(group)
        assert marked(rows[0].advantages) == changed_tokens(WRONG, one.token_ids)[0]


def test_siblings_take_the_closest_solved_original():
    ys = [text([9, 9, 3, END], 1.0), text(WRONG), text([1, 2, 8, END], 1.0), text([1, 2, 4, END])]
    found = advantages(SIBLINGS, ys)
    assert marked(found[1]) == [False, False, True, False]
    assert marked(found[3]) == [False, False, True, False]


def test_siblings_ignore_a_repair_and_both_prefers_it_to_a_closer_sibling():
    ys = [text([1, 2, 8, END], 1.0), text(WRONG)]
    repairs = [(1, text([9, 8, 3, END], 1.0))]
    assert marked(advantages(SIBLINGS, ys, repairs)[1]) == [False, False, True, False]
    assert marked(advantages(BOTH, ys, repairs)[1]) == [True, True, False, False]
    assert marked(advantages(BOTH, ys)[1]) == [False, False, True, False]
    assert all(marked(advantages(MASK, ys)[1]))


def test_another_failures_repair_is_never_used():
    ys = [text(WRONG), text(WRONG), text(WRONG, 0.5)]
    for credit in (MASK, BOTH, ROWS, CREDITS["ibpo"], CREDITS["ibpo-lean"]):
        found = advantages(credit, ys, [(1, text(RIGHT, 1.0))])
        assert all(marked(found[0])) and marked(found[1]) == [False, True, False, False]


def test_an_unsolved_repair_is_no_counterfactual_and_no_row():
    for bad in (text(RIGHT, 0.5), text([1, 5, 3], 1.0)):
        rows, _ = ROWS(group_of([text(WRONG), text(RIGHT, 1.0)], [(0, bad)]))
        assert len(rows) == 2 and all(marked(rows[0].advantages))


def test_a_rewrite_masks_nothing_but_still_counts_in_phi_and_may_be_a_row():
    attempt = [1, 2, 3, END]
    half, more = [1, 8, 9, END], [7, 8, 9, END]  # 2 and 3 of 4 tokens
    credit = CREDITS["ibpo"]
    for repair, rewrite in ((half, 0), (more, 1)):
        group = group_of(
            [text(attempt), text(attempt), text([5, END], 0.5)], [(0, text(repair, 1))]
        )
        rows, counts = credit(group)
        assert counts["rewrites"] == rewrite and counts["masked"] == 1 - rewrite
        assert all(marked(rows[0].advantages)) == bool(rewrite)
        assert rows[3].token_ids == repair and rows[3].advantages[1] > 0
        # R' = 0.3, 0, 0.5 and the row's 1: mean 0.45, std sqrt(0.53 / 3) = 0.42032
        assert rows[0].advantages[1] == pytest.approx(-0.15 / 0.42042, abs=1e-5)


def test_a_sibling_that_is_a_rewrite_masks_nothing_and_is_counted():
    rows, counts = SIBLINGS(group_of([text(WRONG), text([7, 8, 9, END], 1.0)]))
    assert all(marked(rows[0].advantages)) and counts["rewrites"] == 1 and counts["masked"] == 0
    wide = Credit("siblings", mask_failed=True, max_edit_fraction=0.75)
    assert marked(advantages(wide, [text(WRONG), text([7, 8, 9, END], 1)])[0]) == [1, 1, 1, 0]


def test_the_edited_fraction_is_counted_over_masked_texts():
    ys = [text(RIGHT, 1.0), text(WRONG), text([1, 5, 4, 4, END])]  # 1 of 4, and 2 of 5 tokens
    _, counts = SIBLINGS(group_of(ys))
    assert counts["masked"] == 2
    assert counts["edited_fraction"] == pytest.approx(1 / 4 + 2 / 5)


def test_solved_texts_are_credited_everywhere_unless_mask_solved():
    ys = [text(RIGHT, 1.0), text([9, 9, 9, END]), text(WRONG)]
    repairs = [(2, text([1, 2, 8, END], 1.0))]
    for name, credit in CREDITS.items():
        assert all(marked(advantages(credit, ys, repairs)[0])), name
    credit = Credit("siblings", mask_failed=True, mask_solved=True)
    # against its closest failure WRONG, not against [9, 9, 9, END]
    assert marked(advantages(credit, ys)[0]) == [False, True, False, False]


def test_mask_solved_without_a_failure_masks_nothing():
    ys = [text(RIGHT, 1.0), text([1, 5, END], 2.0)]  # two rewards, so not flat
    found = advantages(Credit(mask_solved=True), ys)
    assert all(map(all, map(marked, found)))


def test_clamp_keeps_a_repaired_failure_from_positive_credit_and_counts_it():
    # R' = 0.3, 0, 0, 0: mean 0.075, std 0.15; A = 0.225 / 0.1501 = 1.4990 and -0.075 / 0.1501
    ys, repairs = [text(WRONG)] * 4, [(0, text(RIGHT, 1.0))]
    for clamp, expected in ((False, 1.4990), (True, 0.0)):
        credit = Credit("revisions", 3, "all", repair_bonus=0.3, clamp_failed=clamp)
        rows, counts = credit(group_of(ys, repairs))
        found = first_of([row.advantages for row in rows])
        assert found == pytest.approx([expected] + [-0.49967] * 3, abs=1e-4)
        assert counts["would_be_positive"] == 1 and counts["failures"] == 4


def test_clamp_leaves_solved_texts_and_repair_rows_alone():
    credit = CREDITS["ibpo"]
    found = advantages(credit, [text(RIGHT, 1.0), text(WRONG)], [(1, text([1, 2, 8, END], 1.0))])
    assert found[0][0] > 0 and found[2][2] > 0


def test_variance_condition_is_reported_in_population_moments():
    # p = 1/4; phi = 0, 1, 0, 0: mean 1/4, population variance 3/16; b = 0.3
    ys = [text(RIGHT, 1.0)] + [text(WRONG)] * 3
    _, counts = CREDITS["ibpo-shaping"](group_of(ys, [(1, text(RIGHT, 1.0))]))
    assert counts["variance_left"] == pytest.approx(0.3 * 3 / 16)
    assert counts["variance_right"] == pytest.approx(2 * 0.25 * 0.25)


# ---- Edges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CREDITS)
@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7, 1.0])
def test_a_flat_group_gets_exactly_zero(name, reward):
    rows, counts = CREDITS[name](group_of([text(RIGHT, reward)] * 7))
    assert counts["flat"] == 1 and len(rows) == 7
    assert all(a == 0 for row in rows for a in row.advantages)


@pytest.mark.parametrize("name", CREDITS)
def test_an_all_wrong_group_has_a_signal_only_through_repairs(name):
    credit = CREDITS[name]
    ys = [text(WRONG), text([1, 2, 4, END]), text([6, END])]
    rows, counts = credit(group_of(ys, [(0, text(WRONG)), (1, text([9, END]))]))
    assert counts["flat"] == 1 and counts["all_wrong"] == 1
    assert not any(a for row in rows for a in row.advantages)
    rows, counts = credit(group_of(ys, [(0, text(RIGHT, 1.0))]))
    signal = credit.rows_in_baseline or credit.repair_bonus > 0
    assert counts["all_wrong"] == 1 and counts["flat"] == (not signal)
    assert any(a for row in rows for a in row.advantages) == signal


def test_every_sample_truncated_is_a_group_of_failures():
    ys = [text([1, 2, 3], 1.0), text([1, 2, 4]), text([1, 2, 5])]  # a right answer, not ended
    repair = text([1, 2, 4, 6, END], 1.0)
    rows, counts = ROWS(group_of(ys, [(1, repair)]))
    assert counts["all_wrong"] == 1 and counts["failures"] == 3 and counts["solved"] == 0
    # rewards 1, 0, 0 and the row's 1: mean 0.5, std 0.57735
    assert rows[0].advantages == pytest.approx([0.86588] * 3, abs=1e-5)
    # cut off strict prefix of its repair: there is no token to blame
    assert rows[1].advantages == [0, 0, 0]
    assert marked(rows[3].advantages) == [False, False, False, True, True]


def test_a_finished_strict_prefix_of_its_repair_is_blamed_for_ending():
    attempt = Trajectory([1, 2], [-1.0, -1.0], "", True, 0.0)  # 2 is an end token here
    rows, _ = ROWS(group_of([attempt, text(WRONG)], [(0, text([1, 2, END], 1.0))]))
    assert marked(rows[0].advantages) == [False, True]


def test_a_lone_end_token_and_an_empty_completion():
    empty = Trajectory([], [], "", False, 0.0)
    ys = [text([END]), empty, text(RIGHT, 1.0)]
    repairs = [(0, text([5, END], 1.0)), (1, text([5, END], 1.0))]
    for credit in (*CREDITS.values(), Credit("both", 2, "all", mask_failed=True, mask_solved=True)):
        rows, counts = credit(group_of(ys, repairs))
        assert [row.token_ids for row in rows[:3]] == [[END], [], RIGHT]
        assert rows[1].advantages == [] and rows[0].advantages[0] < 0 < rows[2].advantages[1]
        assert counts["failures"] == 2


def test_a_repair_equal_to_its_attempt_gives_neither_row_nor_mask():
    # (a task may judge by more than the ids, so the equal repair may be called solved)
    same, other = text(WRONG, 1.0), text(RIGHT, 1.0)
    rows, counts = ROWS(group_of([text(WRONG), text([6, END], 0.5)], [(0, same)]))
    assert len(rows) == 2 and all(marked(rows[0].advantages)) and counts["revisions_same"] == 1
    rows, counts = ROWS(group_of([text(WRONG), text([6, END])], [(0, same), (0, other)]))
    assert len(rows) == 3 and rows[2].token_ids == RIGHT  # the equal one is closer, and no repair
    assert marked(rows[0].advantages) == [False, True, False, False]


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_an_error_naming_the_sample(reward):
    ys = [text(WRONG), text(RIGHT, 1.0), text(WRONG, reward)]
    with pytest.raises(ValueError, match=r"sample 2 of '1\+1='.*(nan|inf)") as error:
        CREDITS["grpo"](group_of(ys))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_repairs_reward_that_is_no_number_is_an_error_naming_the_sample(reward):
    ys = [text(WRONG), text(WRONG), text(RIGHT, 1.0)]
    with pytest.raises(ValueError, match=r"sample 1 of '1\+1='.*(nan|inf)"):
        CREDITS["ibpo"](group_of(ys, [(1, text(RIGHT, reward))]))


def test_unscored_samples_leave_the_group_and_are_counted():
    ys = [text(WRONG), text(WRONG, None), text(RIGHT, 1.0), text([1, 2, 4, END], None)]
    without, _ = SIBLINGS(group_of([ys[0], ys[2]]))
    rows, counts = SIBLINGS(group_of(ys))
    assert rows == without and counts["unscored"] == 2
    assert counts["failures"] == 1 and counts["solved"] == 1


def test_a_repair_keeps_its_attempt_when_unscored_samples_stand_before_it():
    ys = [text(WRONG, None), text([4, 4, 4, END]), text(WRONG)]
    rows, _ = ROWS(group_of(ys, [(2, text(RIGHT, 1.0))]))
    assert [row.token_ids for row in rows] == [[4, 4, 4, END], WRONG, RIGHT]
    assert [all(marked(r.advantages)) for r in rows] == [True, False, False]


def test_a_group_of_unscored_samples_has_no_rows_and_is_flat():
    rows, counts = CREDITS["ibpo"](group_of([text(WRONG, None)] * 3))
    assert rows == [] and counts["flat"] == 1 and counts["unscored"] == 3


def test_a_row_whose_lists_differ_in_length_is_refused():
    CreditedRow([7], [1, 2], [-1.0, -1.0], [0.0, 0.0])
    for bad in (
        ([7], [1], [-1.0, -1.0], [0.0, 0.0]),
        ([7], [1, 2], [-1.0], [0.0, 0.0]),
        ([7], [1, 2], [-1.0, -1.0], [0.0]),
        ([], [1, 2], [-1.0, -1.0], [0.0, 0.0]),
    ):
        with pytest.raises(ValueError):
            CreditedRow(*bad)


# ---- A slow, obvious second implementation -------------------------------------------------------


@cache
def tails(a, b):
    """distance[i][j] = Levenshtein distance of a[i:] and b[j:], by dynamic programming."""
    distance = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in range(len(a), -1, -1):
        for j in range(len(b), -1, -1):
            if i == len(a) or j == len(b):
                distance[i][j] = (len(a) - i) + (len(b) - j)
            else:
                distance[i][j] = min(
                    distance[i + 1][j] + 1,
                    distance[i][j + 1] + 1,
                    distance[i + 1][j + 1] + (a[i] != b[j]),
                )
    return distance


def distance_of(a, b):
    return tails(tuple(a), tuple(b))[0][0]


@cache
def valid_marks(a, b, a_finished, b_finished):
    """The marks of every optimal alignment of a and b that keeps their whole common prefix."""
    distance = tails(a, b)

    def end(ids, finished):
        return {len(ids) - 1} if finished and ids else set()

    @cache
    def walk(i, j):
        """All pairs (marked positions of a, of b) of optimal alignments of a[i:] and b[j:]."""
        if (i, j) == (len(a), len(b)):
            return {(frozenset(), frozenset())}
        at_a = {i} if i < len(a) else end(a, a_finished)
        at_b = {j} if j < len(b) else end(b, b_finished)
        found = set()
        for di, dj in ((1, 1), (1, 0), (0, 1)):
            if i + di > len(a) or j + dj > len(b):
                continue
            kept = (di, dj) == (1, 1) and a[i] == b[j]
            if distance[i][j] == distance[i + di][j + dj] + (not kept):
                marks = (set(), set()) if kept else (at_a, at_b)
                found |= {(x | marks[0], y | marks[1]) for x, y in walk(i + di, j + dj)}
        return found

    prefix = 0
    while prefix < min(len(a), len(b)) and a[prefix] == b[prefix]:
        prefix += 1
    assert distance[prefix][prefix] == distance[0][0]  # keeping the prefix costs nothing
    return [
        ([k in x for k in range(len(a))], [k in y for k in range(len(b))])
        for x, y in walk(prefix, prefix)
    ]


def valid(y, other):
    return valid_marks(tuple(y.token_ids), tuple(other.token_ids), y.finished, other.finished)


def nearest(y, others):
    """The first of the closest."""
    best = None
    for other in others:
        d = distance_of(y.token_ids, other.token_ids)
        if best is None or d < best[0]:
            best = d, other
    return best[1]


def slow_credit(group, credit):
    """ESTIMATOR.md, steps 3 to 7. [(ids, old log-probabilities, admissible advantages)], counts.

    Optimal alignments are not unique, so each row has a list of the advantages that it may have.
    """
    counts = Counter()
    rows, repair_of = [], {}
    members = [(i, y) for i, y in enumerate(group.trajectories) if y.reward is not None]
    counts["unscored"] = len(group.trajectories) - len(members)

    def is_solved(y):
        return y.finished and y.reward >= 1

    shaped = []
    for i, y in members:
        phi = 0.0
        if not is_solved(y):
            own = [r for r in group.revisions if r.of == i]
            if own:
                phi = statistics.fmean(1.0 if is_solved(r.trajectory) else 0.0 for r in own)
            usable = [
                r.trajectory
                for r in own
                if is_solved(r.trajectory) and r.trajectory.token_ids != y.token_ids
            ]
            if usable:
                repair_of[i] = nearest(y, usable)
        shaped.append(y.reward + credit.repair_bonus * phi)

    baseline = list(shaped)
    if credit.revision_rows == "plain" and credit.rows_in_baseline:
        baseline += [y.reward for y in repair_of.values()]
    flat = len(set(baseline)) <= 1

    def advantage(reward):
        if flat:
            return 0.0
        return (reward - statistics.fmean(baseline)) / (statistics.stdev(baseline) + 1e-4)

    for (i, y), reward in zip(members, shaped, strict=True):
        a = advantage(reward)
        counterfactual = None
        if is_solved(y):
            failures = [o for _, o in members if not is_solved(o)]
            if credit.mask_solved and failures:
                counterfactual = nearest(y, failures)
        else:
            counts["failures"] += 1
            counts["would_be_positive"] += a > 0
            if credit.clamp_failed and a > 0:
                a = 0.0
            if credit.mask_failed:
                solved = [o for _, o in members if is_solved(o)]
                if credit.counterfactuals in ("revisions", "both") and i in repair_of:
                    counterfactual = repair_of[i]
                elif credit.counterfactuals in ("siblings", "both") and solved:
                    counterfactual = nearest(y, solved)
        everything = [True] * len(y.token_ids)
        masks = [everything]
        if counterfactual is not None:
            masks = [
                m if sum(m) <= credit.max_edit_fraction * len(m) else everything
                for m, _ in valid(y, counterfactual)
            ]
        rows.append((y.token_ids, y.logprobs, [[a if c else 0.0 for c in m] for m in masks]))

    if credit.revision_rows == "plain":
        for i, repair in repair_of.items():
            a = advantage(repair.reward)
            masks = [m for _, m in valid(group.trajectories[i], repair)]
            if credit.uniform_rows:
                masks = [[True] * len(repair.token_ids)]
            old = next(r.plain_logprobs for r in group.revisions if r.trajectory is repair)
            rows.append((repair.token_ids, old, [[a if c else 0.0 for c in m] for m in masks]))
        counts["revision_rows"] = len(repair_of)
    counts["flat"], counts["rows"] = int(flat), len(rows)
    counts["solved"] = sum(is_solved(y) for _, y in members)
    return rows, counts


@st.composite
def texts(draw, rewards=(0.0, 0.0, 0.5, 1.0, 1.0, None)):
    ids = draw(st.lists(st.integers(1, 3), max_size=6))
    ended = draw(st.booleans()) or not ids
    return text(ids + [END] * ended, draw(st.sampled_from(rewards)))


@st.composite
def groups(draw):
    ys = draw(st.lists(texts(), min_size=2, max_size=6))
    repairs = []
    for i, y in enumerate(ys):
        if y.reward is not None and not y.solved:
            for repair in draw(st.lists(texts((0.0, 0.5, 1.0, 1.0)), max_size=3)):
                if draw(st.booleans()):  # a small edit of the attempt
                    at = draw(st.integers(0, len(y.token_ids) - 1))
                    new = draw(st.lists(st.integers(1, 3), max_size=2))
                    ids = y.token_ids[:at] + new + y.token_ids[at + 1 :]
                    repair = text(ids if ids[-1:] == [END] else ids + [END], repair.reward)
                repairs.append((i, repair))
    return group_of(ys, draw(st.permutations(repairs)))


switches = st.builds(
    lambda counterfactuals, bonus, fraction, rows, flags: Credit(
        counterfactuals,
        2,
        "all",
        repair_bonus=bonus,
        max_edit_fraction=fraction,
        revision_rows=rows,
        **dict(zip(("clamp_failed", "mask_failed", "mask_solved"), flags, strict=False)),
        uniform_rows=flags[3],
        rows_in_baseline=flags[4],
    ),
    st.sampled_from(["none", "revisions", "siblings", "both"]),
    st.sampled_from([0.0, 0.3, 0.6]),
    st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    st.sampled_from(["none", "plain"]),
    st.lists(st.booleans(), min_size=5, max_size=5),
)


def agree(group, credit):
    """The credit and the slow one agree on a group, which stays as it was."""
    before = copy.deepcopy(group)
    rows, counts = credit(group)
    assert group == before
    expected, expected_counts = slow_credit(group, credit)
    assert len(rows) == len(expected)
    for row, (ids, old, admissible) in zip(rows, expected, strict=True):
        assert row.prompt_ids == group.prompt_ids
        assert row.token_ids == ids and row.old_logprobs == old
        assert any(row.advantages == pytest.approx(one, abs=1e-9) for one in admissible)
    for name, value in expected_counts.items():
        assert counts[name] == value, name


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(groups())
def test_every_preset_agrees_with_a_slow_implementation(group):
    for credit in CREDITS.values():
        agree(group, credit)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(groups(), switches)
def test_every_combination_of_switches_agrees_with_a_slow_implementation(group, credit):
    agree(group, credit)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(texts(), texts())
def test_marks_are_those_of_an_optimal_alignment_that_keeps_the_common_prefix(y, other):
    before = copy.deepcopy((y, other))
    found = changed_tokens(y.token_ids, other.token_ids, y.finished, other.finished)
    assert found in valid(y, other)
    assert (y, other) == before


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(groups(), min_size=2, max_size=4), st.sampled_from(sorted(CREDITS)))
def test_the_order_of_groups_does_not_matter(several, name):
    credit = CREDITS[name]
    assert [credit(g) for g in several] == [credit(g) for g in reversed(several)][::-1]


def test_the_order_of_the_samples_within_a_group_does_not_matter():
    ys = [text(RIGHT, 1.0), text(WRONG), text([4, 4, END], 0.5), text([1, 2, 8, 8, END])]
    repairs = {1: text([1, 2, 9, END], 1.0), 3: text([1, 2, 8, END], 1.0)}

    def credited(order):
        moved = [(order.index(i), y) for i, y in repairs.items()]
        rows, _ = CREDITS["ibpo"](group_of([ys[i] for i in order], moved))
        return {tuple(row.token_ids): row.advantages for row in rows}

    first, second = credited([0, 1, 2, 3]), credited([3, 1, 0, 2])
    assert len(first) == 6 and first.keys() == second.keys()
    for ids in first:
        assert first[ids] == pytest.approx(second[ids], abs=1e-12)


# ---- Presets and switches ------------------------------------------------------------------------

# The table of ESTIMATOR.md. "-" means that the switch plays no part: off.
PRESETS = """
name           counterfactuals  K  revised  bonus  clamp  mask  rows   uniform  baseline  reference
grpo           none             -  0        0      -      no    none   no       no        sibling
ibpo-shaping   revisions        3  all      0.3    no     no    none   no       no        sibling
ibpo-mask      revisions        3  all      0      -      yes   none   no       no        sibling
ibpo-siblings  siblings         -  0        0      -      yes   none   no       no        sibling
ibpo           revisions        3  all      0.3    yes    yes   plain  no       yes       sibling
ibpo-lean      both             2  1        0      -      yes   plain  no       yes       sibling
repair-rows    revisions        2  1        0      -      no    plain  yes      yes       sibling
resample       revisions        2  1        0      -      no    plain  yes      yes       resample
shuffled       both             2  1        0      -      yes   plain  no       yes       other_problem
"""  # noqa: E501
TABLE = [line.split() for line in PRESETS.strip().splitlines()[1:]]


@pytest.mark.parametrize("line", TABLE, ids=[line[0] for line in TABLE])
def test_every_preset_is_its_row_of_the_table(line):
    name, counterfactuals, k, revised, bonus, clamp, mask, rows, uniform, baseline, reference = line
    credit = CREDITS[name]
    assert credit.counterfactuals == counterfactuals
    assert credit.references == (0 if k == "-" else int(k))
    assert credit.revised_failures_per_group == ("all" if revised == "all" else int(revised))
    assert credit.repair_bonus == float(bonus)
    assert credit.clamp_failed is (clamp == "yes")
    assert credit.mask_failed is (mask == "yes")
    assert credit.revision_rows == rows
    assert credit.uniform_rows is (uniform == "yes")
    assert credit.rows_in_baseline is (baseline == "yes")
    assert credit.reference_from == reference
    assert credit.mask_solved is False and credit.max_edit_fraction == 0.5


def test_there_is_no_preset_outside_the_table():
    assert sorted(CREDITS) == sorted(line[0] for line in TABLE)


def test_switches_change_a_preset_and_nothing_else():
    given = "references = 2, mask_solved=true,repair_bonus=0.5,revised_failures_per_group=4"
    found = credit_of(Config(credit="ibpo", switches=given))
    assert found == Credit(
        "revisions", 2, 4, repair_bonus=0.5, clamp_failed=True, mask_failed=True,
        mask_solved=True, revision_rows="plain", rows_in_baseline=True,
    )  # fmt: skip
    assert credit_of(Config(credit="ibpo-lean", switches="revised_failures_per_group=all")) == (
        Credit("both", 2, "all", mask_failed=True, revision_rows="plain", rows_in_baseline=True)
    )
    assert all(credit_of(Config(credit=name)) == credit for name, credit in CREDITS.items())


@pytest.mark.parametrize("name", CREDITS)
def test_every_preset_passes_the_check(name):
    Config(credit=name).check()


@pytest.mark.parametrize(
    "changes, name, value",
    [
        ({"group_size": 1}, "group_size", "1"),
        ({"problems_per_step": 0}, "problems_per_step", "0"),
        ({"minibatches": 9, "problems_per_step": 8}, "minibatches", "9"),
        ({"minibatches": 0}, "minibatches", "0"),
        ({"microbatch_tokens": 0}, "microbatch_tokens", "0"),
        ({"temperature": 0.0}, "temperature", "0.0"),
        ({"temperature": math.nan}, "temperature", "nan"),
        ({"learning_rate": math.inf}, "learning_rate", "inf"),
        ({"clip_low": 1.1}, "clip_low", "1.1"),
        ({"clip_high": 0.9}, "clip_high", "0.9"),
        ({"max_new_tokens": 0}, "max_new_tokens", "0"),
        ({"credit": "gpro"}, "credit", "gpro"),
        ({"objective": "ppo"}, "objective", "ppo"),
        ({"credit": "ibpo", "group_size": 2}, "references", "3"),
        (
            {"credit": "shuffled", "problems_per_step": 1, "minibatches": 1},
            "problems_per_step",
            "1",
        ),
        ({"switches": "mask_faild=true"}, "mask_failed", "mask_faild"),
        ({"switches": "mask_failed=maybe"}, "mask_failed", "maybe"),
        ({"switches": "mask_failed"}, "mask_failed", "''"),
        ({"switches": "counterfactuals=brothers"}, "counterfactuals", "brothers"),
        ({"switches": "reference_from=gold"}, "reference_from", "gold"),
        ({"switches": "revision_rows=all"}, "revision_rows", "all"),
        ({"switches": "revised_failures_per_group=-1"}, "revised_failures_per_group", "-1"),
        ({"switches": "revised_failures_per_group=few"}, "revised_failures_per_group", "few"),
        ({"switches": "references=0"}, "references", "0"),
        ({"switches": "references=-1"}, "references", "-1"),
        ({"switches": "references=-1", "credit": "grpo"}, "references", "-1"),
        ({"switches": "references=2", "credit": "grpo"}, "references", "2"),
        ({"switches": "references=2.5"}, "references", "2.5"),
        ({"switches": "references=all"}, "references", "all"),
        ({"switches": "max_edit_fraction=1.5"}, "max_edit_fraction", "1.5"),
        ({"switches": "max_edit_fraction=nan"}, "max_edit_fraction", "nan"),
        ({"switches": "max_edit_fraction=all"}, "max_edit_fraction", "all"),
        ({"switches": "repair_bonus=much"}, "repair_bonus", "much"),
        ({"switches": "repair_bonus=all"}, "repair_bonus", "all"),
        ({"switches": "repair_bonus=nan"}, "repair_bonus", "nan"),
        ({"switches": "repair_bonus=inf"}, "repair_bonus", "inf"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line_with_its_name_and_what_is_allowed(
    changes, name, value
):
    with pytest.raises(ValueError) as error:
        Config(**changes).check()
    message, _, allowed = str(error.value).partition("allowed: ")
    assert "\n" not in str(error.value) and allowed
    assert name in str(error.value) and value in message


@pytest.mark.parametrize(
    "changes, choices",
    [
        ({"credit": "gpro"}, list(CREDITS)),
        ({"objective": "ppo"}, list(ibpo_minimal.OBJECTIVES)),
        ({"switches": "counterfactuals=x"}, ["none", "revisions", "siblings", "both"]),
        ({"switches": "reference_from=x"}, ["sibling", "other_problem", "resample"]),
        ({"switches": "revision_rows=x"}, ["none", "plain"]),
    ],
)
def test_a_wrong_choice_is_refused_with_every_right_one(changes, choices):
    with pytest.raises(ValueError) as error:
        Config(**changes).check()
    assert all(choice in str(error.value).partition("allowed: ")[2] for choice in choices)


# ---- Pairing: which failures are revised, and what they are shown --------------------------------


class Prompts:
    """A task and a policy whose prompts are the strings that they were built from."""

    max_tokens = 5
    device = "cpu"

    def compare_prompt(self, problem, attempt, reference):
        return f"{problem.prompt}|{attempt}|{reference}"

    def verify(self, problem, text):
        return Verdict(1.0, "2", "")

    def encode(self, prompt):
        return [prompt]

    def quotable(self, text):
        return f"<{text}>"


@pytest.fixture
def revised(monkeypatch):
    """revised(groups, credit, seed): revise the groups; returns the prompts that were sampled."""
    prompts = []

    def sample(policy, given, copies, limit, temperature, generator):
        assert copies == 1
        prompts.extend(given)
        return [text(RIGHT) for _ in given]

    def old_logprobs(policy, pairs, config):
        return [[-0.5] * len(ids) for _, ids in pairs]

    monkeypatch.setattr(ibpo_minimal, "sample", sample)
    monkeypatch.setattr(ibpo_minimal, "old_logprobs", old_logprobs)

    def run(groups, credit, seed=0):
        prompts.clear()
        revise(Prompts(), Prompts(), groups, credit, Config(), random.Random(seed), None)
        return list(prompts)

    return run


def named(prompt, rewards):
    """A group whose samples are called prompt0, prompt1, ..."""
    group = group_of([text(WRONG, r, f"{prompt}{i}") for i, r in enumerate(rewards)])
    group.problem, group.prompt_ids = Problem(prompt, "2"), [prompt]
    return group


def test_each_failure_meets_k_minus_1_siblings_solved_ones_first(revised):
    for seed in range(10):
        group = named("a", [0.0, 1.0, 0.0, 0.0, None])
        revised([group], CREDITS["ibpo"], seed)
        assert [r.of for r in group.revisions] == [0, 0, 2, 2, 3, 3]  # never solved or unscored
        for i in (0, 2, 3):
            first, second = [r.reference for r in group.revisions if r.of == i]
            assert first == "<a1>" and second in {"<a0>", "<a2>", "<a3>", "<a4>"} - {f"<a{i}>"}


def test_the_prompt_shows_the_attempt_and_the_reference_made_quotable(revised):
    group = named("a", [0.0, 1.0])
    assert revised([group], CREDITS["ibpo-lean"]) == [["a|<a0>|<a1>"]]
    assert group.revisions[0].reference == "<a1>"


def test_k_1_means_no_reference(revised):
    group = named("a", [0.0, 1.0])
    assert revised([group], Credit("revisions", 1, "all")) == [["a|<a0>|None"]]
    assert group.revisions[0].reference is None


def test_the_order_of_references_is_drawn_within_each_class(revised):
    drawn = set()
    for seed in range(40):
        group = named("a", [0.0, 1.0, 1.0, 0.0])
        revised([group], Credit("revisions", 4, "all"), seed)
        drawn.add(tuple(r.reference for r in group.revisions if r.of == 0))
    assert drawn == {("<a1>", "<a2>", "<a3>"), ("<a2>", "<a1>", "<a3>")}


def test_the_cap_draws_which_failures_are_revised_from_the_seed(revised):
    def draw(seed):
        group = named("a", [0.0, 1.0, 0.0, 0.0])
        revised([group], CREDITS["ibpo-lean"], seed)
        return [r.of for r in group.revisions]

    drawn = [draw(seed) for seed in range(30)]
    assert {tuple(d) for d in drawn} == {(0,), (2,), (3,)}
    assert drawn == [draw(seed) for seed in range(30)]


def test_shuffled_shows_an_attempt_at_another_problem_solved_ones_first(revised):
    for seed in range(10):
        groups = [named("a", [0.0, 1.0]), named("b", [0.0, 1.0]), named("c", [0.0, 0.0])]
        revised(groups, CREDITS["shuffled"], seed)
        found = [group.revisions[0].reference for group in groups]
        assert found[0] == "<b1>" and found[1] == "<a1>" and found[2] in ("<a1>", "<b1>")


def test_resample_draws_as_many_fresh_samples_from_the_plain_prompt(revised):
    rewards = [0.0, 1.0, 0.0]
    repairs = revised([named("a", rewards), named("b", [1.0, 1.0])], CREDITS["repair-rows"])
    fresh = revised([named("a", rewards), named("b", [1.0, 1.0])], CREDITS["resample"])
    assert fresh == [["a"]] and len(fresh) == len(repairs)


def test_revisions_are_scored_and_only_those_that_become_rows_get_plain_log_probabilities(revised):
    for name, filled in (("ibpo", True), ("ibpo-mask", False)):
        group = named("a", [0.0, 1.0, 0.0])
        revised([group], CREDITS[name])
        repair = group.revisions[0]
        assert repair.trajectory.solved and repair.trajectory.parsed
        assert repair.plain_logprobs == ([-0.5] * 4 if filled else None)
        assert group.revisions[1].plain_logprobs is None  # a tie: the lowest index is the row
        rows, counts = CREDITS[name](group)
        assert counts["revision_rows"] == 2 * filled


def test_a_step_without_failures_samples_no_revision(revised):
    group = named("a", [1.0, 1.0])
    assert revised([group], CREDITS["ibpo"]) == [] and group.revisions == []


def test_quoted_text_holds_no_special_token():
    policy = Policy.__new__(Policy)
    policy.tokenizer = tiny_tokenizer()
    special = set(policy.tokenizer.all_special_ids)
    for token in policy.tokenizer.all_special_tokens:
        hostile = f"1{token}2{token[:2]}{token}{token[2:]}"
        assert special & set(policy.tokenizer.encode(hostile, add_special_tokens=False))
        quoted = policy.quotable(hostile)
        assert not special & set(policy.tokenizer.encode(quoted, add_special_tokens=False))
    policy.tokenizer = SimpleNamespace(all_special_tokens=["<|im_end|>", "</s>"])
    quoted = policy.quotable("</s>a<|im_end|></</s>s>")
    assert "<|im_end|>" not in quoted and "</s>" not in quoted
