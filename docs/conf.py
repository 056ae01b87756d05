"""How Sphinx builds these pages (./dev docs). Markdown stays as GitHub shows it; nothing is loaded from elsewhere."""

import re

project = "Penstock"
author = "The Penstock authors"
extensions = ["myst_parser"]
root_doc = "README"
exclude_patterns = ["requirements*"]
myst_heading_anchors = 4  # what [text](page.md#a-heading) points to, as on GitHub
html_theme = "furo"
html_title = "Penstock"
html_copy_source = False
html_show_sphinx = False
html_last_updated_fmt = None
# A block without a language is text, not Python that does not parse.
highlight_language = "none"


def setup(app):
    app.connect("source-read", add_navigation)
    app.connect("build-finished", add_index)


def add_navigation(app, docname, source):
    """The side bar has the index's pages under the index's headings: GitHub has no word for a table of contents."""
    if docname != root_doc:
        return
    for section in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:]:
        shelf = section.splitlines()[0]
        pages = re.findall(r"^- \[[^]]+\]\(([^)#]+)\.md\)", section, re.MULTILINE)
        source[0] += "\n```{toctree}\n:hidden:\n:caption: " + shelf + "\n\n" + "\n".join(pages) + "\n```\n"


def add_index(app, exception):
    """A web server shows index.html; the pages link to README.html, as on GitHub."""
    if exception is None:
        (app.outdir / "index.html").write_text('<meta http-equiv="refresh" content="0; url=README.html">\n')
