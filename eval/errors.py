"""Errors of the evaluation. Each message says what was wrong and what to do about it."""

from __future__ import annotations

from vtoken_sglang.errors import ConfigError, VTokenError

__all__ = ["ConfigError", "DatasetError", "FiguresError", "ResultsError", "ServerError"]


class DatasetError(VTokenError):
    """The conversation file is missing, unreadable, or holds too little for the workload."""


class ServerError(VTokenError):
    """A server did not start, ended early, or answered a request with an error."""

    def __init__(self, problem: str, log_tail: str = "", log_path: str = "") -> None:
        self.problem, self.log_tail, self.log_path = problem, log_tail, log_path
        message = problem
        if log_tail:
            message += f"\n--- last lines of {log_path or 'the server log'} ---\n{log_tail}"
        super().__init__(message)


class ResultsError(VTokenError):
    """A result cannot be written or read: the target exists, or the file is not a result."""


class FiguresError(ResultsError):
    """A figures file would lose something: a larger measurement, or its provenance."""
