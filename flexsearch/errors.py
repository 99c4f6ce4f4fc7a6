"""Every error that a user can cause. The CLI turns these into a message and exit code 2; anything else is our bug."""

from __future__ import annotations

import re
from typing import Self


class FlexsearchError(Exception):
    """A mistake in what the user gave, or a failure of the cluster.

    ``message`` says what is wrong, ``remedy`` what to do about it; ``str()`` gives both, as sentences. ``kind`` is the
    class as a word for programs: ``topology_error``.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        self.message, self.remedy = message, remedy
        super().__init__(message, remedy)

    def __str__(self) -> str:
        if not self.remedy:
            return self.message
        return f"{self.message}{'' if self.message.endswith(('.', '!', '?', ':')) else '.'} {self.remedy}"

    @property
    def kind(self) -> str:
        return re.sub(r"(?<=.)(?=[A-Z])", "_", type(self).__name__).lower()

    def at(self, place: str) -> Self:
        """The same error, with the place where it happened before its message: ``strategy file s.json: ...``."""
        return type(self)(f"{place}: {self.message}", self.remedy)


class UsageError(FlexsearchError):
    """A command line that makes no sense: an unknown option, an argument too few, a value out of range."""


class FileFormatError(FlexsearchError):
    """A graph, topology, strategy or profile file that cannot be read; names the file, the field and the remedy."""


class OutputError(FlexsearchError):
    """A file that cannot be written: no such folder, no space, an input of the same command; names the file."""


class NotationError(FlexsearchError):
    """An access pattern that does not parse or does not fit the shapes it is used with; quotes the pattern."""


class ImportModelError(FlexsearchError):
    """A model that cannot be turned into an operator graph; names the operator, its layer and its source line."""


class TopologyError(FlexsearchError):
    """A cluster description that contradicts itself, or a device or route that does not exist."""


class StrategyError(FlexsearchError):
    """A strategy that is not legal for this graph and topology, or that was made for another one."""


class RecipeError(FlexsearchError):
    """A synchronisation recipe with a wrong option, or a combination that makes no sense; says why."""


class DatasetError(FlexsearchError):
    """A data set that is not there, or has too few samples."""


class ProfileError(FlexsearchError):
    """A measured profile that does not fit the device or the graph it is used with."""


class RuntimeFailure(FlexsearchError):
    """A distributed run that cannot start or go on: wrong world size, missing device, dead or diverging rank."""
