import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pdserve.engine.chat_template import ChatTemplate
from pdserve.engine.errors import InvalidRequest, ModelError

TRIMMING = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
KEEPING = TRIMMING.replace(" | trim", "")
SYNTAX = """
{%- for m in messages %}
    {%- if m.role == 'skip' %}{% continue %}{% endif %}
    {% generation %}{{ m | tojson }}{% endgeneration %}
    {{ {'é': '<b>'} | tojson(indent=2) }}
{% endfor %}
"""


@pytest.mark.parametrize("source", [TRIMMING, KEEPING, SYNTAX])
def test_render_equals_transformers(source):
    messages = [{"role": "user", "content": " héllo "}, {"role": "skip", "content": "x"}]

    text = ChatTemplate(source, {"bos_token": "<s>"}).render(messages)

    expected, _ = render_jinja_template([messages], chat_template=source, add_generation_prompt=True, bos_token="<s>")
    assert text == expected[0]


@pytest.mark.parametrize("source", [TRIMMING, KEEPING])
@pytest.mark.parametrize("final", ["OK!", "OK!\n", "OK! ", " Yes"])
def test_continued_message_ends_as_in_transformers(source, final):
    """C093, C094."""
    messages = [
        {"role": "assistant", "content": final.strip()},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": final},
    ]

    text = ChatTemplate(source, {"bos_token": ""}).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )

    expected, _ = render_jinja_template([messages], chat_template=source, continue_final_message=True, bos_token="")
    assert text == expected[0]
    assert text.endswith(final.strip() if source is TRIMMING else final)


def test_the_templates_own_refusal_reaches_the_caller():
    """C090."""
    template = ChatTemplate("{{ raise_exception('System role not supported') }}", {})

    with pytest.raises(InvalidRequest, match="System role not supported") as caught:
        template.render([{"role": "system", "content": "x"}])
    assert caught.value.field == "messages"


@pytest.mark.parametrize("source", ["{{ messages[0].nothing.more }}", "{{ 'a' + messages[0].content }}", "{{ 1 / 0 }}"])
def test_a_template_that_fails_is_the_requests_fault(source):
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render([{"role": "user", "content": None}])


def test_the_template_cannot_reach_into_python():
    template = ChatTemplate("{{ messages.__class__.__mro__ }}", {})

    with pytest.raises(InvalidRequest):
        template.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("name", ["messages", "tools", "tokenize", "add_generation_prompt", "chat_template"])
def test_reserved_variables_are_refused(name):
    """C096."""
    with pytest.raises(InvalidRequest, match=name):
        ChatTemplate("x", {}).render([], variables={name: True})


def test_variables_reach_the_template():
    """C096."""
    template = ChatTemplate("{{ 'think' if enable_thinking is not false else 'answer' }}", {})

    assert template.render([], variables={"enable_thinking": False}) == "answer"
    assert template.render([]) == "think"


def test_both_ways_to_end_the_prompt_are_refused_together():
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        ChatTemplate("x", {}).render([{"role": "user", "content": "a"}], continue_final_message=True)


def test_broken_template_is_a_model_error():
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("{% if %}", {})
