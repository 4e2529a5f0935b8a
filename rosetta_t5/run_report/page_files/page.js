"use strict";
// Everything that comes from a run is inserted as text (textContent), never as markup.

const COLORS = ["#3b6fd4", "#d9702b", "#22936a", "#a055b8", "#b8890b", "#d1475d", "#0e8fa3", "#7a7f87"];
const TIME_UNITS = [[86400, "days"], [3600, "hours"], [60, "minutes"], [1, "seconds"]];
const state = { data: null, hidden: new Set(), axis: "steps", smoothing: 0, log: false, clip: false };
const charts = new Map(); // element → function that draws it

// ---------------------------------------------------------------------------------- small parts

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter(Boolean));
  return element;
}

async function decompress(base64) {
  const bytes = Uint8Array.from(atob(base64.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

function decodeNumbers(base64, type) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  return Array.from(new type(bytes.buffer));
}

function decodePoints(points) {
  return {
    steps: decodeNumbers(points.steps, Float64Array),
    seconds: decodeNumbers(points.seconds, Float32Array),
    values: decodeNumbers(points.values, Float32Array),
  };
}

// Plotly reads a few HTML tags in the names of lines.
const shorten = (text) => (text.length > 22 ? `${text.slice(0, 21)}…` : text);
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
const color = (run) => COLORS[state.data.runs.indexOf(run) % COLORS.length];
const visibleRuns = () => state.data.runs.filter((run) => !state.hidden.has(run.name));
const own = (object, name) => (Object.hasOwn(object, name) ? object[name] : undefined);

function smooth(values, weight) {
  let average = 0;
  let power = 1;
  return values.map((value) => {
    average = weight * average + (1 - weight) * value;
    power *= weight;
    return average / (1 - power);
  });
}

// The unit of all time axes: the largest of which the longest visible run has at least two.
function timeUnit() {
  const longest = Math.max(1, ...visibleRuns().map((run) => run.duration));
  return TIME_UNITS.find(([seconds]) => longest >= 2 * seconds) ?? TIME_UNITS.at(-1);
}

const inTimeUnit = (seconds) => seconds.map((second) => second / timeUnit()[0]);

function axisTitle(axis) {
  if (axis === "seconds") return `Time since the start (${timeUnit()[1]})`;
  return axis === "tokens" ? "Tokens, with padding" : "Step";
}

function xValues(points, run) {
  if (state.axis === "seconds") return inTimeUnit(points.seconds);
  if (state.axis === "tokens") return points.steps.map((step) => step * run.tokensPerStep);
  return points.steps;
}

// ---------------------------------------------------------------------------------------- charts

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function layout(xTitle, yTitle, isLog) {
  const axis = {
    gridcolor: style("--line"), linecolor: style("--line"), zeroline: false, automargin: true,
    tickfont: { size: 11 }, minexponent: 4,
  };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: style("--muted") },
    margin: { l: 8, r: 10, t: 8, b: 8 },
    hovermode: "x unified",
    hoverlabel: { bgcolor: style("--card"), bordercolor: style("--line"), font: { color: style("--ink"), size: 12 } },
    // A finger scrolls the page.
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    showlegend: false,
    xaxis: { ...axis, title: { text: xTitle, font: { size: 12 }, standoff: 6 }, nticks: 7, exponentformat: "SI", unifiedhovertitle: { text: `${xTitle} %{x}` } },
    yaxis: { ...axis, title: { text: yTitle, font: { size: 12 }, standoff: 6 }, type: isLog ? "log" : "linear", nticks: 6, exponentformat: "power" },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } },
  };
}

const CONFIG = { responsive: true, displayModeBar: false };
const DASHES = [["solid", "solid"], ["dot", "dotted"], ["dash", "dashed"]]; // plotly's and CSS's names

function linesOf(panel, run) {
  const found = [];
  panel.lines.forEach((line, number) => {
    const series = own(own(run.series, line.group) ?? {}, line.tag);
    if (series) found.push({ line, series, dash: DASHES[number % DASHES.length][0] });
  });
  return found;
}

