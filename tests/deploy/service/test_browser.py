"""The page in a browser: it stays current by itself, alone, and whatever names are made of."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from deploy.progress_model import Readings, ShardReading, WorkerReading
from deploy.runner.readings import FigureTally, ReadingFiles
from deploy.service.access import Exposure
from deploy.service.identities import TokenRole
from tests.support.service_in_process import Running, Start, listening

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on PATH")

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


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
        sync_api.expect(self.page.locator(where).first).to_contain_text(text, timeout=120_000)

    def _note(self, kind: str, text: str) -> None:
        if kind == "error":
            self.faults.append(text)

    def _asked(self, url: str) -> None:
        if not url.startswith((self.url, "data:")):
            self.faults.append(f"outside request: {url}")


@pytest.fixture
def tab(service: Running) -> Iterator[Tab]:
    with opened(service) as found:
        yield found


@contextmanager
def opened(service: Running) -> Iterator[Tab]:
    with listening(service) as url, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
        page.set_default_timeout(120_000)
        found = Tab(page, url)
        yield found
        browser.close()
        service.service.feed.close()
        assert found.faults == []


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


def write_readings(service: Running, job: str, steps: int) -> None:
    """What a runner with two workers and a shard would have written by now."""
    workers = tuple(
        WorkerReading(
            name=name, clock=clock, step=clock, standing="runs", waits=False, loss=1.0, restarts=0
        )
        for name, clock in (("w0", steps), ("w1", steps - 3))
    )
    shard = ShardReading(
        shard=0, version=steps, updates_per_s=9.0, bytes_in_per_s=1e6, bytes_out_per_s=1e6,
        max_clock_gap=3,
    )  # fmt: skip
    files = ReadingFiles(service.service.store.folder(job) / "readings")
    for step in range(1, steps + 1):
        figures = Readings(
            elapsed_s=float(step), steps=step, planned=2 * steps, remaining_s=9.0,
            samples_per_s=80.0, loss=1 / step, rate=0.1, epoch=1.0, staleness_mean=1.0,
            staleness_max=3, bound=4, absent=0, workers=workers, shards=(shard,),
        )  # fmt: skip
        now = time.time() - steps + step
        files.write(FigureTally().reading(1, now, figures, 8 * step, 0.5))


def test_a_list_that_is_open_stays_current(service: Running, tab: Tab) -> None:
    """A job that is submitted later appears and ends without a reload; its name is text."""
    tab.open("/")
    job = service.submit("succeed", name=HOSTILE)
    tab.sees("#jobs", HOSTILE)
    tab.sees("#jobs", "SUCCEEDED")
    assert tab.page.locator("#jobs img, #jobs script").count() == 0
    tab.page.keyboard.press("Tab")
    focused = "document.activeElement.className"
    assert tab.page.evaluate(focused) == "skip"
    assert service.get(job)["name"] == HOSTILE
    accessible(tab)


def test_a_job_from_its_page(service: Running, tab: Tab) -> None:
    """Figures arrive by the stream, charts are drawn, buttons act, and it fits a small screen."""
    job = service.submit("train", name=HOSTILE)
    service.await_state(job, "RUNNING")
    tab.open(f"/jobs/{job}")
    write_readings(service, job, 40)
    tab.sees("#figures", "40 / 80")
    tab.sees("#learning .sentence", "The loss fell: 1 at first, 0.025 now")
    tab.sees("#clocks .bars", "clock 37")
    tab.sees("#shards .bars", "9 updates/s")
    tab.sees("#logs pre", "attempt 1: train")
    assert tab.page.locator("[data-chart=loss] canvas").count() == 1
    tab.page.get_by_role("button", name="Pause").click()
    tab.sees("#state", "PAUSED")
    tab.sees("#events", "PAUSING")
    assert tab.page.get_by_role("button", name="Pause").is_disabled()
    tab.page.set_viewport_size({"width": 360, "height": 740})
    tab.page.get_by_role("button", name="Resume").click()
    tab.sees("#attempt", "attempt 2")
    accessible(tab)


def test_signing_in(start: Start) -> None:
    """A token opens the page that was asked for; the session changes things, and ends."""
    with start(driven=False, exposure=Exposure(tokens=True)) as running, opened(running) as tab:
        store, page = running.service.access, tab.page
        _, token = store.create_token("root", TokenRole.ADMINISTRATOR, None, 3600.0)
        page.goto(tab.url + "/service")
        accessible(tab)
        page.get_by_label("Token").fill(token)
        page.keyboard.press("Enter")
        tab.sees("h1", "Service")
        page.get_by_label("Name").fill("carol")
        page.get_by_label("Projects").fill("vision, speech")
        page.get_by_role("button", name="Create").click()
        tab.sees("#secret", "dps_")
        carol = store.of_token(page.locator("#secret code").inner_text())
        assert carol is not None
        assert carol.projects == frozenset({"vision", "speech"})
        page.reload()
        tab.sees("#tokens", "carol")
        tab.sees("#audit", "POST /tokens")
        accessible(tab)
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Revoke").first.click()
        tab.sees("#tokens", "revoked")
        page.get_by_role("button", name="Sign out").click()
        tab.sees("h1", "Sign in")
        page.goto(tab.url + "/")
        tab.sees("h1", "Sign in")
        tab.faults[:] = [fault for fault in tab.faults if "Revoke the token of carol" not in fault]
