"""What does MXFP4 cost this checkpoint? Measured before any training, with a proposal of what to keep in bf16.

    python -m model.calibrate CHECKPOINT --data corpus.txt
    python -m model.calibrate CHECKPOINT --data chats.jsonl --bits 4.6 --json report.json

CHECKPOINT is a folder of this project, or a published checkpoint by path or URL. Each expert tensor is put into MXFP4
alone: weight error, error of its MoE layer's output, KL of the next-token distributions against the stored weights.
Then each layer, and everything together. `--bits` or `--keep` chooses tensors to keep in bf16 and measures that
mixture. Each layer takes about 1.5 forwards of the calibration tokens.

The report goes to stdout, progress to stderr. Deterministic for a seed. Exit codes: 0 done, 2 a mistake, told in one
line.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from model.calibration.choice import check_bits, keep_within, keep_worst
from model.calibration.measure import Calibration, LayerResult
from model.calibration.report import RANDOM_WARNING, Report
from model.calibration.tokens import (
    CalibrationError,
    CalibrationTokens,
    check_length,
    checkpoint_encoder,
    random_tokens,
    read_tokens,
)
from model.checkpoint import open_model
from model.config import ComputeDtype, ConfigError, ModelConfig
from model.hf.files import Folder
from model.loaded import CheckpointError, Weight, master_of
from model.mxfp4 import MXFP4Error, ScaleRule
from model.transformer import Transformer

EXIT_OK = 0
EXIT_MISTAKE = 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CalibrationError(f"command line: {message}; see --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; a mistake is one line on stderr."""
    try:
        _run(_parser().parse_args(argv))
    except (CalibrationError, CheckpointError, ConfigError, MXFP4Error) as error:
        _say(" ".join(str(error).split()))
        return EXIT_MISTAKE
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m model.calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument(
        "--data", "--text", type=Path, metavar="FILE",
        help="a text, or .jsonl with a document a line (a string, {\"text\": ...}, a list of token ids); "
        "without it: random token ids",
    )  # fmt: skip
    parser.add_argument("--sequences", type=int, default=8, metavar="N", help="default %(default)s")
    parser.add_argument("--length", type=int, default=256, metavar="L", help="tokens a sequence, default %(default)s")
    parser.add_argument("--rule", type=ScaleRule, choices=list(ScaleRule), default=ScaleRule.EVEN, metavar="RULE",
                        help="even (default, what is published), floor or rceil")  # fmt: skip
    parser.add_argument("--dtype", type=ComputeDtype, choices=list(ComputeDtype), default=ComputeDtype.fp32,
                        metavar="DTYPE", help="of the matrix products: fp32 (default) or bf16")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the choice of sequences, or of random ids")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--bits", type=float, metavar="B", help="bits a value, on average over all expert tensors")
    choice.add_argument("--keep", type=int, metavar="N", help="keep the N most damaging tensors")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file too")
    return parser


def _run(arguments: argparse.Namespace) -> None:
    _check(arguments)
    started = time.monotonic()
    opened = open_model(arguments.checkpoint)
    for note in opened.notes:
        _say(note)
    config = dataclasses.replace(opened.config, compute_dtype=arguments.dtype)
    tokens = _tokens(arguments, config)
    if tokens.is_random:
        _say(RANDOM_WARNING)
    model = _build(config, opened.weights)
    calibration = Calibration(model, tokens.sequences, arguments.rule)
    _say(f"source: {tokens.num_tokens} tokens, {time.monotonic() - started:.1f} s with loading")

    def progress(layer: LayerResult, num_layers: int) -> None:
        _say(
            f"layer {layer.layer}, {num_layers - 1 - layer.layer} to go: KL {layer.divergence.kl_mean:.2e}, "
            f"{time.monotonic() - started:.1f} s"
        )

    measured = calibration.measure(progress)
    choice = mixture = None
    if arguments.bits is not None:
        choice = keep_within(measured.tensors, arguments.bits)
    elif arguments.keep is not None:
        choice = keep_worst(measured.tensors, arguments.keep)
    if choice is not None:
        mixture = calibration.mixture(set(choice.kept))
    report = Report(
        checkpoint=arguments.checkpoint,
        rule=arguments.rule,
        dtype=arguments.dtype,
        seed=arguments.seed,
        tokens=tokens,
        measurements=measured,
        choice=choice,
        mixture=mixture,
    )
    sys.stdout.write(report.to_text())
    if arguments.json is not None:
        try:
            arguments.json.write_text(report.to_json())
        except OSError as error:
            raise CalibrationError(f"--json: could not be written, got {error}; name another file") from error


def _check(arguments: argparse.Namespace) -> None:
    """Everything that can be said before the checkpoint is opened."""
    if arguments.sequences < 1:
        raise CalibrationError(f"--sequences: must be at least 1, got {arguments.sequences}; give a positive number")
    if not 0 <= arguments.seed < 2**63:
        raise CalibrationError(f"--seed: must be in [0, 2^63), got {arguments.seed}; choose another")
    if arguments.bits is not None:
        check_bits(arguments.bits)
    out = arguments.json
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise CalibrationError(f"--json: must be a file in an existing folder, got {out}; make its folder first")


def _tokens(arguments: argparse.Namespace, config: ModelConfig) -> CalibrationTokens:
    check_length(arguments.length, config.max_positions)
    cut = {"num_sequences": arguments.sequences, "length": arguments.length, "seed": arguments.seed}
    if arguments.data is None:
        return random_tokens(config.vocab_size, **cut)
    return read_tokens(arguments.data, checkpoint_encoder(Folder(arguments.checkpoint)), config.vocab_size, **cut)


def _build(config: ModelConfig, weights: Iterator[tuple[str, Weight]]) -> Transformer:
    """The network in fp32, on tensors that are read straight into their place."""
    with torch.device("meta"):
        model = Transformer(config)
    model.load_state_dict({name: master_of(weight) for name, weight in weights}, assign=True)
    return model.requires_grad_(False)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