function traces(panel, run) {
  return linesOf(panel, run).flatMap(({ line, series, dash }) => {
    const points = decodePoints(series.points);
    const means = series.means ? decodePoints(series.means) : points;
    const scaled = (values) => (line.factor === 1 ? values : values.map((value) => value * line.factor));
    const name = plain([shorten(run.name), line.label].filter(Boolean).join(" · "));
    const common = { mode: points.steps.length === 1 ? "markers" : "lines", hovertemplate: "%{y:.5g}" };
    const pen = { color: color(run), width: 1.6, dash };
    const main = { ...common, name, x: xValues(means, run), y: smooth(scaled(means.values), state.smoothing), line: pen };
    if (!series.means && state.smoothing === 0) return [main];
    const faint = { ...common, name: series.means ? "extremes" : "as measured", opacity: 0.3, line: { ...pen, width: 1 } };
    return [{ ...faint, x: xValues(points, run), y: scaled(points.values) }, main];
  });
}

function drawPanel(plot, panel) {
  const runs = visibleRuns().filter((run) => state.axis !== "tokens" || run.tokensPerStep);
  const lines = runs.flatMap((run) => traces(panel, run));
  const look = layout(axisTitle(state.axis), panel.unit, state.log);
  // Rates and shares are read against zero.
  if (!state.log && /per second|%|GiB|ms/.test(panel.unit)) look.yaxis.rangemode = "tozero";
  const values = lines.flatMap((line) => line.y);
  // Smoothing rounds, so a constant's values differ a little.
  const isConstant = values.every((value) => Math.abs(value - values[0]) <= 1e-9 * Math.abs(value));
  if (values.length && isConstant) look.yaxis.range = rangeAround(values[0]);
  else if (state.clip && values.length) look.yaxis.range = usualRange(values);
  if (!lines.length) look.annotations = [note(emptyReason())];
  return Plotly.react(plot, lines, look, CONFIG);
}

// The range of a vertical axis without the highest and the lowest hundredth of the values.
function usualRange(all) {
  const values = all.filter((y) => !state.log || y > 0).sort((a, b) => a - b);
  const scaled = [0.01, 0.99].map((share) => values[Math.round(share * (values.length - 1))]).map((y) => (state.log ? Math.log10(y) : y));
  const margin = 0.05 * (scaled[1] - scaled[0]) || 1;
  return [scaled[0] - margin, scaled[1] + margin];
}

// The range of a vertical axis of a constant, which plotly would draw from the constant - 1 to + 1.
function rangeAround(value) {
  if (state.log && value > 0) return [Math.log10(value) - 0.5, Math.log10(value) + 0.5];
  const margin = Math.abs(value) / 5 || 1;
  return [value - margin, value + margin];
}

function emptyReason() {
  if (!visibleRuns().length) return "Every run is switched off";
  return state.axis === "tokens" ? "The visible runs did not record the tokens of a step" : "Not recorded by the visible runs";
}

function note(text) {
  return { text, showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5, font: { size: 13 } };
}

const KINDS = {
  start: ["start", "triangle-right", "--ink"],
  restart: ["restart", "triangle-right", "--warning"],
  checkpoint: ["checkpoint", "diamond", "--good"],
  interrupted: ["preempted or stopped by a signal", "square", "--warning"],
  finished: ["finished", "circle", "--good"],
  lost: ["ended without a record", "x", "--warning"],
};

function eventsOf(run) {
  const { log, checkpoints, progress } = run.timeline;
  const events = log.map((event, n) => {
    if (event.kind === "end") return { ...event, kind: event.reason === "interrupted" ? "interrupted" : "finished" };
    return { ...event, kind: n ? "restart" : "start" };
  });
  // A start that follows another start: the end of the run in between was not recorded.
  const afterLoss = log.filter((event, n) => event.kind === "start" && log[n - 1]?.kind === "start");
  if (progress) events.push(...afterLoss.map((restart) => ({ kind: "lost", ...lastProgress(run, restart.seconds) })));
  checkpoints.forEach((one) => events.push({ ...one, kind: "checkpoint", text: one.kept ? "kept" : "removed since" }));
  return events;
}

