"""Reading answers out of completions the way a person would, in linear time, whatever they hold.

Only ASCII digits are digits. What a person could not read for certain ("1e5", "1.234,50", forty-one
digits) is no answer: it is not guessed at, and it still takes the place of an earlier answer.
"""

import operator
import re
from fractions import Fraction

MAX_DIGITS = 40  # of a number that a person would still read
MAX_EXPRESSION = 200  # characters
MAX_INTEGER = 9  # digits of an integer in an expression

MINUS = ("-", "\u2212", "\u2013")  # hyphen, minus sign, en dash
SEPARATORS = ",_'\u2019\u00a0\u2009\u202f"  # of thousands; the last three: no-break, thin spaces
CURRENCY = "$\u20ac\u00a3\u00a5"

# Possessive quantifiers (`*+`) give nothing back, so no text makes a pattern quadratic.
TOKEN = re.compile(
    r"(?P<marker>=|\\boxed\s*+\{|\bA:|\b(?i:equals|(?:answer|result|total|sum)\s*+(?:is\b|:)))"
    rf"|(?<!\w)(?P<number>\.?[0-9]++(?:[.{SEPARATORS}][0-9]++)*+)(?P<tail>\w*+)"
)
PLAIN = re.compile(
    rf"([0-9]*|[1-9][0-9]{{0,2}}([{SEPARATORS}])[0-9]{{3}}(?:\2[0-9]{{3}})*)(\.[0-9]+)?"
)
# Between two numbers: an operator, so that neither of them is an answer yet.
JOINT = re.compile(
    r"[ \t)\]}]*+\n?+[ \t]*+"
    rf"(?:\*\*|[-+*/^x\u00d7\u00f7\u00b7{''.join(MINUS[1:])}]|\\times|\\cdot|\\div)"
    rf"[ \t(\[{{{CURRENCY}]*+[-+]?+[ \t({CURRENCY}]*+"
)
# A plain space separates thousands only where nothing but one number stands between marker and end
# of line: "= 1 234" but not "85 123 44".
SPACED = re.compile(
    r"(?m)(?:[=:]|\bis)[ \t]*+(?:[-+][ \t]*+)?[1-9][0-9]{0,2}(?: [0-9]{3})++(?=[ \t.]*+$)"
)

LIST_NUMBER = r"(?<![\w.])-?[0-9]++(?:\.[0-9]++)?+(?!\w)"
LIST_SEPARATOR = r"(?:[ \t]*+[,;][ \t]*+|[ \t]++)(?:and[ \t]++)?+"
LIST = re.compile(rf"{LIST_NUMBER}(?:{LIST_SEPARATOR}{LIST_NUMBER})*+")

# What is no part of an expression but touches one ("2.5*4", "2^3") is taken along to be refused.
EXPRESSION = re.compile(r"(?<![\w.])(?:-(?=[0-9(]))?+[0-9(][-+*/().,^0-9 \t]*+")
TYPESET = str.maketrans("\u00d7\u00f7\u00b7\u2212", "*/*-")

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def final_number(text):
    """The number that a person reads as the answer, as a canonical decimal string; None: no answer.

    The last answer counts. Behind a marker ("=", "answer is", "\\boxed{") it is the number right
    there; otherwise the last one. A number joined to another by an operator is an operand, not an
    answer.

    >>> final_number("12+34=46\\n+50=96"), final_number("The answer is 85 (=80+5).")
    ('96', '85')
    >>> final_number("= 1,247.0 which is the sum of 6 numbers"), final_number("It is -$007.")
    ('1247', '-7')
    >>> final_number("= 1e5"), final_number("9**9**9")
    (None, None)
    """
    text = SPACED.sub(lambda m: re.sub(r"(?<=[0-9]) ", "_", m[0]), text)
    answer = None
    settled = False  # the number right behind the last marker is found: what follows is comment
    joined = False  # an operator stands between the number before and this one
    marked = False  # the token before is a marker
    end = 0
    tokens = list(TOKEN.finditer(text))
    for token, following in zip(tokens, [*tokens, None][1:], strict=True):
        gap, end = text[end : token.start()], token.end()
        if token["marker"]:
            settled, joined, marked = False, False, True
            continue
        operand = joined
        between = text[end : following.start()] if following and following["number"] else ""
        joined = JOINT.fullmatch(between) is not None
        if not (operand or joined or settled):
            answer = _canonical(token["number"], token["tail"], _negative(gap))
            settled = marked and not re.search(r"\w", gap)
        marked = False
    return answer


