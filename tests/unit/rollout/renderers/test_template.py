import json

import pytest

from rollout.config import ChatFormat
from rollout.renderers.base import STATED_DATE
from rollout.renderers.template import (
    ChatTemplate,
    ChatTemplateError,
    check_against_template,
    compare_with_folder,
    first_difference,
)
from tests.unit.rollout.renderers.vocabulary import renderer_for, tokenizer_for

TURNS = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
)
CHATML = TURNS + "{{- '<|im_start|>assistant\\n' }}"


def check(source):
    chat_format = ChatFormat.native if "<end>" in source else ChatFormat.smollm2
    return check_against_template(renderer_for(chat_format), ChatTemplate(source, {}), tokenizer_for(chat_format))


def native(source):
    """The native format, as a template."""
    header = "{{ '<bos>' }}{% for m in messages %}{{ '<' + m.role + '>' + m.content + '<end>' }}{% endfor %}"
    return header + source


def test_an_equal_template_has_no_difference():
    assert check(native("{{ '<assistant>' }}")) is None


def test_the_first_difference_is_told_in_one_line():
    told = check(native("{{ '<assistant>\n' }}"))
    assert told is not None
    assert told.startswith("chat format native: differs from the template at character ")
    assert "\n" not in told
    assert told.endswith("the template has 'ser>\\nHow warm?<end><assistant>\\n'")


def test_ids_are_compared_and_not_only_the_text():
    renderer, tokenizer = renderer_for(ChatFormat.native), tokenizer_for(ChatFormat.native)
    other = type(tokenizer).from_str(tokenizer.to_str())
    other.add_tokens(["warm"])
    template = ChatTemplate(native("{{ '<assistant>' }}"), {})
    assert check_against_template(renderer, template, tokenizer) is None
    told = check_against_template(renderer, template, other)
    assert told == "chat format native: the texts are equal, but not their token ids"


def test_a_declared_tool_and_its_call_are_probed():
    """A template without tools equals a format that declares them on the plain probe only."""
    told = check_against_template(
        renderer_for(ChatFormat.chatml), ChatTemplate(CHATML, {}), tokenizer_for(ChatFormat.chatml)
    )
    assert told is not None
    assert "# Tools" in told


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        ("abc", "abd", "differs from the template at character 2: 'abc', the template has 'abd'"),
        ("ab", "abd", "differs from the template at character 2: 'ab', the template has 'abd'"),
        ("abd", "ab", "differs from the template at character 2: 'abd', the template has 'ab'"),
    ],
)
def test_where_two_texts_part(ours, theirs, told):
    assert first_difference(ours, theirs) == told


def test_a_template_runs_as_in_transformers():
    values = "{{ {'b': 'é', 'a': 1} | tojson }} {{ strftime_now('%Y-%m-%d') }} {{ bos_token }}"
    text = values + "{% if true %}\nx\n{% endif %}\n"
    assert ChatTemplate(text, {"bos_token": "<s>"}).render([]) == f'{{"b": "é", "a": 1}} {STATED_DATE} <s>x\n'


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{% if %}", "chat template: must be jinja, got <Expected an expression"),
        ("{{ raise_exception('no\nsystem') }}", "chat template: must render, got <no system>"),
        ("{{ messages.append(1) }}", "chat template: must render, got <access to attribute 'append'"),
        ("{{ ().__class__.__bases__ }}", "chat template: must render, got <access to attribute '__class__'"),
        ("{{ 1 // 0 }}", "chat template: must render, got <integer division or modulo by zero>"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "chat template: must render, got <Range too big"),
        ("{{ 'a' + 1 }}", "chat template: must render, got <can only concatenate str"),
    ],
)
def test_a_template_that_does_not_run_is_refused_in_one_line(source, problem):
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(source, {}).render([])
    assert str(caught.value).startswith(problem)
    assert "\n" not in str(caught.value)


def test_a_folders_template_is_found_in_either_place_and_compared(tmp_path):
    tokenizer = tokenizer_for(ChatFormat.native)
    renderer = renderer_for(ChatFormat.native)

    def told():
        return compare_with_folder(renderer, tokenizer, tmp_path)

    assert told() == "chat format native: the checkpoint has no chat template to compare it with"
    config = {"chat_template": native("{{ '<assistant>' }}"), "bos_token": {"content": "<bos>"}, "eos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert told() == "chat format native: writes what the checkpoint's chat template does"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}!")  # the file of its own goes before
    assert told().startswith("chat format native: differs from the template at character 5")
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    assert told().startswith("chat format native: not compared with the checkpoint's template: chat template: must be")
    (tmp_path / "tokenizer_config.json").write_text("[")
    assert "tokenizer_config.json: must be JSON" in told()
