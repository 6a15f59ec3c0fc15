"""The page of benchmarks as one HTML file that needs nothing else: styles and pictures are inside.

In: the Markdown that report.py makes (headings, tables, lists, paragraphs, pictures, bold, code;
no other Markdown) and SVG by picture name. Out: HTML for light and dark screens.
"""

import re
from collections.abc import Iterator, Mapping
from html import escape
from itertools import groupby
from typing import Final

_IMAGE: Final = re.compile(r"!\[(.*?)\]\(plots/(.*?)\)$")
_VERDICTS: Final = {"aim reached": "aim", "target reached": "target", "missed": "missed"}
_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1f2430; --soft: #667085; --line: #dfe3ea;
  --paper: #ffffff; --panel: #f6f7f9; --good: #1d7f5c; --fair: #2f6fca; --bad: #c0392b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ec; --soft: #98a2b3; --line: #333a46;
  --paper: #14171c; --panel: #1c2128; --good: #4fc79b; --fair: #7fb0f5; --bad: #ff8a7a; } }
body { margin: 0 auto; max-width: 70rem; padding: 2rem 1.25rem 4rem; color: var(--ink);
  background: var(--paper); font: 15px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.8rem; margin: 0 0 .5rem; } h2 { margin: 2.5rem 0 .5rem; }
h3 { margin: 2.25rem 0 .75rem; padding-top: .75rem; border-top: 1px solid var(--line); }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin: 1rem 0; }
nav a { color: var(--fair); text-decoration: none; } nav a:hover { text-decoration: underline; }
.wide { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .3rem .75rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } th.text, td.text { text-align: left; }
tbody tr:hover { background: var(--panel); }
code { background: var(--panel); padding: .1em .3em; border-radius: 3px; font-size: .9em; }
figure { margin: 1rem 0; overflow-x: auto; } figure svg { max-width: 100%; height: auto; }
p, li { max-width: 48rem; } .aim { color: var(--good); } .target { color: var(--fair); }
.missed { color: var(--bad); font-weight: 600; }
"""


def make_html(page: str, pictures: Mapping[str, str]) -> str:
    blocks = list(_blocks(page))
    body = "\n".join(_block(lines, pictures) for lines in blocks)
    title = escape(page.splitlines()[0].removeprefix("# "))
    links = [line for lines in blocks for line in lines if line.startswith(("## ", "### "))]
    nav = "".join(
        f'<a href="#{_anchor(line)}">{_inline(line.lstrip("# "))}</a>'
        for line in dict.fromkeys(links)
    )
    head, _, rest = body.partition("</h1>")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"{head}</h1>\n<nav>{nav}</nav>{rest}\n</body>\n</html>\n"
    )


def _blocks(page: str) -> Iterator[list[str]]:
    for has_text, lines in groupby(page.splitlines(), key=lambda line: bool(line.strip())):
        if has_text:
            yield list(lines)


def _block(lines: list[str], pictures: Mapping[str, str]) -> str:
    first = lines[0]
    if first.startswith("#"):
        level = len(first) - len(first.lstrip("#"))
        words = _inline(first[level:].strip())
        return f'<h{level} id="{_anchor(first)}">{words}</h{level}>'
    if image := _IMAGE.match(first):
        return f'<figure aria-label="{escape(image[1])}">{pictures.get(image[2], "")}</figure>'
    if first.startswith("|"):
        return _table(lines)
    if first.startswith("- "):
        return f"<ul>{''.join(f'<li>{_inline(line[2:])}</li>' for line in lines)}</ul>"
    return f"<p>{_inline(' '.join(lines))}</p>"


def _table(lines: list[str]) -> str:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    head, body = rows[0], rows[2:]
    is_text = [i == 0 or any(row[i][:1].isalpha() for row in body) for i in range(len(head))]
    top = "".join(_cell("th", text, left) for text, left in zip(head, is_text, strict=True))
    inner = "".join(
        f"<tr>{''.join(_cell('td', *cell) for cell in zip(row, is_text, strict=True))}</tr>"
        for row in body
    )
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{inner}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _cell(tag: str, text: str, is_text: bool) -> str:
    kinds = [
        kind for kind in ("text" if is_text else "", _VERDICTS.get(text.split(",")[0], "")) if kind
    ]
    style = f' class="{" ".join(kinds)}"' if kinds else ""
    return f"<{tag}{style}>{_inline(text)}</{tag}>"


def _inline(text: str) -> str:
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", escape(text))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)


def _anchor(heading: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")
