"""Learners on 2 and 4 ranks, the experts shared out or not, against the same learner on one rank.

Everything runs with the published view on, that is MXFP4 experts and bf16 elsewhere. With the kernels' batch-invariant
forward, losses and routes of any number of ranks have the same bits; gradients differ by the order of their sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.checkpoint import save_model
from model.config import Family, KernelChoice, ModelConfig
from rl.algorithms.config import BalanceScope
from rl.batch import TrainSample
from rl.learner.balance import BalanceSettings
from tests.numerics import ranks, test_learner
from tests.numerics.families import MINI, make_model
from tests.numerics.ranks import Case, Found

TOLERANCE = 1e-5
"""Relative, in norm: a sum over all tokens has at most 2^8 terms in another order, so 2^8 * 2^-24 = 1.5e-5 at worst."""

BALANCE = BalanceSettings(load_balance_coef=0.5, scope=BalanceScope.global_batch, router_z_coef=0.01)
QUICK = Family.qwen3_moe
SLOW = [family for family in MINI if family is not QUICK]
EVERY_FAMILY = [pytest.param(QUICK, id=QUICK)] + [pytest.param(f, id=f, marks=pytest.mark.slow) for f in SLOW]


def sample(number: int, num_tokens: int, config: ModelConfig) -> TrainSample:
    """Context, answer, observation, answer; routes that keep to the first half of the experts."""
    rng = np.random.default_rng((number, num_tokens))
    shape = (num_tokens - 1, len(config.moe_layers))
    some = [rng.permutation(config.num_experts // 2)[: config.num_experts_per_tok] for _ in range(np.prod(shape))]
    ids = rng.integers(0, config.vocab_size, num_tokens)
    routes_TLK = np.array(some, np.uint8).reshape(*shape, -1)
    return dataclasses.replace(test_learner.sample(number, num_tokens, ids=ids), routes_TLK=routes_TLK)


def cases(family: Family, start: Path) -> list[Case]:
    """What one rank and several do alike."""
    config = MINI[family]
    starved = tuple(sample(i, 12 + i, config) for i in range(7))
    free = tuple(dataclasses.replace(one, routes_TLK=np.zeros((0, 0, 0), np.uint8)) for one in starved)
    common = {"model": config, "start": start, "samples": free, "balance": BALANCE}
    return [
        Case(**common, name="gradient"),
        Case(**common, name="clipped", max_grad_norm=0.5),
        Case(**common, name="torch", kernels=KernelChoice.torch),
        Case(**common, name="five steps", sgd=True, num_steps=5, max_grad_norm=0.5),
        Case(**common | {"samples": starved}, name="starved", replay=True),
        Case(**common | {"samples": starved}, name="starved, five steps", replay=True, sgd=True, num_steps=5),
        # One sample, so that all ranks but one compute padding.
        Case(**common | {"samples": free[:1]}, name="padding"),
    ]


Runs = Callable[..., tuple[dict[str, Found], dict[str, Found]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """What one rank found and what `num_ranks` found."""
    folder = tmp_path_factory.mktemp("ranks")
    alone: dict[Family, dict[str, Found]] = {}

    def both(family: Family, num_ranks: int, expert_parallel: int, zero_stage: int, *names: str):
        start = folder / family
        if not start.exists():
            start.mkdir()
            save_model(start, MINI[family], dict(make_model(MINI[family]).named_parameters()), {})
        if family not in alone:
            alone[family] = ranks.run(cases(family, start), 1, folder / f"{family}-alone")
        name = f"{family}-{num_ranks}-{expert_parallel}-{zero_stage}"
        job = [
            dataclasses.replace(case, expert_parallel=expert_parallel, zero_stage=zero_stage)
            for case in cases(family, start)
            if case.name in (names or alone[family])
        ]
        return alone[family], ranks.run(job, num_ranks, folder / name)

    return both


def assert_close(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = float(tensor.norm())
        assert float((got[name] - tensor).norm()) <= TOLERANCE * scale, name


def assert_alike(family: Family, one: Mapping[str, Found], several: Mapping[str, Found]) -> None:
    for name, got in several.items():
        expected = one[name]
        # Of the first step: later ones amplify the rounding of the weights, which have their own bound. A loss is a
        # mean of terms of about 1 that cancel.
        np.testing.assert_allclose(got.losses[0], expected.losses[0], rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)
        np.testing.assert_allclose(got.grad_norms[0], expected.grad_norms[0], rtol=TOLERANCE, err_msg=name)
        np.testing.assert_array_equal(got.loads_LE[0], expected.loads_LE[0])
        assert len(got.losses) == len(expected.losses)
        if expected.moments:
            assert_close(got.gradients(), expected.gradients())
        else:
            assert_close(got.masters, expected.masters)
    # The comparison sees something: there are gradients everywhere, the clip bites, an expert starves.
    gradients = one["gradient"].gradients()
    trained = {name for name, parameter in make_model(MINI[family]).named_parameters() if "selection_bias" not in name}
    assert gradients.keys() == trained
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
    assert one["clipped"].grad_norms[0] > 1
    half = MINI[family].num_experts // 2
    starved = one["starved"]
    assert not starved.loads_LE[0][:, half:].any()
    assert all(not g[half:].any() for n, g in starved.gradients().items() if ".experts." in n)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_two_ranks_that_share_the_experts_out_are_one(runs: Runs, family: Family):
    one, two = runs(family, 2, 2, 1)
    assert two.keys() == one.keys()
    assert_alike(family, one, two)
    whole = one["gradient"].num_own_parameters
    experts = sum(m.numel() for n, m in one["gradient"].masters.items() if ".experts." in n)
    assert two["gradient"].num_own_parameters == whole - experts // 2


def test_the_digests_of_what_was_published_need_no_gather_and_see_damage_on_any_rank(runs: Runs):
    one, two = runs(QUICK, 2, 2, 1, "gradient")
    for found in (one["gradient"], two["gradient"]):
        assert found.digests_again == found.digests
        assert found.num_gathers == 0
        changed = {name for name, value in found.digests.items() if found.digests_damaged[name] != value}
        assert changed == {ranks.damaged_tensor(MINI[QUICK])}
        assert found.digests_damaged.keys() == found.digests.keys()


ARRANGEMENTS = [
    *((family, 2, expert_parallel, stage) for family in MINI for expert_parallel, stage in ((1, 1), (2, 2))),
    (Family.qwen3_moe, 2, 1, 2),
    *((family, 4, 2, 1) for family in (Family.qwen3_moe, Family.gpt_oss, Family.deepseek_v3)),
    (Family.gpt_oss, 4, 2, 2),
    (Family.gpt_oss, 4, 4, 1),
]
"""Ranks, ranks that share the experts out, ZeRO stage."""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "num_ranks", "expert_parallel", "zero_stage"), ARRANGEMENTS)
def test_ranks_in_any_arrangement_are_one(
    runs: Runs, family: Family, num_ranks: int, expert_parallel: int, zero_stage: int
):
    names = ("clipped", "five steps", "starved")
    assert_alike(family, *runs(family, num_ranks, expert_parallel, zero_stage, *names))


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_checkpoints_and_snapshots_do_not_tell_how_many_ranks_there_were(family: Family, tmp_path: Path):
    """One rank, then two that share the experts out, then one: every file the same, every next step the same."""
    config = MINI[family]
    folders = [tmp_path / name for name in ("start", "one", "two", "one again", "two on")]
    for folder in folders:
        folder.mkdir()
    start, first, second, third, on = folders
    save_model(start, config, dict(make_model(config).named_parameters()), {})
    samples = tuple(sample(i, 12 + i, config) for i in range(4))
    common = {"model": config, "start": start, "samples": samples, "balance": BALANCE}
    made = ranks.run(
        [
            Case(**common, name="made", num_steps=2, save=first, record=True),
            Case(**common, name="next", load=first, num_steps=1),
        ],
        1,
        tmp_path / "job one",
    )
    recorded = made["made"].recorded
    twice = ranks.run(
        [
            Case(**common, name="again", load=first, num_steps=0, save=second, expert_parallel=2),
            Case(**common, name="next", load=first, num_steps=1, save=on, expert_parallel=2),
            # The weights at the start, which recorded the samples: two ranks find the same logprobs and routes.
            Case(
                **common | {"samples": recorded}, name="parity", num_steps=0, expert_parallel=2, micro_batch_tokens=20
            ),
        ],
        2,
        tmp_path / "job two",
    )
    back = ranks.run([Case(**common, name="back", load=second, num_steps=0, save=third)], 1, tmp_path / "job three")
    for name in ("model.safetensors", "optimizer.safetensors", "config.json"):
        assert (second / name).read_bytes() == (first / name).read_bytes(), name
        assert (third / name).read_bytes() == (first / name).read_bytes(), name
        assert name == "config.json" or (on / name).read_bytes() != (first / name).read_bytes()
    assert twice["again"].digests == made["made"].digests == back["back"].digests
    np.testing.assert_allclose(twice["next"].losses, made["next"].losses, rtol=TOLERANCE)
    assert_close(twice["next"].moments, made["next"].moments)
    parity = twice["parity"].parity
    assert parity is not None
    assert parity.num_tokens == sum(len(one.targets_R) for one in recorded)
    assert (parity.max_abs_nats, parity.num_flipped_tokens) == (0.0, 0)


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_an_offloaded_optimizer_makes_the_same_steps(zero_stage: int, tmp_path: Path):
    config = MINI[Family.gpt_oss]
    (tmp_path / "start").mkdir()
    save_model(tmp_path / "start", config, dict(make_model(config).named_parameters()), {})
    common: dict[str, Any] = {
        "model": config, "start": tmp_path / "start", "samples": tuple(sample(i, 12 + i, config) for i in range(6)),
        "expert_parallel": 2, "zero_stage": zero_stage, "num_steps": 3, "micro_batch_tokens": 30,
    }  # fmt: skip
    job = [Case(**common, name=f"{limit}-{offload}", max_grad_norm=limit, offload=offload) for limit in (1e9, 0.5)
           for offload in (False, True)]  # fmt: skip
    found = ranks.run(job, 2, tmp_path / "job")
    for limit in (1e9, 0.5):
        kept, offloaded = (found[f"{limit}-{offload}"] for offload in (False, True))
        assert kept.grad_norms[0] > 0.5, "the control: the lower limit clips"
        np.testing.assert_allclose(offloaded.grad_norms, kept.grad_norms, rtol=TOLERANCE)
        assert_close(offloaded.masters, kept.masters)
        assert_close(offloaded.moments, kept.moments)
