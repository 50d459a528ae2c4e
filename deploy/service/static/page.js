// Keeps a page of the training service current: one EventSource for a tab, closed while it is
// hidden. Text from the service enters the page as text nodes only, never as markup.
"use strict";

const body = document.body;
const job = body.dataset.job;
const api = `/api/v1/jobs/${encodeURIComponent(job)}`;
const $ = (selector, within = document) => within.querySelector(selector);
const opened = Number(body.dataset.after);
let last = opened;
let source = null;
const MOST_EVENTS = 1000, AGAIN_MS = 30000;

const SHAPES = JSON.parse(body.dataset.shapes ?? "{}");

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// As _number in page.py, which renders the same figures before this script has run.
function figure(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) || size >= 1000) return Math.round(value).toLocaleString("en-GB");
  if (size < 1e-6) return value.toExponential(2);
  return value.toLocaleString("en-GB", { maximumSignificantDigits: digits });
}

const counted = (value, noun) => `${figure(value)}\u00a0${noun}${value === 1 ? "" : "s"}`;
const range = (noun, least, most) => (least === most ? `${noun} ${figure(least)}` : `${noun}s ${figure(least)} to ${figure(most)}`);
const ratio = (part, whole) => `${figure(part)}\u00a0/\u00a0${figure(whole)}`;

