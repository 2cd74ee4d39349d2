"""Places where a long name in the site may be broken between lines: after a dot, a slash, an underscore and the like.

Hydra keys and paths hold no spaces, so a browser would break them anywhere, or widen the page. A hook of mkdocs.
"""

from __future__ import annotations

import html
import re

_SHORT = 16
"""Names of at most so many letters are not broken."""
_CODE = re.compile(r'<pre.*?</pre>|(<code>|<span class="doc doc-object-name[^>]*>)(.*?)(?=</code>|</span>)', re.DOTALL)
_PLACE = re.compile(r"(?<=\w)([./=,]|::?|_|\|)(?=[\w$\[{/])")


def on_post_page(output: str, **_: object) -> str:
    """Return a page of the site whose long names can be broken; blocks of code stay."""
    return _CODE.sub(lambda found: found[0] if found[1] is None else found[1] + breakable(found[2]), output)


def breakable(text: str) -> str:
    """Return HTML with the places of its long words; words with hyphens, which browsers break, are kept whole."""
    return "".join(part if part[:1] in ("<", " ") else _word(part) for part in re.findall("<[^>]*>| +|[^< ]+", text))


def _word(text: str) -> str:
    if len(html.unescape(text)) > _SHORT:
        text = _PLACE.sub(r"\1<wbr>", text)
    return re.sub(r"(?<![^>])[^<>]*-[^<>]*(?![^<])", r'<span class="whole">\g<0></span>', text)
