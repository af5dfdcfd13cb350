"use strict";
// Draws the charts and the table of layers from the JSON in the page. Colors come from the style sheet.
const content = JSON.parse(document.getElementById("content").textContent);
const layers = content.layers;
const dark = matchMedia("(prefers-color-scheme: dark)");
const touch = matchMedia("(pointer: coarse)").matches;

function resolved(value, style) {
  if (typeof value === "string") return value.startsWith("var(") ? style.getPropertyValue(value.slice(4, -1)).trim() : value;
  if (Array.isArray(value)) return typeof value[0] === "number" ? value : value.map((each) => resolved(each, style));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, resolved(each, style)]));
}

function axis(given, style) {
  const line = style.getPropertyValue("--line").trim();
  return { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, fixedrange: touch, ...given };
}

function draw(plot) {
  const style = getComputedStyle(document.documentElement);
  const view = content.charts[plot.dataset.chart].views[Number(plot.dataset.view)];
  const traces = resolved(view.data, style);
  for (const trace of traces) {
    if (trace.meta === "layers") trace.hovertext = layers.name.map((name) => name.replaceAll("<", "&lt;"));
    if (trace.meta in hiddenKeys) trace.visible = !hiddenKeys[trace.meta];
  }
  const layout = resolved(view.layout, style);
  const color = (name) => style.getPropertyValue(name).trim();
  Plotly.react(plot, traces, {
    height: 250, showlegend: false, hovermode: "closest", dragmode: touch ? false : "zoom",
    margin: { l: 8, r: 12, t: 10, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("--soft") },
    hoverlabel: { bgcolor: color("--card"), bordercolor: color("--line"), font: { color: color("--text") }, namelength: -1 },
    ...layout,
    xaxis: axis(layout.xaxis, style), yaxis: axis(layout.yaxis, style),
  }, { responsive: true, displayModeBar: false });
}

const hiddenKeys = {};
const plots = [...document.querySelectorAll(".plot")];
plots.forEach(draw);
dark.addEventListener("change", () => plots.forEach(draw));

for (const button of document.querySelectorAll("[data-view-of]")) {
  button.addEventListener("click", () => {
    const plot = plots.find((each) => each.dataset.chart === button.dataset.viewOf);
    plot.dataset.view = button.dataset.number;
    for (const other of button.parentElement.children) other.setAttribute("aria-pressed", String(other === button));
    draw(plot);
  });
}

for (const button of document.querySelectorAll("[data-key]")) {
  button.addEventListener("click", () => {
    const hide = button.getAttribute("aria-pressed") === "true";
    hiddenKeys[button.dataset.key] = hide;
    button.setAttribute("aria-pressed", String(!hide));
    plots.forEach(draw);
  });
}

// --- the table of layers ---

const STEP = 100;
const count = (number) => number.toLocaleString("en-US");
const percent = (share) => `${(100 * share).toFixed(2)}%`;

function short(number) {
  for (const [unit, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]])
    if (number >= size) return `${Number((number / size).toPrecision(3))} ${unit}`;
  return String(number);
}

function cell(text, className) {
  const found = document.createElement("td");
  found.textContent = text;
  if (className) found.className = className;
  return found;
}

function nameCell(name) {
  const found = cell("", "text name");
  for (const part of name.split(/(?<=[._])/)) found.append(part, document.createElement("wbr"));
  return found;
}

function densityCell(share) {
  const found = document.createElement("td");
  const bar = document.createElement("span");
  bar.className = "bar";
  const filled = document.createElement("i");
  filled.style.width = percent(share);
  if (share > 0) bar.append(filled);
  found.append(bar, percent(share));
  return found;
}

function deadCell(index) {
  const [dead, all] = [layers.dead[index], layers.features[index]];
  return cell(dead ? `${count(dead)} of ${count(all)}` : "–", dead === all ? "bad" : "");
}

const COLUMNS = {
  number: (index) => cell(String(index + 1)),
  name: (index) => nameCell(layers.name[index]),
  type: (index) => cell(layers.type[index], "text"),
  shape: (index) => cell(layers.shape[index]),
  weights: (index) => cell(count(layers.weights[index])),
  nonzeros: (index) => cell(count(layers.nonzeros[index])),
  density: (index) => densityCell(layers.density[index]),
  dead: deadCell,
  macs: (index) => cell(short(layers.macs[index])),
  bytes: (index) => cell(`${short(layers.bytes[index])}B`.replace(/(\d)B/, "$1 B")),
};

const table = document.getElementById("layers");
if (table) {
  const body = table.tBodies[0];
  const heads = [...table.querySelectorAll("th[data-column]")];
  const filter = document.getElementById("filter");
  const status = document.getElementById("shown");
  const more = document.getElementById("more");
  let order = layers.name.map((_, index) => index);
  let found = order;
  let limit = STEP;

  const show = () => {
    const text = filter.value.trim().toLowerCase();
    const matches = (index) => `${layers.name[index]} ${layers.type[index]}`.toLowerCase().includes(text);
    found = text ? order.filter(matches) : order;
    body.replaceChildren(...found.slice(0, limit).map((index) => {
      const row = document.createElement("tr");
      row.append(...heads.map((head) => COLUMNS[head.dataset.column](index)));
      return row;
    }));
    const visible = Math.min(limit, found.length);
    status.textContent = `${count(visible)} of ${count(layers.name.length)} layers`;
    more.hidden = visible === found.length;
  };

  const sort = (head) => {
    const column = head.dataset.column;
    const rising = head.getAttribute("aria-sort") ? head.getAttribute("aria-sort") === "descending" : column === "name";
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", rising ? "ascending" : "descending");
    const values = layers[column] ?? layers.name.map((_, index) => index);
    const compare = (a, b) => (typeof values[a] === "string"
      ? values[a].localeCompare(values[b], "en", { numeric: true }) : values[a] - values[b]);
    order = [...order].sort((a, b) => (rising ? compare(a, b) : compare(b, a)) || a - b);
    show();
  };

  for (const head of heads) head.querySelector("button").addEventListener("click", () => sort(head));
  filter.addEventListener("input", () => { limit = STEP; show(); });
  more.addEventListener("click", () => { limit += STEP * 5; show(); });
  show();
}
