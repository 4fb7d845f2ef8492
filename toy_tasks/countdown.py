"""countdown: reach the target with an expression that uses each number exactly as often as given.

    25,3,7,11:79          the prompt: the numbers, and the target
    25*3=75               a student carries out a plan that works, in an order of his own,
    11-11=4               but copies badly: here he wrote 11 once more, in place of 7,
    75+4=79
    (25*3)+(11-11)        and here again

Many answers are right, so the verifier works out the expression and compares it with the target,
not with a solution.
"""

import operator
import re
from collections import Counter

from .base import Problem, Task, Verdict, register
from .carry_chain import CAREFUL
from .numbers import TYPESET, evaluate, final_expression

SLIPS = 0.5  # how often the student writes the number before once more, in place of the next one
LARGEST = 99  # of all results on the way

STEP = r"^(([0-9]{1,9})[-+*/]([0-9]{1,9}))=([0-9]{1,9})$"

# Plans hold whole numbers only.
EXACT = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


def symbols_for(a, b):
    """The operators with which `a` and `b` give a new whole number from 1 to LARGEST.

    >>> symbols_for(12, 4), symbols_for(4, 12), symbols_for(60, 70)
    (['+', '-', '*', '/'], ['+', '*'], [])
    """
    fits = {"+": True, "-": a > b, "*": min(a, b) > 1, "/": b > 1 and a % b == 0}
    return [s for s, fit in fits.items() if fit and EXACT[s](a, b) <= LARGEST]


def orders(plan):
    """All ways to carry out a plan that differ in which operand of a + or * comes first.

    A plan is the position of a number, or (plan, operator, plan).

    >>> list(orders(((0, "-", 1), "*", 2)))
    [((0, '-', 1), '*', 2), (2, '*', (0, '-', 1))]
    """
    if isinstance(plan, int):
        yield plan
        return
    left, symbol, right = plan
    for a in orders(left):
        for b in orders(right):
            yield a, symbol, b
            if symbol in "+*":
                yield b, symbol, a


def spell(plan, numbers):
    """The solution as a list of tokens: text, or the position of a number that is to be copied.

    >>> "".join(map(str, spell(((0, "-", 1), "*", 2), (9, 4, 6))))
    '0-1=5\\n5*2=30\\n(0-1)*2'
    """
    steps = []

    def visit(plan):
        if isinstance(plan, int):
            return [plan], [plan], numbers[plan]
        left, symbol, right = plan
        (expression_a, name_a, a), (expression_b, name_b, b) = visit(left), visit(right)
        value = EXACT[symbol](a, b)
        steps.extend([*name_a, symbol, *name_b, f"={value}\n"])
        return ["(", *expression_a, symbol, *expression_b, ")"], [str(value)], value

    expression = visit(plan)[0]
    return [*steps, *expression[1:-1]]


def say(tokens, written):
    """The text of the tokens, the number at each position copied as `written` says."""
    return "".join(str(written[t]) if isinstance(t, int) else t for t in tokens)


