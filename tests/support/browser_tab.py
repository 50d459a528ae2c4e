"""A page of the service in Debian's Chromium, driven by Playwright; and axe, which examines it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.support.service_in_process import Running, listening

CHROMIUM = shutil.which("chromium")
REFUSED = "net::ERR_"
"""In what Chromium prints about requests that met a server that was away."""


class Tab:
    """A page of a browser, and what it must not do: fail, or ask another machine."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.faults: list[str] = []
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("dialog", lambda dialog: self.faults.append(dialog.message))
        page.on("console", lambda line: self._note(line.type, line.text))
        page.on("request", lambda request: self._asked(request.url))

    def open(self, path: str) -> None:
        self.page.goto(self.url + path)
        self.sees("#link", "live")

    def sees(self, where: str, text: str) -> None:
        """Wait until the text is there; the page gets no help."""
        from playwright.sync_api import expect

        expect(self.page.locator(where).first).to_contain_text(text, timeout=120_000)

    def _note(self, kind: str, text: str) -> None:
        if kind == "error":
            self.faults.append(text)

    def _asked(self, url: str) -> None:
        if not url.startswith((self.url, "data:")):
            self.faults.append(f"outside request: {url}")

    def events_shown(self) -> list[str]:
        """The lines of the list of events, the oldest first, without their times."""
        lines = self.page.locator("#events li").all_text_contents()
        return [line[8:].strip() for line in reversed(lines)]


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser without a window. While it is open, no loop of asyncio runs in this thread."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def open_tab(browser: Any, url: str) -> Iterator[Tab]:
    """A page for the service at this URL, without the cookies and files of other pages.

    What it must not do fails at the end.
    """
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.set_default_timeout(120_000)
    tab = Tab(page, url)
    try:
        yield tab
    finally:
        context.close()
    assert tab.faults == []


@contextmanager
def browser_tab(url: str) -> Iterator[Tab]:
    """A page of a browser of its own."""
    with chromium() as browser, open_tab(browser, url) as tab:
        yield tab


@contextmanager
def open_page(browser: Any, service: Running) -> Iterator[Tab]:
    """A page of a service in this process."""
    with listening(service) as url, open_tab(browser, url) as tab:
        yield tab
        service.service.feed.close()


def accessible(tab: Tab) -> None:
    """Fail if axe finds a violation in the page, wide or narrow; without axe, look no further."""
    axe = find_spec("axe_playwright_python")
    if axe is None or axe.origin is None:
        return
    (script,) = Path(axe.origin).parent.rglob("axe.min.js")
    tab.page.evaluate(script.read_text())
    for width in (1280, 360):
        tab.page.set_viewport_size({"width": width, "height": 740})
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        found = tab.page.evaluate("() => axe.run({ resultTypes: ['violations'] })")
        assert [(each["id"], each["nodes"][0]["html"]) for each in found["violations"]] == []
