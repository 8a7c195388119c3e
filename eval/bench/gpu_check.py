"""`scripts/gpu_check.sh`: check and measure the CUDA path on one GPU, with nothing to download.

    kernels      every Triton kernel against its PyTorch reference
    kernel_mismatches flashinfer   real plans over compacted rows, graph replay across a commit
    flashinfer_max_error times        copy, pack, decode attention
    copy_ratio, ... served       with --model, where sglang is installed: real servers, compared by
    `eval study demo`

Each part writes its figures when it is done, so a run that is cut short keeps what it measured. A
part that cannot run here says why and writes nothing; one that fails does not stop the others.
`--dry-run` needs no GPU: the kernels run in Triton's interpreter, the FlashInfer code on a
stand-in given by its caller, and nothing is measured or written.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import secrets
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eval import provenance
from eval.errors import FiguresError
from eval.figures import write_figures
from eval.markdown import table
from eval.results import number

from . import flashinfer_checks
from .flashinfer_loader import load_flashinfer
from .kernel_checks import Case, check_kernels

TOPIC = "cuda"
DEFAULT_OUT = Path(__file__).resolve().parents[2] / "docs" / "results" / "cuda.json"
SMALL = flashinfer_checks.Sizes(
    q_heads=4, kv_heads=2, dim=32, lanes=3, span=100, own=9, dtype=torch.float32
)
# Seconds into the run after which nothing that compiles for minutes is started.
LAST_START_S = 240
# Seconds that the whole run may take, and the least that are worth starting servers for.
LIMIT_S = 470
MIN_SERVED_S = 90


class NotHereError(Exception):
    """A part cannot run here; the message says why."""


@dataclass(slots=True, kw_only=True)
class Check:
    """One run.

    Fields:
        model, dataset: what to serve; without both, nothing is.
        library: FlashInfer's wrappers, or None with the reason in `missing`.
        cases: comparisons so far; any that did not pass makes the run fail.
        figures: measured so far.
        missing: what could not run here -> why.
    """

    device: torch.device
    seed: int
    repeats: int
    dry: bool
    model: str | None = None
    dataset: str | None = None
    library: Any = None
    cases: list[Case] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    missing: dict[str, str] = field(default_factory=dict)


def kernels(check: Check) -> None:
    """Compare every kernel with its reference."""
    cases = check_kernels(check.device, check.seed, small=check.dry)
    check.cases += cases
    wrong = sum(not case.passed for case in cases)
    unit = f"of {len(cases)} comparisons with the PyTorch references"
    check.figures["kernel_mismatches"] = {"value": wrong, "unit": unit, "spread": None}


def flashinfer(check: Check) -> None:
    """Compare FlashInfer over compacted rows with plain attention; commit under a captured
    graph."""
    _flashinfer(check, SMALL if check.dry else flashinfer_checks.Sizes())


def flashinfer_other_heads(check: Check) -> None:
    """The same with another head layout and dtype, if its modules can still be compiled in time."""
    if time.monotonic() - check.started > LAST_START_S:
        raise NotHereError("no time left for compiling another head layout")
    sizes = flashinfer_checks.Sizes(q_heads=9, kv_heads=3, dim=64, dtype=torch.float16, own=17)
    _flashinfer(check, sizes)


def _flashinfer(check: Check, sizes: flashinfer_checks.Sizes) -> None:
    generator = torch.Generator(check.device).manual_seed(check.seed)
    limit = flashinfer_checks.LIMITS[sizes.dtype]
    label = f"{sizes.q_heads}x{sizes.kv_heads}x{sizes.dim} {sizes.dtype}"
    for part in (
        flashinfer_checks.decode_errors,
        flashinfer_checks.extend_errors,
    ):
        pruned = flashinfer_checks.make_pruned(sizes, check.device, generator)
        for what, error in part(check.library, pruned, generator):
            case = Case(kernel="flashinfer", what=f"{what}, {label}", error=error, limit=limit)
            check.cases.append(case)
    differing, error = flashinfer_checks.graph_commit_mismatches(
        check.library, sizes, check.device, generator
    )
    check.cases += [
        Case(kernel="flashinfer", what=f"graph, {label}", error=error, limit=limit),
        Case(kernel="commit", what=f"graph, {label}", error=differing),
    ]
    errors = [case.error for case in check.cases if case.kernel == "flashinfer"]
    check.figures.pop("flashinfer_max_error", None)
    # A part that raised, or NaN in an output, is a failed comparison and no number.
    if all(map(math.isfinite, errors)):
        check.figures["flashinfer_max_error"] = {
            "value": max(errors),
            "unit": f"absolute, over {len(errors)} comparisons with float64 attention, variance 1",
            "spread": None,
        }
    check.figures["graph_commit_mismatches"] = {
        "value": int(sum(case.error for case in check.cases if case.kernel == "commit")),
        "unit": "lanes whose bits changed when every live token moved between two replays",
        "spread": None,
    }


def copy_times(check: Check) -> None:
    """Bandwidth of moving slots."""
    from .kernel_times import copy_figures

    check.figures.update(copy_figures(check.device, check.repeats, check.seed))


def pack_times(check: Check) -> None:
    """`pack_live`, and against SGLang's index kernel if SGLang is installed."""
    from .kernel_times import pack_figures

    theirs = None
    try:
        from vtoken_sglang_eval.bench import stock_index
    except ImportError as error:
        check.missing["pack_time_ratio"] = str(error)
    else:
        theirs = stock_index.gather_rows
    check.figures.update(pack_figures(theirs, check.device, check.repeats, check.seed))


