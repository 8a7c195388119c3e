#!/usr/bin/env python3
"""Pack what `gpu_check.sh` needs of FlashInfer for a GPU machine that cannot install anything.

A whole FlashInfer and its dependencies are gigabytes; its attention kernels, which are compiled
there on first use, need a few megabytes of Python, CUDA sources and headers, and tvm-ffi. There:

    mkdir -p SITE && tar -xf gpu_site.tar.xz -C SITE
    PYTHONPATH=SITE scripts/gpu_check.sh --out FILE

That machine needs nvcc, ninja and Python with torch, triton, numpy, aiohttp, click, filelock,
cuda-bindings. Run this where flashinfer is installed; pip downloads the wheels for the other
Python named by `--python-version`. With `--compile` the modules of the check are compiled here
and carried too, which saves minutes there: needs nvcc (CUDA_HOME) but no GPU, and the
architecture in FLASHINFER_CUDA_ARCH_LIST, such as 9.0a.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

# Families of kernels that attention does not use; most of the package.
LEFT_OUT = {
    "data",
    "experimental",
    "fused_moe",
    "gdn_kernels",
    "gemm",
    "kda_kernels",
    "moe_ep",
    "prims_ts",
    "__pycache__",
}
SOURCES = ("include", "spdlog", "cccl", "cutlass/include", "cutlass/tools/util/include")
WHEELS = (
    "apache-tvm-ffi", "nvidia-ml-py", "tabulate", "einops",
    "tqdm", "requests", "urllib3", "certifi", "idna",
)  # fmt: skip
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux2014_x86_64")


def copy_flashinfer(site: Path) -> None:
    """Copy the Python modules, headers and attention sources of the installed flashinfer."""
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        raise SystemExit("error: flashinfer is not installed in this environment")
    source, target = Path(spec.origin).parent, site / "flashinfer"
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.is_dir() and entry.name not in LEFT_OUT:
            shutil.copytree(entry, target / entry.name, ignore=shutil.ignore_patterns("*.pyc"))
        elif entry.suffix == ".py":
            shutil.copy2(entry, target)
    for folder in SOURCES:
        shutil.copytree(source / "data" / folder, target / "data" / folder)
    (target / "data" / "csrc").mkdir()
    for entry in (source / "data" / "csrc").iterdir():
        if entry.is_file():
            shutil.copy2(entry, target / "data" / "csrc")


def add_wheels(site: Path, python_version: str) -> None:
    """Unpack the few dependencies for another Python into `site`."""
    wanted = [f"{name}=={importlib.metadata.version(name)}" for name in WHEELS]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python_version]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*command, "--dest", folder, *wanted], check=True)
        for wheel in sorted(Path(folder).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)


def compile_modules(site: Path) -> None:
    """Compile what `eval.bench.flashinfer_checks` runs, and put it where FlashInfer looks first."""
    import torch
    from flashinfer.jit.attention import gen_batch_decode_module
    from flashinfer.jit.cascade import gen_cascade_module
    from flashinfer.prefill import _gen_batch_prefill_primary_module

    specs = [gen_cascade_module()]
    for dtype, dim in ((torch.bfloat16, 128), (torch.float16, 64)):
        shape = (dtype, dtype, dtype, torch.int32, dim, dim, 0, False, False)
        specs.append(gen_batch_decode_module(*shape))
        specs.append(_gen_batch_prefill_primary_module("fa2", *shape, False))
    for spec in specs:
        spec.build()
        target = site / "flashinfer" / "data" / "aot" / spec.name
        target.mkdir(parents=True)
        shutil.copy2(spec.jit_library_path, target)
        print(f"compiled {spec.name}", flush=True)


def main() -> None:
    """Write the archive and print its size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_site.tar.xz"))
    parser.add_argument("--python-version", default="3.12", help="of the GPU machine")
    parser.add_argument("--compile", action="store_true", help="also carry compiled modules")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        copy_flashinfer(site)
        add_wheels(site, chosen.python_version)
        if chosen.compile:
            compile_modules(site)
        with tarfile.open(chosen.out, "w:xz", preset=3) as archive:
            for entry in sorted(site.iterdir()):
                archive.add(entry, entry.name)
    print(f"{chosen.out}: {chosen.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
