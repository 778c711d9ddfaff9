"""Hostile templates: every rendering ends, soon and small, whatever the template computes."""

from __future__ import annotations

import resource
import time

import pytest

from folio.app.models.chat_template.template import ChatTemplate, RenderError

MESSAGES = [{"role": "user", "content": "Hello"}]
LIMIT_S = 0.2
DOUBLED = "{% set n = namespace(x=START) %}{% for i in range(60) %}{% set n.x = STEP %}{% endfor %}{{ n.x | length }}"


def doubled(start: str, step: str) -> str:
    return DOUBLED.replace("START", start).replace("STEP", step)


NEST = "{% set n = namespace(x=['a']) %}{% for i in range(60) %}{% set n.x = STEP %}{% endfor %}"
HOSTILE = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops that filter": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}x{% endfor %}{% endfor %}",
    "an endless range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "a recursive loop": "{% for i in range(99) recursive %}{{ loop(range(99)) }}{% endfor %}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "text times number": "{{ ('x' * 10 ** 11) | length }}",
    "text times number, folded": "{{ 'x' * 100000000000 }}",
    "list times number": "{{ [0] * 10 ** 10 }}",
    "lists times numbers": NEST.replace("STEP", "[n.x * 1000]") + "{{ n.x }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "power of a variable": "{% set n = messages | length + 8 %}{{ n ** (n ** n) }}",
    "products": doubled("9", "n.x * n.x"),
    "sums of texts": doubled("'x'", "n.x + n.x"),
    "joined texts": doubled("'x'", "n.x ~ n.x"),
    "sums of lists": doubled("[1]", "n.x + n.x"),
    "texts in blocks": doubled("'x'", "n.x + ''")
    + "{% set t %}{% for i in range(99999) %}"
    + "x" * 999
    + "{% endfor %}{% endset %}",
    "output": "{% for i in range(99999) %}" + "x" * 999 + "{% endfor %}",
    "replaced": doubled("'x'", "n.x | replace('x', 'xxxxxxxxxxxxxxxx')"),
    "replaced by a method": doubled("'x'", "n.x.replace('x', 'xxxxxxxxxxxxxxxx')"),
    "joined by a filter": doubled("'x'", "[n.x, n.x] | join(n.x)"),
    "joined by a method": doubled("'x'", "n.x.join([n.x, n.x])"),
    "width": "{{ 'x'.ljust(10 ** 10) }}",
    "width of a filter": "{{ 'x' | center(10000000000) }}",
    "indentation": "{{ ('\\n' * 10000000) | indent(1000) }}",
    "indented JSON": "{{ messages | tojson(indent=10000000000) }}",
    "indented nested JSON": NEST.replace("STEP", "[n.x, n.x] if i < 16 else [n.x]") + "{{ n.x | tojson(indent=64) }}",
    "format": "{{ '%10000000000d' % 1 }}",
    "format with a variable width": "{{ '%*d' % (10000000000, 1) }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "format method": "{{ '{:10000000000}'.format(1) }}",
    "format method with a variable width": "{{ '{:{}}'.format(1, 10000000000) }}",
    "format method by item": "{{ ''['for' ~ 'mat'] }}{{ '{:10000000000}'['format'](1) }}",
    "bytes of a number": "{{ (1).to_bytes(10000000000, 'big') }}",
    "encoded": "{{ 'x'.encode('utf-8').zfill(10000000000) }}",
    "tabs": "{{ ('\\t' * 10000).expandtabs(1000000) }}",
    "a filter that pads": "{{ [1] | batch(10000000000, 'x') | list }}",
    "slices": "{{ [1] | slice(10000000000) | list }}",
    "numbers by their digits": "{{ ('f' * 2000000) | int(0, 16) // (('f' * 1000000) | int(0, 16)) }}",
    "digits": "{{ 1.5 | round(1000000000, 'ceil') }}",
    "shared lists, written": NEST.replace("STEP", "[n.x, n.x]") + "{{ n.x }}",
    "shared lists, as JSON": NEST.replace("STEP", "[n.x, n.x]") + "{{ n.x | tojson }}",
    "shared lists, compared": NEST.replace("STEP", "[n.x, n.x]") + "{{ n.x == messages }}",
    "shared lists in dicts": NEST.replace("STEP", "{'a': n.x, 'b': n.x}") + "{{ n.x }}",
    "shared lists by dict()": NEST.replace("STEP", "dict(a=n.x, b=n.x)") + "{{ n.x }}",
    "shared lists by batch": NEST.replace("STEP", "(n.x + n.x) | batch(2) | list") + "{{ n.x }}",
    "shared lists by arguments": "{% set n = namespace(x=['a']) %}{% macro f() %}{% set n.x = varargs %}{% endmacro %}"
    "{% for i in range(60) %}{{ f(n.x, n.x) }}{% endfor %}{{ n.x }}",
    "items made one by one": "{{ ('a' * 99999) | map('replace', 'a', 'x' * 9999999) | list | length }}",
    "items made one by one, joined": "{{ ('a' * 99999) | map('replace', 'a', 'x' * 9999999) | join('y' * 9999999) }}",
    "items made one by one, spread": "{% macro f() %}{{ varargs | length }}{% endmacro %}"
    "{{ f(*(('a' * 99999) | map('replace', 'a', 'x' * 9999999))) }}",
    "a long separator": "{{ range(99999) | map('string') | join('y' * 9999999) | length }}",
    "a long separator of a method": "{{ ('y' * 9999999).join(range(99999) | map('string')) | length }}",
    "summed lists": "{{ ([[1] * 10] * 8000) | sum(start=[]) | length }}",
    "random text": "{{ lipsum(n=1000000000) }}",
    "split": "{{ ('x ' * 8000000).split() | length }}",
    "split lines": "{{ ('\\n' * 8000000).splitlines() | length }}",
    "a date": "{{ strftime_now('%Y' * 100000000) }}",
    "a list of characters": "{% for i in range(9999) %}{% set t = ('x' * 4000000) | list %}{% endfor %}",
    "equal texts": "{% set a = 'x' * 16000000 %}{% set b = 'x' * 16000000 %}"
    "{% for i in range(99999) if a == b %}x{% endfor %}",
    "the interpreter": "{{ ''.__class__.__mro__[1].__subclasses__() | length }}",
    "the interpreter by attr": "{{ (''|attr('__class__')).__mro__ }}",
    "a namespace's attributes": "{% set n = namespace() %}{% set n.__class__ = 5 %}{{ n }}",
    "another template": "{% include 'x' %}",
    "nested expressions": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


@pytest.mark.thirds
@pytest.mark.parametrize("name", HOSTILE)
def test_a_rendering_ends_soon_and_small(name: str) -> None:
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    template = ChatTemplate(HOSTILE[name], {})
    assert template.fault is not None  # told at load
    compiled = time.thread_time() - begun
    begun = time.thread_time()
    try:
        text = template.render(MESSAGES, limit_s=LIMIT_S)
    except RenderError:
        text = ""
    took = time.thread_time() - begun
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(
        f"{name}: probes {compiled:.2f} s, rendering {took:.2f} s, {grown >> 10} MiB, {text[:40]!r}; {template.fault}"
    )
    assert took < LIMIT_S + 1.0  # of one operation, on a slow machine
    assert compiled < 4.0
    assert grown < 700 << 10  # KiB