def attention_times(check: Check) -> None:
    """Decode attention over scattered and repacked slots."""
    from .kernel_times import attention_figures

    check.figures.update(attention_figures(check.library, check.device, check.repeats, check.seed))


def served(check: Check) -> None:
    """Serve a small model on this GPU, stock against ours, by the evaluation's own command."""
    if check.model is None or check.dataset is None:
        raise NotHereError("no --model and --dataset")
    if importlib.util.find_spec("sglang") is None:
        raise NotHereError("sglang is not installed")
    left = LIMIT_S - (time.monotonic() - check.started)
    if left < MIN_SERVED_S:
        raise NotHereError(f"{left:.0f} s are left, too few to start servers")
    command = [sys.executable, "-m", "eval", "study", "demo", "--device", "cuda"]
    command += ["--model", check.model, "--dataset", check.dataset, "--repeats", "1"]
    command += ["--ablations", "stock"]
    what = shlex.join(command[2:])
    process = subprocess.Popen(command)
    try:
        status = process.wait(timeout=left)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its servers
        status, what = process.wait(), f"{what}: not done in {left:.0f} s"
    check.cases.append(Case(kernel="served", what=what, error=abs(status)))


PARTS: tuple[tuple[Callable[[Check], None], bool, bool], ...] = (
    # part, needs FlashInfer, needs a GPU
    (kernels, False, False),
    (copy_times, False, True),
    (pack_times, False, True),
    (flashinfer, True, False),
    (attention_times, True, True),
    (flashinfer_other_heads, True, True),
    (served, False, True),
)


def run(check: Check, save: Callable[[Check], None]) -> None:
    """Run every part that can run here; `save` after each."""
    for part, needs_flashinfer, needs_gpu in PARTS:
        if check.dry and needs_gpu:
            check.missing[part.__name__] = "needs a GPU"
            continue
        if needs_flashinfer and check.library is None:
            check.missing[part.__name__] = check.missing.get("flashinfer", "no FlashInfer")
            continue
        started = time.monotonic()
        try:
            part(check)
        except (ImportError, NotHereError) as error:
            check.missing[part.__name__] = str(error)
            continue
        except Exception as error:
            # A kernel that does not compile on this GPU must not hide what the others do.
            traceback.print_exc()
            what = f"raised {type(error).__name__}: {error}"
            check.cases.append(Case(kernel=part.__name__, what=what, error=float("inf")))
            continue
        print(f"{part.__name__}: done in {time.monotonic() - started:.0f} s", flush=True)
        try:
            save(check)
        except FiguresError as error:
            check.missing["figures file"] = str(error)


