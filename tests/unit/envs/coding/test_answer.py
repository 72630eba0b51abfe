import pytest

from envs.coding.answer import extract, format_answer

SOURCE = "def f(xs):\n    return [x for x in xs if x > 0]\n"


def test_a_formatted_answer_is_extracted_unchanged():
    answer = extract(format_answer(SOURCE), "f")
    assert (answer.well_formed, answer.source, answer.note) == (True, SOURCE, "")


@pytest.mark.parametrize("fence", ["```", "```py", "```Python", "``` python3 ", "   ```python", "````python"])
def test_spellings_of_the_fence(fence):
    closing = "````" if fence.startswith("````") else "```"
    assert extract(f"Sure.\n{fence}\n{SOURCE}{closing}\nDone.", "f").source == SOURCE


def test_the_last_block_counts():
    other = "def f(xs):\n    return 1\n"
    assert extract(f"```python\n{other}```\nNo:\n```python\n{SOURCE}```", "f").source == SOURCE
    assert extract(f"```python\n{SOURCE}```\nIt prints\n```text\ndef f(xs)\n```", "f").source == SOURCE


def test_windows_line_ends_and_helper_functions_are_fine():
    source = "import math\ndef g(x):\n    return x\ndef f(xs):\n    def f(y):\n        return y\n    return f(xs)\n"
    assert extract(("```python\n" + source + "```").replace("\n", "\r\n"), "f").source == source


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("", "no code block"),
        ("I give up", "no code block"),
        (SOURCE, "no code block"),
        ("`def f(xs): pass`", "no code block"),
        ("```text\nhello\n```", "no code block"),
        ("```python\n" + SOURCE, "unclosed code block"),
        ("```python\n" + SOURCE + "```\n```python\ndef f(xs):", "unclosed code block"),
        ("```python\n```", "no function f"),
        ("```python\nf = lambda xs: xs\n```", "no function f"),
        ("```python\ndef fun(xs):\n    return xs\n```", "no function f"),
        ("```python\n" + SOURCE + SOURCE + "```", "two functions f"),
        ("```python\ndef f(xs):\n    return '\ud800'\n```", "not text"),
        ("```" * 10_000, "unclosed code block"),
        ("(" * 100_000, "no code block"),
    ],
)
def test_a_malformed_answer_is_a_note_and_no_exception(text, note):
    answer = extract(text, "f")
    assert (answer.well_formed, answer.source, answer.note) == (False, "", note)


def test_text_that_no_parser_survives_is_left_to_the_sandbox():
    deep = "def f(xs):\n    return " + "(" * 50_000 + "\n"
    assert extract(format_answer(deep), "f").well_formed
