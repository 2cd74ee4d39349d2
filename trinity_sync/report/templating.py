"""The jinja2 templates of the report. What they are given is escaped, unless a template made it."""

from __future__ import annotations

import html
import os
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from trinity_sync.tracking import units

_ENVIRONMENT = Environment(
    loader=PackageLoader("trinity_sync.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {
    "moment": units.moment,
    "page": lambda folder: f"{quote(os.fsencode(folder))}/report.html",  # without a ":", so relative
    "number": lambda value: units.number(units.finite(value)),
    "px": "{:.1f}".format,
    "quoted": lambda text: Markup(html.escape(str(text))),  # names quotes, where markupsafe numbers them
    "seconds": lambda value: units.seconds(units.finite(value)),
    "size": lambda value: units.size(units.finite(value)),
}


def render(template: str, **values: object) -> Markup:
    """Fill in a file of `templates/`; the result is markup to every other template."""
    return Markup(_ENVIRONMENT.get_template(template).render(values))
