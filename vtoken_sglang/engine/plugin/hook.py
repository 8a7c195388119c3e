"""A hook: a function of ours after or around one of SGLang's, declared on the function itself.

SGLang logs a hook that does not land and serves on. For KV memory that is wrong, so each hook is

  resolved   before it is registered: its target exists, in a file that this code was written for,
  verified   after `HookRegistry.apply_hooks` ran: our function is really in the call chain,
  attested   by each scheduler in its ready message (`hooks.launcher.check_attestation`).

Any of the three failing raises `HookError`, which the plugin turns into process exit.

An SGLang with the series of `patches/` offers a call-out in place of some hooks. Where it is
present it is used, and the hook stays out.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from vtoken_sglang.engine.plugin.upstream import UPSTREAM_SHA256
from vtoken_sglang.errors import HookError

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOut:
    """An attribute of a patched SGLang that holds a function to call, None until it is set.

    Fields:
        path: dotted path of the attribute, on a class or a module.
        function: what is put there.
    """

    path: str
    function: Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """One attachment point.

    Fields:
        function: ours. After: (result, *arguments) -> another result, or None to keep it. Around:
            (original, *arguments) -> result.
        kind: how it wraps the target, in SGLang's `HookType` terms.
        target: dotted path of the SGLang function or method.
        why: what would break without it.
        remove_when: what upstream would have to offer so that the hook can go.
        call_out: what takes its place in a patched SGLang; None: nothing does.
    """

    function: Callable[..., Any]
    kind: Literal["after", "around"]
    target: str
    why: str
    remove_when: str
    call_out: CallOut | None = None

    @property
    def name(self) -> str:
        """The function's name, used in messages."""
        return self.function.__name__


_declared: list[Hook] = []


def hook(
    *,
    after: str = "",
    around: str = "",
    why: str,
    remove_when: str,
    call_out: CallOut | None = None,
) -> Callable[[Function], Function]:
    """Declare the decorated function a hook on the target `after` or `around`; see `Hook`. The
    function itself is unchanged, and nothing is registered."""
    assert bool(after) != bool(around), "one target"

    def declare(function: Function) -> Function:
        _declared.append(
            Hook(
                function=function,
                kind="after" if after else "around",
                target=after or around,
                why=why,
                remove_when=remove_when,
                call_out=call_out,
            )
        )
        return function

    return declare


def hooks_of(module: str) -> tuple[Hook, ...]:
    """The hooks that a module of `vtoken_sglang.engine.hooks` declares, in its order."""
    name = importlib.import_module(f"vtoken_sglang.engine.hooks.{module}").__name__
    return tuple(each for each in _declared if each.function.__module__ == name)


def used_call_out(hook: Hook) -> CallOut | None:
    """The hook's call-out where this SGLang offers it."""
    if hook.call_out is None:
        return None
    owner, name = _owner_of(hook.call_out.path)
    return hook.call_out if hasattr(owner, name) else None


def register(hook: Hook) -> None:
    """Set the call-out of one hook where there is one, else register the hook with SGLang.

    Raises:
        HookError: the target does not exist or lies in a file without a hash in `upstream`, or
            another plugin has the call-out.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        source = source_of(pkgutil.resolve_name(hook.target))
    except (ImportError, AttributeError, ValueError) as error:
        raise HookError(hook.name, f"target {hook.target} does not exist ({error})") from error
    if source not in UPSTREAM_SHA256:
        raise HookError(hook.name, f"{source}, which defines {hook.target}, has no known hash")
    call_out = used_call_out(hook)
    if call_out is None:
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind.upper()])
        return
    owner, name = _owner_of(call_out.path)
    if getattr(owner, name) not in (None, call_out.function):
        raise HookError(hook.name, f"the call-out {call_out.path} is taken")
    setattr(owner, name, call_out.function)


def source_of(target: Callable[..., Any]) -> str:
    """The file that defines a function or class, relative to the `sglang` package if inside it."""
    import sglang

    path, root = Path(inspect.getfile(inspect.unwrap(target))), Path(inspect.getfile(sglang)).parent
    return (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()


def verify_landed(hook: Hook) -> None:
    """Raise HookError unless our function is called: it is in the target's call chain and every
    module that had imported the target has the chain, or it is in the call-out."""
    if (call_out := used_call_out(hook)) is not None:
        if pkgutil.resolve_name(call_out.path) is not call_out.function:
            raise HookError(hook.name, f"the call-out {call_out.path} was taken away")
        return
    target = pkgutil.resolve_name(hook.target)
    if not any(each is hook.function for each in _wrapped_hooks(target)):
        raise HookError(hook.name, f"the hook on {hook.target} did not land")
    owner, _ = _owner_of(hook.target)
    if not inspect.isclass(owner):
        original = inspect.unwrap(target)
        for name, module in list(sys.modules.items()):
            if any(value is original for value in list(getattr(module, "__dict__", {}).values())):
                raise HookError(hook.name, f"{name} has {hook.target} without the hook")


def _owner_of(path: str) -> tuple[Any, str]:
    owner, _, name = path.rpartition(".")
    return pkgutil.resolve_name(owner), name


def _wrapped_hooks(function: Any) -> Iterator[object]:
    """Yield every object closed over by the wrappers around `function`, outermost first."""
    function = getattr(function, "__func__", function)
    while function is not None:
        for cell in getattr(function, "__closure__", None) or ():
            yield cell.cell_contents
        function = getattr(function, "__wrapped__", None)
