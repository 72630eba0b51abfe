"""Learners that keep only the inputs of blocks against learners that keep everything: the same to the last bit.

What the second run of a block may not do: choose experts, count anything, read other weights, meet the other ranks'
all-to-alls out of turn.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.checkpoint import save_model
from model.config import ComputeDtype, Family, KernelChoice, ModelConfig
from model.kernels.dispatch import resolve_kernels
from model.moe import Router, Routing
from model.parallel.groups import Ranks
from model.transformer import parameter_shapes
from rl.batch import pack
from rl.learner.balance import BalanceSettings, RouterLoss
from rl.learner.config import ActivationCheckpointing, QuantizationConfig, StraightThroughKind
from rl.learner.policy import PolicyOutput, PublishedPolicy
from rl.learner.streams import batch_logprobs
from scripts.bench import recompute as bench
from tests.numerics import ranks
from tests.numerics.families import MINI, make_model
from tests.numerics.ranks import Case
from tests.numerics.test_expert_parallel import BALANCE, EVERY_FAMILY, QUICK, sample
from tests.numerics.test_placement import assert_same

ALONE = Ranks(rank=0, num_ranks=1, expert_group=None)
NONE, BLOCK = ActivationCheckpointing.none, ActivationCheckpointing.block
QUANTIZATION = {
    "identity": QuantizationConfig(),
    "clipped": QuantizationConfig(straight_through=StraightThroughKind.clipped),
    "off": QuantizationConfig(enabled=False),
}
TWO_ROWS = 2 * 4 * 40
"""Bytes of logits: many chunks, so that the loss projects a second time, too."""


def policy(
    config: ModelConfig,
    checkpointing: ActivationCheckpointing,
    kernels: KernelChoice = KernelChoice.auto,
    quantization: QuantizationConfig = QUANTIZATION["identity"],
) -> PublishedPolicy:
    made = PublishedPolicy(config, resolve_kernels(kernels), ALONE, quantization, 0, checkpointing)
    made.model.load_state_dict(make_model(config).state_dict())
    made.refresh()
    return made


def loss(made: PublishedPolicy, config: ModelConfig, *, replay: bool) -> tuple[torch.Tensor, PolicyOutput]:
    """Of logprobs by chunks and of the routers, as an update adds them up."""
    batch = pack([sample(i, 12 + i, config) for i in range(4)])
    out = made(batch, batch.routes_TLK if replay else None)
    cut = dataclasses.replace(out, unembedding=dataclasses.replace(out.unembedding, chunk_bytes=TWO_ROWS))
    logprobs_R = batch_logprobs(cut, batch, made._kernels)
    settings = BalanceSettings(load_balance_coef=0.5, router_z_coef=0.01)
    router = RouterLoss(
        settings=settings, model=config, num_tokens=batch.num_tokens, num_sequences=4, dispatched=None
    ).part(out, batch)
    advantages_R = torch.linspace(-1, 1, len(logprobs_R))
    return (logprobs_R * advantages_R).mean() + router.weighted, out


def found(made: PublishedPolicy, config: ModelConfig, *, replay: bool = False) -> dict[str, Any]:
    total, out = loss(made, config, replay=replay)
    total.backward()
    return {
        "loss": total.detach(),
        "hidden": out.hidden_RD.detach(),
        "routes": out.routes_TLK,
        **{f"logits {i}": logits_TE.detach() for i, logits_TE in enumerate(out.router_logits_TE)},
        **{name: master.grad for name, master in made.masters().items()},
    }


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    assert one.keys() == other.keys()
    return [
        name
        for name in one
        if not (one[name] is other[name] is None)
        and (one[name] is None or other[name] is None or not torch.equal(one[name], other[name]))
    ]


@pytest.mark.parametrize("replay", [False, True], ids=["free", "replay"])
@pytest.mark.parametrize("dtype", ComputeDtype)
@pytest.mark.parametrize("kernels", [KernelChoice.auto, KernelChoice.torch])
@pytest.mark.parametrize("family", Family)
def test_a_pass_has_the_same_bits(family: Family, kernels: KernelChoice, dtype: ComputeDtype, replay: bool):
    config = dataclasses.replace(MINI[family], compute_dtype=dtype)
    for name, quantization in QUANTIZATION.items():
        kept, again = (
            found(policy(config, how, kernels, quantization), config, replay=replay) for how in (NONE, BLOCK)
        )
        assert not differing(again, kept), name
        trained = {n for n in kept if n.startswith("model.") and "selection_bias" not in n}
        assert all(kept[n].abs().max() > 0 for n in trained), "there is something to compare"


def test_two_passes_add_up_as_they_do_without():
    """A gradient that is there already, and a pass that was never followed by a backward."""
    config = MINI[QUICK]
    sums = []
    for how in (NONE, BLOCK):
        made = policy(config, how)
        found(made, config)
        loss(made, config, replay=False)
        sums.append(found(made, config, replay=True))
    assert not differing(*sums)


@pytest.mark.parametrize("given", [None, torch.uint8, torch.int64])
def test_the_second_run_has_the_choices_of_the_first(given: torch.dtype | None, monkeypatch: pytest.MonkeyPatch):
    config = MINI[QUICK]
    batch = pack([sample(i, 12 + i, config) for i in range(4)])
    asked: list[torch.Tensor | None] = []
    route = Router.forward

    def spied(self: Router, x_TD: torch.Tensor, replay_TK: torch.Tensor | None) -> Routing:
        asked.append(replay_TK)
        return route(self, x_TD, replay_TK)

    monkeypatch.setattr(Router, "forward", spied)
    out = policy(config, BLOCK)(batch, None if given is None else batch.routes_TLK.to(given))
    num_layers = len(config.moe_layers)
    first = asked[:]
    assert len(first) == num_layers
    assert all((replay_TK is None) == (given is None) for replay_TK in first)
    out.hidden_RD.sum().backward()
    second = asked[num_layers:]
    assert len(second) == num_layers, "each block runs again once"
    for layer, replay_TK in enumerate(reversed(second)):
        assert torch.equal(replay_TK, out.routes_TLK[:, layer].long())


def kept_bytes(made: PublishedPolicy, config: ModelConfig) -> int:
    """Of all tensors that the graph of a pass holds, without the weights; each storage once."""
    held: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def pack_hook(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = (storage, storage.nbytes())  # kept alive, so that no other takes its place
        return tensor

    batch = pack([sample(i, 12 + i, config) for i in range(4)])
    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
        out = made(batch)
    weights = {w.untyped_storage().data_ptr() for w in (*made._views.values(), *made.masters().values())}
    del out
    return sum(nbytes for pointer, (_, nbytes) in held.items() if pointer not in weights)


@pytest.mark.parametrize("kernels", [KernelChoice.auto, KernelChoice.torch])
@pytest.mark.parametrize("family", Family)
def test_the_graph_holds_the_inputs_of_blocks(family: Family, kernels: KernelChoice):
    """And routes, and what embedding and final norm keep: ids, and at most its input, its normed input and a factor."""
    config = MINI[family]
    num_tokens, width = sum(11 + i for i in range(4)), config.hidden_size
    inputs = config.num_layers * num_tokens * width * 4
    routes = len(config.moe_layers) * num_tokens * config.num_experts_per_tok * 8
    ends = num_tokens * (8 + 2 * width * 4 + 4) + 4 * width
    assert inputs <= kept_bytes(policy(config, BLOCK, kernels), config) <= inputs + routes + ends
    assert kept_bytes(policy(config, NONE, kernels), config) > 4 * inputs


@pytest.mark.slow
def test_a_pass_grows_the_process_by_the_inputs_of_blocks_and_what_one_block_keeps():
    """Beside them the gradients of the views, which wait for those of the first block, and a chunk of logits twice."""
    layers, tokens, hidden = sizes = [48, 4096, 128]
    kept, again = (bench.growth_bytes(way, sizes, mapped=True) for way in (NONE, BLOCK))
    config = bench.configuration(layers, hidden)
    inputs = layers * tokens * hidden * 4
    routers = layers * tokens * (4 * config.num_experts + 8 * config.num_experts_per_tok)
    gradients = 4 * sum(map(math.prod, parameter_shapes(config).values()))
    logits = 2 * 4 * tokens * config.vocab_size
    one_block = kept / layers
    assert again <= inputs + routers + gradients + logits + 2 * one_block, "its values and their gradients"
    assert again < kept / 5


def test_frozen_weights_get_nothing_and_blocks_below_the_trained_ones_do_not_run_again(monkeypatch: pytest.MonkeyPatch):
    config = MINI[Family.gpt_oss]
    lowest = 2
    grads, num_runs = [], []
    for how in (NONE, BLOCK):
        made = policy(config, how)
        for name, master in made.masters().items():
            master.requires_grad_(name.startswith(f"model.layers.{lowest}.") and name.endswith("proj.weight"))
        runs: list[int] = []
        for index, layer in enumerate(made.model.model.layers):
            layer.register_forward_pre_hook(lambda _module, _args, index=index, runs=runs: runs.append(index))
        grads.append(found(made, config))
        num_runs.append([runs.count(index) for index in range(config.num_layers)])
    assert not differing(*grads)
    got = {name for name, gradient in grads[1].items() if name.startswith("model.") and gradient is not None}
    assert got == {f"model.layers.{lowest}.self_attn.{which}_proj.weight" for which in "qkvo"}
    assert num_runs == [[1] * config.num_layers, [1 + (index >= lowest) for index in range(config.num_layers)]]


def pairs(family: Family, folder: Path, **changes: Any) -> list[Case]:
    """Cases of several steps, each without and with checkpointing."""
    config = MINI[family]
    start = folder / "start"
    start.mkdir()
    save_model(start, config, dict(make_model(config).named_parameters()), {})
    recorded = tuple(sample(i, 12 + i, config) for i in range(5))
    free = tuple(dataclasses.replace(one, routes_TLK=np.zeros((0, 0, 0), np.uint8)) for one in recorded)
    common = {"start": start, "balance": BALANCE, "max_grad_norm": 0.5, "num_steps": 3, **changes}
    fp32, bf16 = (dataclasses.replace(config, compute_dtype=dtype) for dtype in ComputeDtype)
    cases = [
        Case(**common, name="free", model=fp32, samples=free),
        Case(**common, name="replay, starved", model=bf16, samples=recorded, replay=True),
        Case(**common, name="torch", model=fp32, samples=free, kernels=KernelChoice.torch),
        Case(**common, name="clipped", model=fp32, samples=free, quantization=QUANTIZATION["clipped"]),
        Case(**common, name="masters", model=bf16, samples=recorded, replay=True, quantization=QUANTIZATION["off"]),
        # One sample: the other rank computes padding, whose loss and gradients are 0.
        Case(**common, name="padding", model=fp32, samples=free[:1]),
    ]
    return [
        dataclasses.replace(case, name=f"{case.name}/{how}", activation_checkpointing=how)
        for case in cases
        for how in (NONE, BLOCK)
    ]


def assert_pairs_are_the_same(found: Mapping[str, ranks.Found]) -> None:
    for name in {each.partition("/")[0] for each in found}:
        kept, again = found[f"{name}/{NONE}"], found[f"{name}/{BLOCK}"]
        assert_same(again, kept)
        assert again.grad_norms == kept.grad_norms
        assert (again.terms, again.watched) == (kept.terms, kept.watched)
        assert len(set(kept.losses)) == len(kept.losses), "the weights have moved"


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_steps_of_one_rank_have_the_same_bits(family: Family, tmp_path: Path):
    assert_pairs_are_the_same(ranks.run(pairs(family, tmp_path), 1, tmp_path / "job"))


@pytest.mark.parametrize("zero_stage", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_steps_of_two_ranks_that_share_the_experts_out_have_the_same_bits(
    family: Family, zero_stage: int, tmp_path: Path
):
    job = pairs(family, tmp_path, expert_parallel=2, zero_stage=zero_stage, micro_batch_tokens=30)
    assert_pairs_are_the_same(ranks.run(job, 2, tmp_path / "job"))
