"""column_addition: two long numbers added digit by digit from the right, with the carry written.

    478+356               the prompt
    8+6=14                a column: its two digits
    7+5+0=12              and the carry of the column before; here it was forgotten (it is 1)
    4+3+1=8
    =824                  the units of the columns, read upwards

Everything after a forgotten carry may inherit the mistake, and every right solution looks the same.
"""

import re
from dataclasses import dataclass

from .base import Problem, Task, Verdict, register
from .carry_chain import CAREFUL
from .numbers import final_number

FORGETS = 0.6  # how often the student forgets a carry that is due


@dataclass(frozen=True)
class Column:
    """A column as it was written; `carry` is None where it has no third term."""

    digits: tuple
    carry: int | None
    total: int
    match: re.Match


def parse(text):
    """The columns of a text, from the right.

    >>> [(c.digits, c.carry, c.total) for c in parse("8+6=14\\n7+5+0=12\\n=24")]
    [((8, 6), None, 14), ((7, 5), 0, 12)]
    """
    pattern = r"^([0-9])\+([0-9])(?:\+([0-9]))?=([0-9]{1,2})$"
    return [
        Column((int(m[1]), int(m[2])), int(m[3]) if m[3] else None, int(m[4]), m)
        for m in re.finditer(pattern, text, re.MULTILINE)
    ]


def read_upwards(totals):
    """The sum that the totals of the columns spell.

    >>> read_upwards([14, 12, 8]), read_upwards([14, 13])
    (824, 134)
    """
    carried = totals[-1] // 10 * 10 ** len(totals)
    return carried + sum(total % 10 * 10**i for i, total in enumerate(totals))


@register("column_addition")
class ColumnAddition(Task):
    """Column addition of two numbers. Difficulty: how many digits each has."""

    difficulty = 5
    difficulties = range(2, 13)
    mix = range(2, 7)
    # For each of them a line like "9+9+1=19", a digit of the sum, and air.
    max_tokens = property(lambda self: 12 * self.difficulty)
    instruction = (
        "Add digit by digit from the right, a column on each line: its two digits, then the carry "
        "of the column before (0 if there is none), like 7+5+1=13; the first column, like 8+6=14, "
        "has no carry. The last line is = and the sum."
    )

    def draw(self, rng):
        low, high = 10 ** (self.difficulty - 1), 10**self.difficulty
        a, b = rng.randrange(low, high), rng.randrange(low, high)
        columns = tuple((a // 10**i % 10, b // 10**i % 10) for i in range(self.difficulty))
        return Problem(f"{a}+{b}", str(a + b), columns)

    def grade(self, problem, text):
        parsed = final_number(text)
        if parsed is None:
            return Verdict(0.0, None, "no number")
        right = parsed == problem.answer
        return Verdict(float(right), parsed, "right" if right else "wrong sum")

    # ---- the student -------------------------------------------------------------------------
    def write(self, problem, remembers):
        """The columns; remembers[i] says whether column i gets the carry that it is due."""
        lines, totals = [], []
        for (a, b), remember in zip(problem.data, remembers, strict=True):
            carry = totals[-1] // 10 if totals and remember else 0
            lines.append(f"{a}+{b}+{carry}={a + b + carry}" if totals else f"{a}+{b}={a + b}")
            totals.append(a + b + carry)
        return "\n".join([*lines, f"={read_upwards(totals)}"])

    def demonstrate(self, problem, rng, careful=False):
        """A student's solution, forgetting most carries unless careful."""
        return self.write(problem, [careful or rng.random() >= FORGETS for _ in problem.data])

    def demonstrate_revision(self, problem, attempt, reference, rng):
        """The student corrects `attempt`, keeping the carries that he did not forget.

        With a right reference he nearly always mends all; with a wrong one, one of another problem
        or none, he is as careless as ever.
        """
        columns = parse(attempt)
        if tuple(column.digits for column in columns) != problem.data:
            return self.demonstrate(problem, rng)
        helped = self.verify(problem, reference).reward == 1.0
        careful = helped and rng.random() < CAREFUL
        due = [0, *(column.total // 10 for column in columns)]
        kept = [(c.carry or 0) == carry for c, carry in zip(columns, due, strict=False)]
        return self.write(problem, [k or careful or rng.random() >= FORGETS for k in kept])

    # ---- the oracle --------------------------------------------------------------------------
    def error_spans(self, problem, text):
        """Spans of digits that are not the column's, carries that are not due, and wrong sums."""
        spans, columns, due = [], parse(text), 0
        for i, column in enumerate(columns):
            m = column.match
            if i >= len(problem.data):
                spans.append(m.span())  # the problem has no such column
                continue
            if sorted(column.digits) != sorted(problem.data[i]):
                right = problem.data[i]
                spans += [m.span(j + 1) for j in (0, 1) if column.digits[j] != right[j]]
            if column.carry not in (None, due):
                spans.append(m.span(3))
            # A carry that is not written may still have been counted, and should have been.
            if column.total != sum(column.digits) + (due if column.carry is None else column.carry):
                spans.append(m.span(4))
            due = column.total // 10
        result = re.search(r"^=([0-9]{1,40})\s*\Z", text, re.MULTILINE)
        if result:
            complete = len(columns) == len(problem.data)
            follows = read_upwards([c.total for c in columns]) if complete else int(problem.answer)
            if int(result[1]) != follows:
                spans.append(result.span(1))
        return spans
