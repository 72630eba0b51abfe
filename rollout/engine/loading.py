"""A checkpoint folder as what an engine needs: its configuration, weights, tokenizer and chat format."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from model.checkpoint import load_model, open_model, policy_folder
from model.config import KernelChoice, ModelConfig
from model.kernels.cpu.isa import Isa
from model.kernels.dispatch import Kernels, resolve_kernels
from model.layers import TORCH_DTYPE
from model.loaded import LoadedModel
from model.snapshot import PackedTensor
from rollout.config import ChatFormat, EngineConfig, EngineConfigError, LoadMode, Precision
from rollout.engine.mapped import MappedExperts, spool
from rollout.engine.text import TextSide
from rollout.renderers.base import Renderer
from rollout.renderers.codec import RendererError
from rollout.renderers.registry import make_renderer
from rollout.tokenizer import TOKENIZER_FILE, load_tokenizer

log = logging.getLogger(__name__)

_TOLD_BY_TOKENS = (ChatFormat.harmony, ChatFormat.kimi, ChatFormat.deepseek, ChatFormat.chatml, ChatFormat.native)
"""The formats that a tokenizer's control tokens tell apart, tried in this order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedEngine:
    """What `Engine.load` builds from: the weights are `published` bytes, or else `values`."""

    model: ModelConfig
    published: Mapping[str, PackedTensor] | None
    values: Mapping[str, torch.Tensor]
    text: TextSide | None
    kernels: Kernels


def load(path: Path, config: EngineConfig, chat_format: ChatFormat | None) -> LoadedEngine:
    """Read a checkpoint of ours or a published one; `chat_format` `None`: the one that its tokenizer has tokens for.

    Raises:
        EngineConfigError: A setting that cannot be carried out, or no such folder.
        KernelError, CheckpointError, TokenizerError, RendererError: See `resolve_kernels`,
            `load_model`, `load_tokenizer`, `make_renderer`.
    """
    check_config(config)
    if not path.is_dir():
        problem = "must be a folder with a checkpoint" if path.exists() else "there is no such folder"
        raise EngineConfigError(f"engine: {problem}, got {path}; name the folder that holds its config.json")
    if config.load is LoadMode.mmap:
        return _load_mapped(path, config, chat_format)
    loaded = load_model(policy_folder(path) if config.precision is Precision.mxfp4 else path)
    published: Mapping[str, PackedTensor] | None = None
    values: Mapping[str, torch.Tensor] = {}
    if config.precision is Precision.mxfp4:
        kernels, published = resolve_kernels(config.kernels), loaded.packed()
    else:
        if config.kernels not in (KernelChoice.auto, KernelChoice.torch):
            raise EngineConfigError(
                f"engine.kernels: experts in {config.precision} run in torch only, got {config.kernels}; set "
                "precision to mxfp4, or kernels to torch"
            )
        kernels, values = resolve_kernels(KernelChoice.torch), _values(loaded, config.precision)
    return LoadedEngine(
        model=loaded.config, published=published, values=values, text=_text(path, chat_format), kernels=kernels
    )


def checked_path(path: object) -> Path:
    """What was given as the folder of a checkpoint.

    Raises:
        EngineConfigError: It is no path, or a URL: an engine reads the tokenizer beside the weights, from a folder.
    """
    if not isinstance(path, str | os.PathLike) or isinstance(given := os.fspath(path), bytes):
        raise EngineConfigError(
            f"engine: a checkpoint must be given as a path, got {path!r}; name its folder as a text"
        )
    if "://" in given:
        raise EngineConfigError(
            f"engine: a checkpoint is loaded from a folder of this machine, got the URL {given}; download it, or "
            "convert it with python -m model.export, which reads URLs"
        )
    return Path(given)


def check_config(config: EngineConfig) -> None:
    """Raises EngineConfigError when it is something else, or a setting of it cannot be carried out."""
    given: object = config
    if not isinstance(given, EngineConfig):
        raise EngineConfigError(
            f"engine.config: must be an EngineConfig, got {given!r}; write EngineConfig(max_seq_len=...)"
        )
    config.validate()


def _load_mapped(path: Path, config: EngineConfig, chat_format: ChatFormat | None) -> LoadedEngine:
    """As `load`, with the experts on disk."""
    kernels = resolve_kernels(config.kernels)
    if kernels.layers is None or config.precision is not Precision.mxfp4:
        raise EngineConfigError(
            f"engine.load: experts are mapped as MXFP4 for the CPU kernels, got mmap with precision "
            f"{config.precision} and kernels {kernels.name}; set load to eager, or precision to mxfp4 and kernels to "
            "auto on a machine with a compiler"
        )
    experts = MappedExperts(Isa(kernels.name.value), budget_bytes=config.expert_memory_bytes)
    opened = open_model(policy_folder(path))
    return LoadedEngine(
        model=opened.config,
        published=spool(opened.weights),
        values={},
        text=_text(path, chat_format),
        kernels=dataclasses.replace(kernels, layers=dataclasses.replace(kernels.layers, experts=experts)),
    )


def _values(loaded: LoadedModel, precision: Precision) -> dict[str, torch.Tensor]:
    masters = loaded.masters()
    if precision is Precision.fp32:
        return masters
    dtype = TORCH_DTYPE[loaded.config.compute_dtype]
    return {name: master.bfloat16().to(dtype) for name, master in masters.items()}


def _text(path: Path, chat_format: ChatFormat | None) -> TextSide | None:
    file = path / TOKENIZER_FILE
    if chat_format is None and not file.is_file():
        log.info("engine: %s has no %s, so prompts are token ids", path, TOKENIZER_FILE)
        return None
    tokenizer = load_tokenizer(file)
    renderer: Renderer | None = None
    for name in _TOLD_BY_TOKENS if chat_format is None else (chat_format,):
        try:
            renderer = make_renderer(name, tokenizer)
            log.info("engine: chat format %s (%s)", name, "requested" if chat_format else "by the tokenizer's tokens")
            break
        except RendererError:
            if chat_format is not None:
                raise
    else:
        log.info("engine: %s has the tokens of no chat format, so prompts are text or token ids", file)
    return TextSide(tokenizer, renderer)
