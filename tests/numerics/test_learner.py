"""The learner against plain autograd on the same straight-through model, torch's AdamW, and itself.

One process group a process, and every learner here is one more engine on it: none of them is closed.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.checkpoint import save_model
from model.config import ModelConfig
from model.layers import project_logits
from model.moe_losses import dispatch_totals, load_balancing_loss, router_sums, router_z_loss
from model.mxfp4 import dequantize
from model.packed_attention import PackedAttention
from model.snapshot import Format, StraightThrough, digest, tensor_format, verify
from model.transformer import Transformer, init_weights, parameter_shapes
from rl.algorithms.config import AlgorithmConfig
from rl.algorithms.registry import build_algorithm
from rl.batch import TrainSample, micro_batches, pack
from rl.learner.deepspeed import OptimizerSettings, Rendezvous
from rl.learner.learner import Learner, LearnerError, LearnerSpec
from rl.learner.policy import PolicyOutput
from rl.parity import ParityError
from rollout.types import WeightVersion
from tests.numerics.tolerances import relative_error, summed
from tests.ports import free_port

MODEL = ModelConfig(
    vocab_size=48, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
    expert_hidden_size=32, num_experts=4, num_experts_per_tok=2, max_positions=64,
)  # fmt: skip
GRPO = build_algorithm(AlgorithmConfig())
LR = 1e-2

GRADIENT = 12 * summed(128)
"""Two layers of 3 chained products, forward and backward, of sums of at most 128 terms, in two orders."""

MakeLearner = Callable[..., Learner]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    model = Transformer(MODEL)
    init_weights(model, 3)
    save_model(folder, MODEL, dict(model.named_parameters()), {})
    return folder


@pytest.fixture(scope="module")
def make(start: Path) -> Iterator[MakeLearner]:
    """A learner from `start`; keywords change its spec or its optimizer's settings."""
    environment = dict(os.environ)

    def build(**changes: Any) -> Learner:
        optimizer = OptimizerSettings(beta1=0.9, beta2=0.95, weight_decay=0.0, max_grad_norm=1e9, zero_stage=1)
        spec = LearnerSpec(
            model=MODEL, optimizer=optimizer, start=start, num_threads=1, micro_batch_tokens=10_000,
        )  # fmt: skip
        for part in ("optimizer", "balance"):
            settings = getattr(spec, part)
            of_part = {name: changes.pop(name) for name in list(changes) if hasattr(settings, name)}
            spec = dataclasses.replace(spec, **{part: dataclasses.replace(settings, **of_part)})
        spec = dataclasses.replace(spec, **changes)
        return Learner(spec, Rendezvous(rank=0, world_size=1, address="127.0.0.1", port=free_port()))

    yield build
    os.environ.clear()
    os.environ.update(environment)


def sample(number: int, num_tokens: int, *, ids: np.ndarray | None = None, targets: range | None = None) -> TrainSample:
    """Context, answer, observation, answer: two runs of trainable tokens; ratios well away from 1."""
    rng = np.random.default_rng((number, num_tokens))
    drawn = rng.integers(0, MODEL.vocab_size, num_tokens)
    half = num_tokens // 2
    places = np.array(targets or [*range(3, half - 1), *range(half + 1, num_tokens - 1)])
    return TrainSample(
        key=f"{number:03d}",
        ids_T=drawn if ids is None else ids,
        targets_R=places,
        behavior_logprobs_R=rng.normal(-4.0, 0.3, len(places)).astype(np.float32),
        advantages_R=rng.normal(size=len(places)).astype(np.float32),
        routes_TLK=np.zeros((0, 0, 0), np.uint8),
        weight_version=0,
        trained=True,
    )


SAMPLES = [sample(i, 12 + i) for i in range(8)]
WEIGHED = [dataclasses.replace(one, token_weight=1 / 16, token_mass=1 / len(one.targets_R)) for one in SAMPLES]


def masters(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner._policy.model.named_parameters()}