// The steps over time, with a gap before each start.
function progressOf(run) {
  const { steps, seconds } = decodePoints(run.timeline.progress);
  for (const start of run.timeline.log.filter((event) => event.kind === "start")) {
    const at = seconds.findIndex((second) => second >= start.seconds);
    if (at < 0) continue;
    steps.splice(at, 0, NaN, start.step ?? NaN);
    seconds.splice(at, 0, start.seconds, start.seconds);
  }
  return { steps, seconds };
}

// Where a run was when it was last heard of before a time.
function lastProgress(run, time) {
  const { steps, seconds } = decodePoints(run.timeline.progress);
  const n = seconds.findLastIndex((second) => second < time);
  return n < 0 ? { seconds: time, step: 0 } : { seconds: seconds[n], step: steps[n] };
}

function drawTimeline(plot) {
  const lines = [];
  visibleRuns().forEach((run, number) => {
    if (run.timeline.progress) {
      const points = progressOf(run);
      lines.push({
        x: inTimeUnit(points.seconds), y: points.steps, mode: "lines", name: plain(run.name),
        line: { color: color(run), width: 1.6 }, hovertemplate: "step %{y:,}", showlegend: false,
      });
    }
    const events = eventsOf(run);
    for (const [kind, [label, symbol, ink]] of Object.entries(KINDS)) {
      const found = events.filter((event) => event.kind === kind);
      if (!found.length && number) continue;
      lines.push({
        x: inTimeUnit(found.map((event) => event.seconds)), y: found.map((event) => event.step ?? 0), mode: "markers", name: label, cliponaxis: false,
        marker: { symbol, size: kind === "checkpoint" ? 7 : 10, color: style(ink), line: { color: color(run), width: 1 } },
        text: found.map((event) => event.text ?? ""), legendgroup: kind,
        showlegend: found.length > 0 && !lines.some((line) => line.legendgroup === kind && line.showlegend),
        hovertemplate: `${label} at step %{y:,} %{text}<extra>${plain(run.name)}</extra>`,
      });
    }
  });
  const look = layout(axisTitle("seconds"), "Step", false);
  look.hovermode = "closest";
  look.showlegend = true;
  look.yaxis.exponentformat = "SI";
  if (!lines.length) look.annotations = [note(emptyReason())];
  return Plotly.react(plot, lines, look, CONFIG);
}

// A chart is drawn when it is about to be seen, and again when something it shows has changed.
const observer = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    target.isNear = isIntersecting;
    if (isIntersecting && target.isStale) draw(target);
  }
}, { rootMargin: "300px" });

function draw(plot) {
  plot.isStale = false;
  charts.get(plot)(plot);
}

function redraw() {
  for (const plot of charts.keys()) {
    plot.isStale = true;
    if (plot.isNear) draw(plot);
  }
}

function plotElement(drawer, className = "plot") {
  const plot = make("div", { className, isStale: true });
  charts.set(plot, drawer);
  observer.observe(plot);
  return plot;
}

// -------------------------------------------------------------------------------------- sections

function section(title, ...children) {
  const id = title.toLowerCase().replaceAll(/[^a-z]+/g, "-");
  document.getElementById("sections").append(make("a", { href: `#${id}`, textContent: title }));
  return make("section", { id }, make("h2", { textContent: title }), ...children);
}

function table(columns, rows, className = "", numbers = []) {
  const cell = (tag, text, n) => make(tag, { textContent: text, className: numbers.includes(n) ? "number" : "", "data-label": columns[n] });
  const head = make("thead", {}, make("tr", {}, ...columns.map((name, n) => cell("th", name, n))));
  const body = rows.map((row) => make("tr", {}, ...row.map((text, n) => cell("td", text, n))));
  return make("table", { className }, head, make("tbody", {}, ...body));
}

function noteLine(textContent) {
  return make("p", { className: "note", textContent });
}

function card(...children) {
  return make("div", { className: "card" }, ...children);
}

function overviewSection() {
  const grid = make("div", { className: "grid summaries" });
  updates.push(() => grid.replaceChildren(...visibleRuns().map(summaryCard)));
  return section("Overview", grid);
}

