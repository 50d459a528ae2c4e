// The colours of charts, from the style sheet, and new figures in a chart that is zoomed.
"use strict";

const chartColour = (name) => getComputedStyle(document.body).getPropertyValue(name).trim();

function chartAxis(more = {}) {
  return { stroke: chartColour("--quiet"), grid: { stroke: chartColour("--line"), width: 1 }, ticks: { stroke: chartColour("--line"), width: 1 }, ...more };
}

// What a reader has zoomed into stays when figures are added; a double click shows all again.
function putFigures(chart, data) {
  const [across] = chart.data, { min, max } = chart.scales.x;
  const zoomed = across.length > 1 && (min > across[0] || max < across.at(-1));
  chart.setData(data, !zoomed);
  if (zoomed) chart.redraw();
}

// A canvas keeps the colours with which it was drawn.
function onNewColours(draw) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}