def first_gradients(learner: Learner) -> dict[str, torch.Tensor]:
    """Clipped gradients of the only step so far: AdamW's first moment is then (1 - beta1) g."""
    moments, num_steps = learner._engine.optimizer_state()
    assert num_steps == 1
    prefix = "exp_avg/"
    return {n.removeprefix(prefix): m / (1 - 0.9) for n, m in moments.items() if n.startswith(prefix)}


def reference_loss(
    viewed: dict[str, torch.Tensor],
    samples: list[TrainSample],
    balance_coef: float,
    z_coef: float,
    *,
    replay: bool = False,
) -> torch.Tensor:
    """The minibatch's loss in one pass over all of it, with the model called directly."""
    model = Transformer(MODEL)
    batch = pack(samples)
    inputs = (batch.ids_T, batch.positions_T, PackedAttention(batch.cu_seqlens), batch.routes_TLK if replay else None)
    out = torch.func.functional_call(model, viewed, inputs)
    logits_RV = project_logits(out.hidden_TD[batch.rows_R], viewed["model.embed_tokens.weight"])
    chosen_R = torch.log_softmax(logits_RV, -1)[torch.arange(len(batch.rows_R)), batch.target_ids_R]
    ratio_R = (chosen_R - batch.behavior_logprobs_R).exp()
    loss_R = -torch.minimum(ratio_R * batch.advantages_R, ratio_R.clamp(0.8, 1.28) * batch.advantages_R)
    real_T = torch.ones(batch.num_tokens, dtype=torch.bool)
    totals = dispatch_totals(out.routes_TLK, real_T, MODEL.num_experts)
    sums = router_sums(out.router_logits_TE, real_T)
    router = balance_coef * load_balancing_loss(sums, totals) + z_coef * router_z_loss(sums, totals)
    weight_R = torch.cat([torch.full((len(one.targets_R),), one.token_weight) for one in samples])
    return (loss_R * weight_R).sum() / sum(len(one.targets_R) * one.token_mass for one in samples) + router


def published_values(learner: Learner) -> dict[str, torch.Tensor]:
    """Every tensor decoded from the bytes of a snapshot, by this test's own reading of the format."""
    snapshot, _ = learner.snapshot(WeightVersion(0))
    values: dict[str, torch.Tensor] = {}
    for name, packed in snapshot.tensors.items():
        payload = torch.from_numpy(packed.payload.copy())
        if tensor_format(name) is Format.MXFP4:
            values[name] = dequantize(payload, torch.from_numpy(packed.scales.copy()), torch.float32).view(packed.shape)
        else:
            values[name] = payload.view(torch.bfloat16).view(packed.shape).float()
    return values


