import pytest

from model.checkpoint import load_model
from model.upcycle import Split
from rollout.tokenizer import TOKENIZER_FILE
from scripts import make_smollm2
from tests.unit.model.small_gguf import CONFIG, write


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(make_smollm2, "RECIPE", Split(num_experts=3, num_experts_per_tok=3))
    return write(tmp_path / "small.gguf")


def test_the_folder_is_a_model_with_its_tokenizer_and_is_found_made(tmp_path, source):
    folder = tmp_path / "models" / "small"
    made_of = make_smollm2.provenance(source)
    assert not make_smollm2.is_made(folder, made_of)
    make_smollm2.make(source, folder, made_of)
    assert make_smollm2.is_made(folder, made_of)
    loaded = load_model(folder)
    assert (loaded.config.num_experts, loaded.config.expert_hidden_size) == (3, CONFIG.expert_hidden_size // 3)
    names = {path.name for path in folder.iterdir()}
    assert {TOKENIZER_FILE, "chat_template.jinja", "tokenizer_config.json"} <= names
    assert [path.name for path in folder.parent.iterdir()] == ["small"]


def test_another_source_another_recipe_and_a_damaged_folder_are_made_again(tmp_path, source, monkeypatch):
    folder = tmp_path / "small"
    made_of = make_smollm2.provenance(source)
    make_smollm2.make(source, folder, made_of)
    other = write(tmp_path / "other.gguf", metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 2.0})
    assert not make_smollm2.is_made(folder, make_smollm2.provenance(other))
    monkeypatch.setattr(make_smollm2, "RECIPE", Split(num_experts=1, num_experts_per_tok=1))
    assert not make_smollm2.is_made(folder, make_smollm2.provenance(source))
    (folder / TOKENIZER_FILE).write_text("{}")
    assert not make_smollm2.is_made(folder, made_of)