@register("countdown")
class Countdown(Task):
    """Reach a target. Difficulty: how many numbers are given."""

    difficulty = 4
    difficulties = range(3, 7)
    mix = range(3, 5)
    # For each of them a line like "75+24=99", its part of the expression, and air.
    max_tokens = property(lambda self: 16 * self.difficulty)
    instruction = (
        "Write one expression that comes to the target (after the colon) and uses each number "
        "before it exactly as often as given, with only + - * / and parentheses. You may work it "
        "out step by step; the last line is the expression alone, like (25+50)+7."
    )

    def draw(self, rng):
        while True:
            numbers = tuple(rng.sample(range(1, 26), self.difficulty))
            plans = list(enumerate(numbers))  # (plan, value): at first each number is one
            while len(plans) > 1:
                (p, a), (q, b) = (plans.pop(rng.randrange(len(plans))) for _ in range(2))
                symbols = symbols_for(a, b)
                if not symbols:
                    break
                symbol = rng.choice(symbols)
                plans.append(((p, symbol, q), EXACT[symbol](a, b)))
            else:
                [(plan, target)] = plans
                prompt = f"{','.join(map(str, numbers))}:{target}"
                return Problem(prompt, str(target), (numbers, plan))

    def grade(self, problem, text):
        expression = final_expression(text)
        if expression is None:
            return Verdict(0.0, None, "no expression")
        try:
            value, used = evaluate(expression)
        except ValueError as error:
            return Verdict(0.0, expression, str(error))
        if Counter(used) != Counter(problem.data[0]):
            return Verdict(0.0, expression, "not the numbers given")
        right = value == int(problem.answer)
        return Verdict(float(right), expression, "right" if right else "not the target")

    # ---- the student -------------------------------------------------------------------------
    def demonstrate(self, problem, rng, careful=False):
        """A student's solution: a plan that works, in an order of his own, copied carelessly."""
        numbers, plan = problem.data
        tokens = spell(rng.choice(list(orders(plan))), numbers)
        written, before = {}, None
        for i in dict.fromkeys(t for t in tokens if isinstance(t, int)):
            slips = before is not None and not careful and rng.random() < SLIPS
            before = written[i] = before if slips else numbers[i]
        return say(tokens, written)

    def demonstrate_revision(self, problem, attempt, reference, rng):
        """The student corrects `attempt`, in its own order, keeping the numbers copied rightly.

        With a right reference he nearly always mends all; with a wrong one, one of another problem
        or none, he is as careless as ever.
        """
        numbers, plan = problem.data
        for order in orders(plan):
            tokens = spell(order, numbers)
            written = self.read(tokens, numbers, attempt)
            if written:
                break
        else:
            return self.demonstrate(problem, rng)
        helped = self.verify(problem, reference).reward == 1.0
        careful = helped and rng.random() < CAREFUL
        for i, number in written.items():
            if number != numbers[i] and (careful or rng.random() >= SLIPS):
                written[i] = numbers[i]
        return say(tokens, written)

    def read(self, tokens, numbers, text):
        """position -> number as `text` copies it; None if it is no copy of the tokens."""
        pattern = "".join("([0-9]{1,9})" if isinstance(t, int) else re.escape(t) for t in tokens)
        m = re.fullmatch(pattern, text.strip())
        if not m:
            return None
        positions = [t for t in tokens if isinstance(t, int)]
        written = dict(zip(positions, map(int, m.groups()), strict=True))
        before = None
        for i, number in written.items():
            if number not in (numbers[i], before):
                return None  # no slip of the student's: the numbers come in another order
            before = number
        return written if say(tokens, written) == text.strip() else None

    # ---- the oracle --------------------------------------------------------------------------
    def error_spans(self, problem, text):
        """Spans of numbers that are not there to be used (any more), and of wrong results.

        Where every step is right but the expression is not, what is wrong is the expression.
        """
        given, copied, results = Counter(problem.data[0]), Counter(), Counter()
        spans, end = [], 0
        for m in re.finditer(STEP, text, re.MULTILINE):
            end = m.end()
            missing = []
            for span in (m.span(2), m.span(3)):
                number = int(text[slice(*span)])
                if results[number]:
                    results[number] -= 1
                    continue
                copied[number] += 1
                if copied[number] > given[number]:
                    missing.append(span)
            # With a number miscopied, the result is that of the number meant: no second mistake.
            spans += missing if missing or _follows(m[1], int(m[4])) else [m.span(4)]
            results[int(m[4])] += 1

        expression = final_expression(text[end:])
        if expression is None:
            return spans
        start = end + text[end:].translate(TYPESET).rfind(expression)
        there = copied if end else given  # what the steps miscopied, the expression inherits
        for m in re.finditer(r"[0-9]{1,9}", expression):
            there[int(m[0])] -= 1
            if there[int(m[0])] < 0:
                spans.append((start + m.start(), start + m.end()))
        if not spans and self.verify(problem, text).reward < 1.0:
            spans.append((start, start + len(expression)))
        return spans


def _follows(operation, result):
    try:
        return evaluate(operation)[0] == result
    except ValueError:  # division by zero
        return False
