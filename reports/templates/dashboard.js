"use strict";
// Everything shown comes from the JSON block; filters narrow the records and redraw charts and tables.
const DATA = JSON.parse(document.getElementById("data").textContent);
const RECORDS = DATA.records, RUNS = DATA.runs;
const FILTERS = [...document.querySelectorAll("#filters select")];
const number = (x, digits = 4) => x == null ? "" : Number(x.toPrecision(digits)).toLocaleString("en", {maximumFractionDigits: 6});
const orderOf = r => r.tokens * 1e12 + r.batch * 1e8 + r.context;
const shapeOf = r => `${r.batch}x${r.tokens}@${r.context}`;
const runLabel = i => { const r = RUNS[i]; return `${r.when.slice(0, 10)} #${i + 1} ${r.commit.slice(0, 7)}`; };
const engineOf = r => r.engine + (r.mode ? ` ${r.mode}` : "") + (r.backend ? ` ${r.backend}` : "");

for (const select of FILTERS) {
  const field = select.dataset.field;
  const values = [...new Set(RECORDS.map(r => r[field]).filter(v => v != null))];
  values.sort((a, b) => typeof a === "number" ? a - b : String(a).localeCompare(String(b)));
  select.append(new Option("all", ""));
  for (const v of values) select.append(new Option(field === "run" ? runLabel(v) : String(v), String(v)));
}

// the history shows one component at a time: the one filtered for, or the one chosen beside the chart
const focus = document.getElementById("f-history");
for (const c of [...new Set(RECORDS.filter(r => r.median_us != null).map(r => r.component))].sort()) focus.append(new Option(c, c));
focus.value = [...focus.options].some(o => o.value === "layer.reuse") ? "layer.reuse" : focus.options[0]?.value ?? "";

function readHash() {
  const wanted = new URLSearchParams(location.hash.startsWith("#filter?") ? location.hash.slice(8) : "");
  for (const s of FILTERS) if ([...s.options].some(o => o.value === (wanted.get(s.dataset.field) ?? ""))) s.value = wanted.get(s.dataset.field) ?? "";
}
function chosen() {
  const active = FILTERS.filter(s => s.value !== "");
  return RECORDS.filter(r => active.every(s => String(r[s.dataset.field]) === s.value));
}

function rowsFor(id, records) {
  const measured = records.filter(r => r.median_us != null);
  const base = r => ({...r, engine: engineOf(r), size: shapeOf(r), shape: `${r.component} ${shapeOf(r)}`, order: orderOf(r)});
  if (id === "history") return measured.filter(r => r.component === focus.value && r.outcome !== "negative").map(r => ({...base(r), label: runLabel(r.run), series: `${shapeOf(r)} ${engineOf(r)}`}));
  // the other charts show one state: the newest run that has the figure
  const newest = new Map();
  for (const r of measured) newest.set([r.component, r.config, r.device, shapeOf(r), engineOf(r)].join("|"), r);
  const last = [...newest.values()].filter(r => r.outcome !== "negative");
  // parts of a layer are in the heat map; here they would hide the whole layers, unless one was asked for
  const asked = document.getElementById("f-component").value !== "";
  if (id === "ratios") return last.filter(r => r.ratio != null && (asked || !r.component.startsWith("op."))).map(base);
  if (id === "heat") {
    const best = new Map();
    for (const r of last.filter(r => r.ratio != null && r.engine === "optimized")) {
      const key = `${r.component}|${shapeOf(r)}`;
      if (!best.has(key) || r.ratio < best.get(key).ratio) best.set(key, r);
    }
    return [...best.values()].map(base);
  }
  if (id === "peers") {
    const shapes = new Set(records.map(r => [r.run, r.component, r.batch, r.tokens, r.context].join("|")));
    const found = new Map();
    for (const p of DATA.peers)
      if (shapes.has([p.run, p.component, p.batch, p.tokens, p.context].join("|"))) found.set([p.component, p.config, shapeOf(p), p.peer].join("|"), p);
    return [...found.values()].map(p => ({...p, shape: `${p.component} ${shapeOf(p)}`, order: orderOf(p)}));
  }
  return DATA.state;
}

