"""What a model writes, on the page: Markdown, code, formulas; while it grows, and in long chats."""

import re

from tests.serve.browser import expect, in_all_views, last, open_long, say, talk
from tests.serve.viewer import make_round


@in_all_views
def test_text_of_a_model_stays_text(pages, view):
    bad = (
        "<img src=x onerror=document.title='bad'> <b>bold</b> [x](javascript:alert(1))\n\n"
        "![seen](http://other.invalid/x.png)\n\n```html\n<script>1</script>\n```"
    )
    pages.engine.pieces = [make_round(bonus=5), *re.split("(?<=[<`])", bad)]
    page = pages(**view)
    say(page, "<i>question</i>")
    expect(last(page, "footer")).to_be_visible()
    expect(page.locator(".question .bubble")).to_have_text("<i>question</i>")
    expect(last(page, ".body p").first).to_have_text(bad.split("\n")[0])
    expect(last(page, ".body code")).to_have_text("<script>1</script>")
    # A picture would be fetched from elsewhere; it is a link, which waits to be followed.
    expect(last(page, ".body a")).to_have_attribute("href", "http://other.invalid/x.png")
    assert page.locator(".reply img, .reply script, .reply b, .question i").count() == 0
    assert page.title() == "fake · draftree"


@in_all_views
def test_markdown(pages, view):
    pages.engine.pieces = [
        "# Title\nSome **bold *and* `code`** 2 * 3 * 4\nsnake_case_name ~~gone~~\n\n",
        "1. one\n2. two\n   more\n\n- a\n  - b\n    1. c\n\n> said\n\n---\n",
        "| a | b |\n|---|--:|\n| 1 | **2** |\n\n",
        "[link](https://example.org) https://example.org/bare file.py\n\n```py",
        "thon\nx = 1\n\ny\n```\nend",
    ]
    page = pages(**view)
    say(page)
    expect(last(page, "footer")).to_be_visible()
    body = last(page, ".body")
    tags = body.evaluate("body => [...body.children].map((child) => child.localName)")
    assert tags == ["h3", "p", "ol", "ul", "blockquote", "hr", "div", "p", "figure", "p"]
    expect(body.locator("strong").first).to_have_text("bold and code")
    expect(body.locator("strong code")).to_have_text("code")
    expect(body.locator("em")).to_have_text(["and"])
    expect(body.locator("s, del")).to_have_text("gone")
    assert "2 * 3 * 4\nsnake_case_name" in body.locator("p").first.inner_text()
    assert body.locator("> ol > li").all_inner_texts() == ["one", "two\nmore"]
    expect(body.locator("ul ul ol li")).to_have_text("c")
    expect(body.locator("td")).to_have_text(["1", "2"])
    expect(body.locator(".table")).to_have_attribute("tabindex", "0")  # to scroll it by keys
    align = "cell => getComputedStyle(cell).textAlign"
    assert [cell.evaluate(align) for cell in body.locator("td").all()] == ["left", "right"]
    links = body.locator("a")
    expect(links).to_have_text(["link", "https://example.org/bare"])
    assert links.first.get_attribute("rel") == "noopener noreferrer"
    assert links.first.get_attribute("target") == "_blank"
    expect(body.locator("figcaption span")).to_have_text("python")
    assert body.locator("figure code").text_content() == "x = 1\n\ny"


@in_all_views
def test_code_has_colours_and_can_be_copied(pages, view):
    pages.engine.pieces = ["```python\ndef one():\n    return 'two'\n```"]
    page = pages(permissions=["clipboard-read", "clipboard-write"], **view)
    say(page)
    expect(last(page, "code .hljs-keyword")).to_have_text(["def", "return"])
    colours = {
        last(page, f"code .{name} >> nth=0").evaluate("word => getComputedStyle(word).color")
        for name in ("hljs-keyword", "hljs-string", "hljs-title")
    }
    assert len(colours) == 3
    last(page, "figure button").click()
    expect(last(page, "figure button")).to_have_text("Copied")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == "def one():\n    return 'two'"


@in_all_views
def test_formulas(pages, view):
    pages.engine.pieces = [
        "Inline $e^{i\\pi} + 1 = 0$ and \\(a_1\\), for $5 and $6.\n\n",
        "$$\n\\int_0^1 x^2\\,dx = \\frac{1}{3}\n$$\n\n\\[\\sqrt{2}\\]\n\nBroken $\\frac{$ stays.",
    ]
    page = pages(**view)
    say(page)
    expect(last(page, ".katex")).to_have_count(4)
    expect(last(page, ".katex-display")).to_have_count(2)
    expect(last(page, ".katex-mathml math")).to_have_count(4)  # for those who listen
    expect(last(page, ".body p").first).to_contain_text("for $5 and $6.")
    expect(last(page, ".body p").last).to_contain_text("\\frac{")
    page.evaluate("document.fonts.ready")
    assert page.evaluate("document.fonts.check('16px KaTeX_Math')")
    # The policy forbids styles in markup; a fraction has its height all the same.
    height = last(page, ".katex-display >> nth=0").evaluate("one => one.offsetHeight")
    assert height > 30


