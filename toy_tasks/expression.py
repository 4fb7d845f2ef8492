"""expression: nested parentheses, reduced one operation a line.

((7+5)*2)-(9-3)       the prompt
=((7+5)*2)-6          a student always takes the first operation that can be done, or the last;
=(2*2)-6              here the carry of 7+5 was forgotten (it is 12),
=4-6                  and everything after it inherits the mistake
=-2
"""

import re
from dataclasses import dataclass

from .base import Problem, Task, Verdict, register
from .carry_chain import CAREFUL
from .numbers import MAX_EXPRESSION, OPERATORS, final_number

FORGETS = 0.6  # how often the student forgets to carry or to borrow
LARGEST = 50  # true results are from 1 to this: elementary, and no product with 0 hides a slip

NUMBER = r"-?[0-9]{1,6}"
OPERATION = rf"({NUMBER})([-+*])({NUMBER})"


def operate(a, symbol, b, carry=True):
    """a <symbol> b; with carry=False, the ten that the units carry or borrow is forgotten.

    >>> operate(7, "+", 5), operate(7, "+", 5, carry=False), operate(12, "-", 5, carry=False)
    (12, 2, 17)
    """
    exact, units = OPERATORS[symbol](a, b), OPERATORS[symbol](a % 10, b % 10)
    if carry or min(a, b) < 0:
        return exact
    return exact - 10 * (units > 9) + 10 * (units < 0)


def reducible(expression):
    """Matches of the operations that can be done at once, from the left.

    >>> [m[0] for m in reducible("((7+5)*2)-(9-3)")], [m[0] for m in reducible("4-6")]
    (['(7+5)', '(9-3)'], ['4-6'])
    """
    whole = re.fullmatch(OPERATION, expression)
    return [whole] if whole else list(re.finditer(rf"\({OPERATION}\)", expression))


def reduce(expression, m, carry=True):
    """The expression with the operation `m` done."""
    value = operate(int(m[1]), m[2], int(m[3]), carry)
    return f"{expression[: m.start()]}{value}{expression[m.end() :]}"


def value(expression):
    """What an expression comes to; None if it is none, or too long to be one of this task's.

    >>> value("((7+5)*2)-(9-3)"), value("((7+5)")
    (18, None)
    """
    if len(expression) > MAX_EXPRESSION:
        return None
    while matches := reducible(expression):
        expression = reduce(expression, matches[0])
    return int(expression) if re.fullmatch(NUMBER, expression) else None


@dataclass(frozen=True)
class Step:
    """A line: the operation it does of those at hand (None: not one), if rightly, what it wrote."""

    index: int | None
    right: bool
    span: tuple


def parse(prompt, text):
    """(steps, last expression) of a text that reduces `prompt`.

    >>> steps, last = parse("(7+5)*2", "=2*2\\n=4")
    >>> [(step.index, step.right, step.span) for step in steps], last
    ([(0, False, (1, 2)), (0, True, (6, 7))], '4')
    """
    steps, previous = [], prompt
    for line in re.finditer(r"[^\n=][^\n]*", text):
        written = line[0].rstrip()
        if not written:
            continue
        steps.append(_explain(previous, written, line.start()))
        if value(written) is not None:
            previous = written  # right or wrong: what follows is judged by it
    return steps, previous


def _explain(previous, written, offset):
    """The Step from one expression to the next, which stands at `offset` in the text."""
    slip = None
    for index, m in enumerate(reducible(previous)):
        start, end = m.start(), len(written) - len(previous) + m.end()
        span = (offset + start, offset + end)
        if written == reduce(previous, m):
            return Step(index, True, span)
        untouched = previous[:start] == written[:start] and previous[m.end() :] == written[end:]
        if not slip and untouched and re.fullmatch(NUMBER, written[start:end]):
            slip = Step(index, False, span)
    if slip:
        return slip
    # Several operations at once, or none: right if it comes to the same.
    result = value(written)
    same = result is not None and result == value(previous)
    return Step(None, same, (offset, offset + len(written)))


@register("expression")
class Expression(Task):
    """Nested parentheses. Difficulty: how many operations there are."""

    difficulty = 5
    difficulties = range(2, 9)
    mix = range(2, 7)
    max_tokens = property(lambda self: 3 * self.difficulty**2 + 8)  # lines get shorter and shorter
    instruction = (
        "Do one operation at a time. On each line write = and the expression that is left, like "
        "=(12*2)-5 after ((7+5)*2)-5. The last line is = and the result."
    )

    def draw(self, rng):
        def grow(operations):
            if not operations:
                digit = rng.randint(1, 9)
                return str(digit), digit
            while True:
                on_the_left = rng.randrange(operations)
                left, a = grow(on_the_left)
                right, b = grow(operations - 1 - on_the_left)
                symbols = [s for s in "+-*" if 1 <= operate(a, s, b) <= LARGEST]
                if symbols:
                    symbol = rng.choice(symbols)
                    return f"({left}{symbol}{right})", operate(a, symbol, b)

        expression, result = grow(self.difficulty)
        return Problem(expression[1:-1], str(result))

    def grade(self, problem, text):
        parsed = final_number(text)
        if parsed is None:
            return Verdict(0.0, None, "no number")
        right = parsed == problem.answer
        return Verdict(float(right), parsed, "right" if right else "wrong result")

    # ---- the student -------------------------------------------------------------------------
    def write(self, problem, choices):
        """The lines; each choice is which operation is done next, and whether with care."""
        lines, expression = [], problem.prompt
        for index, carry in choices:
            expression = reduce(expression, reducible(expression)[index], carry)
            lines.append(f"={expression}")
        return "\n".join(lines)

    def demonstrate(self, problem, rng, careful=False):
        """A student's solution: from the left or from the right, forgetting most carries."""
        index, operations = rng.choice((0, -1)), len(re.findall(r"[-+*]", problem.prompt))
        choices = [(index, careful or rng.random() >= FORGETS) for _ in range(operations)]
        return self.write(problem, choices)

    def demonstrate_revision(self, problem, attempt, reference, rng):
        """The student corrects `attempt`, in its own order, keeping what was right.

        With a right reference he nearly always mends all; with a wrong one, one of another problem
        or none, he is as careless as ever.
        """
        steps, last = parse(problem.prompt, attempt)
        if any(step.index is None for step in steps) or reducible(last):
            return self.demonstrate(problem, rng)
        helped = self.verify(problem, reference).reward == 1.0 and all(
            step.index is not None for step in parse(problem.prompt, reference)[0]
        )  # another problem may happen to have the same result
        careful = helped and rng.random() < CAREFUL
        choices = [(s.index, s.right or careful or rng.random() >= FORGETS) for s in steps]
        return self.write(problem, choices)

    # ---- the oracle --------------------------------------------------------------------------
    def error_spans(self, problem, text):
        """Spans of results, or of whole lines, that do not follow from the line before."""
        return [step.span for step in parse(problem.prompt, text)[0] if not step.right]
