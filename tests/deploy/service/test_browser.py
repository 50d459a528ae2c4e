"""The page in a browser: it stays current by itself, alone, and whatever names are made of."""

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from deploy.run.progress_model import LinkReading
from deploy.runner.readings import FigureTally, ReadingFiles
from deploy.service.access import Exposure
from deploy.service.page import _number
from deploy.service.retention import ServiceLimits
from deploy.service.tokens import TokenRole
from tests.support.browser_tab import CHROMIUM, REFUSED, Tab, accessible, chromium, open_page
from tests.support.eventually import eventually
from tests.support.job_readings import training_figures
from tests.support.service_in_process import CutLine, Running, Start

sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on PATH")

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One for all tests here: a start costs more than most of them."""
    with chromium() as started:
        yield started


@pytest.fixture
def tab(browser: Any, service: Running) -> Iterator[Tab]:
    with open_page(browser, service) as page:
        yield page


def write_readings(service: Running, job: str, steps: int, clocks: Sequence[int] = ()) -> None:
    """What a runner with a shard and workers at some clocks, two by default, would have written."""
    files = ReadingFiles(service.service.store.folder(job) / "readings")
    for step in range(1, steps + 1):
        figures = training_figures(
            step,
            2 * steps,
            elapsed_s=float(step),
            loss=1 / step,
            clocks=clocks or (steps, steps - 3),
            links=(LinkReading("a", HOSTILE, 1.5, 2e6),),
        )
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
    tab.sees("#traffic .bars", "1 MB/s in, 1 MB/s out")
    tab.sees("#traffic .bars", f"a → {HOSTILE}")
    tab.sees("#traffic .bars", "RTT 1.5 ms, 2 MB/s pushed")
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


def test_a_chart_keeps_its_zoom_and_the_log_comes_once(service: Running, tab: Tab) -> None:
    """New figures leave a zoomed axis as it is; requests for a log never overlap."""
    job = service.submit("train", labels={"stub": "train", "team": "a"})
    service.await_state(job, "RUNNING")
    write_readings(service, job, 40)
    tab.open(f"/jobs/{job}")
    page = tab.page
    tab.sees("#figures", "40 / 80")
    tab.sees("#about", "project default")
    tab.sees("#about", "team=a")
    tab.sees("#logs pre", "attempt 1: train")
    eventually(lambda: page.evaluate("Boolean(charts.loss)"), because="the chart is drawn")
    page.evaluate("charts.loss.setScale('x', { min: 5, max: 10 })")
    write_readings(service, job, 60)
    newest = "charts.loss.data[0].at(-1)"
    eventually(lambda: page.evaluate(newest) == 60, because=lambda: str(page.evaluate(newest)))
    page.evaluate("draw($('[data-chart=loss]'))")
    scale = "[charts.loss.scales.x.min, charts.loss.scales.x.max]"
    assert page.evaluate(scale) == [5, 10]
    again = "logNext = 0; $('#logs pre').textContent = ''; Promise.all([showLogs(), showLogs()])"
    page.evaluate(again)
    tab.sees("#logs pre", "attempt 1: train")
    text = "$('#logs pre').textContent.split('attempt 1').length - 1"
    assert page.evaluate(f"showLogs().then(() => {text})") == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_have_the_colours_of_the_page(service: Running, tab: Tab, scheme: str) -> None:
    """Axes and curves of a comparison are drawn in the style sheet's colours of each scheme."""
    tab.page.emulate_media(color_scheme=scheme)
    jobs = [service.submit("train") for _ in range(2)]
    for job in jobs:
        write_readings(service, job, 20)
    tab.page.goto(f"{tab.url}/compare?jobs={','.join(jobs)}")
    page = tab.page
    sync_api.expect(page.locator("#said")).to_contain_text("0.05")
    quiet, accent = (page.evaluate(f"chartColour('--{name}')") for name in ("quiet", "accent"))
    assert page.evaluate("chart.axes.map((axis) => axis.stroke())") == [quiet, quiet]
    assert page.evaluate("chart.series[1].stroke()") == accent
    other = "dark" if scheme == "light" else "light"
    page.emulate_media(color_scheme=other)
    eventually(
        lambda: page.evaluate("chart.series[1].stroke()") != accent,
        because="the chart is drawn again in the other colours",
    )