function summaryCard(run) {
  const dot = make("i", { className: "dot" });
  dot.style.background = color(run);
  const numbers = run.numbers.map(([name, value, explanation]) => make("div", {},
    make("dt", { textContent: name }), make("dd", { textContent: value }), make("dd", { className: "muted", textContent: explanation })));
  const title = make("h3", {}, dot, make("span", { textContent: run.name }));
  return make("div", { className: "card summary" }, title, make("p", { textContent: run.sentence }), make("dl", {}, ...numbers));
}

// What the cells of a column are sorted by: numbers, durations such as 4d05h, or texts.
function sortKey(text) {
  const seconds = { d: 86400, h: 3600, m: 60, s: 1 };
  const parts = [...text.matchAll(/(\d+)([dhms])/g)];
  if (parts.length) return parts.reduce((sum, [, count, unit]) => sum + count * seconds[unit], 0);
  const number = parseFloat(text.replaceAll(",", ""));
  return Number.isNaN(number) ? text : number;
}

function runsSection() {
  const { columns } = state.data;
  const order = { column: null, sign: 1 };
  const compare = (a, b) => {
    const [x, y] = [a, b].map((row) => sortKey(row[order.column]));
    return order.sign * (typeof x === typeof y ? (x > y) - (x < y) : typeof x === "number" ? -1 : 1);
  };
  const fill = (filter) => {
    const rows = visibleRuns().map((run) => run.row).filter((row) => row.join(" ").toLowerCase().includes(filter));
    if (order.column !== null) rows.sort(compare);
    const numbers = columns.map((_, n) => n).filter((n) => n && rows.every((row) => /^[\d–]/.test(row[n])));
    const shown = table(columns, rows, "row", numbers);
    shown.tHead.rows[0].querySelectorAll("th").forEach((head, n) => {
      if (n === order.column) head.setAttribute("aria-sort", order.sign > 0 ? "ascending" : "descending");
      const sort = () => {
        Object.assign(order, { column: n, sign: n === order.column ? -order.sign : 1 });
        body.update();
        body.querySelectorAll("th button")[n].focus();
      };
      head.replaceChildren(make("button", { type: "button", textContent: columns[n], onclick: sort }));
    });
    return shown;
  };
  const [bar, body] = filtered("Filter the runs", fill);
  return section("Runs", card(bar, body));
}

function timelineSection() {
  return section("Timeline", make("div", { className: "card chart" }, plotElement(drawTimeline, "plot tall")));
}

function nonfiniteNotes(panel) {
  const found = [];
  for (const run of visibleRuns()) {
    for (const { line, series } of linesOf(panel, run)) {
      if (!series.nonfiniteCount) continue;
      const label = [run.name, line.label].filter(Boolean).join(" · ");
      found.push(`${label}: ${series.nonfiniteCount.toLocaleString("en")} of ${series.count.toLocaleString("en")} values are infinite or NaN, first at step ${series.nonfinite[0].toLocaleString("en")}`);
    }
  }
  return found.map(noteLine);
}

// What distinguishes the lines of one run; the colours of runs are those of their buttons.
function lineKey(panel) {
  if (panel.lines.length === 1) return null;
  const keys = panel.lines.map((line, number) => {
    const sample = make("i");
    sample.style.borderTopStyle = DASHES[number % DASHES.length][1];
    return make("span", {}, sample, line.label);
  });
  return make("div", { className: "key" }, ...keys);
}

function panelCard(panel) {
  const notes = make("div");
  updates.push(() => notes.replaceChildren(...nonfiniteNotes(panel)));
  const plot = plotElement((target) => drawPanel(target, panel));
  const save = make("button", { type: "button", className: "save", textContent: "Save", title: "Save the chart as a PNG" });
  save.onclick = () => Plotly.downloadImage(plot, { format: "png", scale: 2, width: plot.clientWidth, height: plot.clientHeight, filename: panel.title });
  const head = make("div", { className: "head" }, make("h3", { textContent: panel.title }), lineKey(panel));
  return make("div", { className: "card chart" }, head, notes, plot, save);
}