const COLUMNS = {
  history: ["label", "series", "median_us", "low_us", "high_us", "floor_us", "ratio"],
  ratios: ["shape", "engine", "format", "median_us", "floor_us", "ratio"],
  peers: ["shape", "peer", "our_us", "peer_us", "factor", "comparable", "note"],
  heat: ["component", "size", "engine", "median_us", "floor_us", "ratio"],
  state: ["form", "capacity", "kind", "bytes"],
  figures: ["run", "component", "shape", "engine", "format", "bytes_floor_us", "launch_floor_us", "median_us", "correctness", "ratio", "gbps", "tflops", "distinct_experts", "nodes", "check", "note"],
};
const NAMES = {median_us: "measured us", low_us: "quartile 1", high_us: "quartile 3", floor_us: "floor us", bytes_floor_us: "bytes floor us", launch_floor_us: "launch floor us", ratio: "x floor", gbps: "GB/s", tflops: "TFLOP/s", distinct_experts: "experts", our_us: "ours us", peer_us: "peer us", factor: "times faster"};

function fillTable(table, columns, rows) {
  const sort = table.dataset.sort, down = table.dataset.down === "1";
  if (sort) rows = [...rows].sort((a, b) => {
    const [x, y] = [a[sort], b[sort]];
    if (x == null || y == null) return (x == null) - (y == null);
    return (typeof x === "number" ? x - y : String(x).localeCompare(String(y))) * (down ? -1 : 1);
  });
  const numeric = c => rows.some(r => typeof r[c] === "number");
  const head = document.createElement("tr");
  for (const c of columns) {
    const th = document.createElement("th"), button = document.createElement("button");
    th.scope = "col";
    if (numeric(c)) th.className = "n";
    th.ariaSort = sort === c ? (down ? "descending" : "ascending") : "none";
    button.type = "button";
    button.textContent = (NAMES[c] ?? c) + (sort === c ? (down ? " ▼" : " ▲") : "");
    button.onclick = () => {
      table.dataset.down = sort === c && !down ? "1" : "0";
      table.dataset.sort = c;
      fillTable(table, columns, rows);
      table.querySelectorAll("thead button")[columns.indexOf(c)].focus();
    };
    th.append(button);
    head.append(th);
  }
  const thead = document.createElement("thead"), tbody = document.createElement("tbody");
  thead.append(head);
  for (const r of rows) {
    const tr = document.createElement("tr");
    for (const c of columns) {
      const td = document.createElement("td");
      if (c === "correctness") {
        const tag = document.createElement("span");
        tag.className = "tag " + (r.passed ? "passed" : "failed");
        tag.textContent = r.passed ? "passed" : "not printed";
        td.append(tag);
      } else if (c === "note" || c === "check") {
        td.className = r[c] ? "wide" : "";
        td.textContent = (r[c] ?? "") + (c === "check" && r.detail ? " " + JSON.stringify(r.detail) : "");
      } else if (typeof r[c] === "number") {
        td.className = "n";
        td.textContent = c === "bytes" || c === "capacity" ? r[c].toLocaleString("en") : number(r[c]);
      } else {
        td.textContent = r[c] == null ? "" : String(r[c]);
        if (c === "run") td.className = "line";
      }
      tr.append(td);
    }
    tbody.append(tr);
  }
  table.replaceChildren(thead, tbody);
}

