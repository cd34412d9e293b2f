"""Chat templates that llama.cpp's server knows by name, as far as its tests use them."""

from __future__ import annotations

_GENERATION = "{% if add_generation_prompt %}%s{% endif %}"
_LOOP = "{% for message in messages %}"
_TURN_OVER = "<|END_OF_TURN_TOKEN|>"
_TURN = "<|START_OF_TURN_TOKEN|>"

BUILT_IN = {
    "chatml": _LOOP
    + "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    + _GENERATION.replace("%s", "{{ '<|im_start|>assistant\n' }}"),
    "llama3": _LOOP
    + "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content + '<|eot_id|>' }}"
    + "{% endfor %}"
    + _GENERATION.replace("%s", "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"),
    "command-r": _LOOP
    + "{% set role = {'system': 'SYSTEM', 'user': 'USER', 'assistant': 'CHATBOT'}[message.role] %}"
    + "{{ '"
    + _TURN
    + "<|' + role + '_TOKEN|>' + message.content + '"
    + _TURN_OVER
    + "' }}{% endfor %}"
    + _GENERATION.replace("%s", "{{ '" + _TURN + "<|CHATBOT_TOKEN|>' }}"),
}
