"""A packing as a web page: one self-contained file, drawn by a script of its own, that loads nothing from anywhere.

    treepack.report(packed).save("report.html")

    segments <- bars        the trees as nested bars, what is too small merged
    pictures <- png         the attention mask and its tiles, down-sampled
    totals, histograms      the numbers of all trees
    page                    all of it as one page (needs jinja2), with assets/ (template, style, script)

Nothing here is loaded by `import treepack`.
"""

from .page import Report, report

__all__ = ["Report", "report"]
