"""The templates of pages, and other files in ``templates/``."""

import functools
import json
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup


def template_text(name: str) -> str:
    """Return the content of a file in ``templates/``."""
    return resources.files("snip_megatron.reporting").joinpath("templates", name).read_text(encoding="utf-8")


@functools.cache
def page_template(name: str) -> jinja2.Template:
    """Return a page of ``templates/`` as a template, which escapes all text."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["data"] = _script_data
    environment.filters["figure"] = lambda value: "" if value is None else f"{value:.4g}"
    environment.filters["percent"] = lambda value: "" if value is None else f"{value:.2%}"
    return environment.from_string(template_text(name))


def _script_data(value: Any) -> Markup:
    """Return JSON for a ``<script type="application/json">``. ``<``, ``>`` and ``&`` are escaped."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))
