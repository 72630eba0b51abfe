"""The command line: every direction, and mistakes as one line with exit code 2."""

import pytest
import torch
from safetensors import SafetensorError

from model.checkpoint import load_model, save_model
from model.config import Family
from model.export import main
from model.loaded import Form
from model.snapshot import published_view, view
from tests.unit.model.families.minis import CONFIGS, masters, published, same

FAMILIES = [Family.gpt_oss, Family.qwen3_moe]


@pytest.mark.parametrize("family", FAMILIES)
def test_masters_become_a_published_checkpoint_and_masters_again(tmp_path, family, capsys):
    config, given, expected = CONFIGS[family], masters(CONFIGS[family]), published(CONFIGS[family])
    source = tmp_path / "source"
    source.mkdir()
    save_model(source, config, given, {})
    (source / "tokenizer.json").write_text("{}")
    assert main([str(source), str(tmp_path / "mxfp4"), "--format", "mxfp4"]) == 0
    assert all(same(weight, expected[name]) for name, weight in load_model(tmp_path / "mxfp4").weights.items())
    assert main([str(tmp_path / "mxfp4"), str(tmp_path / "native"), "--format", "native"]) == 0
    native = load_model(tmp_path / "native")
    assert (native.form, native.config) == (Form.MASTER, config)
    assert all(torch.equal(native.weights[name], view(expected[name])) for name in expected)
    assert main([str(tmp_path / "native"), str(tmp_path / "bf16"), "--format", "bf16"]) == 0
    assert all(torch.equal(w, view(expected[name])) for name, w in load_model(tmp_path / "bf16").masters().items())
    for folder in ("mxfp4", "native", "bf16"):
        assert (tmp_path / folder / "tokenizer.json").read_text() == "{}"
    assert capsys.readouterr().out.splitlines()[0] == f"mxfp4 checkpoint in {tmp_path / 'mxfp4'}"
    assert not [*tmp_path.glob(".*.partial")]


def test_the_policy_of_a_run_is_the_bytes_that_it_trained_on(tmp_path, capsys):
    """Where those do not follow from the masters, a checkpoint has both."""
    config, given = CONFIGS[Family.qwen3_moe], masters(CONFIGS[Family.qwen3_moe])
    trained_on = published_view({name: master * 1.5 for name, master in given.items()})
    source = tmp_path / "checkpoint"
    (source / "published").mkdir(parents=True)
    save_model(source, config, given, {})
    save_model(source / "published", config, trained_on, {})
    (source / "tokenizer.json").write_text("{}")
    assert main([str(source), str(tmp_path / "mxfp4"), "--format", "mxfp4"]) == 0
    told = f"note: the bytes are those of {source / 'published'}, which training read"
    assert told in capsys.readouterr().out.splitlines()
    assert all(same(weight, trained_on[name]) for name, weight in load_model(tmp_path / "mxfp4").weights.items())
    assert (tmp_path / "mxfp4" / "tokenizer.json").read_text() == "{}"
    for format in ("native", "bf16"):
        assert main([str(source), str(tmp_path / format), "--format", format]) == 0
        assert told not in capsys.readouterr().out
        loaded = load_model(tmp_path / format).masters()
        expected = given if format == "native" else {name: master.bfloat16() for name, master in given.items()}
        assert all(torch.equal(loaded[name], master.float()) for name, master in expected.items())


def test_foreign_bytes_and_their_description_pass_through(tmp_path):
    config, weights = CONFIGS[Family.gpt_oss], published(CONFIGS[Family.gpt_oss])
    source = tmp_path / "published"
    source.mkdir()
    save_model(source, config, weights, {})
    assert main([str(source), str(tmp_path / "one"), "--format", "mxfp4"]) == 0
    assert main([str(tmp_path / "one"), str(tmp_path / "two"), "--format", "mxfp4", "--max-shard-bytes", "9000"]) == 0
    two = load_model(tmp_path / "two")
    assert all(same(weight, weights[name]) for name, weight in two.weights.items())
    assert two.metadata == {"format": "pt", "mxfp4_rule": "even", "mxfp4_version": "1"}
    assert len([*(tmp_path / "two").glob("*.safetensors")]) > 2


