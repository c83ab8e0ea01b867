"""Chat templates that render tools, calls and results, each in the form that its family documents.

Written for these tests: the forms are the families', the templates are short.
"""

QWEN = """
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}You are helpful.{% endif %}

# Tools
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
Write each call as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% elif messages[0].role == 'system' -%}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- elif message.role == 'assistant' -%}
<|im_start|>assistant
{{ message.content }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}
{% endif -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'user' -%}
<|im_start|>user
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Qwen 2.5 and 3, and Hermes: JSON between tags, results as a user's message."""

LLAMA3 = """
{%- for message in messages %}
{%- if message.role == 'tool' -%}
<|im_start|>ipython
{{ message.content | tojson }}<|im_end|>
{% elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif -%}
<|im_start|>assistant
{"name": "{{ message.tool_calls[0].function.name }}", "parameters": {{ message.tool_calls[0].function.arguments | tojson
 }}}<|im_end|>
{% else -%}
<|im_start|>{{ message.role }}
{% if tools and loop.first %}Answer with a call of one of these functions:
{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}{% endif %}{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Llama 3.1 to 3.3: the functions with the first message, one bare JSON object as a call."""

MISTRAL = """
{%- set last_user = namespace(index=-1) %}
{%- for message in messages if message.role == 'user' %}{% set last_user.index = messages.index(message) %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.index0 == last_user.index %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST] {{ message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids of calls have 9 letters and digits') }}{% endif -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{{- ", " if not loop.last }}
{%- endfor %}]<|im_end|>
{%- elif message.role == 'tool' -%}
[TOOL_RESULTS] {"content": {{ message.content | tojson }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
{%- elif message.role == 'assistant' %} {{ message.content }}<|im_end|>
{%- else %}{{ raise_exception('only users and assistants') }}
{%- endif %}
{%- endfor %}"""
"""Mistral 7B 0.3 and Nemo: a list behind a marker, ids of nine characters, the functions with the last question."""

PYTHONIC = """
{%- for message in messages %}
{%- if message.role == 'tool' -%}
<|im_start|>ipython
{{ message.content }}<|im_end|>
{% else -%}
<|im_start|>{{ message.role }}
{% if tools and loop.first %}{{ tools | tojson }}
Calls go between <|python_start|> and <|python_end|>.
{% endif %}{{ message.content }}
{%- if message.tool_calls %}<|python_start|>[
{%- for call in message.tool_calls %}{{ call.function.name }}(
{%- for key, value in call.function.arguments.items() %}{{ key }}={{ value | tojson }}{{ ", " if not loop.last }}
{%- endfor %}){{ ", " if not loop.last }}
{%- endfor %}]<|python_end|>{% endif %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Llama 4: a list of calls in Python's syntax."""

NO_SYSTEM = """
{%- for message in messages %}
{%- if message.role not in ('user', 'assistant') %}{{ raise_exception('no such role') }}{% endif %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must take turns') }}{% endif -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template without tools that knows users and assistants alone, in turns."""
