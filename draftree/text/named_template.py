"""Chat templates by the names that users of llama.cpp give them, for `--chat-template NAME`.

In: how a family writes a turn. Out: Jinja sources. A model's own is better.
"""

from typing import Final

CHATML: Final = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
_COMMAND_ROLE: Final = (
    "({'system': '<|SYSTEM_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}[message.role]"
    " | default('<|USER_TOKEN|>'))"
)


def _write(
    before: str, after: str, end: str, *, role: str = "message.role", reply: str = "assistant"
) -> str:
    """A turn is `before`, its role, `after`, its text, `end`; role: an expression; reply: its value
    for the turn that the model is to write.
    """
    turn = f"{before!r} + {role} + {after!r} + (message.content | trim) + {end!r}"
    return (
        f"{{%- for message in messages %}}{{{{- {turn} }}}}{{%- endfor %}}"
        f"{{%- if add_generation_prompt %}}{{{{- {before + reply + after!r} }}}}{{%- endif %}}"
    )


TEMPLATES: Final = {
    "chatml": CHATML,
    "command-r": _write(
        "<|START_OF_TURN_TOKEN|>",
        "",
        "<|END_OF_TURN_TOKEN|>",
        role=_COMMAND_ROLE,
        reply="<|CHATBOT_TOKEN|>",
    ),
    "granite": _write("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>\n"),
    "llama3": _write("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"),
    "phi3": _write("<|", "|>\n", "<|end|>\n"),
    "phi4": _write("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
}