def test_notes_are_printed(tmp_path, capsys):
    source, config = tmp_path / "source", CONFIGS[Family.mixtral]
    source.mkdir()
    save_model(source, config, masters(config), {})
    assert main([str(source), str(tmp_path / "bf16"), "--format", "bf16"]) == 0
    assert main([str(tmp_path / "bf16"), str(tmp_path / "mxfp4"), "--format", "mxfp4"]) == 0
    assert (
        "note: 4 parameters are stored as BF16 and rounded where they are published as mxfp4: ["
        in capsys.readouterr().out
    )


def test_mistakes_are_one_line_and_leave_nothing(tmp_path, capsys):
    source, dest, config = tmp_path / "source", tmp_path / "dest", CONFIGS[Family.mixtral]
    assert main([str(source), str(dest), "--format", "bf16"]) == 2
    source.mkdir()
    broken = masters(config)
    broken["model.layers.1.mlp.experts.down_proj"][0, 0, 0] = torch.nan
    save_model(source, config, broken, {})
    assert main([str(source), str(dest), "--format", "mxfp4"]) == 2
    assert [*tmp_path.iterdir()] == [source]
    dest.mkdir()
    assert main([str(source), str(dest), "--format", "bf16"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert "config.json: must be a JSON object" in lines[0]
    assert "every magnitude must be below" in lines[1]
    assert lines[2] == f"{dest}: must not exist, got a file or folder; choose another name or remove it"


def test_nothing_that_exists_is_removed_but_the_rest_of_a_killed_conversion(tmp_path, capsys):
    config = CONFIGS[Family.mixtral]
    for name in ("out.partial", ".out.partial"):
        (tmp_path / name).mkdir()
        save_model(tmp_path / name, config, masters(config), {})
    dest = tmp_path / "out"
    for source in (tmp_path / ".out.partial", f"file://{tmp_path}/.out.partial"):
        assert main([str(source), str(dest), "--format", "bf16"]) == 2
        assert load_model(tmp_path / ".out.partial").config == config
    dest.symlink_to(tmp_path / "nowhere")
    assert main([str(tmp_path / "out.partial"), str(dest), "--format", "bf16"]) == 2
    dest.unlink()
    assert main([str(tmp_path / "out.partial"), str(dest), "--format", "bf16"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.partial"]
    lines = capsys.readouterr().err.splitlines()
    assert ["must not be where" in line for line in lines] == [True, True, False]


def test_a_destination_that_cannot_be_written_is_one_line(tmp_path, capsys):
    source, blocked, config = tmp_path / "source", tmp_path / "file", CONFIGS[Family.mixtral]
    source.mkdir()
    blocked.touch()
    save_model(source, config, masters(config), {})
    dest = blocked / "out"
    assert main([str(source), str(dest), "--format", "bf16"]) == 2
    assert main([str(source), str(tmp_path / "out"), "--format", "bf16", "--max-shard-bytes", "0"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{dest}: could not be written, got [Errno 20]")
    assert second == "--max-shard-bytes: must be positive, got 0; leave it out for the default"


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    source, config = tmp_path / "source", CONFIGS[Family.mixtral]
    source.mkdir()
    save_model(source, config, masters(config), {})

    def full(*_, **__):
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr("model.safetensors_file.save_file", full)
    assert main([str(source), str(tmp_path / "out"), "--format", "bf16"]) == 2
    assert capsys.readouterr().err == (
        f"{tmp_path / 'out'}: could not be written, got No space left on device (os error 28); "
        "give a folder with room for it\n"
    )
    assert [*tmp_path.iterdir()] == [source]
