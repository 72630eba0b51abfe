"""The pieces of every family cover each parameter once and each stored tensor once."""

import pytest
import torch

from model.config import Family
from model.families.registry import FAMILIES
from model.transformer import parameter_shapes
from tests.unit.model.families.minis import CONFIGS

W, X, GATE_UP = "block_sparse_moe.experts.", "mlp.experts.", ("gate", "up")
LAYOUTS = [(family, index) for family, format in FAMILIES.items() for index in range(len(format.layouts))]


@pytest.mark.parametrize(("family", "index"), LAYOUTS)
def test_pieces_cover_parameters_and_files_exactly_once(family, index):
    config, layout = CONFIGS[family], FAMILIES[family].layouts[index]
    stored: dict[str, torch.Tensor] = {}
    for name, shape in parameter_shapes(config).items():
        parameter = torch.zeros(shape, dtype=torch.int32)
        for piece in layout.pieces(config, name, shape):
            used = stored.setdefault(piece.name, torch.zeros(piece.shape, dtype=torch.int32))
            assert tuple(used.shape) == piece.shape
            assert used[piece.source].shape == parameter[piece.target].shape
            used[piece.source] += 1
            parameter[piece.target] += 1
        assert (parameter == 1).all(), name
    assert all((used == 1).all() for used in stored.values())


@pytest.mark.parametrize(
    ("family", "index", "name", "expected"),
    [
        (Family.mixtral, 0, "mlp.router.weight", ["block_sparse_moe.gate.weight"]),
        (Family.mixtral, 0, "mlp.experts.gate_up_proj", [f"{W}{e}.w{i}.weight" for e in range(3) for i in (1, 3)]),
        (Family.mixtral, 0, "mlp.experts.down_proj", [f"{W}{e}.w2.weight" for e in range(3)]),
        (Family.qwen3_moe, 0, "mlp.router.weight", ["mlp.gate.weight"]),
        (Family.olmoe, 0, "mlp.experts.gate_up_proj", [f"{X}{e}.{m}_proj.weight" for e in range(3) for m in GATE_UP]),
        (Family.deepseek_v3, 0, "mlp.router.selection_bias", ["mlp.gate.e_score_correction_bias"]),
        (Family.deepseek_v3, 0, "self_attn.kv_a_proj_with_mqa.weight", ["self_attn.kv_a_proj_with_mqa.weight"]),
        (Family.gpt_oss, 0, "mlp.experts.gate_up_proj", ["mlp.experts.gate_up_proj"] * 2),
    ],
)  # fmt: skip
def test_names_below_a_layer(family, index, name, expected):
    config, prefix = CONFIGS[family], "model.layers.1."
    shape = parameter_shapes(config)[prefix + name]
    pieces = FAMILIES[family].layouts[index].pieces(config, prefix + name, shape)
    assert [piece.name for piece in pieces] == [prefix + name for name in expected]


def test_gate_and_up_rows_of_gpt_oss_alternate():
    config, name = CONFIGS[Family.gpt_oss], "model.layers.0.mlp.experts.gate_up_proj"
    stored = torch.arange(3 * 128).view(3, 128, 1).expand(3, 128, 32)
    parameter = torch.full((3, 128, 32), -1)
    for piece in FAMILIES[Family.gpt_oss].layouts[0].pieces(config, name, (3, 128, 32)):
        parameter[piece.target] = stored[piece.source]
    assert parameter[0, :3, 0].tolist() == [0, 2, 4]
    assert parameter[1, 64:67, 0].tolist() == [129, 131, 133]


def test_the_fused_projection_of_openais_code_is_query_key_value():
    config, layout = CONFIGS[Family.gpt_oss], FAMILIES[Family.gpt_oss].layouts[1]
    sources = {}
    for part, rows in (("q", 12), ("k", 6), ("v", 6)):
        (piece,) = layout.pieces(config, f"model.layers.1.self_attn.{part}_proj.bias", (rows,))
        sources[part] = (piece.name, piece.shape, piece.source)
    assert sources == {
        "q": ("block.1.attn.qkv.bias", (24,), (slice(0, 12),)),
        "k": ("block.1.attn.qkv.bias", (24,), (slice(12, 18),)),
        "v": ("block.1.attn.qkv.bias", (24,), (slice(18, 24),)),
    }