function panelSection(title) {
  const panels = state.data.panels.filter((panel) => panel.section === title);
  if (!panels.length) return null;
  const grid = make("div", { className: "grid" }, ...panels.map(panelCard));
  if (title === "Other metrics") {
    grid.classList.add("padded");
    return section(title, make("details", { className: "card" }, make("summary", { textContent: `${panels.length} further metrics` }), grid));
  }
  return section(title, grid);
}

function choice(label, names, onchange) {
  const select = make("select", { onchange }, ...names.map((name) => make("option", { value: name, textContent: name })));
  return [make("label", {}, label, select), select];
}

function samplesSection() {
  const keys = state.data.runs.flatMap((run, n) => Object.keys(run.samples).map((task) => [n, task]));
  if (!keys.length) return null;
  const body = make("div", { className: "scroll" });
  const several = state.data.runs.length > 1;
  const names = keys.map(([n, task]) => (several ? `${state.data.runs[n].name} · ${task}` : task));
  const [taskLabel, task] = choice("Task", names, () => fillSteps());
  const [stepLabel, step] = choice("Evaluation at step", [], () => show());
  const samples = () => {
    const [n, name] = keys[task.selectedIndex];
    return state.data.runs[n].samples[name];
  };
  const show = () => {
    const rows = samples()[step.value] ?? [];
    const shown = table(["Input", "Target", "Prediction"], rows, "text samples");
    rows.forEach(([, target, prediction], n) => {
      if (target.trim() === prediction.trim()) shown.tBodies[0].rows[n].cells[2].classList.add("same");
    });
    body.replaceChildren(shown);
  };
  const fillSteps = () => {
    const chosen = step.value;
    const wasLatest = step.selectedIndex <= 0;
    const steps = Object.keys(samples()).sort((a, b) => b - a);
    step.replaceChildren(...steps.map((value) => make("option", { value, textContent: Number(value).toLocaleString("en") })));
    if (!wasLatest && steps.includes(chosen)) step.value = chosen;
    show();
  };
  updates.push(fillSteps);
  const hint = make("span", { className: "muted", textContent: "A prediction that equals its target is green." });
  return section("Predictions", card(make("div", { className: "bar" }, taskLabel, stepLabel, hint), body));
}

function filtered(placeholder, fill, ...controls) {
  const body = make("div", { className: "tall-table" });
  const search = make("input", { type: "search", placeholder, "aria-label": placeholder });
  body.update = () => body.replaceChildren(fill(search.value.toLowerCase()));
  search.oninput = body.update;
  controls.forEach((control) => control.addEventListener("change", body.update));
  updates.push(body.update);
  return [make("div", { className: "bar" }, search, ...controls), body];
}

function configurationSection() {
  if (!state.data.runs.some((run) => Object.keys(run.config).length)) return null;
  const isDifference = (name, runs) => new Set(runs.map((run) => own(run.config, name))).size > 1;
  const box = make("input", { type: "checkbox", checked: state.data.runs.length > 1 });
  const only = make("label", {}, box, "only differences");
  const fill = (filter) => {
    const runs = visibleRuns();
    let names = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
    if (box.checked && runs.length > 1) names = names.filter((name) => isDifference(name, runs));
    names = names.filter((name) => name.toLowerCase().includes(filter));
    if (!names.length) return make("p", { className: "muted bar", textContent: "No such setting, or no difference." });
    const rows = names.map((name) => [name, ...runs.map((run) => own(run.config, name) ?? "–")]);
    return table(["Setting", ...runs.map((run) => run.name)], rows, "code");
  };
  const controls = state.data.runs.length > 1 ? [only] : [];
  return section("Configuration", card(...filtered("Filter the settings", fill, ...controls)));
}

