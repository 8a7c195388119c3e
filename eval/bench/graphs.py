"""A CUDA graph of one call, or its stand-in where there is no CUDA (the dry run)."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Captured:
    """`work` captured once and replayed; it must write its result into a tensor it keeps."""

    def __init__(self, work: Callable[[], object], device: torch.device) -> None:
        self._work = work
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type != "cuda":
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            work()

    def replay(self) -> None:
        """Run it on the current stream."""
        if self._graph is None:
            self._work()
        else:
            self._graph.replay()
