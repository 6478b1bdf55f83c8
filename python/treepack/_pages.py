"""A page of the documentation to what a message calls it: its address, where the package's metadata has one."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, metadata


def page(name: str, part: str = "") -> str:
    """The address of a page, `page("cli")`, or of a part of it, `page("cli", "exit-codes")`.

    The site is the project URL "Documentation" of the package (pyproject.toml). Without one it is the file in the
    repository.
    """
    site = _site()
    if site is None:
        return f"docs/{name}.md in treepack's repository"
    return f"{site.rstrip('/')}/{name}.html" + (f"#{part}" if part else "")


def _site() -> str | None:
    try:
        urls = metadata("treepack").get_all("Project-URL") or []
    except PackageNotFoundError:  # run from a folder, not installed
        return None
    named = dict(url.split(", ", 1) for url in urls if ", " in url)
    return named.get("Documentation")
