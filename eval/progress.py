"""Progress on standard error: a bar with time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from tqdm import tqdm

from .estimate import minutes


class Progress:
    """Counts requests over all runs of an evaluation; the time left includes server starts."""

    def __init__(self, runs: int, requests_per_run: int, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._runs, self._finished, self._begin = runs, 0, time.monotonic()
        self._bar: tqdm[None] | None = None
        if self._stream.isatty():
            self._bar = tqdm(
                total=runs * requests_per_run,
                unit="request",
                file=self._stream,
                leave=False,
                disable=False,  # whatever TQDM_DISABLE says about the downloads of others
                smoothing=0,  # rate over everything so far, so that server starts count
            )

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._bar is not None:
            tqdm.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def stage(self, text: str) -> None:
        """What is going on right now."""
        if self._bar is not None:
            self._bar.set_description(text)

    def begin(self, text: str) -> None:
        """What is going on right now, also said where there is no bar, before the first result."""
        if self._bar is not None:
            self._bar.set_description(text)
        else:
            self.say(text)

    def request(self) -> None:
        """One more request has been answered."""
        if self._bar is not None:
            self._bar.update()

    def run_finished(self, text: str) -> None:
        """One more run is complete; says so, with the time left judged by those so far."""
        self._finished += 1
        elapsed = time.monotonic() - self._begin
        left = elapsed / self._finished * (self._runs - self._finished)
        rest = f", about {minutes(left)} left" if self._finished < self._runs else ""
        self.say(f"[{self._finished}/{self._runs}] {text} ({minutes(elapsed)} elapsed{rest})")

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
