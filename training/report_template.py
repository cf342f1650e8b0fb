"""The frame of the report page: its style sheet, and helpers that escape all text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

#: No address occurs in the page, and the browser is told to load none.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1c2330; --soft: #5b6575; --page: #ffffff; --card: #f5f7fa; --line: #d5dbe3;
  --link: #1d5fc4; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e4e8ee; --soft: #a3adbb; --page: #14181f; --card: #1d232d;
  --line: #39424f; --link: #7fb2ff; }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 1320px; padding: 1rem; color: var(--ink); background: var(--page);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }}
h1 {{ font-size: 1.6rem; margin: .5rem 0; }}
h2 {{ font-size: 1.3rem; margin: 2rem 0 .5rem; border-top: 1px solid var(--line); padding-top: 1.5rem; }}
h3 {{ font-size: 1.05rem; margin: 1.5rem 0 .5rem; }}
a {{ color: var(--link); }}
.soft {{ color: var(--soft); }}
.verdict {{ border-left: 4px solid var(--link); background: var(--card); padding: .6rem .9rem; margin: .8rem 0; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }}
caption {{ text-align: left; color: var(--soft); padding: .2rem 0; }}
th, td {{ text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: normal; }}
td.number, th.number {{ text-align: right; white-space: nowrap; }}
tr.own td {{ font-weight: 600; }}
dl {{ display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: .2rem 1rem; margin: .8rem 0; }}
dt {{ color: var(--soft); }}
dd {{ margin: 0; }}
.plots {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 360px), 1fr)); gap: 1rem; }}
figure {{ margin: 0; background: var(--card); border: 1px solid var(--line); padding: .7rem; }}
figure svg {{ width: 100%; height: auto; color: var(--ink); stroke-linejoin: round; }}
figcaption {{ color: var(--soft); font-size: .9rem; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def page(title: str, body: str) -> str:
    """The whole page. The body is HTML; the title is text."""
    return _PAGE.format(title=escape(title), body=body)


def text(value: object) -> str:
    """Anything as escaped text."""
    return escape(str(value))


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    caption: str,
    numbers_from: int,
    own: Sequence[int] = (),
) -> str:
    """A table of text that scrolls by itself where the screen is narrow.

    Args:
        head: names of the columns.
        rows: texts of the cells.
        caption: what the table says.
        numbers_from: columns from this one on are aligned as numbers.
        own: rows to stress.
    """

    def cells(row: Sequence[object], tag: str) -> str:
        kinds = [' class="number"' if at >= numbers_from else "" for at in range(len(row))]
        scope = ' scope="col"' if tag == "th" else ""
        return "".join(
            f"<{tag}{scope}{kind}>{text(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True)
        )

    stressed = ' class="own"'
    body = "\n".join(
        f"<tr{stressed if at in own else ''}>{cells(row, 'td')}</tr>" for at, row in enumerate(rows)
    )
    return (
        f'<div class="scroll"><table><caption>{text(caption)}</caption>\n<thead><tr>{cells(head, "th")}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """A list of names and values."""
    items = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in pairs)
    return f"<dl>{items}</dl>"


def figure(svg: str, caption: str) -> str:
    """A plot, already made to stand inside a page, with its caption."""
    labelled = svg.replace("<svg", f'<svg role="img" aria-label="{text(caption)}"', 1)
    return f"<figure>{labelled}<figcaption>{text(caption)}</figcaption></figure>"
