"""worksheet: independent sums, worked in an order of one's own, all results repeated at the end.

    47+38,25+19,66+52     the prompt
    25+19=44              a student starts anywhere and goes round, forwards or backwards;
    47+38=75              here a carry was forgotten (it is 85),
    66+52=118
    75,44,118             and here the results in the order of the prompt repeat the mistake

The sums are independent, so two failures can be wrong in different places: where they differ, one
of them is wrong, and comparing two wrong attempts can make a right one. Where both forgot the same
carry there is nothing to see.
"""

import re
from dataclasses import dataclass

from .base import Problem, Task, Verdict, register
from .carry_chain import CAREFUL, add
from .numbers import final_list

FORGETS = 0.7  # how often the student forgets a carry: 22% of 4 sums, 15% of 5 come out all right


@dataclass(frozen=True)
class Sum:
    """A line of the worksheet as it was written; the spans are those of `a+b` and of the result."""

    terms: tuple
    result: int
    terms_span: tuple
    result_span: tuple


def parse(text):
    """The sums of a text, in order.

    >>> [(line.terms, line.result) for line in parse("25+19=44\\n47+38=75\\n75,44")]
    [((25, 19), 44), ((47, 38), 75)]
    """
    return [
        Sum((int(m[1]), int(m[2])), int(m[3]), (m.start(1), m.end(2)), m.span(3))
        for m in re.finditer(r"\b([0-9]{1,9})\+([0-9]{1,9})=([0-9]{1,9})\b", text)
    ]


@register("worksheet")
class Worksheet(Task):
    """Independent sums. Difficulty: how many sums of two two-digit numbers."""

    difficulty = 4
    difficulties = range(2, 11)
    mix = range(2, 6)
    # For each of them a line like "47+85=132", its "132" again, and air.
    max_tokens = property(lambda self: 16 * self.difficulty)
    instruction = (
        "Work out each sum on a line of its own, like 12+34=46. The last line repeats all results "
        "in the order of the problem, separated by commas."
    )

    def draw(self, rng):
        numbers = rng.sample(range(10, 100), 2 * self.difficulty)
        sums = tuple(zip(numbers[::2], numbers[1::2], strict=True))
        prompt = ",".join(f"{a}+{b}" for a, b in sums)
        return Problem(prompt, ",".join(str(a + b) for a, b in sums), sums)

    def grade(self, problem, text):
        results = final_list(text)
        if not results:
            return Verdict(0.0, None, "no list of results")
        parsed = ",".join(map(str, results))
        right = parsed == problem.answer
        return Verdict(float(right), parsed, "right" if right else "wrong results")

    # ---- the student -------------------------------------------------------------------------
    def write(self, problem, results):
        """The worksheet; `results` maps each sum to its result, in the order of working."""
        lines = [f"{a}+{b}={result}" for (a, b), result in results.items()]
        return "\n".join([*lines, ",".join(str(results[terms]) for terms in problem.data)])

    def demonstrate(self, problem, rng, careful=False):
        """A student's solution: in an order of his own, forgetting most carries unless careful."""
        sums = problem.data
        start, step = rng.randrange(len(sums)), rng.choice((1, -1))
        order = [sums[(start + step * i) % len(sums)] for i in range(len(sums))]
        return self.write(problem, {s: add(*s, careful or rng.random() >= FORGETS) for s in order})

    def demonstrate_revision(self, problem, attempt, reference, rng):
        """The student corrects `attempt`, in its own order, looking closely where the two differ.

        Where they agree he sees no reason to doubt, right or wrong. A sum with nothing to compare
        it with (no reference, or one of another problem) he does over, as careless as ever.
        """
        mine = {line.terms: line.result for line in parse(attempt)}
        other = {line.terms: line.result for line in parse(reference or "")}
        if mine.keys() != set(problem.data):
            return self.demonstrate(problem, rng)

        def correct(terms):
            if mine[terms] == other.get(terms, sum(terms)):
                return mine[terms]
            remembers = CAREFUL if terms in other else 1 - FORGETS
            return sum(terms) if rng.random() < remembers else mine[terms]

        return self.write(problem, {terms: correct(terms) for terms in mine})

    # ---- the oracle --------------------------------------------------------------------------
    def error_spans(self, problem, text):
        """Spans of the wrong results, of sums that are not asked for, and of false repetitions."""
        spans, said = [], {}
        for line in parse(text):
            terms = line.terms if line.terms in problem.data else line.terms[::-1]
            if terms not in problem.data:
                spans.append(line.terms_span)
            elif line.result != sum(terms):
                spans.append(line.result_span)
            said[terms] = line.result
        start = text.rstrip().rfind("\n") + 1
        if "=" in text[start:]:
            return spans  # it breaks off before the results are repeated
        repeated = list(re.finditer(r"[0-9]+", text[start:]))
        for m, terms in zip(repeated, problem.data, strict=False):
            if m[0] != str(said.get(terms, sum(terms))):
                spans.append((start + m.start(), start + m.end()))
        for m in repeated[len(problem.data) :]:
            spans.append((start + m.start(), start + m.end()))
        return spans
