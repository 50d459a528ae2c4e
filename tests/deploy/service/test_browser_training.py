"""The page while LeNet trains on MNIST for real: one service, one job, from its start to its end.

The tests share both, and each continues where the one before it has left them.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support import lenet_job
from tests.support.browser_tab import CHROMIUM, REFUSED, Tab, browser_tab
from tests.support.cli_process import PATIENCE_S
from tests.support.eventually import eventually
from tests.support.served import Served, served_in

pytest.importorskip("playwright.sync_api")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on PATH"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
DEMO = Path(__file__).parents[3] / "deploy" / "demo"


class Training:
    """A job that trains, the service that runs it, and its page."""

    def __init__(self, served: Served, job: str, tab: Tab) -> None:
        self.served = served
        self.job = job
        self.tab = tab

    def await_points(self, chart: str, least: int) -> int:
        """Wait until a chart of the page has more than `least` points; returns how many.

        The page draws a chart only while it is in view.
        """
        holder = self.tab.page.locator(f"[data-chart={chart}]")
        script = f"charts.{chart} ? charts.{chart}.data[1].filter(Number.isFinite).length : 0"

        def drawn() -> int:
            holder.scroll_into_view_if_needed()
            found = int(self.tab.page.evaluate(script))
            return found if found > least else 0

        return eventually(
            drawn,
            because=lambda: f"{least} points in {chart}: {self.served.get(self.job)}",
            within_s=PATIENCE_S,
        )


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """LeNet on MNIST with two workers and two shards, which would train for days."""
    folder = tmp_path_factory.mktemp("served")
    text = (DEMO / "lenet_solver.prototxt").read_text()
    text = text.replace('net: "', f'net: "{DEMO}/').replace("test_iter: 100", "test_iter: 3")
    (folder / "lenet.prototxt").write_text(f"{text}test_initialization: false\n")
    pq.write_table(lenet_job.rows("test").slice(0, 300), folder / "test.parquet")
    with served_in(folder) as served:
        status, answer = served.command(
            *("submit", "lenet.prototxt", "--data", DEMO / "mnist", "--test-data", "test.parquet"),
            *("--shards-in", "processes", "--shards", 2, "--workers", 2, "--max-iter", 10**6),
            *("--snapshot-every", "2s", "--snapshot-keep", 3, "--name", "lenet"),
        )
        assert status == 0
        with browser_tab(served.url) as tab:
            tab.open(f"/jobs/{answer['id']}")
            yield Training(served, answer["id"], tab)
            tab.page.goto("about:blank")
            tab.faults[:] = [fault for fault in tab.faults if REFUSED not in fault]


def test_figures_grow(training: Training) -> None:
    """The curve of the loss grows, the shards count staleness, and all workers are there."""
    tab = training.tab
    tab.sees("#state", "RUNNING")
    before = training.await_points("loss", 1)
    training.await_points("loss", before)
    tab.sees("#learning .sentence", "The loss")
    tab.sees("#stale .sentence", "Half of the updates missed at most")
    assert tab.page.locator("#stale .bars svg").count() > 0
    training.await_points("staleness", 1)
    assert tab.page.locator("#clocks .bars svg").count() == 2
    assert tab.page.locator("#shards .bars svg").count() == 2
    tab.sees("#time .sentence", "Goodput")
    assert tab.page.locator("#time .bars svg").first.locator(".lost").count() == 1


def test_the_service_is_killed(training: Training) -> None:
    """The job trains on; the page connects again by itself, with each event once and in order."""
    served, tab = training.served, training.tab
    runner = served.runner(training.job)
    served.kill()
    tab.sees("#link", "offline, retrying")
    served.start()
    tab.sees("#link", "live")
    assert served.runner(training.job) == runner
    before = training.await_points("loss", 1)
    training.await_points("loss", before)
    assert served.get(training.job)["attempt"] == 1
    check_events(training)


def check_events(training: Training) -> None:
    """The page lists the events that the service has, in its order: that in which it took them in.

    The service and the runner write journals of their own, so their times may be out of order.
    """

    def shown() -> list[str]:
        found: list[str] = training.tab.page.locator("#events time").evaluate_all(
            "times => times.map((each) => each.title)"
        )
        return found[::-1]

    def known() -> list[str]:
        events = training.served.client.get(f"/jobs/{training.job}/events", limit=1000)["events"]
        times = [datetime.fromtimestamp(int(event["time"]), UTC) for event in events]
        return [f"{time:%Y-%m-%d %H:%M:%S}" for time in times]

    eventually(lambda: shown() == known(), because=lambda: f"{known()}, and not {shown()}")


def test_pause_and_resume(training: Training) -> None:
    """Buttons pause the job and resume it; from a snapshot it takes the steps that it is left."""
    served, tab = training.served, training.tab
    tab.page.get_by_role("button", name="Pause").click()
    tab.sees("#state", "PAUSED")
    snapshot = int(served.get(training.job)["snapshot"])
    served.ask(training.job, "set", settings={"max_iter": snapshot + 20})
    tab.page.get_by_role("button", name="Resume").click()
    tab.sees("#attempt", "attempt 2")
    tab.sees("#state", "RUNNING")


def test_the_end(training: Training) -> None:
    """The job succeeds; its snapshots and artefacts are listed without a reload."""
    served, tab = training.served, training.tab
    tab.sees("#state", "SUCCEEDED")
    served.await_state(training.job, "SUCCEEDED", 2)
    shown = {
        each["name"] for each in served.client.get(f"/jobs/{training.job}/snapshots")["snapshots"]
    }
    assert shown
    eventually(
        lambda: set(tab.page.locator("#snapshots tbody th").all_text_contents()) == shown,
        because=lambda: f"the snapshots {shown}",
    )
    tab.sees("#artefacts", "weights.safetensors")
    check_events(training)
    assert served.get(training.job)["head"]["accuracy"] > 0.5
