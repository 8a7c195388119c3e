"""`vtoken-sglang patch` and `scripts/apply_patches.py`: lines, exit codes, what they import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patches.conftest import tree
from vtoken_sglang import patching

SCRIPT = Path(__file__).parents[2] / "scripts" / "apply_patches.py"


def run(package: Path, action: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = patching.main([action, "--root", str(package)])
    out, err = capsys.readouterr()
    return code, out, err


def test_lines_and_exit_codes(
    package: Path, released: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(package, "--check", capsys)
    assert (code, out.count("pristine ")) == (1, 3)
    assert err.count("\n") == 1
    assert "vtoken-sglang patch --apply" in err
    code, out, err = run(package, "--apply", capsys)
    assert (code, err, out.count("applied   ")) == (0, "", 3)
    assert out.startswith("patches applied\n")
    code, out, err = run(package, "--apply", capsys)
    assert (code, err) == (0, "")
    assert out.startswith("nothing to do")
    code, out, err = run(package, "--check", capsys)
    assert (code, err) == (0, "")
    assert patching.series_hash()[:12] in out
    code, out, err = run(package, "--reverse", capsys)
    assert (code, err, out.count("pristine ")) == (0, "", 3)
    assert out.startswith("patches reversed\n")
    code, out, err = run(package, "--reverse", capsys)
    assert (code, err) == (0, "")
    assert out.startswith("nothing to reverse")
    assert tree(package) == tree(released)


def test_each_patch_gets_its_line_when_refused(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (package / "srt/managers/scheduler.py").write_text("gone\n")
    code, out, err = run(package, "--apply", capsys)
    assert code == 1
    assert [line.split()[0] for line in out.splitlines()] == ["modified", "pristine", "pristine"]
    assert "sglang/srt/managers/scheduler.py is modified" in err


@pytest.mark.parametrize("arguments", [[], ["--check", "--apply"], ["--force"]])
def test_bad_arguments(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        patching.main(arguments)
    assert exit_.value.code == 2


def test_no_package_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(tmp_path / "nowhere", "--apply", capsys)
    assert code == 1
    assert "no sglang release at" in err


def test_script_is_the_same_command_and_imports_no_engine(package: Path) -> None:
    program = (
        "import runpy, sys\n"
        "sys.argv = [sys.argv[1], '--apply', '--root', sys.argv[2]]\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as exit_:\n    print('code', exit_.code)\n"
        "print([name for name in ('torch', 'sglang', 'numpy') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(SCRIPT), str(package)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[0] == "patches applied"
    assert done.stdout.splitlines()[-2:] == ["code 0", "[]"]
    patching.check(package)


def test_installed_package_is_found_without_importing_it() -> None:
    program = (
        "import sys; from vtoken_sglang import patching; print(patching.package_root());"
        "assert 'sglang' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert (Path(done.stdout.strip()) / "_version.py").is_file()
