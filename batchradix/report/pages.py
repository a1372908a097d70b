"""What the pages have in common: one HTML file each that needs nothing else, without scripts."""

from __future__ import annotations

from typing import Any

import jinja2

from batchradix._version import VERSION
from batchradix.report.charts import WIDTH, printable


def render_page(template: str, title: str, **content: Any) -> str:
    """A page by the name of its template in this package.

    All that stands on it is escaped: labels and names come from data.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("batchradix", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals["WIDTH"] = WIDTH
    return environment.get_template(template).render(
        title=printable(title), version=VERSION, **content
    )
