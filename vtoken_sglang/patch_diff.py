"""Unified diffs, applied with no tolerance: a hunk fits at its own line numbers or not at all.

Works on bytes, so that applying and reversing give back every byte. Diffs that create, delete or
rename files, hunks without context, and files without a final newline are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vtoken_sglang.errors import HookError

_HUNK = re.compile(rb"@@ -(\d+),(\d+) \+(\d+),(\d+) @@(?: .*)?\n")
_OLD = re.compile(rb"--- a/([^\t\n]+)\n")
_NEW = re.compile(rb"\+\+\+ b/([^\t\n]+)\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunk:
    """One changed region.

    Fields:
        old_start, new_start: 1-based line number of the first line, before and after.
        old_lines, new_lines: every line of the region, context included, with its newline.
        changed: lines removed plus lines added.
    """

    old_start: int
    new_start: int
    old_lines: tuple[bytes, ...]
    new_lines: tuple[bytes, ...]
    changed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDiff:
    """All hunks of one patch for one file. `path` is as in the patch, without `a/`."""

    patch: str
    path: str
    hunks: tuple[Hunk, ...]

    @property
    def changed_lines(self) -> int:
        """Lines removed plus lines added."""
        return sum(hunk.changed for hunk in self.hunks)

    def apply(self, content: bytes) -> bytes:
        """Return `content` with the change. Raises HookError when any line differs."""
        return self._replace(content, forward=True)

    def reverse(self, content: bytes) -> bytes:
        """Return `content` without the change. Raises HookError when any line differs."""
        return self._replace(content, forward=False)

    def _replace(self, content: bytes, *, forward: bool) -> bytes:
        lines = _split_lines(content)
        result: list[bytes] = []
        taken = 0
        for hunk in self.hunks:
            start, old, new = hunk.old_start - 1, hunk.old_lines, hunk.new_lines
            target = hunk.new_start - 1
            if not forward:
                start, target, old, new = target, start, new, old
            result += lines[taken:start]
            if len(result) != target or tuple(lines[start : start + len(old)]) != old:
                raise HookError(self.patch, f"does not fit {self.path} at line {start + 1}")
            result += new
            taken = start + len(old)
        return b"".join(result + lines[taken:])


def parse_patch(name: str, data: bytes) -> tuple[dict[str, str], tuple[FileDiff, ...]]:
    """Split a patch file into its header fields and its diffs.

    Args:
        name: patch name, used as the hook name in messages.
        data: the whole patch file.
    Raises: HookError with the line number for anything that is not header or strict unified diff.
    """
    if not data.endswith(b"\n"):
        raise HookError(name, "patch file does not end with a newline")
    reader = _Reader(name, _split_lines(data))
    header = reader.header()
    diffs: list[FileDiff] = []
    while not reader.at_end():
        diffs.append(reader.file_diff())
    if not diffs:
        raise HookError(name, "patch file holds no diff")
    if len({diff.path for diff in diffs}) != len(diffs):
        raise HookError(name, "patch file names a file twice")
    return header, tuple(diffs)


def _split_lines(data: bytes) -> list[bytes]:
    """Lines with their newline; `bytes.splitlines` would also break at a lone carriage return."""
    *lines, tail = data.split(b"\n")
    return [line + b"\n" for line in lines] + ([tail] if tail else [])


class _Reader:
    """Cursor over the lines of one patch file."""

    def __init__(self, name: str, lines: list[bytes]) -> None:
        self._name, self._lines, self._next = name, lines, 0

    def at_end(self) -> bool:
        return self._next == len(self._lines)

    def header(self) -> dict[str, str]:
        fields: dict[str, str] = {}
        key = ""
        while not self._ahead(b"--- "):
            line = self._take().decode().rstrip("\n")
            if line.startswith(" ") and key:
                fields[key] += " " + line.strip()
            elif match := re.fullmatch(r"([A-Z][A-Za-z-]*): (.*\S)", line):
                key = match[1]
                if key in fields:
                    raise self._error(f"second {key} field")
                fields[key] = match[2]
            elif line:
                raise self._error("neither a header field nor a diff")
        return fields

    def file_diff(self) -> FileDiff:
        old, new = self._match(_OLD), self._match(_NEW)
        if old[1] != new[1]:
            raise self._error("the two paths of a diff differ")
        hunks = [self._hunk()]
        while not self.at_end() and self._ahead(b"@@ "):
            hunks.append(self._hunk())
        return FileDiff(patch=self._name, path=old[1].decode(), hunks=tuple(hunks))

    def _hunk(self) -> Hunk:
        old_start, old_count, new_start, new_count = map(int, self._match(_HUNK).groups())
        old: list[bytes] = []
        new: list[bytes] = []
        changed = 0
        while len(old) < old_count or len(new) < new_count:
            line = self._take()
            if line[:1] not in (b" ", b"-", b"+"):
                raise self._error("not a line of a hunk")
            changed += line[:1] != b" "
            if line[:1] != b"+":
                old.append(line[1:])
            if line[:1] != b"-":
                new.append(line[1:])
        if (len(old), len(new)) != (old_count, new_count) or changed in (0, len(old) + len(new)):
            raise self._error("hunk does not match its own line counts, or lacks change or context")
        return Hunk(
            old_start=old_start,
            new_start=new_start,
            old_lines=tuple(old),
            new_lines=tuple(new),
            changed=changed,
        )

    def _ahead(self, prefix: bytes) -> bool:
        if self.at_end():
            raise HookError(self._name, "patch file ends too early")
        return self._lines[self._next].startswith(prefix)

    def _match(self, pattern: re.Pattern[bytes]) -> re.Match[bytes]:
        match = pattern.fullmatch(self._take())
        if match is None:
            raise self._error("not the expected line of a unified diff")
        return match

    def _take(self) -> bytes:
        if self.at_end():
            raise HookError(self._name, "patch file ends too early")
        self._next += 1
        return self._lines[self._next - 1]

    def _error(self, problem: str) -> HookError:
        return HookError(self._name, f"patch file, line {self._next}: {problem}")
