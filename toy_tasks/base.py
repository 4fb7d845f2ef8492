"""What every toy task is: problems, prompts, a verifier, a sloppy student and an error oracle.

A task is a subclass of `Task` in the registry `TASKS`. It defines how a problem is drawn and how an
answer is judged; that is enough to train on it. The toy tasks also bring a *student*, whose
demonstrations warm-start the tiny policy, and an *oracle* that marks the true mistakes in a text.
Training never sees the oracle; the measurements do.
"""

import random
import re
import zlib
from dataclasses import dataclass

SPLITS = {"train": range(0, 6), "validation": range(6, 7), "test": range(7, 8)}
MAX_TEXT = (
    20_000  # characters of a completion that a verifier reads; the last ones, where the answer is
)


@dataclass(frozen=True)
class Problem:
    """One problem: what is asked, the right answer, and whatever its task needs to judge a text."""

    prompt: str
    answer: str
    data: tuple = ()


@dataclass(frozen=True)
class Verdict:
    """A verifier's judgement: reward in [0, 1], the answer it read (None: none found), and why."""

    reward: float
    parsed: str | None
    reason: str


TASKS: dict[str, type["Task"]] = {}


def register(name):
    """Class decorator: put a task into the registry under `name`."""

    def add(cls):
        cls.name = name
        TASKS[name] = cls
        return cls

    return add


def make_task(name, difficulty=None, words=False):
    """The task `name` at `difficulty` (None: its default); one-line ValueError when there is none.

    >>> make_task("carry_chain", 4).problem(seed=0, index=0).prompt.count("+")
    3
    """
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; allowed: {', '.join(sorted(TASKS))}")
    return TASKS[name](difficulty, words)


class Task:
    """Base class of the tasks. A subclass sets the class attributes and `draw` and `grade`.

    difficulty: an int in `difficulties`; what it means is the task's own business (its docstring).
    words: prompts in full sentences, for a pretrained model; otherwise the terse form that the tiny
        character policy was warm-started on.
    """

    name = ""
    difficulty = 1
    difficulties = range(1, 2)
    mix = range(0)  # the difficulties that one warm-started policy serves
    max_tokens = 256  # length limit of a completion
    instruction = ""  # how the task is put to a pretrained model
    demonstrated = (
        True  # False for a task without a student: it can be trained on, not warm-started
    )

    def __init__(self, difficulty=None, words=False):
        if difficulty is not None:
            if difficulty not in self.difficulties:
                low, high = self.difficulties[0], self.difficulties[-1]
                raise ValueError(
                    f"{self.name}: difficulty = {difficulty!r}; allowed: {low} to {high}"
                )
            self.difficulty = difficulty
        self.words = words

    # ---- to be defined by a task -------------------------------------------------------------
    def draw(self, rng):
        """One Problem from the generator `rng` (random.Random)."""
        raise TypeError(f"{type(self).__name__} has no draw(rng)")

    def grade(self, problem, text):
        """The Verdict on a completion; may raise, `verify` turns that into reward 0."""
        raise TypeError(f"{type(self).__name__} has no grade(problem, text)")

    # ---- shared by all tasks -----------------------------------------------------------------
    def problem(self, seed, index, split="train"):
        """Problem number `index` of `split`, a pure function of (seed, index).

        The splits are disjoint in content, not only in index: a problem belongs to the one that the
        checksum of its prompt says, and drawing goes on until the checksum fits.
        """
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}; allowed: {', '.join(SPLITS)}")
        rng = random.Random(f"{self.name}/{self.difficulty}/{split}/{seed}/{index}")
        for _ in range(10_000):
            problem = self.draw(rng)
            if zlib.crc32(problem.prompt.encode()) % 8 in SPLITS[split]:
                return problem
        raise ValueError(f"{self.name}: too few different problems to have some for {split!r}")

    def prompt(self, problem):
        """What the policy is shown for a fresh attempt."""
        return f"{self.instruction}\n\n{problem.prompt}" if self.words else f"{problem.prompt}\n"

    def compare_prompt(self, problem, attempt, reference=None):
        """What the policy is shown to correct `attempt` by comparing it with a sibling.

        It never holds the right answer and does not say whether the reference is right. The caller
        has neutralised end tokens and chat markers in both texts; the bars of the terse form and
        the tags of the worded one are neutralised here: quoted text cannot end its own quotation.
        """
        if not self.words:
            attempt, reference = ((t or "").replace("|", " ") for t in (attempt, reference))
            return f"{problem.prompt}\n|{attempt}|{reference}|"
        quoted = [f"<attempt>\n{_without_tags(attempt)}\n</attempt>"]
        if reference is not None:
            quoted.append(f"<other_attempt>\n{_without_tags(reference)}\n</other_attempt>")
        return (
            f"{self.instruction}\n\n{problem.prompt}\n\n"
            + "\n".join(quoted)
            + "\n\nEither may be wrong. Compare them step by step and find what is wrong in the "
            "first attempt. Then write the first attempt again with the smallest change that "
            "makes it right. Write only the corrected attempt."
        )

    def verify(self, problem, text):
        """The Verdict on one completion, whatever it holds; never raises.

        >>> task = make_task("carry_chain", 2)
        >>> task.verify(Problem("47+38", "85", (47, 38)), "I think 47 + 38 = 85.").reward
        1.0
        """
        try:
            return self.grade(problem, text[-MAX_TEXT:])
        except Exception as error:  # whatever a completion provokes costs its own reward only
            return Verdict(0.0, None, f"unreadable ({type(error).__name__})")


def _without_tags(text):
    return re.sub(r"<(?=\s*/?\s*(other_)?attempt)", "< ", text, flags=re.IGNORECASE)