def test_a_clone_by_a_form(service: Running, tab: Tab) -> None:
    """The form has the job's settings, says what is wrong at its field, and sends what changed; the
    keyboard suffices."""
    job = service.submit("succeed", name=HOSTILE)
    service.await_state(job, "SUCCEEDED")
    tab.open(f"/jobs/{job}")
    page = tab.page
    focus(tab, "Clone")
    page.keyboard.press("Enter")
    tab.sees("#cloning h2", f"Clone {HOSTILE}")
    settings = service.get(job)["settings"]
    assert page.get_by_label("Workers").input_value() == str(settings["workers"])
    assert page.get_by_label("Staleness bound").input_value() == str(settings["staleness"])
    assert page.get_by_label("Name").input_value() == f"{HOSTILE} (copy)"
    accessible(tab)
    page.keyboard.press("Escape")
    assert not page.locator("#cloning").is_visible()
    page.get_by_role("button", name="Clone", exact=True).click()
    for label, value, words in (
        ("Workers", "many", "--workers: expected a whole number, got 'many'"),
        ("Workers", "9", "--workers: expected at most 8"),
        ("Staleness bound", "-1", "--staleness: expected"),
        ("Strategy", "downpour:scale=0", "scale"),
        ("Name", "x" * 201, "name: expected 1 to 200 printable characters"),
    ):
        field = page.get_by_label(label)
        before = field.input_value()
        field.fill(value)
        page.keyboard.press("Enter")
        sync_api.expect(field).to_have_attribute("aria-invalid", "true")
        sync_api.expect(field).to_be_focused()
        described = field.get_attribute("aria-describedby")
        tab.sees(f"#{described}", words)
        field.fill(before)
    page.get_by_label("Steps of each worker").fill("77")
    page.get_by_label("Name").fill("second")
    page.get_by_role("button", name="Submit the clone").click()
    tab.sees("h1", "second")
    clone = page.url.rpartition("/")[2]
    assert service.get(clone)["settings"]["max_iter"] == 77
    assert service.get(clone)["settings"]["workers"] == settings["workers"]
    tab.faults[:] = [fault for fault in tab.faults if "422" not in fault]


def test_figures_are_written_alike(service: Running, tab: Tab) -> None:
    """The page's script and its templates show a figure in the same words, in full digits."""
    tab.open("/")
    shown = {
        0: "0", 7: "7", 1234567: "1,234,567", 3950.2: "3,950", 39_502_000.2: "39,502,000",
        999.96: "1,000", 0.5: "0.5", 12.3456: "12.35", 0.00012347: "0.0001235",
        1e-5: "0.00001", 3.95e-7: "3.95e-7", -2.5: "-2.5",
    }  # fmt: skip
    for value, text in shown.items():
        assert (tab.page.evaluate(f"figure({value})"), _number(value)) == (text, text)
    assert _number(None) == tab.page.evaluate("figure(null)") == "–"
    assert tab.page.evaluate("counted(1, 'step')") == "1\N{NO-BREAK SPACE}step"


def test_an_open_page_says_that_contact_is_lost(start: Start, browser: Any) -> None:
    """While the process of the job is stopped, and no longer."""
    limits = ServiceLimits(silent_s=0.3, free_mb=0)
    with start(limits=limits) as running, open_page(browser, running) as tab:
        job = running.submit("alive")
        running.await_state(job, "RUNNING")
        tab.open(f"/jobs/{job}")
        contact = tab.page.locator("#contact")
        assert not contact.is_visible()
        folder = running.service.store.folder(job)
        pid = json.loads((folder / "attempt.json").read_text())["pid"]
        os.kill(pid, signal.SIGSTOP)
        tab.sees("#contact", "contact lost since")
        assert contact.is_visible()
        accessible(tab)
        os.kill(pid, signal.SIGCONT)
        sync_api.expect(contact).to_be_hidden(timeout=120_000)


