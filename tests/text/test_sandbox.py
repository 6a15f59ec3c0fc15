"""Templates that mean harm end in an error: soon, and without taking the machine's memory."""

import resource
import sys
import time

import pytest
from jinja2 import Undefined
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from draftree.errors import TokenizerError
from draftree.text.meter import Meter
from draftree.text.sandbox import Sandbox
from draftree.text.template import ChatTemplate

GROW = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"


def grow(start: str, step: str, end: str = "{{ ns.x }}") -> str:
    return GROW.replace("START", start).replace("STEP", step) + end


NAMESPACES = "{% set n0 = namespace(a=1) %}" + "".join(
    f"{{% set n{i} = namespace(a=1) %}}{{% set n{i}.a = n{i - 1} %}}{{% set n{i}.b = n{i - 1} %}}"
    for i in range(1, 50)
)
BIG = "{% set s = 'a' * 1000000 %}"

HOSTILE = {
    # Python's insides
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attr filter": "{{ '' | attr('__class__') }}",
    "map attribute": "{{ messages | map(attribute='__class__') | list }}",
    "format attribute": "{{ '{0.__class__}'.format(1) }}",
    "function globals": "{{ raise_exception.__globals__ }}",
    "method owner": "{{ strftime_now.__self__ }}",
    "template internals": "{{ self._TemplateReference__context }}",
    "cycler": "{{ cycler.__init__.__globals__.os }}",
    "change messages": "{{ messages.append(1) }}",
    "change message": "{{ messages[0].update({'a': 1}) }}",
    # endless work
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "range": "{% for i in range(1000000000) %}{% endfor %}",
    "macros": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "endless block": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "endless loop": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "filters": "{% for i in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
    "filtered loops": (
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}"
    ),
    "power": "{{ 9 ** 999999999 }}",
    "squares": grow("3", "ns.x * ns.x"),
    "round": "{{ 1.5 | round(999999999, 'ceil') }}",
    # huge strings
    "repeat": "{{ 'a' * 10000000000 }}",
    "repeat reversed": "{{ 10000000000 * 'a' }}",
    "add": grow("'aaaaaaaa'", "ns.x + ns.x"),
    "concatenate": grow("'aaaaaaaa'", "ns.x ~ ns.x"),
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent many": BIG + "{{ ('%s' * 1000) % ((s,) * 1000) }}",
    "format": "{{ '{:>1000000000}'.format(1) }}",
    "format nested": "{{ '{:>{}}'.format(1, 1000000000) }}",
    "format many": BIG + "{{ ('{0}' * 1000).format(s) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "strftime": "{{ strftime_now('%999999999Y') }}",
    "center": "{{ 'a' | center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "bytes": "{{ 'a'.encode().ljust(1000000000) }}",
    "integer bytes": "{% set x = 5 %}{{ x.to_bytes(1000000000, 'big') }}",
    "replace": grow("'a' * 1000", "ns.x.replace('a', ns.x)"),
    "replace filter": grow("'a' * 1000", "ns.x | replace('a', ns.x)"),
    "join": BIG + "{{ ''.join([s] * 1000) }}",
    "join filter": BIG + "{{ ([s] * 1000) | join }}",
    "join separator": BIG + "{{ s.join(range(9999) | map('string')) }}",
    "replace by name": grow("'a' * 1000", "ns.x | replace(old='a', new=ns.x)"),
    "indent first": "{{ 'a' | indent(1000000000, true) }}",
    "indent": "{{ ('\\n' * 1000000) | indent(10000) }}",
    "json indent": "{{ messages | tojson(indent=1000000000) }}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "fixed text": "{% for i in range(99999) %}" + "A" * 50_000 + "{% endfor %}",
    "fixed text set": "{% set x %}{% for i in range(99999) %}"
    + "A" * 50_000
    + "{% endfor %}{% endset %}",
    "slices": BIG
    + "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}"
    + "{% set ns.x = ns.x + [s[1:]] %}{% endfor %}",
    # huge structures
    "repeat list": "{{ [0] * 1000000000 }}",
    "add lists": grow("[1]", "ns.x + ns.x"),
    "nested lists": grow("[1]", "[ns.x, ns.x]"),
    "nested tuples": grow("(1,)", "(ns.x, ns.x)", "{% if {ns.x: 1} %}{% endif %}"),
    "nested dicts": grow("[1]", "{'a': ns.x, 'b': ns.x}", "{{ ns.x | tojson }}"),
    "nested dict calls": grow("[1]", "dict(a=ns.x, b=ns.x)", "{{ ns.x | tojson }}"),
    "nested namespaces": NAMESPACES + "{{ n49 }}",
    "nested namespaces as separator": NAMESPACES + "{{ ['a', 'b'] | join(n49) }}",
    "nested namespaces as text": NAMESPACES + "{{ n49 | string }}",
    "views": "{% set d = {'a': 'x' * 100000} %}{{ [d.items()] * 10000 }}",
    "views in a loop": (
        "{% set d = {}.fromkeys(range(99999)) %}"
        "{% for i in range(99999) %}{{ d.items() | length }}{% endfor %}"
    ),
    "fromkeys": "{{ {}.fromkeys(range(99999), 'a' * 100000) | tojson }}",
    # the template's own shape
    "deep expression": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "long expression": "{{ 1" + "+1" * 5000 + " }}",
    "deep loops": "{% for a in [1] %}" * 100 + "{% endfor %}" * 100,
}


def peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_in_an_error(name):
    before = peak_bytes()
    start = time.process_time()
    with pytest.raises(TokenizerError):
        template = ChatTemplate(HOSTILE[name], bos="", eos="", time_limit_s=0.3)
        template.render([{"role": "user", "content": "Hi"}])
    assert time.process_time() - start < 5
    assert peak_bytes() - before < 300e6


HARMLESS = {
    "arithmetic": ("{{ 2 ** 10 + 7 % 4 - 6 // 4 }} {{ 2.5 * 1000000000 }}", "1026 2500000000.0"),
    "strings": (
        "{{ 'ab' * 2 + 'c' ~ 1 ~ none }} {{ 'abc'[1:] }} {{ 'abc'[::-1] }}",
        "ababc1None bc cba",
    ),
    "methods": (
        "{{ ' a,b '.strip().split(',') | join('-') }} {{ 'x'.replace('x', 'y') }}",
        "a-b y",
    ),
    "formats": ("{{ '%05.1f|%s' % (2.25, 'a') }} {{ '{}-{:>3}'.format(1, 'b') }}", "002.2|a 1-  b"),
    "braces": ("{{ '{{\"year\": {}}} 2024'.format(1999) }}", '{"year": 1999} 2024'),
    "lists": ("{{ ([1, 2] + [3])[1:] }} {{ (1, 2) }} {{ {'a': [1]} }}", "[2, 3] (1, 2) {'a': [1]}"),
    "filters": ("{{ [3, 1, 2] | sort | join(',') }} {{ 'a\\nb' | indent(2) }}", "1,2,3 a\n  b"),
    "numbers": ("{{ none | default(99999) }} {{ 'abc' | truncate(99999) }}", "None abc"),
    "map": ("{{ messages | map(attribute='role') | map('upper') | list }}", "['USER']"),
    "items": ("{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %}", "a=1"),
    "macro": ("{% macro m(x, y=2) %}{{ x }}{{ y }}{% endmacro %}{{ m(1) }}{{ m(3, y=4) }}", "1234"),
    "call": ("{% macro m() %}<{{ caller() }}>{% endmacro %}{% call m() %}x{% endcall %}", "<x>"),
    "namespace": ("{% set ns = namespace(a=[]) %}{% set ns.a = ns.a + ['b'] %}{{ ns.a }}", "['b']"),
    "set": (
        "{% set x %}a{{ 1 }}{% endset %}{{ x | upper }}{% set a, b = 1, 2 %}{{ a + b }}",
        "A13",
    ),
    "loop": ("{% for i in range(3) %}{{ loop.index }}{% else %}-{% endfor %}", "123"),
    "dict": ("{{ dict(a=1, **{'b': 2}).get('b') }}", "2"),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_metering_changes_nothing_else(name):
    source, text = HARMLESS[name]
    template = ChatTemplate(source, bos="", eos="")
    assert template.render([{"role": "user", "content": "Hi"}]) == text


class _Pairs(dict):  # type: ignore[type-arg]
    """A kind of dict, which is not taken for one."""


ATTRIBUTES = ("role", "items", "get", "pop", "keys", "__class__", "_x", "startswith", "strip")
ATTRIBUTES += ("split", "join", "format", "encode", "append", "index0", "first", "last", "length")
ATTRIBUTES += ("cycle", "_iterator", "a")


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_attributes_are_those_that_jinja_finds(attribute: str) -> None:
    sandbox = Sandbox(Meter(1 << 40, 5.0))
    own, inherited = Sandbox.getattr, ImmutableSandboxedEnvironment.getattr
    loop = LoopContext([1, 2], Undefined, None)  # type: ignore[arg-type]
    next(loop)
    items = {"role": 1, "items": 2, "first": None, "_x": 3}
    for value in (items, _Pairs(items), "text", ["a"], 1, None, loop, Namespace(a=1)):
        found = []
        for ask in (own, inherited):
            try:
                found.append(ask(sandbox, value, attribute))
            except SecurityError as error:
                found.append(str(error))
        assert type(found[0]) is type(found[1]), (value, attribute)
        if isinstance(found[0], Undefined):
            assert [one._undefined_name for one in found] == [attribute] * 2
        elif attribute != "format":  # guarded by a new function each time
            assert found[0] == found[1]
