"""Checks of values: assertions, and conditions one side of which ends in ``raise``. A graph is static and has none of
them, so tracing takes the outcome that raises nothing.

What a condition must be for that is tried: a trace that ends in the check's own error is repeated with the last answer
turned round. Conditions that choose between two ways of computing are no checks; tracing fails at them.
"""

from __future__ import annotations

import ast
import linecache
import sys
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from flexsearch.graph.private import without_effect


class _Check(NamedTuple):
    """Lines of a condition, and those from which it raises; ``passes``: what the condition is to be."""

    first: int
    last: int
    raises_first: int
    raises_last: int
    passes: bool


class _Question(NamedTuple):
    """Where the truth of a tensor was asked for, code and instruction of it; and the check that it is for."""

    code: CodeType
    instruction: int
    check: _Check

    def failed(self, file: str, line: int) -> bool:
        """Whether an error that came from here is that of the check."""
        return file == self.code.co_filename and self.check.raises_first <= line <= self.check.raises_last


class Checks(TorchFunctionMode):
    """Answers for checks, while it is entered. ``settle`` says whether to trace again."""

    def __init__(self) -> None:
        super().__init__()
        self.needed = False
        self._answers: dict[_Question, bool] = {}
        self._turned: set[_Question] = set()

    def settle(self, error: Exception) -> bool:
        """Whether another trace may get past what failed: the first where values decide is made with answers, later
        ones with the one turned round that led to an error of a check."""
        if not self.needed:
            self.needed = is_about_values(error)
            return self.needed
        lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        for question in reversed(self._answers):
            if question not in self._turned and any(question.failed(file, line) for file, line in lines):
                self._turned.add(question)
                self._answers[question] = not self._answers[question]
                return True
        return False

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is torch._assert and isinstance(args[0], torch.Tensor):
            return None
        if func is torch.Tensor.__bool__ or (func is torch.Tensor.item and args[0].dtype == torch.bool):
            question = _question(sys._getframe(1))
            if question is not None:
                return self._answers.setdefault(question, question.check.passes)
        return func(*args, **(kwargs or {}))


def without_checks_of_matrices() -> AbstractContextManager[None]:
    """PyTorch traces the check that a matrix can be solved or factorised as an effect, in an order with others; as any
    other check it is left out."""
    return without_effect("aten::_linalg_check_errors")


def is_about_values(error: BaseException) -> bool:
    """Whether tracing failed because a condition depends on the values of tensors."""
    return "data-dependent" in str(error) or "DataDependent" in type(error).__name__


def _question(frame: FrameType) -> _Question | None:
    """The question that the code of a frame is asking; None if it is not for a check."""
    inside = [check for check in _checks(frame.f_code.co_filename) if check.first <= frame.f_lineno <= check.last]
    return _Question(frame.f_code, frame.f_lasti, min(inside, key=lambda c: c.last - c.first)) if inside else None


@lru_cache
def _checks(file: str) -> tuple[_Check, ...]:
    """The checks of a source file; none where there is no source."""
    try:
        nodes = list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:  # not Python
        return ()
    checks = [_Check(*_lines(node), *_lines(node), True) for node in nodes if isinstance(node, ast.Assert)]
    for node in nodes:
        if isinstance(node, ast.If):
            for body, passes in ((node.body, False), (node.orelse, True)):
                if body and isinstance(body[-1], ast.Raise):
                    checks.append(_Check(*_lines(node.test), body[0].lineno, _lines(body[-1])[1], passes))
    return tuple(checks)


def _lines(node: ast.stmt | ast.expr) -> tuple[int, int]:
    return node.lineno, node.end_lineno or node.lineno
