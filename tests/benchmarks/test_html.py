"""The page as one file: everything inside, nothing asked of a network."""

from html.parser import HTMLParser

from benchmarks.html import make_html
from benchmarks.plot import draw_pictures
from benchmarks.report import make_page
from benchmarks.result import KINDS
from benchmarks.section import SECTIONS
from draftree.bench.record import write_record
from tests.benchmarks import example
from tests.needs import needs_package

PAGE = """\
# Title

Some `code` & **bold**.

## Machine

| model | figure | verdict |
|---|---|---|
| a<b | 3.1 × | missed |

- one
- two

![name](plots/a.png)
"""


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.links, self.ids = [], [], []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag not in ("meta", "br", "img", "link"):
            self.open.append(tag)
        self.links += [found[name] for name in ("href", "src") if name in found]
        self.ids += [found["id"]] if "id" in found else []

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag


def read(text):
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


def test_markdown_of_the_page_becomes_html():
    text = make_html(PAGE, {"a.png": "<svg></svg>"})
    read(text)
    assert "<title>Title</title>" in text
    assert "<p>Some <code>code</code> &amp; <strong>bold</strong>.</p>" in text
    assert '<td class="text">a&lt;b</td><td>3.1 ×</td><td class="text missed">missed</td>' in text
    assert "<li>one</li><li>two</li>" in text
    assert '<figure aria-label="name"><svg></svg></figure>' in text
    assert '<a href="#machine">Machine</a>' in text and '<h2 id="machine">' in text


@needs_package("matplotlib")
def test_whole_page_needs_nothing_from_outside(tmp_path):
    for kind in KINDS:
        write_record(tmp_path, example.record(kind))
    pictures = draw_pictures(tmp_path)
    text = make_html(make_page(tmp_path, pictures), pictures)
    reader = read(text)
    assert text.count("<svg") == len(pictures) == 12
    assert "currentColor" in text and "#1f2430" not in text.partition("</style>")[2]
    assert all(link.startswith("#") for link in reader.links)
    assert {link[1:] for link in reader.links} <= set(reader.ids)
    for _, title, _ in SECTIONS:
        assert f">{title}</h3>" in text
