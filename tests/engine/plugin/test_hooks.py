"""Every hook resolves, is the one this code was written for, and fails closed when it is not."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry

from tests.helpers.fresh_process import CHECK, run_python
from tests.helpers.patched_sglang import patch, stage
from vtoken_sglang.engine.plugin import hook as hook_module
from vtoken_sglang.engine.plugin import registration as plugin
from vtoken_sglang.engine.plugin.hook import (
    CallOut,
    Hook,
    hooks_of,
    register,
    source_of,
    verify_landed,
)
from vtoken_sglang.engine.plugin.upstream import UPSTREAM_SHA256
from vtoken_sglang.errors import HookError
from vtoken_sglang.options import ENVIRONMENT_VARIABLE, VTokenConfig

MODULES = (*plugin.LAUNCHER_HOOKS, *plugin.SCHEDULER_HOOKS)
HOOKS_IN_PLACE = tuple(hook for module in MODULES for hook in hooks_of(module))
(ATTEST,) = (hook for hook in HOOKS_IN_PLACE if hook.name == "attest")
ATTENTION = "vtoken_sglang.engine.attention"


@pytest.mark.parametrize("hook", HOOKS_IN_PLACE, ids=lambda hook: hook.name)
def test_hook_is_complete_and_its_source_is_known(hook: Hook) -> None:
    assert hook.why
    assert hook.remove_when
    assert source_of(pkgutil.resolve_name(hook.target)) in UPSTREAM_SHA256


def test_hook_names_and_targets_are_unique() -> None:
    assert len({hook.name for hook in HOOKS_IN_PLACE}) == len(HOOKS_IN_PLACE)
    assert len({hook.target for hook in HOOKS_IN_PLACE}) == len(HOOKS_IN_PLACE)


def test_every_file_of_an_extended_class_is_known() -> None:
    """Classes of SGLang that ours derive from, wherever they are."""
    own = [
        value
        for module in ("cpu", "flashinfer", "triton")
        for value in vars(importlib.import_module(f"{ATTENTION}.{module}")).values()
        if inspect.isclass(value) and value.__module__.startswith("vtoken_sglang")
    ]
    own.append(importlib.import_module("vtoken_sglang.engine.admission.budget").FootprintBudget)
    bases = {base for each in own for base in each.__mro__ if base.__module__.startswith("sglang.")}
    extended = {source_of(base) for base in bases} - {"srt/layers/attention/base_attn_backend.py"}
    assert len(extended) >= 4
    assert extended <= UPSTREAM_SHA256.keys()


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("sglang.srt.managers.scheduler.Scheduler.no_such_method", "does not exist"),
        ("sglang.srt.nowhere.f", "does not exist"),
        (
            "sglang.srt.utils.common.ceil_align",
            "srt/utils/common.py, which .* no known hash",
        ),
    ],
)
def test_wrong_target_is_refused(target: str, said: str) -> None:
    wrong = dataclasses.replace(ATTEST, target=target)
    with pytest.raises(HookError, match=rf"hook attest: .*{said}"):
        register(wrong)


def test_hook_that_did_not_land_is_noticed() -> None:
    # Nothing was applied to this function in this process.
    with pytest.raises(HookError, match="did not land"):
        verify_landed(ATTEST)


TOY = types.ModuleType("toy_engine")
IMPORTER = types.ModuleType("toy_importer")


def _original(value: int) -> int:
    return value


def _around(original: Callable[[int], int], value: int) -> int:
    return original(value) + 1


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Hook:
    """A hook on a function of a module; another module has imported the function by name."""
    for module in (TOY, IMPORTER):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(module, "f", _original, raising=False)
    monkeypatch.setattr(hook_module, "source_of", lambda _target: next(iter(UPSTREAM_SHA256)))
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    return Hook(
        function=_around,
        kind="around",
        target="toy_engine.f",
        why="to test",
        remove_when="never",
        call_out=CallOut(path="toy_engine.f_listener", function=print),
    )


def test_a_hook_reaches_every_module_that_imported_its_target(
    toy: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys.modules[__name__], "_original")  # this module has imported it, too
    register(toy)
    HookRegistry.apply_hooks()
    verify_landed(toy)
    assert TOY.f(1) == IMPORTER.f(1) == 2
    IMPORTER.f = inspect.unwrap(TOY.f)
    with pytest.raises(HookError, match=r"toy_importer has toy_engine\.f without the hook"):
        verify_landed(toy)


def test_a_call_out_takes_the_place_of_its_hook(toy: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOY, "f_listener", None, raising=False)
    register(toy)
    HookRegistry.apply_hooks()
    verify_landed(toy)
    assert TOY.f_listener is print
    assert TOY.f(1) == 1
    TOY.f_listener = max
    with pytest.raises(HookError, match="was taken away"):
        verify_landed(toy)
    with pytest.raises(HookError, match=r"the call-out toy_engine\.f_listener is taken"):
        register(toy)


BROKEN_HOOK = """
import dataclasses
from vtoken_sglang.engine.plugin import registration as plugin
hooks_of = plugin.hooks_of
def with_one_broken(module):
    hooks = hooks_of(module)
    if module != "scheduler":
        return hooks
    target = "sglang.srt.managers.scheduler.Scheduler.renamed"
    return (dataclasses.replace(hooks[1], target=target),)
plugin.hooks_of = with_one_broken
from sglang.srt.plugins import load_plugins
load_plugins()
print("served on")
"""

LOST_HOOK = """
from sglang.srt.plugins.hook_registry import HookRegistry
original = HookRegistry._apply_target.__func__
def lose_one(cls, target, hooks):
    if not target.endswith("free_kv_row"):
        original(cls, target, hooks)
HookRegistry._apply_target = classmethod(lose_one)
from sglang.srt.plugins import load_plugins
load_plugins()
print("served on")
"""


@pytest.mark.parametrize(
    ("code", "named"),
    [(BROKEN_HOOK, "before_schedule"), (LOST_HOOK, "free_row_segments")],
    ids=["target", "lost"],
)
def test_process_exits_when_a_hook_fails(code: str, named: str) -> None:
    """SGLang swallows what plugins raise; the process must end all the same, naming the hook."""
    done = run_python(code, **{ENVIRONMENT_VARIABLE: VTokenConfig().to_json()})
    assert done.returncode == 2
    assert f"vtoken-sglang: hook {named}:" in done.stderr
    assert "served on" not in done.stdout


def test_check_lists_every_hook_with_its_reason() -> None:
    done = run_python(CHECK)
    assert done.returncode == 0, done.stderr
    for hook in HOOKS_IN_PLACE:
        assert (
            f"ok  {hook.name:<28} {hook.kind:<8} {hook.target}\n      {hook.why}\n" in done.stdout
        )
    assert f"{len(HOOKS_IN_PLACE)} hooks and 0 call-outs in place" in done.stdout


def test_check_says_which_call_outs_are_used(tmp_path: Path) -> None:
    folder = stage(tmp_path)
    assert patch(folder).returncode == 0
    done = run_python(CHECK, PYTHONPATH=str(folder))
    assert done.returncode == 0, done.stderr
    offered = [hook.call_out for hook in HOOKS_IN_PLACE if hook.call_out is not None]
    assert [f"call-out {each.path}" in done.stdout for each in offered] == [True] * 3
    assert f"{len(HOOKS_IN_PLACE) - 3} hooks and 3 call-outs in place" in done.stdout
