"""What is wrong with a data set, in one line."""

from __future__ import annotations

from envs.base import EnvError


class DatasetError(EnvError):
    """A data set that cannot be read, or a row that makes no task."""


class RowError(ValueError):
    """What is wrong with one row; the reader adds the file and the number of the row."""

    def __init__(self, problem: str, got: object, remedy: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.got = str(got)[:80].replace("\n", " ")
        self.remedy = remedy
