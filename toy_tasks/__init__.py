"""Toy tasks: arithmetic with a verifier, a sloppy student and an oracle that marks true mistakes.

Importing the package registers the tasks; `make_task(name, difficulty)` makes one.
"""

# Importing the tasks registers them.
from . import carry_chain, column_addition, countdown, expression, worksheet  # noqa: F401
from .base import TASKS, Problem, Task, Verdict, make_task, register

__all__ = ["TASKS", "Problem", "Task", "Verdict", "make_task", "register"]
