"""Upcycling: a dense model becomes a Mixture of Experts that starts from the same knowledge.

    python -m model.upcycle SOURCE DEST [--recipe split|copies] [--experts 8] [--active 8]

The dense model comes as a Mixture of one expert (`llama`). A recipe says how that expert, the MLP of a layer, becomes
several; everything else is taken over bit for bit. Invariant of the exact cases below: the new network computes the
dense one's function, up to fp32 rounding, before its experts are quantized.

    Split   neuron f = e F/E + i of the MLP becomes neuron i of expert e: each gate row, up row and down column is in
            exactly one expert. With the router at zero each of the K chosen experts weighs 1/K, so `down` is multiplied
            by K. K = E is exact. K a power of two changes no bits of a weight but its exponent, so that the MXFP4
            codes of an expert are those of the dense MLP; another K rounds each weight once more.
    Copies  every expert is the whole MLP (sparse upcycling, Komatsuzaki et al. 2022), and the router is drawn at
            random: exact for every K, because the weights of the chosen experts sum to 1.

Split with K < E is approximate, a start for training: the dense MLP needs all its neurons. The router then prefers the
experts whose mean gate row points along the input (a random router loses more; the figures are in RESULTS.md), and its
rows are so short that the weights stay near 1/K.

Neurons are cut in the order of the checkpoint. Training gave that order no meaning, so this is a random partition, the
one that LLaMA-MoE (Zhu et al. 2024) found best after further training. Balanced k-means of the gate rows (in the manner
of MoEfication, Zhang et al. 2022) was tried on SmolLM2-135M: it loses more with K < E and gains 0.002 nats, which is
next to nothing, after quantization.

Shapes: D model dim, F neurons of the dense MLP, N neurons of an expert, E experts, K experts a token.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from model.checkpoint import appearing_whole, save_model
from model.config import MXFP4_BLOCK, ConfigError, ModelConfig
from model.hf.files import Folder
from model.llama import LlamaError, read_llama
from model.loaded import CheckpointError

_ROUTER_SCALE = 1e-3
"""Length of a router row in an approximate split; a normed input is of the order of sqrt(D), so logits are of 0.1."""


class UpcycleError(ValueError):
    """A recipe that does not fit the dense model."""


class ExpertLayer(NamedTuple):
    """The fp32 parameters of one layer of experts."""

    router_ED: torch.Tensor
    gate_up_E2ND: torch.Tensor
    down_EDN: torch.Tensor


class Recipe(Protocol):
    """How the MLP of a layer becomes experts."""

    @property
    def num_experts(self) -> int:
        """E."""
        ...

    @property
    def num_experts_per_tok(self) -> int:
        """K."""
        ...

    def expert_size(self, mlp_size: int) -> int:
        """N for an MLP of F neurons. Raises UpcycleError when it cannot be made into experts."""
        ...

    def layer(self, index: int, gate_FD: torch.Tensor, up_FD: torch.Tensor, down_DF: torch.Tensor) -> ExpertLayer:
        """The experts of layer `index`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Cut the neurons of the MLP into experts. Exact when `num_experts_per_tok` is all of them."""

    num_experts: int = 8
    num_experts_per_tok: int = 8

    def expert_size(self, mlp_size: int) -> int:
        """F / E."""
        if self.num_experts < 1 or mlp_size % (self.num_experts * MXFP4_BLOCK):
            blocks = mlp_size // MXFP4_BLOCK
            fitting = [e for e in range(1, blocks + 1) if mlp_size % (e * MXFP4_BLOCK) == 0]
            raise UpcycleError(
                f"num_experts: must cut {mlp_size} neurons into equal parts of a multiple of {MXFP4_BLOCK}, "
                f"got {self.num_experts}; use one of {fitting}"
            )
        return mlp_size // self.num_experts

    def layer(self, index: int, gate_FD: torch.Tensor, up_FD: torch.Tensor, down_DF: torch.Tensor) -> ExpertLayer:
        """The same for every layer: `index` plays no part."""
        cut = (self.num_experts, -1)
        gate_END, up_END = gate_FD.unflatten(0, cut), up_FD.unflatten(0, cut)
        down_EDN = down_DF.unflatten(1, cut).transpose(0, 1) * self.num_experts_per_tok
        router_ED = F.normalize(gate_END.mean(1), dim=-1) * _ROUTER_SCALE
        if self.num_experts_per_tok == self.num_experts:
            router_ED = torch.zeros_like(router_ED)
        return ExpertLayer(router_ED, torch.cat([gate_END, up_END], 1), down_EDN.contiguous())


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Make every expert a copy of the MLP. Exact for any `num_experts_per_tok` while `perturbation` is 0.

    `router_std` is the deviation of the router's weights, not 0: with equal logits every token would go to the same
    experts. `perturbation` adds noise of that fraction of a matrix's own deviation to each copy, so that they differ
    from the start and not only by the tokens that they train on.
    """

    num_experts: int = 8
    num_experts_per_tok: int = 2
    router_std: float = 0.02
    perturbation: float = 0.0
    seed: int = 0

    def expert_size(self, mlp_size: int) -> int:
        """F."""
        if not self.router_std > 0.0:
            raise UpcycleError(
                f"router_std: must be above 0, got {self.router_std}; equal logits send every token to the same experts"
            )
        return mlp_size

    def layer(self, index: int, gate_FD: torch.Tensor, up_FD: torch.Tensor, down_DF: torch.Tensor) -> ExpertLayer:
        """Copies of one layer; its random numbers are a function of seed and index."""
        generator = torch.Generator().manual_seed((self.seed << 20) + index)
        router_ED = torch.empty(self.num_experts, gate_FD.shape[1]).normal_(0.0, self.router_std, generator=generator)
        gate_up_E2ND = self._copies(torch.cat([gate_FD, up_FD]), generator)
        return ExpertLayer(router_ED, gate_up_E2ND, self._copies(down_DF, generator))

    def _copies(self, matrix: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        copies = matrix.repeat(self.num_experts, 1, 1)
        if self.perturbation:
            noise = torch.empty_like(copies).normal_(0.0, 1.0, generator=generator)
            copies.add_(noise, alpha=self.perturbation * float(matrix.std()))
        return copies


def upcycle(
    config: ModelConfig, masters: Mapping[str, torch.Tensor], recipe: Recipe
) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Configuration and fp32 masters of the Mixture of Experts, for `checkpoint.save_model`.

    Args:
        config: The dense model's, with one expert (`llama.llama_config`).
        masters: The dense model's, with one expert (`llama.from_llama`). What is no MLP is shared with the result.
        recipe: How to make experts.

    Raises:
        UpcycleError, ConfigError: As `upcycled_config`.
    """
    upcycled = upcycled_config(config, recipe)
    weights = {name: weight for name, weight in masters.items() if ".mlp." not in name}
    for index in range(config.num_layers):
        mlp = f"model.layers.{index}.mlp"
        gate_FD, up_FD = masters[f"{mlp}.experts.gate_up_proj"][0].chunk(2)
        layer = recipe.layer(index, gate_FD, up_FD, masters[f"{mlp}.experts.down_proj"][0])
        weights[f"{mlp}.router.weight"] = layer.router_ED
        weights[f"{mlp}.experts.gate_up_proj"] = layer.gate_up_E2ND
        weights[f"{mlp}.experts.down_proj"] = layer.down_EDN
    return upcycled, weights


def upcycled_config(config: ModelConfig, recipe: Recipe) -> ModelConfig:
    """The configuration alone.

    Raises:
        UpcycleError: The recipe does not fit, or `config` has more than one expert already.
        ConfigError: The result is a network that cannot be built, such as one with more choices than experts.
    """
    if config.num_experts != 1:
        raise UpcycleError(
            f"model.num_experts: only a dense model (one expert) can be upcycled, got {config.num_experts} experts; "
            "read it with model/llama.py"
        )
    upcycled = dataclasses.replace(
        config,
        expert_hidden_size=recipe.expert_size(config.expert_hidden_size),
        num_experts=recipe.num_experts,
        num_experts_per_tok=recipe.num_experts_per_tok,
    )
    upcycled.validate()
    return upcycled


def main(arguments: Sequence[str] | None = None) -> int:
    """Upcycle a published dense checkpoint, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m model.upcycle", description="A dense Llama as a MoE.")
    parser.add_argument("source", help="a dense Llama-type checkpoint: a folder, or a URL that fsspec reads")
    parser.add_argument("dest", type=Path, help="the folder to write; must not exist")
    parser.add_argument("--recipe", choices=["split", "copies"], default="split", help="see model/upcycle.py")
    parser.add_argument("--experts", type=int, default=8, help="experts of a layer (default: 8)")
    parser.add_argument("--active", type=int, help="experts of a token (default: all of a split, 2 copies)")
    chosen = parser.parse_args(arguments)
    kind, usual = (Split, chosen.experts) if chosen.recipe == "split" else (Copies, 2)
    recipe = kind(num_experts=chosen.experts, num_experts_per_tok=usual if chosen.active is None else chosen.active)
    try:
        with appearing_whole(chosen.dest) as folder:
            dense, masters = read_llama(chosen.source)
            config, weights = upcycle(dense, masters, recipe)
            save_model(folder, config, weights, {"source": chosen.source, "recipe": repr(recipe)})
            source = Folder(chosen.source)
            for name in source.companions():
                source.copy(name, folder)
    except (CheckpointError, ConfigError, LlamaError, UpcycleError) as error:
        sys.stderr.write("".join(f"{line}\n" for line in str(error).splitlines()))
        return 2
    total = sum(weight.numel() for weight in weights.values())
    sys.stdout.write(
        f"{total / 1e6:.1f} M parameters in {chosen.dest}: {config.num_experts} experts a layer, "
        f"{config.num_experts_per_tok} active\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
