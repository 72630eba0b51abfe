"""Small engines and the requests that tests give them."""

import dataclasses
from functools import cache

import torch

from model.config import KernelChoice, ModelConfig
from model.kernels.cpu.isa import available_isas
from model.kernels.dispatch import resolve_kernels
from model.packed_attention import PackedAttention
from model.snapshot import published_view, view
from model.transformer import Transformer, init_weights
from rollout.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.types import SampleRequest, SamplingParams, WeightVersion
from tests.numerics import families
from tests.numerics.families import MINI

STOP = 5
CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    expert_hidden_size=32,
    tie_embeddings=False,
)
CONFIGS = {
    "grouped queries": CONFIG,
    "one kv head a head, biased router, shared expert, tied": dataclasses.replace(
        CONFIG, num_kv_heads=4, router_bias=True, shared_expert_hidden_size=32, tie_embeddings=True
    ),
    "one kv head, all experts": dataclasses.replace(CONFIG, num_kv_heads=1, num_experts=3, num_experts_per_tok=3),
    **{f"family {family}": config for family, config in MINI.items()},
}
KERNELS = [KernelChoice.torch, *(KernelChoice(isa.value) for isa in available_isas())]
"""Everything that can compute here."""


def make_model(config=CONFIG, seed=0):
    """A model whose weights are what publishing makes of them."""
    if config in MINI.values():
        model = families.make_model(config, seed)
    else:
        model = Transformer(config)
        init_weights(model, seed)
        with torch.no_grad():
            if model.lm_head is not None:
                model.lm_head.weight.mul_(4.0)  # logits of a few units: neither flat nor certain
    model.load_state_dict({name: view(packed) for name, packed in published(model).items()})
    return model.requires_grad_(False)


@cache
def published(model):
    """The bytes that an engine runs."""
    return published_view({name: tensor.detach().float() for name, tensor in model.state_dict().items()})


MODEL = make_model()


def make_engine(
    model=MODEL,
    *,
    max_batch_size=8,
    max_seq_len=64,
    version=1,
    kernels=KernelChoice.auto,
    stop_ids=frozenset({STOP}),
    text=None,
    **config,
):
    """An engine that runs `model`."""
    settings = EngineConfig(max_batch_size=max_batch_size, max_seq_len=max_seq_len, **config)
    engine = Engine(model.config, settings, stop_ids=stop_ids, text=text, kernels=resolve_kernels(kernels))
    engine.swap_weights(WeightVersion(version), published(model))
    return engine


def prompt(session, length):
    """Token ids that follow from both numbers and hold no stop token."""
    generator = torch.Generator().manual_seed(session)
    return tuple(torch.randint(6, CONFIG.vocab_size, (length,), generator=generator).tolist())


def ask(session, length=6, *, temperature=1.0, max_tokens=12, seed=None, ids=None, **how):
    """A request."""
    return SampleRequest(
        session=session,
        prompt_ids=prompt(session, length) if ids is None else ids,
        params=SamplingParams(temperature=temperature, max_tokens=max_tokens, **how),
        seed=1000 + session if seed is None else seed,
    )


def full_forward(model, ids, replay=None):
    """Logits [T, V] and routes of a sequence in one pass, without a cache."""
    out = model(torch.tensor(ids), torch.arange(len(ids)), PackedAttention([0, len(ids)]), replay)
    return model.logits(out.hidden_TD), out.routes_TLK
