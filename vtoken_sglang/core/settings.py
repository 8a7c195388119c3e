"""When and how much the reclaimer works. One frozen object; nothing below it reads options."""

from dataclasses import dataclass

from vtoken_sglang.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimSettings:
    """Knobs of free and repack.

    Fields:
        threshold: a row is repacked when the waste of its sealed pages is above this share
            (the paper's trigger F > 0.25); in [0, 1].
        hysteresis: a row that was repacked waits until its waste has grown by this share since,
            under pressure too; in [0, 1]. Keeps a row from being repacked every step.
        merge: below the trigger, too, a row's emptiest pages are emptied when their tokens fit into
            one page: a copy of at most a page then returns at least a page, so over its life a
            row copies no more tokens that way than it evictions.
        reclaim: False is the naive arm: evictions only mask, nothing is freed or moved.
        min_gain_pages: a repack must return at least this many pages more than it takes; >= 1.
        max_moved_tokens: most tokens copied per step, all rows together; >= 1 (below a page,
            nothing is repacked).
        check: compare the bytes of every moved token before the commit (slow, for tests and
            `--vtoken-check`).
    """

    threshold: float = 0.25
    hysteresis: float = 0.05
    merge: bool = True
    reclaim: bool = True
    min_gain_pages: int = 1
    max_moved_tokens: int = 16384
    check: bool = False

    def __post_init__(self) -> None:
        for field in ("threshold", "hysteresis"):
            value = getattr(self, field)
            if not 0.0 <= value <= 1.0:
                raise ConfigError(field, "a share between 0 and 1", value)
        for field in ("min_gain_pages", "max_moved_tokens"):
            value = getattr(self, field)
            if value < 1:
                raise ConfigError(field, "at least 1", value)
