"""The FlashInfer stand-in accepts no call that the installed flashinfer would not accept."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

flashinfer = pytest.importorskip("flashinfer", reason="needs the full profile")

from tests.helpers import flashinfer_stand_in as stand_in  # noqa: E402

METHODS = (
    "__init__",
    "plan",
    "begin_forward",
    "run",
    "forward",
    "run_return_lse",
    "forward_return_lse",
)
WRAPPERS = (
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
)
PAIRS = [
    *((f"{wrapper}.{method}", wrapper, method) for wrapper in WRAPPERS for method in METHODS),
    (f"{WRAPPERS[0]}._plan_impl", WRAPPERS[0], "_plan_impl"),
]
POSITIONAL = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def differences(ours: Callable[..., Any], theirs: Callable[..., Any]) -> list[str]:
    """Calls of `ours` that `theirs` would refuse or take otherwise."""
    mine, real = parameters(ours), parameters(theirs)
    places = list(real)
    found = []
    for place, (name, parameter) in enumerate(mine.items()):
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            if not any(entry.kind is parameter.kind for entry in real.values()):
                found.append(f"**{name}: not there")
            continue
        if name not in real:
            found.append(f"{name}: not there")
        elif parameter.kind in POSITIONAL and (
            places.index(name) != place or real[name].kind not in POSITIONAL
        ):
            found.append(f"{name}: at another place")
        elif parameter.default != real[name].default:
            found.append(f"{name}: default {real[name].default!r}, not {parameter.default!r}")
    needed = {
        name
        for name, entry in real.items()
        if entry.default is entry.empty
        and entry.kind not in (entry.VAR_POSITIONAL, entry.VAR_KEYWORD)
    }
    return found + [f"{name}: required there" for name in sorted(needed - set(mine))]


@pytest.mark.parametrize(("wrapper", "method"), [p[1:] for p in PAIRS], ids=[p[0] for p in PAIRS])
def test_methods(wrapper: str, method: str) -> None:
    ours = getattr(getattr(stand_in, wrapper), method)
    theirs = getattr(getattr(flashinfer, wrapper), method)
    assert differences(ours, theirs) == []


def test_functions() -> None:
    assert differences(stand_in.fast_decode_plan, flashinfer.fast_decode_plan) == []
    assert differences(stand_in.merge_state, flashinfer.merge_state) == []
    assert differences(stand_in.merge_states, flashinfer.merge_states) == []


def test_a_drift_would_show() -> None:
    def theirs(a: int, b: int = 1, *, c: int = 2) -> None: ...

    def moved(b: int = 1, a: int = 0) -> None: ...

    def other_default(a: int, *, b: int = 5) -> None: ...

    def extra(a: int, *, d: int = 0) -> None: ...

    def lacking(*, c: int = 2) -> None: ...

    def subset(a: int, *, c: int = 2) -> None: ...

    assert differences(subset, theirs) == []
    assert len(differences(moved, theirs)) == 2
    assert differences(other_default, theirs) == ["b: default 1, not 5"]
    assert differences(extra, theirs) == ["d: not there"]
    assert differences(lacking, theirs) == ["a: required there"]
