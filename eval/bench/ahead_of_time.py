"""Compile the Triton kernels for GPUs that this machine lacks, and report what they need.

Triton compiles to machine code without a driver. What the assembler says about registers and
spills is printed by it, so the PTX is assembled once more with `ptxas -v`. Run as a module, it
prints one line per kernel and architecture, or JSON with `--json`; `TRITON_INTERPRET` must be off.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from vtoken_sglang.kernels.attention_mass import triton as attention_mass
from vtoken_sglang.kernels.copy_slots import triton as copy_slots
from vtoken_sglang.kernels.pack_live import triton as pack_live

ARCHITECTURES = (80, 90, 100)
_ALIGNED = ("tt.divisibility", 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One compilation of a kernel.

    Fields:
        label: kernel and configuration, for people.
        kernel: the `triton.jit` function.
        signature: Triton type of each argument that is not a constant, "*" for pointers.
        constants: values of the constexpr arguments.
        num_warps: warps of one program.
        lowest: first architecture that has the needed data types.
    """

    label: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    lowest: int = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReport:
    """What one variant needs on one architecture, as the assembler says.

    Fields:
        registers: per thread.
        shared_bytes: shared memory of a program.
        spill_bytes: stores and loads to local memory for lack of registers, together.
        load_bits, store_bits: widest access to global memory of one thread.
    """

    label: str
    architecture: int
    registers: int
    shared_bytes: int
    spill_bytes: int
    load_bits: int
    store_bits: int


def variants() -> list[Variant]:
    """The kernels in the configurations that a server runs: fp16, bf16, f32 and fp8 pools."""
    chosen = []
    for row_bytes in (128, 256, 2048, 4096):
        shape = copy_slots.launch_shape(row_bytes, 256)
        chosen.append(
            Variant(
                label=f"copy_slots row={row_bytes}B",
                kernel=copy_slots.copy_slots_kernel,
                signature={
                    "addresses": "*i64",
                    "src_slots": "*i64",
                    "dst_slots": "*i64",
                    "n": "i32",
                },
                constants=shape.constants(),
                num_warps=copy_slots.NUM_WARPS,
            )
        )
    return chosen + _pack_variants() + _mass_variants()


def _pack_variants() -> list[Variant]:
    common = {"rows": "*i32", "row_stride": "i32", "row_ids": "*i64", "spans": "*i64"}
    block = pack_live.BLOCK
    chosen = [
        Variant(
            label="count_live",
            kernel=pack_live.count_live_kernel,
            signature={**common, "counts": "*i32"},
            constants={"BLOCK": block},
            num_warps=pack_live.NUM_WARPS,
        )
    ]
    for slots in ("*i32", "*i64"):
        for num_blocks in (1, 128):
            chosen.append(
                Variant(
                    label=f"pack_live slots={slots} blocks={num_blocks}",
                    kernel=pack_live.pack_live_kernel,
                    signature={
                        **common,
                        "indptr": "*i32",
                        "counts": "*i32",
                        "slots": slots,
                        "positions": "*i32",
                        "lens": "*i32",
                    },
                    constants={
                        "HAS_POSITIONS": True,
                        "HAS_LENS": True,
                        "ONE_BLOCK": num_blocks == 1,
                        "NUM_BLOCKS_POW2": num_blocks,
                        "BLOCK": block,
                    },
                    num_warps=pack_live.NUM_WARPS,
                )
            )
    return chosen


