"""Chat templates call what jinja2 has, and nothing that a program has put into its tables."""

import functools
import os

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from grpo_lightning.policy.hf import load
from grpo_lightning.transformer import templates
from tests.support.checkpoints import write_checkpoint
from tests.support.provocations import provocation

TABLES = [jinja2.defaults.DEFAULT_FILTERS, jinja2.defaults.DEFAULT_TESTS, jinja2.defaults.DEFAULT_NAMESPACE]
MESSAGES = [{"role": "user", "content": "hello"}]


def says(template):
    from tokenizers import Tokenizer, models

    found = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    found.chat_template = template
    return found


def test_templates_have_all_that_jinja2_has():
    for name, table in zip(("filters", "tests", "globals"), TABLES, strict=True):
        with templates._own_tables():
            assert getattr(jinja2.Environment(), name) == table
        assert getattr(jinja2.Environment(), name) == table
    text = "{% for m in messages %}{{ m.content | upper | length }}{{ m.role is eq('user') }}{% endfor %}{{ [1] }}"
    assert templates.rendered(says(text), MESSAGES) == "5True[1]"


@provocation(
    "a stranger's chat template with a filter, test or function that the program has registered with jinja2, such as "
    "one that asks a shell",
    "it is unknown there, also where a template is folded while it is compiled",
)
@pytest.mark.parametrize("place", [0, 1, 2], ids=["filter", "test", "function"])
@pytest.mark.parametrize("function", ["own", "eval", "partial", "replaced"])
@pytest.mark.grid
def test_templates_call_nothing_that_a_program_has_registered(place, function, monkeypatch, tmp_path):
    ran = []
    functions = {"own": ran.append, "eval": eval, "partial": functools.partial(ran.append), "replaced": ran.append}
    name = ["abs", "odd", "cycler"][place] if function == "replaced" else "mine"
    monkeypatch.setitem(TABLES[place], name, functions[function])
    monkeypatch.setattr(os, "ran", ran, raising=False)
    called = "__import__('os').ran.append(1)"
    for given in (f'"{called}"', "messages[0].content"):
        template = ["{{ GIVEN | NAME }}", "{{ GIVEN is NAME }}", "{{ NAME(GIVEN) }}"][place]
        text = template.replace("NAME", name).replace("GIVEN", given)
        with pytest.raises(Exception, match=rf"No (filter|test) named '{name}'|'{name}' is undefined"):
            templates.rendered(says(f"{text}{id(ran)}"), [{"role": "user", "content": called}])
    text = f"{template.replace('NAME', name)}{id(ran)} both".replace("GIVEN", "messages[0].content")
    own = says(text).apply_chat_template([{"role": "user", "content": "1"}], tokenize=False)  # the program's own words
    ran.clear()
    for _ in range(2):
        with pytest.raises(Exception, match=rf"No (filter|test) named '{name}'|'{name}' is undefined"):
            templates.rendered(says(text), [{"role": "user", "content": "1"}])
    assert ran == []
    assert says(text).apply_chat_template([{"role": "user", "content": "1"}], tokenize=False) == own
    ran.clear()
    path = write_checkpoint(tmp_path / "llama", "llama", chat=True)
    policy = load(str(path), dtype="float32", attn_implementation="sdpa", trust_remote_code=False)
    policy.tokenizer.chat_template = f"{text}{id(ran)} of a policy"
    with pytest.raises(Exception, match=rf"No (filter|test) named '{name}'|'{name}' is undefined"):
        policy.render(called)
    assert ran == []