def test_libraries_come_after_the_page_and_only_when_needed(pages):
    page = pages()
    sizes = "performance.getEntriesByType('resource').map((entry) => entry.name)"
    pages.engine.pieces = ["Only *words*."]
    talk(page, "words")
    expect(last(page, "em")).to_have_text("words")
    names = page.evaluate(sizes)
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    starts = page.evaluate(
        "performance.getEntriesByType('resource').filter(({name}) => name.includes('/vendor/'))"
        ".map((entry) => entry.startTime)"
    )
    assert starts
    assert not any("katex" in name or "highlight" in name for name in names)
    loaded = page.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
    assert min(starts) >= loaded
    assert paint
    pages.engine.pieces = ["$x$ and\n\n```python\nx = 1\n```"]
    talk(page, "more")
    expect(last(page, ".katex")).to_have_count(1)
    expect(last(page, ".hljs-number")).to_have_count(1)


def test_a_growing_text_does_not_flicker(pages):
    """What has been drawn is not made anew while more comes after it."""
    pages.engine.round_s = 0.01
    steps = [f"{word} " for word in ["first", "words", "of", "a", "paragraph"]]
    code = ["```python\n", *(f"x{i} = {i}\n" for i in range(30)), "```\n\n"]
    page = pages()
    pages.engine.pieces = [*steps, "\n\n- one\n- two\n\n", *code, *steps]
    page.evaluate(
        "window.lost = [];"
        "new MutationObserver((changes) => { for (const change of changes)"
        "  for (const node of change.removedNodes)"
        "    if (node.nodeType === 1) lost.push([change.target.className, node.localName]); })"
        ".observe(document.querySelector('#messages'), {childList: true, subtree: true})"
    )
    say(page)
    expect(last(page, "footer")).to_be_visible()
    expect(last(page, ".body > *")).to_have_count(4)
    lost = [tuple(one) for one in page.evaluate("lost")]
    # The block that grows is replaced by its longer self, but code never is.
    assert ("body", "figure") not in lost
    assert len([one for one in lost if one == ("body", "ul")]) <= 4
    expect(last(page, ".hljs-number")).to_have_count(30)


def test_a_text_ends_the_same_whole_or_in_pieces(pages):
    text = (
        "Para one\nwith lines\n\n1. a\n\n2. b\n\n   in b\n\n| x | y |\n|---|---|\n| 1 | 2 |\n\n"
        "Setext\n===\n\n> quote\nlazy\n\n[ref] and **half\n\n[ref]: https://example.org\n\n"
        "```js\nlet a = `b`;\n```\n\n~~~\n```\n~~~\n\nEnd $x_1$"
    )
    page = pages()
    html = "body => body.innerHTML"
    results = []
    for pieces in ([text], list(text)):
        pages.engine.pieces = pieces
        talk(page, "go")
        expect(last(page, ".hljs-keyword")).to_have_count(1)
        expect(last(page, ".katex")).to_have_count(1)
        results.append(last(page, ".body").evaluate(html))
    assert results[0] == results[1]
    assert '<a href="https://example.org"' in results[0]


def test_a_thousand_messages_cost_what_is_seen_of_them(pages):
    pages.engine.max_ctx = 1_000_000
    page = pages()
    open_long(page, 1000)
    expect(page.locator(".reply").last).to_be_in_viewport()
    expect(page.locator(".reply").last.locator("strong")).to_have_text("999")
    assert page.locator(".reply:has(.plain)").count() > 450  # not drawn yet
    page.evaluate(
        "window.touched = new Set();"
        "new MutationObserver((all) => all.forEach(({target}) => touched.add("
        "target.nodeType === 1 ? target.closest('article') : null)))"
        ".observe(document.querySelector('#messages'), {childList: true, subtree: true})"
    )
    talk(page, "one more")
    expect(last(page, ".body")).to_have_text("Hello there")
    assert page.evaluate("touched.size") <= 5  # the new ones, and the question before
    page.locator("#log").evaluate("log => log.scrollTo(0, 0)")
    expect(page.locator(".reply").first.locator("strong")).to_have_text("1")
    expect(page.locator(".question").first).to_be_in_viewport()
