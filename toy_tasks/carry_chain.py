"""carry_chain: add up numbers one at a time, in an order of one's own.

    47+38+25+19           the prompt
    25+38^=63             a student starts anywhere and goes round, forwards or backwards;
    +47=100               a carry he remembers he marks with ^, here he forgot it (63+47 is 110),
    +19=119               and everything after it inherits the mistake

The order makes two right solutions look different, so a failed attempt can be corrected by
comparing but not by copying. The student who demonstrates it forgets a carry 70% of the time.
"""

import re
from dataclasses import dataclass

from .base import Problem, Task, Verdict, register
from .numbers import final_number

FORGETS = 0.7  # how often the student forgets a carry: most of the time, so RL has to turn it round
CAREFUL = 0.95  # how often the student is careful throughout when a right reference is at hand


def add(a, b, carry=True):
    """a + b; with carry=False, the carry of the units is dropped as the student drops it.

    >>> add(47, 38), add(47, 38, carry=False), add(41, 38, carry=False)
    (85, 75, 79)
    """
    return a + b if carry or a % 10 + b % 10 < 10 else a + b - 10


@dataclass(frozen=True)
class Addition:
    """One written addition: left + term = total, and where term and =total stand in the text."""

    left: int
    term: int
    total: int
    term_span: tuple
    total_span: tuple

    @property
    def right(self):
        return self.total == add(self.left, self.term)


@register("carry_chain")
class CarryChain(Task):
    """Running sums. Difficulty: how many two-digit numbers are added."""

    difficulty = 5
    difficulties = range(2, 13)
    mix = range(2, 10)
    max_tokens = property(lambda self: 9 * self.difficulty)
    instruction = (
        "Add the numbers one at a time. Write each addition on a line of its own, like 12+34=46 "
        "and then +50=96. The last line ends with the total."
    )

    def draw(self, rng):
        terms = tuple(rng.sample(range(10, 100), self.difficulty))
        return Problem("+".join(map(str, terms)), str(sum(terms)), terms)

    def grade(self, problem, text):
        parsed = final_number(text)
        if parsed is None:
            return Verdict(0.0, None, "no number")
        right = parsed == problem.answer
        return Verdict(float(right), parsed, "right" if right else "wrong total")

    # ---- the student -------------------------------------------------------------------------
    def write(self, order, carries):
        """The chain over `order`; carries[i] says whether the carry of addition i is remembered."""
        total, lines = order[0], []
        for term, carry in zip(order[1:], carries, strict=True):
            start = "" if lines else str(total)
            mark = "^" if carry and total % 10 + term % 10 >= 10 else ""
            total = add(total, term, carry)
            lines.append(f"{start}+{term}{mark}={total}")
        return "\n".join(lines)

    def demonstrate(self, problem, rng, careful=False):
        """A student's solution: in an order of his own, forgetting most carries unless careful."""
        terms = problem.data
        start, step = rng.randrange(len(terms)), rng.choice((1, -1))
        order = [terms[(start + step * i) % len(terms)] for i in range(len(terms))]
        return self.write(order, [careful or rng.random() >= FORGETS for _ in order[1:]])

    def demonstrate_revision(self, problem, attempt, reference, rng):
        """The student corrects `attempt`, in its own order, keeping what was right.

        With a right reference he knows that he must look for a slip and nearly always mends all;
        with a wrong one, one of another problem or none, he is as careless as ever.
        """
        order, additions = self.parse(attempt)
        if sorted(order) != sorted(problem.data):  # not a chain of this problem: start afresh
            return self.demonstrate(problem, rng)
        helped = self.verify(problem, reference or "").reward == 1.0
        careful = helped and rng.random() < CAREFUL
        remembers = [a.right or careful or rng.random() >= FORGETS for a in additions]
        return self.write(order, remembers)

    # ---- the oracle --------------------------------------------------------------------------
    def parse(self, text):
        """(order, additions): the numbers a chain adds up, in its order, and its additions."""
        order, additions = [], []
        for m in re.finditer(r"(?:(\d{1,9}) ?)?\+ ?(\d{1,9}) ?\^? ?(= ?(\d{1,9}))", text, re.ASCII):
            if m[1] and not additions:
                order.append(int(m[1]))
            elif not additions:
                continue  # a chain starts with two numbers
            left = int(m[1]) if m[1] else additions[-1].total
            additions.append(Addition(left, int(m[2]), int(m[4]), m.span(2), m.span(3)))
            order.append(int(m[2]))
        return order, additions

    def error_spans(self, problem, text):
        """Where the text is truly wrong, in order: (start, end) of each "=total" that does not
        follow from its own addition (a missing carry mark belongs before the "="), and of each
        number that is not the problem's or was used before.

        >>> task = CarryChain(3)
        >>> task.error_spans(Problem("47+38+25", "110", (47, 38, 25)), "47+38=75\\n+25=100")
        [(5, 8)]
        """
        order, additions = self.parse(text)
        unused, spans = list(problem.data), []
        if order and order[0] in unused:
            unused.remove(order[0])
        for addition in additions:
            if addition.term in unused:
                unused.remove(addition.term)
            else:
                spans.append(addition.term_span)
            if not addition.right:
                spans.append(addition.total_span)
        if not spans and self.verify(problem, text).reward == 0.0:
            spans.append((max(0, len(text) - 1), len(text)))  # it stops too early, or says nothing
        return spans
