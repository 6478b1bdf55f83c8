"""A page of the documentation to what a message calls it: its address, where the package's metadata leads to one."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, metadata


def page(name: str, part: str = "") -> str:
    """The address of a page, `page("cli")`, or of a part of it, `page("cli", "exit-codes")`.

    By the project URLs of the package (pyproject.toml): on the site, "Documentation"; without one as the file at this
    version's tag in the "Repository"; without either by the file's name.
    """
    named, version = _addresses()
    anchor = f"#{part}" if part else ""
    if "Documentation" in named:
        return f"{named['Documentation'].rstrip('/')}/{name}.html{anchor}"
    if "Repository" in named:
        return f"{named['Repository'].rstrip('/')}/blob/v{version}/docs/{name}.md{anchor}"
    return f"docs/{name}.md in treepack's repository"


def _addresses() -> tuple[dict[str, str], str]:
    """The project URLs by their labels, and the version."""
    try:
        found = metadata("treepack")
    except PackageNotFoundError:  # run from a folder, not installed
        return {}, ""
    urls = found.get_all("Project-URL") or []
    return dict(url.split(", ", 1) for url in urls if ", " in url), found["Version"]
