"""Chat templates with the rules of known models, in short."""

from __future__ import annotations

_CHATML = "{{ '<|im_start|>' + m.role + '\n' + m.content }}CALLS{{ '<|im_end|>\n' }}"
_GENERATION = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_CALLS = """{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}
{% for k, v in c.function.arguments | items %}<parameter={{ k }}>{{ v }}</parameter>
{% endfor %}</tool_call>{% endfor %}"""

# Any order of roles; arguments may be a text.
CHATML = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
    + _CHATML.replace("CALLS", "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}{% endfor %}")
    + "{% endfor %}"
    + _GENERATION
)

# One system message, at the beginning; somewhere a user's; arguments are objects.
QWEN = (
    """{% for t in tools or [] %}{{ t | tojson }}{% endfor %}
{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}
{{- raise_exception('No user query found in messages.') }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}
{%- elif m.role not in ('system', 'user', 'assistant', 'tool') %}
{{- raise_exception('Unexpected message role.') }}
{%- endif %}"""
    + _CHATML.replace("CALLS", _CALLS)
    + "{% endfor %}"
    + _GENERATION
)

# The system message is part of the user's first one; roles alternate; no tools.
GEMMA = """{{ bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set first = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}
{%- else %}
    {%- set first = '' %}{% set rest = messages %}
{%- endif %}
{%- for m in rest %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}
    {{- m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

# As the first Gemma: no system message at all.
GEMMA_1 = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + GEMMA.replace("{{ bos_token }}\n", "")
)

# Alternating roles beside calls and results; ids of nine characters.
MISTRAL = """{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- set ns = namespace(index=0) %}
{%- for m in rest %}
    {%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
        {%- if (m.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('After the optional system message, conversation roles must alternate') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- '<s>[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in rest %}
    {%- if m.role == 'user' %}
        {{- '[INST] ' + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for c in m.tool_calls %}
            {%- if c.id | length != 9 %}{{ raise_exception('Tool call IDs should have length 9!') }}{% endif %}
            {{- c.function | tojson + c.id }}
        {%- endfor %}
        {{- ']</s>' }}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content | trim + '</s>' }}
    {%- elif m.role == 'tool' %}
        {%- if m.tool_call_id | length != 9 %}{{ raise_exception('Tool call IDs should have length 9!') }}{% endif %}
        {{- '[TOOL_RESULTS]' + m.content + m.tool_call_id + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}"""

# Only a first system message is shown; one call a message, whose arguments are objects; no text beside it.
LLAMA = """{{ bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + system + '<|eot_id|>' }}
{%- for t in tools or [] %}{{ t | tojson(indent=4) }}{% endfor %}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
        {{- m.tool_calls[0].function.arguments | tojson + '}<|eot_id|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson + '<|eot_id|>' }}
    {%- elif m.role != 'system' %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# All system messages stand at the beginning; arguments are a text.
DEEPSEEK = """{% set ns = namespace(system='') %}
{%- for m in messages if m.role == 'system' %}{% set ns.system = ns.system + m.content + '\n\n' %}{% endfor %}
{{- bos_token }}{{ ns.system }}{{ tools | tojson if tools else '' }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<User>' + m.content }}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {{- '<Assistant>' + m.content }}
        {%- for c in m.tool_calls %}{{ '<call>' + c.function.name + '<sep>' + c.function.arguments }}{% endfor %}<eos>
    {%- elif m.role == 'assistant' %}{{ '<Assistant>' + m.content.split('</think>')[-1] + '<eos>' }}
    {%- elif m.role == 'tool' %}{{ '<output>' + m.content + '</output>' }}
    {%- endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<Assistant>' }}{% endif %}"""

# As of models for images: contents are parts.
PARTS = """{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"""

# The last result must have its call, as gpt-oss's.
HARMONY = """{% set ns = namespace(call=none) %}
{%- for t in tools or [] %}{{ t | tojson }}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'tool' and ns.call is none %}
        {{- raise_exception('Message has tool role, but there was no previous assistant message with a tool call!') }}
    {%- endif %}
    {%- if m.tool_calls %}{% set ns.call = m.tool_calls[0].function %}{{ ns.call | tojson }}{% endif %}
    {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""

TEMPLATES = {
    "chatml": CHATML,
    "qwen": QWEN,
    "gemma": GEMMA,
    "gemma_1": GEMMA_1,
    "mistral": MISTRAL,
    "llama": LLAMA,
    "deepseek": DEEPSEEK,
    "parts": PARTS,
    "harmony": HARMONY,
}