def test_an_alert_of_the_service_is_on_open_pages(service: Running, tab: Tab) -> None:
    """Why no job is started is shown without a reload, and goes away."""
    tab.open("/")
    halted = service.service.supervisor
    service.service.supervisor.reconcile = lambda: setattr(halted, "halted", "the disk is full")  # type: ignore[method-assign]
    tab.sees("#halted", "▲ No job is started: the disk is full")
    service.service.supervisor.reconcile = lambda: setattr(halted, "halted", "")  # type: ignore[method-assign]
    sync_api.expect(tab.page.locator("#halted")).to_be_hidden()
    del service.service.supervisor.reconcile


def test_nothing_is_missing_after_a_break(service: Running, tab: Tab) -> None:
    """Hidden for an hour, a tab then shows each event that it has missed, once and in order."""
    store = service.service.store
    job = service.submit("train", name=HOSTILE)
    service.await_state(job, "RUNNING")
    page = tab.page
    page.clock.install()
    tab.open(f"/jobs/{job}")
    show = """(hidden) => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(show, True)
    tab.sees("#link", "paused while hidden")
    for number in range(300):  # more than a batch of the stream
        store.note(store.get(job), "notice", text=f"{HOSTILE} {number}")
    page.clock.fast_forward("01:00:00")
    page.evaluate(show, False)
    tab.sees("#link", "live")
    tab.sees("#events", "299")
    store.note(store.get(job), "notice", text="the last")
    tab.sees("#events", "the last")
    expected = [f"notice {HOSTILE} {number}" for number in range(300)]
    assert [line for line in tab.events_shown() if HOSTILE in line] == expected
    assert len(tab.events_shown()) == len(store.events([job], limit=1000))
    assert page.locator("#events img, #events script").count() == 0


def test_a_connection_that_breaks(service: Running, tab: Tab) -> None:
    """A page that is cut off connects again by itself; no event is missing, and none is twice."""
    store = service.service.store
    job = service.submit("train")
    service.await_state(job, "RUNNING")
    line = CutLine(int(tab.url.rpartition(":")[2]))
    tab.url = f"http://127.0.0.1:{line.port}"
    tab.open(f"/jobs/{job}")
    tab.sees("#events", "running")
    for number in range(2):
        line.cut()
        tab.sees("#link", "offline, retrying")
        store.note(store.get(job), "notice", text=f"break {number}")
        line.splice()
        tab.sees("#link", "live")
        tab.sees("#events", f"break {number}")
    expected = len(store.events([job], limit=1000))
    assert len(tab.events_shown()) == expected
    tab.page.goto("about:blank")
    line.cut()
    tab.faults[:] = [fault for fault in tab.faults if REFUSED not in fault]


def test_a_page_of_a_large_job(service: Running, tab: Tab) -> None:
    """512 workers are quantiles and the five slowest; a log is text; the keyboard suffices."""
    job = service.submit("train")
    service.await_state(job, "RUNNING")
    log = service.service.store.folder(job) / "logs" / "driver-1.log"
    with log.open("a") as file:
        file.write(HOSTILE + "\n")
    write_readings(service, job, 1, clocks=[1000 + number for number in range(512)])
    tab.open(f"/jobs/{job}")
    tab.sees("#clocks .bars", "clock 1,000")
    rows = tab.page.locator("#clocks .bars svg").count()
    assert rows == 4 + 5
    tab.sees("#clocks .bars", "clock 1,256")
    tab.sees("#clocks .sentence", "512 workers")
    tab.sees("#logs pre", HOSTILE)
    assert tab.page.locator("#logs pre *").count() == 0
    accessible(tab)
    for verb, state in (("Pause", "PAUSED"), ("Resume", "RUNNING")):
        focus(tab, verb)
        tab.page.keyboard.press("Enter")
        tab.sees("#state", state)


def focus(tab: Tab, label: str) -> None:
    """Reach a button by the key Tab alone."""
    tab.page.evaluate("document.activeElement.blur()")
    for _ in range(40):
        tab.page.keyboard.press("Tab")
        if tab.page.evaluate("document.activeElement.textContent") == label:
            return
    raise AssertionError(f"no way to {label} by the keyboard")


def test_signing_in(start: Start, browser: Any) -> None:
    """A token opens the page that was asked for; the session changes things, and ends."""
    with (
        start(driven=False, exposure=Exposure(tokens=True)) as running,
        open_page(browser, running) as tab,
    ):
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
