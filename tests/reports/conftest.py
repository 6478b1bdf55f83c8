"""Reports in the browser of tests/conftest.py."""

import pytest


@pytest.fixture
def open_report(browser, tmp_path):
    """Opens reports as files; in the end no page may have said anything, or asked for anything but itself."""
    contexts, said, asked = [], [], []

    def watched(**options):
        context = browser.new_context(viewport={"width": 1280, "height": 1000}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append((message.type, message.text)))
        page.on("pageerror", lambda error: said.append(("error", str(error))))
        page.on("request", lambda request: asked.append(request.url))
        return page

    def opened(report, **options):
        page = watched(**options)
        target = tmp_path / f"report{len(contexts)}.html"
        report.save(target)
        page.goto(target.as_uri())
        page.wait_for_selector("html[data-shown='0']")
        return page

    opened.watched = watched
    yield opened
    for context in contexts:
        context.close()
    assert said == []
    assert [url for url in asked if not url.startswith(("file://", "data:", "about:"))] == []
    assert len([url for url in asked if url.startswith("file://")]) <= len(contexts)