function modelSection() {
  const cards = state.data.runs.map((run, number) => {
    const about = make("dl");
    updates.push(() => {
      const pairs = state.data.runs[number].about;
      about.replaceChildren(...pairs.flatMap(([name, text]) => [make("dt", { textContent: name }), make("dd", { textContent: text })]));
    });
    const parts = [make("summary", { textContent: run.name }), about];
    if (run.variables.length) {
      const columns = ["Array", "Shape", "Elements", "Partition spec"];
      const fill = (filter) => {
        const rows = run.variables.filter((row) => row[0].toLowerCase().includes(filter));
        return table(columns, rows.map(([name, shape, size, ...rest]) => [name, shape, size.toLocaleString("en"), ...rest]), "code", [2]);
      };
      parts.push(...filtered("Filter the arrays", fill));
    }
    const element = make("details", { className: "card", open: state.data.runs.length === 1 }, ...parts);
    updates.push(() => { element.hidden = state.hidden.has(run.name); });
    return element;
  });
  return section("Model and devices", make("div", { className: "stack" }, ...cards));
}

// --------------------------------------------------------------------------------------- the page

let updates = []; // functions that run when the visible runs change

function refresh() {
  document.getElementById("created").textContent = state.data.created;
  updates.forEach((update) => update());
  redraw();
}

function showRuns() {
  const chips = state.data.runs.map((run) => {
    const dot = make("i", { className: "dot" });
    dot.style.background = color(run);
    const chip = make("button", { type: "button", className: "chip", title: run.folder }, dot, make("span", { textContent: run.name }));
    chip.onclick = () => {
      if (!state.hidden.delete(run.name)) state.hidden.add(run.name);
      chip.setAttribute("aria-pressed", !state.hidden.has(run.name));
      refresh();
    };
    chip.setAttribute("aria-pressed", !state.hidden.has(run.name));
    return chip;
  });
  document.getElementById("chips").replaceChildren(...chips);
}

function build() {
  updates = [];
  charts.clear();
  observer.disconnect();
  document.getElementById("sections").replaceChildren();
  document.querySelector('#axis [value="tokens"]').disabled = !state.data.runs.some((run) => run.tokensPerStep);
  showRuns();
  const sections = [
    overviewSection(), panelSection("Training"), panelSection("Evaluation"), samplesSection(), runsSection(),
    timelineSection(), configurationSection(), modelSection(), panelSection("Other metrics"),
  ];
  document.getElementById("main").replaceChildren(...sections.filter(Boolean));
  refresh();
}

function connectControls() {
  const root = document.documentElement;
  const theme = document.getElementById("theme");
  const setTheme = (dark) => {
    root.dataset.theme = dark ? "dark" : "light";
    theme.textContent = dark ? "Light" : "Dark";
  };
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches);
  theme.onclick = () => { setTheme(root.dataset.theme !== "dark"); redraw(); };
  document.getElementById("axis").onchange = (event) => { state.axis = event.target.value; redraw(); };
  for (const name of ["log", "clip"]) {
    document.getElementById(name).onchange = (event) => { state[name] = event.target.checked; redraw(); };
  }
  document.getElementById("smoothing").oninput = (event) => {
    state.smoothing = Number(event.target.value);
    document.getElementById("smoothing-value").textContent = event.target.value;
    redraw();
  };
}

// New values are drawn in place; the page is only built again if it needs other elements.
function show(data) {
  const elements = ({ panels, runs }) => JSON.stringify([panels, runs.map((run) => [run.name, Object.keys(run.samples), run.variables.length])]);
  const isSame = state.data && elements(state.data) === elements(data);
  state.data = data;
  if (isSame) refresh();
  else build();
}

async function follow(seconds) {
  const created = document.getElementById("created");
  let shown = "";
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
    try {
      const answer = await fetch("data");
      if (!answer.ok) throw new Error(await answer.text());
      const text = await answer.text();
      if (text !== shown) show(JSON.parse(await decompress(text)));
      shown = text;
    } catch (error) {
      created.textContent = `not refreshed: ${error.message}`;
    }
  }
}

async function start() {
  connectControls();
  const source = await decompress(document.getElementById("plotly").textContent);
  document.head.append(make("script", { textContent: source }));
  show(JSON.parse(await decompress(document.getElementById("data").textContent)));
  const seconds = Number(document.body.dataset.refresh);
  if (seconds) follow(seconds);
}

start().catch((error) => {
  document.getElementById("main").replaceChildren(noteLine(`The page could not be drawn: ${error.message}`));
  throw error;
});