def _negative(gap):
    """Does the text before a number end in its sign? Not in "x-5", "total - 5", "--5", "(a)-5"."""
    sign = gap.rstrip(" \t" + CURRENCY)
    if not sign.endswith(MINUS):
        return False
    before = sign[:-1].rstrip() if " " in gap[len(sign) :] else sign[:-1]
    return not (before.endswith((*MINUS, ")")) or before[-1:].isalnum())


def _canonical(number, tail="", negative=False):
    """The decimal string of a number; None where a person could not tell.

    >>> _canonical("007.50"), _canonical("12,34"), _canonical("1", tail="e5")
    ('7.5', None, None)
    """
    plain = PLAIN.fullmatch(number) if len(number) <= 2 * MAX_DIGITS else None
    if not plain or (tail and not tail.isalpha()):
        return None
    whole = re.sub(f"[{SEPARATORS}]", "", plain[1])
    fraction = (plain[3] or "").rstrip("0").rstrip(".")
    if len(whole) + len(fraction) > MAX_DIGITS:
        return None
    value = (whole.lstrip("0") or "0") + fraction
    return f"-{value}" if negative and value != "0" else value


def final_list(text):
    """The numbers listed in the last line that has any, as canonical decimal strings.

    The line's longest list counts, the last of equally long ones.

    >>> final_list("47+38=85\\n25+19=44\\nSo the results are 85, 44.")
    ['85', '44']
    """
    line = next((part for part in reversed(text.split("\n")) if re.search("[0-9]", part)), "")
    lists = [re.findall(LIST_NUMBER, run[0]) for run in LIST.finditer(line)]
    longest = max(reversed(lists), key=len, default=[])
    return [_canonical(n.lstrip("-"), negative=n.startswith("-")) for n in longest]


def final_expression(text):
    """The last arithmetic expression in a text, without what it is said to equal; None: none found.

    >>> final_expression("25+50=75\\nThe answer is (25 + 50) + 7 = 82.")
    '(25 + 50) + 7'
    """
    found = None
    for run in EXPRESSION.finditer(text.translate(TYPESET)):
        expression = run[0].rstrip(" \t.,(+-*/^")
        if re.search("[-+*/^]", expression):
            found = expression
    return found


def evaluate(expression):
    """(value, numbers) of an expression of non-negative integers, + - * / and parentheses.

    The value is an exact Fraction, the numbers are in the order of writing. ValueError, in one
    line, says what is wrong with anything else. There is no recursion, so depth costs nothing.

    >>> evaluate("(3+5)/2*10")
    (Fraction(40, 1), (3, 5, 2, 10))
    >>> evaluate("9**9")
    Traceback (most recent call last):
    ValueError: '*' where a number or '(' should stand
    """
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"{len(expression)} characters; allowed: up to {MAX_EXPRESSION}")
    values, pending, numbers = [], [], []  # the two stacks of the shunting-yard algorithm

    def apply_down_to(rank):
        while pending and _rank(pending[-1]) >= rank:
            symbol, right, left = pending.pop(), values.pop(), values.pop()
            if symbol == "/" and right == 0:
                raise ValueError("division by zero")
            values.append(OPERATORS[symbol](left, right))

    complete = False  # what is read so far ends in a value
    for token in re.findall(r"[0-9]+|\S", expression):
        if (
            token[0] in "0123456789("
            and complete
            or token in ("+", "-", "*", "/", ")")
            and not complete
        ):
            expected = "an operator" if complete else "a number or '('"
            raise ValueError(f"{token[:20]!r} where {expected} should stand")
        if token[0] in "0123456789":
            if len(token) > MAX_INTEGER:
                raise ValueError(f"integer of {len(token)} digits; allowed: up to {MAX_INTEGER}")
            numbers.append(int(token))
            values.append(Fraction(numbers[-1]))
            complete = True
        elif token in OPERATORS:
            apply_down_to(_rank(token))
            pending.append(token)
            complete = False
        elif token == "(":
            pending.append(token)
        elif token == ")":
            apply_down_to(1)
            if not pending:
                raise ValueError("')' without '('")
            pending.pop()
        else:
            raise ValueError(f"{token!r} in an expression; allowed: integers, + - * / ( )")
    if not complete:
        raise ValueError("expression ends where a number or '(' should stand")
    apply_down_to(1)
    if pending:
        raise ValueError("'(' without ')'")
    return values[0], tuple(numbers)


def _rank(symbol):
    return {"(": 0, "+": 1, "-": 1, "*": 2, "/": 2}[symbol]