function duration(seconds) {
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${Math.floor(seconds) % 60} s` : `${Math.ceil(seconds)} s`;
}

// The answer to a GET; one that is not ok while the service cannot be reached: the next look has it.
// A connection may break within the body, so an answer counts once that is there.
const got = (path) => fetch(path)
  .then(async (answer) => new Response(await answer.blob(), answer)).catch(() => ({ ok: false }));
// What the page cannot do without is requested until it is there, also while the service is away.
const awaited = async (path) => {
  for (;;) {
    const answer = await got(path);
    if (answer.ok) return answer.json();
    await new Promise((again) => setTimeout(again, 1000));
  }
};

const clock = (seconds) => new Date(seconds * 1000).toISOString().slice(11, 19);
const day = (seconds) => new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ");

// The stream.

function connect() {
  const which = job ? `jobs=${encodeURIComponent(job)}&` : "";
  source = new EventSource(`/api/v1/stream?${which}after=${last}`);
  source.onopen = () => { $("#link").textContent = "live"; showHalt({ halted: "" }); };
  const own = source;
  source.onerror = () => {
    const closed = own.readyState === EventSource.CLOSED;
    $("#link").textContent = closed ? "ended: reload the page, or sign in" : "offline, retrying";
    // A proxy may have answered in the place of a service that restarts.
    if (closed) setTimeout(() => { if (source === own && !document.hidden) connect(); }, AGAIN_MS);
  };
  source.addEventListener("event", (message) => {
    const event = JSON.parse(message.data);
    last = event.id;
    job ? showEvent(event) : refreshSoon();
  });
  source.addEventListener("service", (message) => showHalt(JSON.parse(message.data)));
  source.addEventListener("reading", (message) => {
    const reading = JSON.parse(message.data);
    if (job) { showContact(reading.contact); showReading(reading); } else showRow(reading);
  });
}

function showHalt({ halted }) {
  $("#halted").hidden = !halted;
  $("#halted").textContent = halted ? `▲ No job is started: ${halted}` : "";
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    source.close();
    $("#link").textContent = "paused while hidden";
  } else {
    connect();
  }
});

// The list.

let refreshing = null;
function refreshSoon() {
  refreshing ??= setTimeout(async () => {
    refreshing = null;
    const answer = await got(`/parts/jobs${location.search}`);
    if (!answer.ok) return;
    const marked = new Set([...document.querySelectorAll("#jobs input:checked")].map((box) => box.value));
    $("#jobs").replaceChildren(...parsed(await answer.text()));
    for (const box of document.querySelectorAll("#jobs input")) box.checked = marked.has(box.value);
  }, 300);
}

// The service's own template, in which every value is escaped. Scripts in it would not run.
const parsed = (text) => new DOMParser().parseFromString(text, "text/html").body.childNodes;

function showRow(reading) {
  const row = $(`tr[data-job="${CSS.escape(reading.job)}"]`);
  if (!row) return;
  const head = reading.head;
  for (const cell of row.querySelectorAll("[data-figure]")) {
    const name = cell.dataset.figure;
    cell.textContent = name === "steps" ? ratio(head.steps, head.planned) : figure(head[name]);
  }
  const values = (head.line ?? []).filter((value) => value !== null);
  if (values.length > 1) {
    const low = Math.min(...values), high = Math.max(...values);
    const points = values.map((value, n) =>
      `${(n * 120 / (values.length - 1)).toFixed(1)},${(23 - (high > low ? (value - low) * 22 / (high - low) : 0)).toFixed(1)}`);
    $("polyline", row).setAttribute("points", points.join(" "));
  }
}

// One job.

function bars(where, rows) {
  const most = Math.max(...rows.map((row) => row.value), 1e-9);
  $(`${where} .bars`).replaceChildren(...rows.flatMap((row) => {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 100 10");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    if (row.slow) svg.classList.add("slow");
    let x = 0;
    for (const [n, value] of (row.parts ?? [row.value]).entries()) {
      const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      if (row.parts) rect.classList.add(PARTS[n]);
      rect.setAttribute("height", "10");
      rect.setAttribute("x", String(x));
      rect.setAttribute("width", String(100 * value / most));
      x += 100 * value / most;
      svg.append(rect);
    }
    return [element("span", row.name), svg, element("span", row.text, { class: "n" })];
  }));
}

const MOST_ROWS = 32, WORST = 5;
const say = (where, text) => { $(`${where} .sentence`).textContent = text; };

function showContact(contact) {
  $("#contact").hidden = !contact;
  $("#contact").textContent = contact ? `contact ${contact}` : "";
}

let newestReading = null;
function showReading({ reading }) {
  if (!reading) return;
  newestReading = reading;
  const now = reading.readings, point = reading.point;
  const trains = $("#state").matches(".RUNNING, .DEGRADED");
  const left = trains && now.remaining_s ? duration(now.remaining_s) : "";
  $("#figures").replaceChildren(...[
    ["loss", figure(now.loss)], ["accuracy", figure(point.accuracy)], ["samples/s", figure(now.samples_per_s, 3)],
    ["steps", ratio(now.steps, now.planned)], ["learning rate", figure(now.rate)],
    ["epoch", figure(now.epoch, 3)], ["to the end", left || "–"],
  ].map(([name, value]) => { const span = element("span", name); span.prepend(element("b", value)); return span; }));
  showStaleness(reading, now, point);
  showWorkers(reading, now);
  showShards(now);
  showTraffic(now, Object.values(reading.times_s));
  drawSoon();
}

function showStaleness(reading, now, point) {
  const gap = `the largest lead was ${counted(point.clock_gap, "step")}`;
  const bound = now.bound === null ? `No bound: ${gap}` : `Bound ${now.bound} lets a worker be at most ${counted(now.bound + 1, "step")} ahead of the slowest: ${gap}`;
  say("#stale", point.staleness_p50 === null ? "No update yet." : `Half of the updates missed at most ${counted(point.staleness_p50, "version")}, 99\u00a0% at most ${figure(point.staleness_p99)}, none more than ${figure(point.staleness_max)}. ${bound}.`);
  bars("#stale", reading.staleness.map((count, n) => ({ name: n === 64 ? "64+" : String(n), value: count, text: figure(count) })));
}

function showWorkers(reading, now) {
  const slowest = Math.min(...now.workers.map((worker) => worker.clock));
  const fastest = Math.max(...now.workers.map((worker) => worker.clock));
  const many = now.workers.length > MOST_ROWS;
  const sorted = [...now.workers].sort((a, b) => a.clock - b.clock);
  const quantile = (share) => sorted[Math.round(share * (sorted.length - 1))].clock;
  const bands = many ? [["fastest", 1], ["90 %", 0.9], ["median", 0.5], ["10 %", 0.1]] : [];
  bars("#clocks", [
    ...bands.map(([name, share]) => ({ name, value: quantile(share), text: `clock ${figure(quantile(share))}` })),
    ...(many ? sorted.slice(0, WORST) : now.workers).map((worker) => ({ name: worker.name, value: worker.clock, slow: worker.clock === slowest && worker.clock < fastest,
      text: `clock ${figure(worker.clock)}, ${worker.standing}${worker.restarts ? `, ${counted(worker.restarts, "restart")}` : ""}` })),
  ]);
  const holds = Object.entries(reading.holds).sort((a, b) => b[1] - a[1]);
  const total = holds.reduce((sum, [, count]) => sum + count, 0);
  const waiting = now.workers.filter((worker) => worker.waits).map((worker) => worker.name);
  const those = waiting.length > WORST ? `${waiting.length} of ${now.workers.length} workers` : waiting.join(", ");
  say("#clocks", `${waiting.length ? `${those} wait${waiting.length === 1 ? "s" : ""} at the gate.` : "No worker waits at the gate."}${many ? ` The clocks of ${now.workers.length} workers by quantile, then the ${WORST} slowest.` : ""}`);
  const advice = $("#advice");
  const share = total ? Math.round(100 * holds[0][1] / total) : 0;
  advice.hidden = !(total >= 10 && share >= 50 && now.workers.length > 2);
  if (!advice.hidden) advice.textContent = `▲ ${holds[0][0]} holds the gate: ${share} % of all waits seen. Give it less data, a faster machine, or raise the bound.`;
  showTimes(Object.entries(reading.times_s));
}

const PARTS = ["compute", "data", "wait", "network", "lost"];
function showTimes(workers) {
  const sums = PARTS.map((part) => workers.reduce((sum, [, times]) => sum + times[part], 0));
  const all = Math.max(sums.reduce((sum, value) => sum + value, 0), 1e-9);
  const share = (value, whole) => `${Math.round(100 * value / whole)} %`;
  say("#time", workers.length ? `Goodput ${share(sums[0], all)}, the share of time in useful steps. The workers spent ${share(sums[1], all)} on data, ${share(sums[2], all)} waiting at the gate, ${share(sums[3], all)} on the network; ${share(sums[4], all)} was lost, in steps for pushes that were dropped and after deaths.` : "No push yet.");
  const total = (times) => PARTS.reduce((sum, part) => sum + times[part], 0);
  const shown = [...workers].sort((a, b) => b[1].wait + b[1].network - a[1].wait - a[1].network).slice(0, workers.length > MOST_ROWS ? WORST : MOST_ROWS);
  bars("#time", shown.map(([name, times]) => ({
    name, value: total(times), parts: PARTS.map((part) => times[part]),
    text: PARTS.map((part) => share(times[part], Math.max(total(times), 1e-9))).join(" / "),
  })));
}

function showShards(now) {
  bars("#shards", now.shards.map((shard) => ({ name: `shard ${shard.shard}`, value: shard.updates_per_s ?? 0,
    text: `${figure(shard.updates_per_s, 3)} updates/s, apply ${figure(shard.apply_ms, 3)} ms, p99 ${figure(shard.apply_p99_ms, 3)} ms, queue ${shard.queue}, p99 ${figure(shard.queue_p99, 3)}, parked ${shard.waiting}, busy ${figure(100 * (shard.busy ?? 0), 2)} %` })));
  const versions = now.shards.map((shard) => shard.version);
  say("#shards", `${now.shards.length} shard${now.shards.length > 1 ? "s" : ""}, ${range("version", Math.min(...versions), Math.max(...versions))}. Each row has updates/s, the mean time of an update and the time that 99 % of the last ones took at most, the messages of the last turn and the most of 99 % of turns, the requests parked at the gate, and the share of time spent on requests.`);
}

function showTraffic(now, workers) {
  const rate = (shard) => (shard.bytes_in_per_s ?? 0) + (shard.bytes_out_per_s ?? 0);
  const links = (now.links ?? []).map((link) => ({ name: `${link.worker_host} → ${link.shard_host}`, value: link.bytes_per_s ?? 0,
    text: `RTT ${figure(link.rtt_ms, 3)} ms, ${figure((link.bytes_per_s ?? 0) / 1e6, 3)} MB/s pushed` }));
  bars("#traffic", [...links.sort((a, b) => (b.value - a.value)).slice(0, MOST_ROWS), ...now.shards.map((shard) => ({ name: `shard ${shard.shard}`, value: rate(shard),
    text: `${figure((shard.bytes_in_per_s ?? 0) / 1e6, 3)} MB/s in, ${figure((shard.bytes_out_per_s ?? 0) / 1e6, 3)} MB/s out` }))]);
  const sum = (part) => workers.reduce((total, times) => total + times[part], 0);
  const all = PARTS.reduce((total, part) => total + sum(part), 0);
  const share = all ? Math.round(100 * sum("network") / all) : 0;
  say("#traffic", all ? `The workers spend ${share} % of their time on the network${share >= 50 ? ": more than on all else. Push less often, or compress" : ""}.` : "No push yet.");
}

function showEvent(event) {
  if (event.data.state) showState(event);
  const list = $("#events ol");
  list.prepend(eventLine(event));
  if (list.childElementCount > MOST_EVENTS) list.lastElementChild.remove();
  if (event.kind === "alert") {
    $("#alerts").hidden = !event.data.alerts.length;
    $("#alerts").textContent = event.data.alerts.map((name) => `▲ ${name}`).join(" ");
  }
  if (["answer", "tested", "ended", "pinned"].includes(event.kind) || event.data.snapshot) showSnapshots();
  if (["tested", "ended"].includes(event.kind) || event.data.state) showArtefacts();
}

function showState(event) {
  const state = event.data.state;
  $("#state").className = `state ${state}`;
  $("#state").textContent = `${SHAPES[state]} ${state}`;
  $("#attempt").textContent = `attempt ${event.attempt}`;
  $("#reason").textContent = `${event.data.code ?? ""} ${event.data.reason ?? ""}`;
  $("#reason").className = state === "FAILED" ? "alert" : "quiet";
  showWaiting();
  for (const button of document.querySelectorAll("[data-verb]")) button.disabled = !button.dataset.states.split(" ").includes(state);
  if (state === "FAILED") $(".panels").prepend($("#logs")); // as the template has it
  showReading({ reading: newestReading });
}

// Other jobs and limits change what a job waits for, without an event of this one.
async function showWaiting() {
  const answer = await got(location.href);
  const waiting = answer.ok && $("#waiting", new DOMParser().parseFromString(await answer.text(), "text/html"));
  if (!waiting) return;
  $("#waiting").hidden = waiting.hidden;
  $("#waiting").textContent = waiting.textContent;
}

function eventLine(event) {
  const line = element("li");
  const { data } = event;
  const words = data.state ? `${SHAPES[data.state]} ${data.state} ${data.reason ?? ""}`
    : event.kind === "tested" ? `test at ${data.iteration}: ${Object.entries(data.figures).map(([name, value]) => `${name} ${figure(value)}`).join(", ")}`
    : event.kind === "starting" ? `starting ${data.what}`
    : event.kind === "set" ? `set ${Object.entries(data.changes ?? {}).map(([name, value]) => `${name} ${value ?? "none"}`).join(", ")}`
    : event.kind === "alert" ? `${data.on ? "▲" : "△"} ${data.alert}: ${data.text}`
    : `${event.kind} ${data.text ?? ""}`;
  line.append(element("time", clock(event.time), { title: day(event.time) }), words);
  return line;
}

// Charts are mounted when they come into view, and follow the colours of the page.
const charts = {};
const COLUMNS = {
  loss: [["loss", "loss"], ["accuracy", "accuracy"]],
  staleness: [["staleness_p50", "median"], ["staleness_p99", "99 %"], ["staleness_max", "largest"]],
};

const drawn = new Map(); // the newest request of each chart: an earlier answer is dropped
async function draw(holder) {
  const kind = holder.dataset.chart, columns = COLUMNS[kind], axis = $("#axis").value;
  const request = Symbol(kind);
  drawn.set(kind, request);
  const answer = await got(`${api}/series?names=${columns.map(([name]) => name).join(",")}&x=${axis}&points=600`);
  if (!answer.ok) return;
  const { x, series } = await answer.json();
  if (drawn.get(kind) !== request) return;
  if (kind === "loss") {
    const losses = series.loss.filter((value) => value !== null);
    say("#learning", losses.length < 2 ? "No figures yet." : `The loss ${losses.at(-1) < losses[0] ? "fell" : "did not fall"}: ${figure(losses[0])} at first, ${figure(losses.at(-1))} now.`);
  }
  const data = [x, ...columns.map(([name]) => series[name])];
  if (charts[kind]) { putFigures(charts[kind], data); return; }
  const colours = ["--accent", "--good", "--warn"].map(chartColour);
  const scale = (name) => (kind === "loss" && name === "accuracy" ? "share" : "y");
  // A point has the accuracy of the newest test before it: sloping lines would show tests that were never made.
  const line = (name) => (name === "accuracy" ? { paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } } : {});
  charts[kind] = new uPlot({
    width: holder.clientWidth, height: kind === "loss" ? 260 : 160,
    scales: { x: { time: false }, share: { range: [0, 1] } },
    axes: [chartAxis(), chartAxis({ scale: "y" }), ...(kind === "loss" ? [chartAxis({ scale: "share", side: 1, grid: { show: false } })] : [])],
    series: [{ label: axis }, ...columns.map(([name, label], n) => ({ label, scale: scale(name), stroke: colours[n], width: 1.5, spanGaps: true, ...line(name) }))],
  }, data, holder);
}

const visible = new Set();
let drawing = null;
function drawSoon() {
  drawing ??= setTimeout(() => { drawing = null; visible.forEach((holder) => draw(holder)); }, 800);
}

async function showSnapshots() {
  const answer = await got(`${api}/snapshots`);
  if (!answer.ok) return;
  const { snapshots } = await answer.json();
  const oldest = snapshots[0];
  say("#snapshots", snapshots.length ? `${counted(snapshots.length, "snapshot")}. A clone may start from ${snapshots.length === 1 ? "it" : "one of them"}.` : "None yet.");
  $("#snapshots tbody").replaceChildren(...snapshots.reverse().map((each) => {
    const row = element("tr"), cell = element("td"), button = element("button", "Clone from here", { type: "button" });
    button.addEventListener("click", () => openCloning(each.name));
    cell.append(button);
    const act = (label, run) => { const made = element("button", label, { type: "button" }); made.addEventListener("click", run); cell.append(" ", made); };
    act("Verify", () => check(each.name, "verify"));
    if (each !== oldest) act("Diff", () => check(oldest.name, "diff", each.name));
    act(each.pinned ? "Unpin" : "Pin", () => pin(each.name, each.pinned ? "unpin" : "pin"));
    const link = element("a", "Export", { href: `${api}/snapshots/${each.name}:export`, download: "" });
    cell.append(" ", link);
    row.append(element("th", each.name, { scope: "row" }), element("td", figure(each.steps), { class: "n" }),
      element("td", figure(each.bytes / 1e6, 3), { class: "n" }), element("td", day(each.taken_at)), cell);
    return row;
  }));
}

const said = (text) => { $("#checked").textContent = text; };
async function check(number, verb, to) {
  said(`${verb} ${number} …`);
  const answer = await fetch(`${api}/snapshots/${number}:${verb}${to ? `?to=${to}` : ""}`);
  const found = await answer.json();
  if (!answer.ok) said(found.detail);
  else if (verb === "verify") said(`${number}: ${found.good ? "good" : `bad: ${found.complaints.join("; ")}`}`);
  else said(`${number} to ${to}: ${found.tensors.map((one) => `${one.name} moved by ${figure(one.l2, 3)} (norm ${figure(one.norm, 3)})`).join("; ")}`);
}

async function pin(number, verb) {
  const answer = await fetch(`${api}/snapshots/${number}:${verb}`, { method: "POST", headers: { "X-CSRF-Token": $("meta[name=csrf]").content } });
  said(answer.ok ? `${number}: ${verb}ned` : (await answer.json()).detail);
}

async function showArtefacts() {
  const answer = await got(`${api}/artefacts`);
  if (!answer.ok) return;
  const { artefacts } = await answer.json();
  say("#artefacts", artefacts.length ? `${counted(artefacts.length, "file")}.` : "None yet.");
  $("#artefacts tbody").replaceChildren(...artefacts.map((each) => {
    const row = element("tr"), name = element("th", undefined, { scope: "row" });
    name.append(element("a", each.name, { href: `${api}/artefacts/${each.name.split("/").map(encodeURIComponent).join("/")}`, download: "" }));
    row.append(name, element("td", figure(each.bytes / 1e6, 3), { class: "n" }), element("td", each.sha256.slice(0, 16), { title: each.sha256 }));
    return row;
  }));
}

// Only one request for the log is under way: the answers to two would both be appended.
let logNext = 0, logPart = "", logBusy = false;
async function showLogs() {
  if (logBusy) return;
  logBusy = true;
  try { await readLogs(); } finally { logBusy = false; }
  if ($("#part").value !== logPart) showLogs(); // another part was chosen meanwhile
}

async function readLogs() {
  const pick = $("#part"), text = $("#logs pre");
  if (pick.value !== logPart) { logPart = pick.value; logNext = 0; text.textContent = ""; }
  const which = logPart ? `part=${encodeURIComponent(logPart)}&` : "";
  const answer = await got(`${api}/logs?${which}${logNext ? `after=${logNext}` : "tail=65536"}`);
  if (!answer.ok) return;
  const parts = (answer.headers.get("X-Log-Parts") || "").split(",").filter(Boolean);
  const more = await answer.text();
  if (logPart && pick.value !== logPart) return;
  const atEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
  text.append(more);
  if (text.textContent.length > 1e6) text.textContent = text.textContent.slice(-5e5);
  logNext = Number(answer.headers.get("X-Log-Next"));
  if (pick.length !== parts.length) {
    pick.replaceChildren(...parts.map((part) => element("option", part)));
    pick.value = logPart || parts.at(-1) || "";
    logPart = pick.value;
  }
  if (atEnd) text.scrollTop = text.scrollHeight;
}

// The answer to a verb, or null while the service cannot be reached.
const sent = (verb, details) => fetch(`${api}:${verb}`, {
  method: "POST", headers: { "Content-Type": "application/json", "X-CSRF-Token": $("meta[name=csrf]").content, "Idempotency-Key": crypto.randomUUID() }, body: JSON.stringify(details),
}).catch(() => null);

async function ask(verb, details = {}) {
  const answer = await sent(verb, details);
  if (!answer) { $("#said").textContent = `${verb}: the service does not answer; repeat it later`; return; }
  const found = await answer.json();
  $("#said").textContent = answer.ok ? `${verb}: accepted, the job is ${found.state}` : found.detail;
}

// The form for a clone: what differs from the job is sent, and what is refused is said at its field.

const cloning = $("#cloning"), OF_CLONE = ["name", "snapshot"];
const cloneFields = () => [...cloning.querySelectorAll("input, select")];

async function openCloning(snapshot = "") {
  const answer = await got(`${api}/snapshots`);
  const { snapshots } = answer.ok ? await answer.json() : { snapshots: [] };
  $("select", cloning).replaceChildren(element("option", "the beginning", { value: "" }),
    ...snapshots.reverse().map((each) => element("option", `snapshot ${figure(Number(each.name))}, ${counted(each.steps, "step")}`, { value: each.name })));
  $("select", cloning).value = snapshot;
  showFaults({});
  cloning.showModal();
}

function showFaults(problem) {
  const named = { resume: "snapshot" }[problem.field] ?? problem.field;
  const wrong = cloneFields().find((field) => field.name === named);
  for (const field of cloneFields()) {
    field.setAttribute("aria-invalid", String(field === wrong));
    $(`#${field.getAttribute("aria-describedby")}`).textContent = field === wrong ? problem.detail : "";
  }
  $("#cloning-fault").textContent = wrong ? "" : problem.detail ?? "";
  wrong?.focus();
}

