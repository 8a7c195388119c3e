"""Which server settings the served tests run under."""

from __future__ import annotations

from dataclasses import dataclass

from tests.helpers.server import PRODUCT, STOCK

# SGLang's own checkers, at their strictest: page accounting at every step, no row entry that
# names a free page, no page freed twice.
STRICT_CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_DEBUG_MEMORY_POOL": "1",
}

POOL_FLAGS = (
    *("--max-total-tokens", "4096", "--max-running-requests", "16"),
    *("--mem-fraction-static", "0.3"),  # derived, it comes out negative with chunking off
    "--constrained-json-disable-any-whitespace",
)


@dataclass(frozen=True, slots=True)
class Configuration:
    """Page size in tokens; radix cache, chunked prefill and overlap on or off; how to start it;
    whether it runs only with -m slow."""

    page_size: int
    radix: bool
    chunked: bool
    overlap: bool
    entry: tuple[str, ...] = PRODUCT
    slow: bool = False

    def flags(self) -> list[str]:
        flags = ["--page-size", str(self.page_size)]
        flags += ["--chunked-prefill-size", "64" if self.chunked else "-1"]
        if not self.radix:
            flags.append("--disable-radix-cache")
        if not self.overlap:
            flags.append("--disable-overlap-schedule")
        return flags

    def __str__(self) -> str:
        names = ("radix", self.radix), ("chunked", self.chunked), ("overlap", self.overlap)
        parts = [f"P{self.page_size}", *(name if on else f"no-{name}" for name, on in names)]
        return "-".join(parts)


# Every pair of settings occurs together at least once, and every value in those that are not slow
# (see test_configurations). The last one is started with SGLang's own launcher, which takes our
# flags wherever the plugin is installed.
CONFIGURATIONS = (
    Configuration(1, radix=True, chunked=True, overlap=True),
    Configuration(1, radix=False, chunked=False, overlap=False),
    Configuration(16, radix=True, chunked=False, overlap=True),
    Configuration(16, radix=False, chunked=True, overlap=False, slow=True),
    Configuration(64, radix=True, chunked=True, overlap=False, slow=True),
    Configuration(64, radix=False, chunked=False, overlap=True, entry=STOCK),
)