const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function config() {
  const ink = css("--ink"), soft = css("--soft"), line = css("--line");
  const axis = {labelColor: ink, titleColor: soft, gridColor: line, domainColor: line, tickColor: line};
  return {background: "transparent", font: "system-ui, sans-serif", view: {stroke: line}, axis, rule: {color: soft}, text: {color: ink},
    legend: {labelColor: ink, titleColor: soft, labelLimit: 260, ...(innerWidth < 600 ? {columns: 1} : {})}, title: {color: ink},
    range: {category: css("--scheme") === "dark" ? ["#8ab4ff", "#ffb86b", "#69d391", "#ff8a80", "#c7a6ff", "#5fd4e0", "#f5d76e", "#f49ac2", "#b0bec5", "#a3c585", "#d9a679", "#9fa8ff"]
      : ["#1856b8", "#c25e00", "#14703a", "#b3261e", "#6b3fa0", "#0b7285", "#8a6d00", "#ad1d6b", "#546e7a", "#5d7a1f", "#7a4a1f", "#3f51b5"]}};
}

const views = {};
async function draw() {
  const records = chosen(), component = document.getElementById("f-component").value;
  if (component && [...focus.options].some(o => o.value === component)) focus.value = component;
  focus.disabled = component !== "";
  document.getElementById("count").textContent = `${records.length} of ${RECORDS.length} figures`;
  for (const [id, spec] of Object.entries(DATA.charts)) {
    const section = document.getElementById(id), rows = rowsFor(id, records);
    section.querySelector(".empty").hidden = rows.length > 0;
    section.querySelector("details").hidden = rows.length === 0;
    fillTable(document.getElementById("table-" + id), COLUMNS[id], rows);
    const place = document.getElementById("chart-" + id);
    views[id]?.finalize();
    delete views[id];
    place.replaceChildren();
    place.hidden = rows.length === 0;
    if (!rows.length) continue;
    // the height follows the number of lines; as a number, since a step does not go with a width that follows the page
    const lines = new Set(rows.map(r => id === "heat" ? r.component : `${r.shape}|${r.peer ?? r.engine}`)).size;
    const height = spec.height.step ? spec.height.step * lines : spec.height;
    const filled = {...structuredClone(spec), height, datasets: {rows}};
    if (id === "heat" && innerWidth < 900) {
      filled.encoding.x.axis.labelAngle = -60;
      filled.layer[1].mark.fontSize = innerWidth < 600 ? 8 : 11;
    }
    views[id] = await vegaEmbed(place, filled, {renderer: "svg", actions: false, config: config()});
  }
  const all = records.map(r => ({...r, run: `#${r.run + 1} ${RUNS[r.run].commit.slice(0, 7)}`, engine: engineOf(r), shape: shapeOf(r)})).reverse();
  fillTable(document.getElementById("table-figures"), COLUMNS.figures, all);
  document.documentElement.dataset.drawn = String(Number(document.documentElement.dataset.drawn ?? 0) + 1);
}
let queue = Promise.resolve();
const redraw = () => { queue = queue.then(draw).catch(e => { document.documentElement.dataset.error = String(e); throw e; }); };

for (const s of FILTERS) s.addEventListener("change", () => {
  const active = new URLSearchParams(FILTERS.filter(f => f.value).map(f => [f.dataset.field, f.value]));
  history.replaceState(null, "", active.size ? "#filter?" + active : location.pathname + location.search);
  redraw();
});
document.querySelector("#filters form").addEventListener("reset", () => setTimeout(() => {
  history.replaceState(null, "", location.pathname + location.search);
  redraw();
}));
focus.addEventListener("change", redraw);
const faults = document.getElementById("f-faults");
faults?.addEventListener("change", () => {
  for (const row of document.querySelectorAll("#table-faults tbody tr")) row.hidden = faults.value !== "" && row.dataset.state !== faults.value;
});
const theme = document.getElementById("theme"), order = ["system", "light", "dark"];
theme.onclick = () => {
  const next = order[(order.indexOf(document.documentElement.dataset.theme ?? "system") + 1) % 3];
  if (next === "system") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = next;
  theme.textContent = "Theme: " + next;
  redraw();
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
function openTarget() {
  const id = location.hash.slice(1);
  if (id.startsWith("filter?")) { readHash(); redraw(); return; }
  const target = id && document.getElementById(id);
  if (target instanceof HTMLDetailsElement) target.open = true;
}
addEventListener("hashchange", openTarget);
readHash();
openTarget();
redraw();
