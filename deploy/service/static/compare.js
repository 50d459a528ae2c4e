// Draws the curves of the compare page. The jobs have points at different places: the axis is the
// union of all, and a curve has no value where its job has no point.
"use strict";

const holder = document.querySelector("#curves");
const said = document.querySelector("#said");
const COLOURS = ["--accent", "--bad", "--good", "--warn", "--curve-5", "--curve-6", "--curve-7", "--curve-8"];
let chart = null;

async function draw() {
  const figure = document.querySelector("#figure").value, axis = document.querySelector("#axis").value;
  const answer = await fetch(`/api/v1/compare?jobs=${document.body.dataset.jobs}&name=${figure}&x=${axis}`);
  if (!answer.ok) { said.textContent = (await answer.json()).detail; return; }
  const { jobs, curves } = await answer.json();
  const across = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  const columns = curves.map((curve) => {
    const at = new Map(curve.x.map((x, n) => [x, curve.y[n]]));
    return across.map((x) => at.get(x) ?? null);
  });
  const last = curves.map((curve) => curve.y.filter((value) => value !== null).at(-1));
  said.textContent = across.length ? jobs.map((job, n) => `${job.name}: ${last[n] === undefined ? "–" : last[n].toLocaleString("en-GB", { maximumSignificantDigits: 4 })}`).join("; ") : "No figures yet.";
  const colours = COLOURS.map(chartColour);
  chart?.destroy();
  chart = new uPlot({
    width: holder.clientWidth, height: 320, scales: { x: { time: false } }, axes: [chartAxis(), chartAxis()],
    series: [{ label: axis }, ...jobs.map((job, n) => ({ label: job.name, stroke: colours[n % colours.length], dash: n < COLOURS.length ? undefined : [6, 4], width: 1.5, spanGaps: true }))],
  }, [across, ...columns], holder);
}

for (const pick of document.querySelectorAll("select")) pick.addEventListener("change", draw);
onNewColours(draw);
addEventListener("resize", () => chart?.setSize({ width: holder.clientWidth, height: 320 }));
draw();