def _mass_variants() -> list[Variant]:
    chosen = []
    for q_type, k_type, lowest in (
        ("*fp16", "*fp16", 80),
        ("*bf16", "*bf16", 80),
        ("*fp32", "*fp32", 80),
        ("*bf16", "*fp8e5", 80),
        ("*bf16", "*fp8e4nv", 89),
    ):
        for kv_heads, group, dim in ((8, 4, 128), (3, 3, 64)):
            chosen.append(
                Variant(
                    label=f"attention_mass q={q_type} k={k_type} heads={kv_heads}x{group}x{dim}",
                    kernel=attention_mass.attention_mass_kernel,
                    signature={
                        "q": q_type,
                        "k_buffer": k_type,
                        "qo_indptr": "*i32",
                        "indptr": "*i32",
                        "slots": "*i32",
                        "positions": "*i32",
                        "row_ids": "*i64",
                        "below_uniform": "*i32",
                        "lse": "*fp32",
                        "scores": "*fp32",
                        "scale": "fp32",
                        "q_token_stride": "i32",
                        "q_head_stride": "i32",
                        "scores_row_stride": "i32",
                    },
                    constants={
                        **attention_mass.constants(kv_heads, group, dim),
                        "HAS_BELOW_UNIFORM": True,
                    },
                    num_warps=attention_mass.num_warps(1 if "fp8" in k_type else 2),
                    lowest=lowest,
                )
            )
    return chosen


def compile_variant(variant: Variant, architecture: int) -> KernelReport:
    """Compile for `sm_<architecture>` and measure.

    Raises:
        RuntimeError: this process interprets Triton instead of compiling it.
        triton.CompilationError, subprocess.CalledProcessError: it does not compile.
    """
    if not isinstance(variant.kernel, JITFunction):
        raise RuntimeError("ahead-of-time compilation: start the process without TRITON_INTERPRET")
    names = variant.kernel.arg_names
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    # Tensors start at multiples of 16 bytes, as torch allocates them and as a launch would find.
    attributes = {
        (index,): [list(_ALIGNED)]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name.endswith("stride")
    }
    source = ASTSource(variant.kernel, signature, dict(variant.constants), attributes)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": variant.num_warps},
    )
    ptx = compiled.asm["ptx"]
    printed = _assemble(ptx, architecture)
    return KernelReport(
        label=variant.label,
        architecture=architecture,
        registers=_number(r"Used (\d+) registers", printed),
        shared_bytes=int(compiled.metadata.shared),
        spill_bytes=_number(r"(\d+) bytes spill stores", printed)
        + _number(r"(\d+) bytes spill loads", printed),
        load_bits=_widest("ld", ptx),
        store_bits=_widest("st", ptx),
    )


def _assemble(ptx: str, architecture: int) -> str:
    """What `ptxas -v` prints for this PTX, with the options that Triton passes."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        name = sm_arch_from_capability(architecture)
        command = [get_ptxas(architecture).path, "-v", "-lineinfo", "--regAllocOptLevel=2"]
        command += [f"--gpu-name={name}", str(source), "-o", str(Path(folder) / "kernel.cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"ptxas printed no {pattern!r}: {text!r}")
    return int(found.group(1))


def _widest(operation: str, ptx: str) -> int:
    """Bits of the widest access to global memory by one instruction."""
    pattern = rf"\b{operation}\.global(?:\.\w+)*?(?:\.v(\d))?\.[bsuf](\d+)\b"
    widths = [int(vector or 1) * int(bits) for vector, bits in re.findall(pattern, ptx)]
    return max(widths, default=0)


def reports(architectures: Sequence[int] = ARCHITECTURES) -> list[KernelReport]:
    """Compile every variant for every architecture that can run it."""
    return [
        compile_variant(variant, architecture)
        for architecture in architectures
        for variant in variants()
        if architecture >= variant.lowest
    ]


def main() -> None:
    """Print the reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--architectures", type=int, nargs="+", default=ARCHITECTURES)
    arguments = parser.parse_args()
    found = reports(arguments.architectures)
    if arguments.json:
        print(json.dumps([asdict(report) for report in found]))
        return
    for report in found:
        print(
            f"sm_{report.architecture:<4}{report.label:<58}{report.registers:>4} registers "
            f"{report.shared_bytes:>6} B shared {report.spill_bytes:>4} B spilled "
            f"{report.load_bits:>4}/{report.store_bits} bit"
        )


if __name__ == "__main__":
    main()
