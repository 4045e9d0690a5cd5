"""Rendering and writing of HTML pages.

A page is one self-contained file: plotly.js, style and data are inside. Its content security policy forbids all network
access, and all scripts except the two whose hashes it names. Text from a run's files can therefore never run as code.
"""

import base64
import functools
import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from snip_megatron import __version__
from snip_megatron.precision.errors import needs_extra
from snip_megatron.runtime.storage import deliver

with needs_extra("report", "a report"):
    from plotly.offline import get_plotlyjs


def render_page(template: str, **values: Any) -> str:
    """Render ``template`` with ``values``. Raises jinja2.UndefinedError if the template needs another value."""
    plotly_js, page_js = get_plotlyjs(), _template_text("report.js")
    return (
        _environment()
        .get_template(template)
        .render(
            version=__version__,
            style=Markup(_template_text("report.css")),
            scripts=[Markup(plotly_js), Markup(page_js)],
            script_hashes=[_csp_hash(plotly_js), _csp_hash(page_js)],
            **values,
        )
    )


def write_page(page: str, path: Path) -> Path:
    """Write the page to ``path`` and return ``path``. Raises SnipError if the file cannot be written."""
    deliver("page", path, page)
    return path


@functools.cache
def _environment() -> jinja2.Environment:
    loader = jinja2.FunctionLoader(_template_text)
    environment = jinja2.Environment(
        autoescape=True, loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["data"] = _data
    environment.filters["figure"] = lambda value: "" if value is None else f"{value:.4g}"
    environment.filters["percent"] = lambda value: "" if value is None else f"{value:.2%}"
    return environment


def _template_text(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


def _data(value: Any) -> Markup:
    """Return JSON for a ``<script type="application/json">``. ``<``, ``>`` and ``&`` are escaped."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


@functools.cache
def _csp_hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
