"""The checkpoint's model becomes the run's, and what contradicts it is one line."""

import dataclasses
import json

import pytest

from model.config import ComputeDtype, ConfigError, Family, ModelConfig, QkNorm
from rl.config import RunConfig
from rl.start_model import adopt_checkpoint, check_chat
from rollout.config import ChatFormat
from rollout.renderers.codec import RendererError
from rollout.tokenizer import TOKENIZER_FILE, TokenizerError
from tests.unit.rollout.renderers.vocabulary import tokenizer_for

STORED = ModelConfig(vocab_size=300, hidden_size=64, num_layers=2, compute_dtype=ComputeDtype.bf16)
PUBLISHED = {
    "model_type": "qwen3_moe", "vocab_size": 320, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32, "intermediate_size": 96, "num_experts": 4,
    "num_experts_per_tok": 2, "norm_topk_prob": True, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip


def start_from(folder, values):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    config = RunConfig()
    config.warm_start.checkpoint = str(folder)
    return config


def test_without_a_checkpoint_nothing_changes():
    config = RunConfig()
    adopt_checkpoint(config)
    assert config == RunConfig()


def test_the_stored_model_is_the_runs_except_its_compute_dtype(tmp_path):
    config = start_from(tmp_path / "ours", STORED.to_dict())
    config.model.hidden_size = 64  # said again, and right
    adopt_checkpoint(config)
    assert config.model.num_layers == 2
    assert config.model.compute_dtype is ComputeDtype.fp32
    adopt_checkpoint(config)  # a second time changes nothing
    assert config.model.vocab_size == 300


def test_a_published_config_is_read_by_its_family(tmp_path):
    config = start_from(tmp_path / "published", PUBLISHED)
    adopt_checkpoint(config)
    assert config.model.family is Family.qwen3_moe
    assert config.model.qk_norm is QkNorm.head
    assert config.model.expert_hidden_size == 32


def test_the_original_files_of_gpt_oss_name_no_model_type(tmp_path):
    original = {
        "num_hidden_layers": 2, "num_experts": 4, "experts_per_token": 2, "vocab_size": 320, "hidden_size": 96,
        "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "initial_context_length": 64,
    }  # fmt: skip
    config = start_from(tmp_path / "original", original)
    adopt_checkpoint(config)
    assert config.model.family is Family.gpt_oss
    assert config.model.num_experts == 4


def test_what_contradicts_the_checkpoint_is_named(tmp_path):
    config = start_from(tmp_path / "ours", STORED.to_dict())
    config.model.num_layers = 3
    with pytest.raises(ConfigError, match=r"^model\.num_layers: the checkpoint .*/ours has 2, got 3; leave it out"):
        adopt_checkpoint(config)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**PUBLISHED, "model_type": "bert"}, r"config\.json: model_type: must be one of .*, got bert"),
        ({**PUBLISHED, "some_new_gate": 2}, r"config\.json: some_new_gate: an unknown key may change"),
        ([1], "cannot be used"),
        ({"family": "mixtral", "num_layers": 3}, "keys must be exactly those of ModelConfig"),
    ],
)
def test_a_config_that_cannot_be_used_is_one_line(tmp_path, values, message):
    with pytest.raises(ConfigError, match=message) as error:
        adopt_checkpoint(start_from(tmp_path / "bad", values))
    assert str(error.value).startswith("warm_start.checkpoint: ")
    assert len(str(error.value).splitlines()) == 1


def test_a_missing_folder_a_missing_file_and_a_url(tmp_path):
    config = RunConfig()
    for checkpoint, message in (
        (str(tmp_path / "none"), "no such folder, got"),
        (str(tmp_path), r"no readable config\.json, got"),
        (
            "hf://org/model",
            r"must be a folder of this machine, got hf://org/model; copy it with python -m model\.export",
        ),
    ):
        config.warm_start.checkpoint = checkpoint
        with pytest.raises(ConfigError, match=f"^warm_start.checkpoint: {message}"):
            adopt_checkpoint(config)


def test_the_chat_format_is_checked_against_the_tokenizer_before_anything_starts(tmp_path):
    check_chat(RunConfig())  # no checkpoint: the warm start trains a tokenizer
    tokenizer = tokenizer_for(ChatFormat.chatml)
    num_entries = tokenizer.get_vocab_size()
    config = start_from(tmp_path / "chat", dataclasses.replace(STORED, vocab_size=num_entries).to_dict())
    adopt_checkpoint(config)
    config.rollout.chat_format = ChatFormat.chatml
    with pytest.raises(TokenizerError, match="tokenizer: no file, got"):
        check_chat(config)
    tokenizer.save(str(tmp_path / "chat" / TOKENIZER_FILE))
    check_chat(config)
    config.rollout.chat_format = ChatFormat.harmony
    with pytest.raises(RendererError, match=r"<\|channel\|>"):
        check_chat(config)
    config.model.vocab_size = num_entries - 1
    with pytest.raises(ConfigError, match=rf"must hold the tokenizer's {num_entries} entries, got {num_entries - 1};"):
        check_chat(config)
