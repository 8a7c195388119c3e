"""The diff applier on small made-up files: exact or refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken_sglang.errors import HookError
from vtoken_sglang.patch_diff import parse_patch

PATCH = b"""Subject: a change
 that goes on

--- a/x.py
+++ b/x.py
@@ -1,3 +1,4 @@
 one
+one and a half
 two
 three
@@ -5,3 +6,2 @@ def near():
 five
-six
 seven
"""
OLD = b"one\ntwo\nthree\nfour\nfive\nsix\nseven\n"
NEW = b"one\none and a half\ntwo\nthree\nfour\nfive\nseven\n"


def test_header_and_diff_are_read() -> None:
    header, (diff,) = parse_patch("p", PATCH)
    assert header == {"Subject": "a change that goes on"}
    assert (diff.path, diff.changed_lines, len(diff.hunks)) == ("x.py", 2, 2)


def test_apply_and_reverse() -> None:
    _, (diff,) = parse_patch("p", PATCH)
    assert diff.apply(OLD) == NEW
    assert diff.reverse(NEW) == OLD


@pytest.mark.parametrize(
    "content",
    [b"zero\n" + OLD, OLD.replace(b"two", b"two "), b"", NEW, OLD.replace(b"\n", b"\r\n")],
    ids=["offset", "context", "empty", "already applied", "line ends"],
)
def test_a_file_that_differs_is_refused(content: bytes) -> None:
    _, (diff,) = parse_patch("p", PATCH)
    with pytest.raises(HookError, match=r"hook p: does not fit x\.py at line 1\b"):
        diff.apply(content)


@given(st.lists(st.sampled_from([b"a", b"\r", b"\x0c", b"\xff", b"\n"])).map(b"".join))
def test_every_other_byte_survives(rest: bytes) -> None:
    _, (diff,) = parse_patch("p", PATCH)
    assert diff.apply(OLD + rest) == NEW + rest
    assert diff.reverse(NEW + rest) == OLD + rest


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"-six\n", b""),
        (b"@@ -5,3", b"@@ -5,2"),
        (b"+++ b/x.py", b"+++ b/y.py"),
        (b"--- a/x.py", b"--- /dev/null"),
        (b" seven\n", b" seven\nstray\n"),
        (b" seven\n", b" seven\n\\ No newline at end of file\n"),
        (b" seven\n", b" seven"),
        (b"@@ -1,3 +1,4 @@\n one\n+one and a half\n two\n three\n", b"@@ -1,0 +1,1 @@\n+x\n"),
        (b"Subject:", b"Subject: twice\nSubject:"),
        (b"Subject: a change\n that goes on\n", b"diff --git a/x.py b/x.py\n"),
        (PATCH[PATCH.index(b"---") :], b""),
        (PATCH, b""),
    ],
)
def test_a_malformed_patch_is_refused(old: bytes, new: bytes) -> None:
    assert old in PATCH
    with pytest.raises(HookError, match="hook p: "):
        parse_patch("p", PATCH.replace(old, new, 1))


def test_a_file_named_twice_is_refused() -> None:
    diff = PATCH[PATCH.index(b"---") :]
    with pytest.raises(HookError, match="names a file twice"):
        parse_patch("p", PATCH + diff)