def saver(out: Path, commit: str | None) -> Callable[[Check], None]:
    """What writes the figures measured so far to `out`. `commit`: where git does not know."""
    words = provenance.portable_command(["scripts/gpu_check.sh", *sys.argv[1:]])
    machine = provenance.machine("cuda")

    def save(check: Check) -> None:
        document = {
            "topic": TOPIC,
            "command": words,
            "commit": provenance.git_commit() or commit,
            "device": provenance.device_label(machine),
            "versions": provenance.versions(),
            "settings": {"seed": check.seed},
            "repeats": check.repeats,
            "figures": check.figures,
        }
        write_figures(out, document)

    return save


def report(check: Check) -> str:
    """A short table of figures, failed comparisons, and what did not run."""
    rows = []
    for name, figure in check.figures.items():
        value = figure["value"]
        rows.append([name, str(value) if isinstance(value, int) else _shown(value), figure["unit"]])
    lines = (
        ["dry run on a CPU: nothing was measured"]
        if check.dry
        else [table(["figure", "value", "unit"], rows)]
    )
    failed = [case for case in check.cases if not case.passed]
    lines.append(f"{len(check.cases)} comparisons, {len(failed)} failed")
    lines += [f"FAILED {case.kernel}: {case.what}: {case.error} > {case.limit}" for case in failed]
    lines += [f"not run: {name}: {why}" for name, why in check.missing.items()]
    return "\n".join(lines)


def _shown(value: float) -> str:
    return number(value) if value >= 1e-3 else f"{value:.1e}"


def dry_run(seed: int, library: Any) -> Check:
    """Everything that runs without a GPU, in a process whose Triton interprets."""
    check = Check(device=torch.device("cpu"), seed=seed, repeats=0, dry=True, library=library)
    run(check, lambda check: None)
    return check


def exit_status(check: Check) -> int:
    """0 if something was compared, all of it passed, and the figures could be written."""
    passed = check.cases and all(case.passed for case in check.cases)
    return 0 if passed and "figures file" not in check.missing else 1


def main(words: Sequence[str] | None = None, stand_in: Any = None) -> int:
    """Exit status: 0 all comparisons passed and figures are written, 1 not so (or nothing was
    compared), 2 no GPU and no --dry-run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="without a GPU; measures nothing")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="figures file")
    parser.add_argument("--repeats", type=int, default=30, help="timed runs of each kernel")
    parser.add_argument("--seed", type=int, help="default: a fresh one, printed")
    parser.add_argument("--commit", help="commit of these files, where git cannot say")
    parser.add_argument("--model", help="folder of a small model to serve as well")
    parser.add_argument("--dataset", help="ShareGPT-format file to serve it with")
    chosen = parser.parse_args(words)
    seed = secrets.randbits(31) if chosen.seed is None else chosen.seed
    print(f"seed {seed}")
    if chosen.dry_run:
        check = dry_run(seed, stand_in)
        print(report(check))
        return exit_status(check)
    if not torch.cuda.is_available():
        print("error: no CUDA device here, so nothing was measured (--dry-run needs none)")
        return 2
    check = Check(
        device=torch.device("cuda", 0),
        seed=seed,
        repeats=chosen.repeats,
        dry=False,
        model=chosen.model,
        dataset=chosen.dataset,
    )
    try:
        check.library = load_flashinfer()
    except ImportError as error:
        check.missing["flashinfer"] = str(error)
    run(check, saver(chosen.out, chosen.commit))
    print(report(check))
    return exit_status(check)


if __name__ == "__main__":
    raise SystemExit(main())
