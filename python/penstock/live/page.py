"""The page: one HTML file with the stylesheet of all reports. It fetches nothing but its events."""

from __future__ import annotations

import base64
import hashlib
import string
from pathlib import Path

from penstock.live.server import Answer
from penstock.reports import page

__all__ = ["answer"]


def answer(job: str) -> Answer:
    """The page of a job. Browsers run its one script and its one stylesheet, and let it talk to this address alone."""
    folder = Path(__file__).parent
    style = (page.FOLDER / "style.css").read_text(encoding="utf-8") + (folder / "page.css").read_text(encoding="utf-8")
    script = (folder / "page.js").read_text(encoding="utf-8")
    template = string.Template((folder / "page.template.html").read_text(encoding="utf-8"))
    made = template.substitute(style=f"\n{style}", script=f"\n{script}", job=job)
    policy = (
        f"default-src 'none'; script-src {_hash(f'{chr(10)}{script}')}; style-src {_hash(f'{chr(10)}{style}')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Answer("text/html; charset=utf-8", made.encode(), (("Content-Security-Policy", policy),))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
