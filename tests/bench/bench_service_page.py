"""The service's page in Debian's Chromium: how soon it is there, how soon it shows a change.

    python -m tests.bench.bench_service_page [--updates 1000000] [--transitions 200]

The service is a process of its own in a fresh home. Its job is a runner that trains nothing
(tests/support/stub_runner.py); the job's series is as long as a series gets, and ends at the given
number of updates. Each load of the page begins with an empty cache. A transition counts from the
time that its event has to the change of the page's list of events.
"""

import argparse
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from deploy.runner import job_folder
from deploy.runner.readings import MAX_POINTS, FigureTally, ReadingFiles, SeriesPoint
from deploy.service.job_store import JOBS
from tests.bench.bench_service import p95_ms, served, submit
from tests.bench.report import Goal, goals, save
from tests.support import tiny_job
from tests.support.browser_tab import CHROMIUM, Tab, browser_tab
from tests.support.job_readings import training_figures

_PAINT = "performance.getEntriesByName('first-contentful-paint').map(entry => entry.startTime)[0]"
_NOTE_EVENTS = """() => {
  window.noted = [];
  const note = (changes) => {
    for (const change of changes)
      for (const line of change.addedNodes) window.noted.push([line.textContent, Date.now() / 1e3]);
  };
  new MutationObserver(note).observe(document.querySelector("#events ol"), { childList: true });
}"""


def write_series(home: Path, job: str, updates: int) -> None:
    """Write a series of as many points as one has at most, and a reading, of this many updates."""
    files = ReadingFiles(home / JOBS / job / job_folder.READINGS)
    now = time.time()
    for point in range(1, MAX_POINTS):
        steps = updates * point // (MAX_POINTS - 1)
        figures = training_figures(
            steps, 2 * updates, elapsed_s=10.0 * point, loss=1 / point, clocks=(steps // 8,) * 8
        )
        at = now - 10.0 * (MAX_POINTS - point)
        files.write(FigureTally().reading(1, at, figures, 64 * steps, 0.9))


def await_state(http: httpx.Client, job: str, state: str) -> None:
    while http.get(f"/api/v1/jobs/{job}").json()["state"] != state:
        time.sleep(0.01)


def paints_ms(url: str, path: str, times: int) -> list[float]:
    """The milliseconds to the first paint of fresh browsers, which all go on to draw the chart."""
    found = []
    for _ in range(times):
        with browser_tab(url) as tab:
            tab.open(path)
            tab.page.wait_for_selector("[data-chart=loss] canvas")
            found.append(float(tab.page.evaluate(_PAINT)))
            tab.page.goto("about:blank")
    return found


def weight(http: httpx.Client, path: str) -> int:
    """The bytes of a page, its styles and its scripts as they are sent."""
    page = http.get(path)
    files = set(re.findall(r'(?:src|href)="(/static/[^"]+)"', page.text))
    assert files, "a page has styles and scripts"
    answers = [page, *(http.get(file).raise_for_status() for file in files)]
    return sum(answer.num_bytes_downloaded for answer in answers)


def transitions_s(http: httpx.Client, tab: Tab, job: str, count: int) -> list[float]:
    """How long after its event each transition is on the open page; a job is paused, resumed."""
    tab.open(f"/jobs/{job}")
    tab.sees("#events", "RUNNING")
    last = http.get(f"/api/v1/jobs/{job}/events?tail=1").json()["events"][0]["id"]
    tab.page.evaluate(_NOTE_EVENTS)
    events: list[Any] = []
    while len(events) < count:
        for verb, state in (("pause", "PAUSED"), ("resume", "RUNNING")):
            http.post(f"/api/v1/jobs/{job}:{verb}", json={}).raise_for_status()
            await_state(http, job, state)
        found = http.get(f"/api/v1/jobs/{job}/events?after={last}&limit=1000").json()["events"]
        events = [event for event in found if event["data"].get("state")]
    # The page allows no script that a test could have it evaluate again and again.
    while len(noted := tab.page.evaluate("window.noted")) < len(found):
        time.sleep(0.05)
    seen = [line for line in noted if _state(line[0])]
    assert [_state(line[0]) for line in seen] == [event["data"]["state"] for event in events]
    return [at - event["time"] for (_, at), event in zip(seen, events, strict=True)]


def _state(line: str) -> str | None:
    """The state in a line of the page's events: a clock time, a shape, the state, and why."""
    found = re.match(r"[\d:]{8}\S* ([A-Z]{6,})\b", line.strip())
    return found[1] if found else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=1_000_000)
    parser.add_argument("--transitions", type=int, default=200)
    parser.add_argument("--loads", type=int, default=20)
    chosen = parser.parse_args()
    if CHROMIUM is None:
        print("bench_service_page: expected chromium on PATH, got none")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        home.mkdir(mode=0o700)
        solver = tiny_job.write_job(Path(folder))
        with served(home) as (_, http, _):
            job, url = submit(http, solver), str(http.base_url).rstrip("/")
            await_state(http, job, "RUNNING")
            write_series(home, job, chosen.updates)
            columns = ",".join(
                name for name in SeriesPoint.__struct_fields__ if name not in ("time", "seconds")
            )
            one, _ = p95_ms(http, f"/api/v1/jobs/{job}/series?names=loss,accuracy")
            most, _ = p95_ms(http, f"/api/v1/jobs/{job}/series?names={columns}&points=2000")
            paints = paints_ms(url, f"/jobs/{job}", chosen.loads)
            figures: dict[str, float] = {
                "series_p95_ms": one,
                "longest_series_p95_ms": most,
                "first_paint_median_ms": statistics.median(paints),
                "first_paint_p95_ms": statistics.quantiles(paints, n=20)[-1],
                "page_bytes": weight(http, f"/jobs/{job}"),
            }
            with browser_tab(url) as tab:
                lags = transitions_s(http, tab, job, chosen.transitions)
                tab.page.goto("about:blank")
            figures["transitions"] = len(lags)
            figures["transition_p95_s"] = statistics.quantiles(lags, n=20)[-1]
            http.post(f"/api/v1/jobs/{job}:cancel", json={"mode": "now"})
            await_state(http, job, "CANCELLED")
    save("service_page", figures)
    goals(
        [
            Goal("first paint of a job's page, p95", figures["first_paint_p95_ms"], 500, "ms"),
            Goal("series of 600 points, p95", one, 150, "ms"),
            Goal("series of 2,000 points, 10 columns, p95", most, 150, "ms"),
            Goal("transition to page, p95", figures["transition_p95_s"], 1, "s"),
            Goal("page and scripts, as sent", figures["page_bytes"] / 1e3, 250, "kB"),
        ]
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