function cloneWanted() {
  const wanted = { settings: {} };
  for (const field of cloneFields()) {
    const text = field.value.trim();
    if (field.name === "snapshot" ? !text : text === field.defaultValue) continue;
    if (OF_CLONE.includes(field.name)) wanted[field.name] = text;
    else wanted.settings[field.name] = /^\d+$/.test(text) ? Number(text) : text || null;
  }
  return wanted;
}

async function submitClone(event) {
  event.preventDefault();
  const button = $("button:not([type=button])", cloning);
  button.disabled = true;
  const answer = await sent("clone", cloneWanted());
  button.disabled = false;
  const found = answer ? await answer.json() : { detail: "The service does not answer; repeat it later." };
  if (answer?.ok) location.href = `/jobs/${encodeURIComponent(found.id)}`;
  else showFaults(found);
}

function shardsWanted() {
  const shards = Number(prompt("The new number of shards"));
  return Number.isInteger(shards) && shards > 0 ? { shards } : null;
}

function changesWanted() {
  const [name, ...rest] = (prompt("An option that changes, such as staleness=8") ?? "").split("=");
  if (!rest.length) return null;
  let value = rest.join("=");
  try { value = JSON.parse(value); } catch { /* a text */ }
  return { settings: { [name.trim().replaceAll("-", "_")]: value } };
}