def straight_through(learner: Learner) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Copies of the masters that ask for a gradient, and their published view over them."""
    leaves = {name: m.requires_grad_() for name, m in masters(learner).items()}
    values = published_values(learner)
    return leaves, {name: StraightThrough.apply(leaf, values[name]) for name, leaf in leaves.items()}


def test_the_forward_reads_exactly_the_published_bytes_of_every_tensor(make: MakeLearner):
    learner = make()
    for step in range(2):
        values = published_values(learner)
        assert values.keys() == parameter_shapes(MODEL).keys()
        with torch.enable_grad():
            read = learner._policy._readable()
        for name, value in values.items():
            assert torch.equal(read[name], value), name
            assert read[name].requires_grad
        with torch.no_grad():
            assert all(torch.equal(read_too, values[n]) for n, read_too in learner._policy._readable().items())
        # The view is not the master: the comparison above would see a learner that reads its masters.
        assert sum(not torch.equal(master, values[n]) for n, master in masters(learner).items()) >= 10 - 5 * (step == 0)
        learner.update([SAMPLES], GRPO, LR)


def test_a_snapshot_passes_the_receivers_check_and_digests_what_the_forward_reads(make: MakeLearner):
    learner = make()
    learner.update([SAMPLES], GRPO, LR)
    snapshot, _ = learner.snapshot(WeightVersion(4))
    verify(snapshot, parameter_shapes(MODEL))
    assert snapshot.digests == {name: digest(name, packed) for name, packed in learner._policy._packed.items()}
    assert learner.view_differences({n: v.numpy() for n, v in published_values(learner).items()}) == {}


@pytest.mark.parametrize("samples", [SAMPLES, WEIGHED], ids=["over tokens", "over episodes"])
@pytest.mark.parametrize(("balance_coef", "z_coef"), [(0.0, 0.0), (0.5, 0.25)])
def test_the_gradient_is_that_of_plain_autograd(make: MakeLearner, balance_coef: float, z_coef: float, samples):
    learner = make(load_balance_coef=balance_coef, router_z_coef=z_coef)
    leaves, viewed = straight_through(learner)
    loss = reference_loss(viewed, samples, balance_coef, z_coef)
    loss.backward()
    report = learner.update([samples], GRPO, LR)
    gradients = first_gradients(learner)
    assert gradients.keys() == leaves.keys()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert relative_error(gradients[name], leaf.grad) < GRADIENT, name
        assert gradients[name].abs().max() > 0, name
    assert report is not None
    total = report.policy_loss + balance_coef * report.balance_loss + z_coef * report.router_z_loss
    assert total == pytest.approx(float(loss.detach()), abs=1e-5)


def test_two_steps_are_those_of_torchs_adamw(make: MakeLearner):
    """Given the learner's own gradients, so that only the optimizer is compared."""
    learner = make(weight_decay=0.1)
    leaves = {name: m.requires_grad_() for name, m in masters(learner).items()}
    adamw = torch.optim.AdamW(leaves.values(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    previous = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    for _ in range(2):
        learner.update([SAMPLES], GRPO, LR)
        moments, _ = learner._engine.optimizer_state()
        for name, leaf in leaves.items():
            moment = moments[f"exp_avg/{name}"]
            leaf.grad = (moment - 0.9 * previous[name]) / (1 - 0.9)
            previous[name] = moment
        adamw.step()
    for name, master in masters(learner).items():
        # A step moves a weight by about lr whatever the gradient's size: where the gradient is no larger than the
        # rounding of the moments it was recovered from (1e-9 of the largest), its sign is open.
        torch.testing.assert_close(master, leaves[name].detach(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("limit", [0.01, 1e9])
def test_the_clip_uses_the_norm_of_all_gradients_together(make: MakeLearner, limit: float):
    learner = make(max_grad_norm=limit)
    leaves, viewed = straight_through(learner)
    reference_loss(viewed, SAMPLES, 0.0, 0.0).backward()
    norm = float(torch.stack([leaf.grad.norm() for leaf in leaves.values() if leaf.grad is not None]).norm())
    assert norm > 0.1
    report = learner.update([SAMPLES], GRPO, LR)
    assert report is not None
    assert report.grad_norm == pytest.approx(norm, rel=1e-5)
    factor = min(1.0, limit / (norm + 1e-6))
    for name, gradient in first_gradients(learner).items():
        leaf = leaves[name]
        assert leaf.grad is not None
        assert relative_error(gradient, factor * leaf.grad) < GRADIENT, name


@pytest.mark.parametrize(("name", "samples"), [("grpo", SAMPLES), ("grpo", WEIGHED), ("gspo", WEIGHED)])
@pytest.mark.parametrize("num_micro_batches", [2, 4, 8])
def test_micro_batches_change_nothing_in_the_policy_gradient(make: MakeLearner, num_micro_batches: int, name, samples):
    limit = {2: 70, 4: 37, 8: 1}[num_micro_batches]
    assert len(list(micro_batches(samples, limit))) == num_micro_batches
    whole, cut, algorithm = make(), make(micro_batch_tokens=limit), build_algorithm(AlgorithmConfig(name=name))
    reports = [learner.update([samples], algorithm, LR) for learner in (whole, cut)]
    expected, got = first_gradients(whole), first_gradients(cut)
    for name in expected:
        assert relative_error(got[name], expected[name]) < GRADIENT, name
    assert reports[0] is not None
    assert reports[1] is not None
    assert reports[1].policy_loss == pytest.approx(reports[0].policy_loss, abs=1e-6)
    assert reports[1].clip_frac == reports[0].clip_frac > 0
    np.testing.assert_array_equal(reports[1].expert_load_LE, reports[0].expert_load_LE)


def test_ids_that_no_trained_token_can_see_have_no_gradient(make: MakeLearner):
    """What follows the last answer is in no loss: its ids change nothing and get nothing."""
    low = np.random.default_rng(0).integers(0, 20, 24)
    other = low.copy()
    low[16:], other[16:] = np.arange(20, 28), np.arange(30, 38)
    gradients = []
    for ids in (low, other):
        learner = make()
        learner.update([[sample(0, 24, ids=ids, targets=range(8, 16))]], GRPO, LR)
        gradients.append(first_gradients(learner))
    for name in gradients[0]:
        assert relative_error(gradients[1][name], gradients[0][name]) < GRADIENT, name
    # Logits tie the embedding to the output, so compare its rows: 20..27 and 30..37 differ by being unseen alike.
    rows = gradients[0]["model.embed_tokens.weight"]
    assert relative_error(rows[20:28], gradients[1]["model.embed_tokens.weight"][20:28]) < GRADIENT


def test_a_learning_rate_of_zero_leaves_every_bit(make: MakeLearner):
    learner = make(weight_decay=0.1)
    before, (snapshot, _) = masters(learner), learner.snapshot(WeightVersion(0))
    for _ in range(3):
        report = learner.update([SAMPLES[:4], SAMPLES[4:]], GRPO, 0.0)
        assert report is not None
        assert report.grad_norm > 0
    after, changed = learner.snapshot(WeightVersion(1))
    assert all(torch.equal(before[name], master) for name, master in masters(learner).items())
    assert after.digests == snapshot.digests
    assert changed
    assert all(changes.is_still for changes in changed.values())


def test_changed_codes_are_counted_against_the_last_snapshot(make: MakeLearner):
    learner = make()
    old, first = learner.snapshot(WeightVersion(0))
    assert first == {}
    learner.update([SAMPLES], GRPO, LR)
    learner.update([SAMPLES], GRPO, LR)
    new, changed = learner.snapshot(WeightVersion(1))
    assert changed.keys() == {name for name, packed in old.tensors.items() if packed.format is Format.MXFP4}
    for name, found in changed.items():
        differs = old.tensors[name].payload ^ new.tensors[name].payload
        assert found.num_codes_changed == ((differs & 15) != 0).sum() + ((differs >> 4) != 0).sum()
    assert sum(found.num_codes_changed for found in changed.values()) > 500


def test_a_minibatch_without_samples_makes_no_step(make: MakeLearner):
    learner = make()
    before = masters(learner)
    assert learner.update([[], []], GRPO, LR) is None
    assert all(torch.equal(before[name], master) for name, master in masters(learner).items())
    report = learner.update([SAMPLES[:1], []], GRPO, LR)
    assert report is not None
    assert (report.num_steps, report.num_tokens) == (1, len(SAMPLES[0].targets_R))


@pytest.mark.parametrize("broken", ["nan advantage", "infinite ratio"])
def test_a_gradient_that_is_not_finite_ends_the_run_and_changes_nothing(make: MakeLearner, broken: str):
    learner = make()
    learner.update([SAMPLES], GRPO, LR)
    before, state = masters(learner), learner._engine.optimizer_state()
    count = len(SAMPLES[0].targets_R)
    bad = (
        dataclasses.replace(SAMPLES[0], advantages_R=np.full(count, np.nan, np.float32))
        if broken == "nan advantage"
        else dataclasses.replace(
            SAMPLES[0],
            behavior_logprobs_R=np.full(count, -1e3, np.float32),
            advantages_R=np.full(count, -1.0, np.float32),
        )
    )
    with pytest.raises(LearnerError, match=r"^learner: the gradient must be finite, got norm (inf|nan); "):
        learner.update([[SAMPLES[1], bad]], GRPO, LR)
    assert all(torch.equal(before[name], master) for name, master in masters(learner).items())
    after = learner._engine.optimizer_state()
    assert after[1] == state[1] == 1
    assert all(torch.equal(value, after[0][name]) for name, value in state[0].items())


def logits(out: PolicyOutput) -> torch.Tensor:
    return out.unembedding(out.hidden_RD)


def test_fit_lowers_the_loss(make: MakeLearner):
    learner = make(load_balance_coef=0.01)
    losses = [learner.fit(SAMPLES, LR) for _ in range(12)]
    assert losses[0] == pytest.approx(np.log(MODEL.vocab_size), abs=0.3)  # near uniform at the start
    assert losses[-1] < 0.6 * losses[0]


def test_fits_loss_is_the_mean_over_trainable_tokens(make: MakeLearner):
    learner, cut = make(), make(micro_batch_tokens=30)
    batch = pack(SAMPLES)
    with torch.no_grad():
        logits_RV = logits(learner._policy(batch))
    expected = torch.nn.functional.cross_entropy(logits_RV, batch.target_ids_R)
    assert learner.fit(SAMPLES, LR) == pytest.approx(float(expected), abs=1e-5)
    assert cut.fit(SAMPLES, LR) == pytest.approx(float(expected), abs=1e-5)


def recorded(learner: Learner, samples: list[TrainSample], temperature: float = 1.0) -> list[TrainSample]:
    """The samples as a sampler that agrees with the learner to the last bit would have recorded them."""
    results = []
    for each in samples:
        batch = pack([each])
        with torch.no_grad():
            out = learner._policy(batch)
        logprobs = torch.log_softmax(logits(out) / temperature, -1)[
            torch.arange(len(each.targets_R)), batch.target_ids_R
        ]
        results.append(
            dataclasses.replace(
                each,
                behavior_logprobs_R=logprobs.numpy(),
                routes_TLK=out.routes_TLK.numpy(),
                temperature=temperature,
            )
        )
    return results


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_parity_with_a_sampler_that_agrees(make: MakeLearner, temperature: float):
    learner = make(micro_batch_tokens=40)
    report = learner.parity(recorded(learner, SAMPLES, temperature))
    assert report.num_tokens == sum(len(each.targets_R) for each in SAMPLES)
    assert report.num_routed == sum(each.num_inputs for each in SAMPLES)
    assert report.num_flipped == 0
    assert report.max_abs_nats < 4e-6  # packing: logits of about 4, 8 u of sums
    batch = pack(SAMPLES)
    with torch.no_grad():
        logits_RV = logits(learner._policy(batch)) / temperature
    entropy = torch.distributions.Categorical(logits=logits_RV).entropy().mean()
    assert report.entropy == pytest.approx(float(entropy), rel=1e-5)


def test_parity_finds_the_one_token_and_the_one_route_that_differ(make: MakeLearner):
    learner = make(micro_batch_tokens=40)
    samples = recorded(learner, SAMPLES)
    logprobs = samples[2].behavior_logprobs_R.copy()
    logprobs[3] += 0.5
    routes = samples[5].routes_TLK.copy()
    routes[4, 1] = (routes[4, 1] + 1) % MODEL.num_experts
    samples[2] = dataclasses.replace(samples[2], behavior_logprobs_R=logprobs)
    samples[5] = dataclasses.replace(samples[5], routes_TLK=routes)
    report = learner.parity(samples)
    assert report.max_abs_nats == pytest.approx(0.5, abs=1e-5)
    num_compared = report.num_tokens - len(samples[5].targets_R)  # the flipped sequence is left out
    assert report.mean_abs_nats == pytest.approx(0.5 / num_compared, rel=1e-3)
    assert report.worst_layer == 1
    assert report.num_flipped == 1
    with pytest.raises(ParityError, match=r"every computed token needs its route, got \(0, 0, 0\) for "):
        learner.parity(SAMPLES)


def test_at_ratio_one_the_first_step_clips_nothing_and_its_loss_is_minus_the_mean_advantage(make: MakeLearner):
    learner = make()
    samples = recorded(learner, SAMPLES, temperature=0.7)
    report = learner.update([samples], GRPO, LR)
    assert report is not None
    assert report.clip_frac == 0.0
    assert report.kl_behavior_policy == pytest.approx(0.0, abs=1e-9)
    mean = np.concatenate([each.advantages_R for each in samples]).astype(np.float64).mean()
    assert report.policy_loss == pytest.approx(-mean, abs=1e-5)


CONTINUE = """
import sys, json, torch
from pathlib import Path
from typing import Any
torch.set_num_threads(1)
from rl.learner.balance import BalanceSettings
from tests.numerics import test_learner as t
folder, port = Path(sys.argv[1]), int(sys.argv[2])
spec = t.LearnerSpec(
    model=t.MODEL, start=Path(sys.argv[3]), num_threads=1, micro_batch_tokens=10_000,
    balance=BalanceSettings(load_balance_coef=0.01),
    optimizer=t.OptimizerSettings(beta1=0.9, beta2=0.95, weight_decay=0.1, max_grad_norm=0.5, zero_stage=1),
)
learner = t.Learner(spec, t.Rendezvous(rank=0, world_size=1, address="127.0.0.1", port=port))
learner.load(folder)
print("AT", json.dumps(learner.snapshot(t.WeightVersion(0))[0].digests))
learner.update([t.SAMPLES[:4], t.SAMPLES[4:]], t.GRPO, t.LR)
out = Path(sys.argv[4])
out.mkdir()
learner.save(out)
print("DONE", json.dumps(learner.snapshot(t.WeightVersion(1))[0].digests))
learner.close()
"""


def test_a_fresh_process_goes_on_to_the_last_bit(make: MakeLearner, start: Path, tmp_path: Path):
    learner = make(load_balance_coef=0.01, weight_decay=0.1, max_grad_norm=0.5)
    learner.update([SAMPLES[4:], SAMPLES[:4]], GRPO, LR)
    saved, here, there = tmp_path / "saved", tmp_path / "here", tmp_path / "there"
    saved.mkdir()
    learner.save(saved)
    at = learner.snapshot(WeightVersion(0))[0].digests
    learner.update([SAMPLES[:4], SAMPLES[4:]], GRPO, LR)
    here.mkdir()
    learner.save(here)
    done = subprocess.run(
        [sys.executable, "-c", CONTINUE, str(saved), str(free_port()), str(start), str(there)],
        check=True, capture_output=True, text=True, timeout=200,
    ).stdout  # fmt: skip
    lines = {
        line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in done.splitlines() if line.startswith(("AT", "DO"))
    }
    assert json.loads(lines["AT"]) == at
    assert json.loads(lines["DONE"]) == learner.snapshot(WeightVersion(1))[0].digests
    # Masters, both moments of every parameter and the number of steps, byte for byte.
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (there / name).read_bytes() == (here / name).read_bytes(), name


def test_loading_into_a_used_learner_forgets_what_it_did(make: MakeLearner, tmp_path: Path):
    """From step 2 back to step 1, and to step 0: moments and step count are those of the checkpoint."""
    learner, straight = make(weight_decay=0.1), make(weight_decay=0.1)
    for number in range(2):
        folder = tmp_path / f"step-{number}"
        folder.mkdir()
        learner.save(folder)
        learner.update([SAMPLES], GRPO, LR)
    for number in (1, 0):
        learner.load(tmp_path / f"step-{number}")
        assert learner._engine.optimizer_state()[1] == number
        straight.load(tmp_path / f"step-{number}")
        for each in (learner, straight):
            each.update([SAMPLES[:5], SAMPLES[5:]], GRPO, LR)
        left, right = learner._engine.optimizer_state(), straight._engine.optimizer_state()
        assert left[1] == right[1] == number + 2
        assert all(torch.equal(value, right[0][name]) for name, value in left[0].items())
        assert all(torch.equal(value, masters(straight)[name]) for name, value in masters(learner).items())
    fresh = make(weight_decay=0.1)
    fresh.update([SAMPLES[:5], SAMPLES[5:]], GRPO, LR)
    assert all(torch.equal(value, masters(fresh)[name]) for name, value in masters(learner).items())