async function openJob() {
  for (const button of document.querySelectorAll("[data-verb]")) {
    button.addEventListener("click", () => {
      const verb = button.dataset.verb;
      if (verb === "clone") { openCloning(); return; }
      if (verb === "cancel" && !confirm("Cancel this job? A snapshot is saved.")) return;
      const details = verb === "reshard" ? shardsWanted() : verb === "set" ? changesWanted() : {};
      if (details) ask(verb, details);
    });
  }
  $("form", cloning).addEventListener("submit", submitClone);
  $("#close-cloning").addEventListener("click", () => cloning.close());
  const drawAgain = () => {
    for (const kind of Object.keys(charts)) { charts[kind].destroy(); delete charts[kind]; }
    drawSoon();
  };
  $("#axis").addEventListener("change", drawAgain);
  onNewColours(drawAgain);
  $("#part").addEventListener("change", showLogs);
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) { visible.add(entry.target); draw(entry.target); } else visible.delete(entry.target);
    }
  });
  document.querySelectorAll(".chart").forEach((holder) => seen.observe(holder));
  addEventListener("resize", () => Object.entries(charts).forEach(([kind, chart]) =>
    chart.setSize({ width: $(`[data-chart=${kind}]`).clientWidth, height: chart.height })));
  const [{ events }, newest] = await Promise.all(
    [`${api}/events?tail=${MOST_EVENTS}`, `${api}/reading`].map(awaited));
  // The stream has those after the page was made, and may have brought some of them already.
  $("#events ol").append(...events.filter((event) => event.id <= opened).reverse().map(eventLine));
  showReading(newest);
  showSnapshots();
  showArtefacts();
  showLogs();
  setInterval(() => { if (!document.hidden) { showLogs(); if (!$("#waiting").hidden) showWaiting(); } }, 2000);
}

if (job) openJob();
if (!document.hidden) connect();
