"use strict";
const run = JSON.parse(document.getElementById("data").textContent);

// Every text of the run enters the document as a text node or an attribute value, never as markup.
function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "text", "circle", "rect", "title"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size >= 10000) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 0.001) return Number(value.toPrecision(3)).toExponential();
  return String(Number(value.toPrecision(4)));
}

function duration(seconds) {
  if (seconds < 120) return `${seconds} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function niceTicks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) ticks.push(tick);
  return ticks.map((tick) => Number(tick.toPrecision(12)));
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low > high) return [0, 1];
  if (low === high) return [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  const margin = (high - low) * 0.05;
  return [low >= 0 && low < margin * 4 ? 0 : low - margin, high + margin];
}

function pathOf(series, values, x, y) {
  let path = "", pen = "M";
  values.forEach((value, i) => {
    if (value === null) { pen = "M"; return; }
    path += `${pen}${x(series.steps[i]).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  });
  return path;
}

// The index of the step nearest to the pointer, by bisection.
function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (steps[middle] < step) low = middle; else high = middle; }
  return step - steps[low] < steps[high] - step ? low : high;
}

function chart(panel, width, height) {
  const left = 46, right = 10, top = 10, bottom = 22;
  const all = panel.series.flatMap((s) => (s.smooth ? s.smooth.concat(s.values) : s.values));
  const [y0, y1] = extent(all);
  const firstStep = Math.min(...panel.series.map((s) => s.steps[0]));
  const lastStep = Math.max(...panel.series.map((s) => s.steps[s.steps.length - 1]));
  const span = Math.max(lastStep - firstStep, 1);
  const x = (step) => left + ((step - firstStep) / span) * (width - left - right);
  const y = (value) => top + ((y1 - value) / (y1 - y0)) * (height - top - bottom);

  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${panel.title} by step` });
  for (const tick of niceTicks(y0, y1, 4)) {
    svg.append(make("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }));
    svg.append(make("text", { x: left - 7, y: y(tick) + 4, "text-anchor": "end" }, number(tick)));
  }
  const steps = niceTicks(firstStep, firstStep + span, width > 340 ? 6 : 4).filter(Number.isInteger);
  for (const tick of steps) {
    svg.append(make("text", { x: x(tick), y: height - 5, "text-anchor": "middle" }, number(tick)));
  }
  panel.series.forEach((series, index) => {
    const stroke = run.colours[index % run.colours.length];
    if (series.smooth) svg.append(make("path", { class: "raw", stroke, d: pathOf(series, series.values, x, y) }));
    svg.append(make("path", { class: "line", stroke, d: pathOf(series, series.smooth || series.values, x, y) }));
    if (series.values.length <= 30) {
      series.values.forEach((value, i) => {
        if (value !== null) svg.append(make("circle", { cx: x(series.steps[i]), cy: y(value), r: 2.6, fill: stroke }));
      });
    }
  });
  const cursor = make("line", { class: "cursor", y1: top, y2: height - bottom });
  svg.append(cursor);

  const legend = make("div", { class: "legend" });
  const label = make("span");
  const readings = panel.series.map((series, index) => {
    const swatch = make("i");
    swatch.style.background = run.colours[index % run.colours.length];
    const value = make("b");
    legend.append(make("span", {}, swatch, series.name, value));
    return { series, value };
  });
  legend.append(label);
  function read(step) {
    for (const { series, value } of readings) {
      const i = step === null ? series.values.length - 1 : nearest(series.steps, step);
      value.textContent = number(series.values[i]);
    }
    label.textContent = step === null ? "" : `step ${Math.round(step)}`;
  }
  read(null);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * width;
    const step = Math.min(Math.max(firstStep + ((at - left) / (width - left - right)) * span, firstStep), lastStep);
    cursor.setAttribute("x1", x(step));
    cursor.setAttribute("x2", x(step));
    cursor.style.visibility = "visible";
    read(step);
  });
  svg.addEventListener("pointerleave", () => { cursor.style.visibility = "hidden"; read(null); });

  const unit = panel.unit ? [" ", make("span", { class: "unit" }, panel.unit)] : [];
  return make("article", { class: "chart" }, make("h3", {}, panel.title, ...unit), svg, legend);
}

function header() {
  const facts = [run.path, `written ${run.written}`].map((fact) => make("span", {}, fact));
  document.getElementById("header").append(make("h1", {}, run.name), make("div", { class: "facts" }, ...facts));
}

function tiles() {
  const tile = (label, value, was = "") =>
    make("div", { class: "tile" }, make("div", { class: "label" }, label), make("div", { class: "value" }, value),
      make("div", { class: "was" }, was));
  const reward = run.panels.find((panel) => panel.title === "Reward");
  const shown = (reward ? reward.series : run.panels.flatMap((panel) => panel.series)).slice(0, 4);
  document.getElementById("tiles").append(
    ...shown.map((s) => tile(s.name, number(s.values[s.values.length - 1]), `at first ${number(s.values[0])}`)),
    tile("steps", number(run.steps)),
    tile("time", duration(run.seconds)),
  );
}

function charts() {
  document.getElementById("charts").append(...run.panels.map((panel) => chart(panel, 460, 220)));
  const further = document.getElementById("further");
  further.hidden = run.further.length === 0;
  further.querySelector("div").append(...run.further.map((panel) => chart(panel, 310, 160)));
}

function sample(record, best, worst) {
  const differ = best > worst;
  const rank = differ && record.reward === best ? " best" : differ && record.reward === worst ? " worst" : "";
  const chips = [make("span", { class: "chip reward" }, `reward ${number(record.reward)}`)];
  const chip = (text) => chips.push(make("span", { class: "chip" }, text));
  if (record.rewards) for (const [name, value] of Object.entries(record.rewards)) chip(`${name} ${number(value)}`);
  if (record.advantage !== undefined) chip(`advantage ${number(record.advantage)}`);
  if (record.length !== undefined) chip(`${number(record.length)} tokens`);
  if (record.stop_reason) chip(record.stop_reason);
  const text = record.completion ? make("div", { class: "text" }, record.completion)
    : make("div", { class: "empty" }, "empty answer");
  return make("article", { class: "sample" + rank }, make("div", { class: "chips" }, ...chips), text);
}

function trajectories() {
  const section = document.getElementById("trajectories");
  section.append(make("h2", {}, "Sampled trajectories"));
  if (run.groups.length === 0) {
    section.append(make("div", { class: "empty" }, "This run has written none."));
    return;
  }
  const slider = make("input", { type: "range", min: 0, "aria-label": "group" });
  const before = make("button", { type: "button", title: "previous (←)" }, "←");
  const after = make("button", { type: "button", title: "next (→)" }, "→");
  const where = make("span", { class: "where", "aria-live": "polite" });
  const search = make("input", { type: "search", placeholder: "search text" });
  const order = make("select", { "aria-label": "order of answers" },
    ...[["sampled", "as sampled"], ["best", "best first"], ["worst", "worst first"], ["long", "longest first"]]
      .map(([value, text]) => make("option", { value }, text)));
  const view = make("div");
  section.append(make("div", { class: "bar" }, before, slider, after, where, search, order), view);
  if (run.groups.length < run.totalGroups) {
    section.append(make("div", { class: "empty" },
      `${run.groups.length} of ${run.totalGroups} groups, taken evenly over the run.`));
  }

  let found = run.groups, at = 0;
  const length = (record) => record.length ?? record.completion.length;
  const orders = {
    sampled: () => 0, best: (a, b) => b.reward - a.reward, worst: (a, b) => a.reward - b.reward,
    long: (a, b) => length(b) - length(a),
  };
  function show() {
    slider.max = Math.max(found.length - 1, 0);
    slider.value = at;
    before.disabled = at <= 0;
    after.disabled = at >= found.length - 1;
    slider.disabled = found.length < 2;
    if (found.length === 0) {
      where.textContent = "nothing found";
      view.replaceChildren();
      return;
    }
    const group = found[at], first = group[0];
    where.textContent = `step ${number(first.step)}${first.split ? ` (${first.split})` : ""} · ${at + 1} of ${found.length}`;
    const rewards = group.map((record) => record.reward);
    const best = Math.max(...rewards), worst = Math.min(...rewards);
    const prompt = make("div", { class: "prompt" }, make("div", { class: "label" }, "prompt"),
      make("div", { class: "text" }, first.prompt));
    if (first.answer !== undefined && first.answer !== null) {
      prompt.append(make("div", { class: "label" }, "expected"), make("div", { class: "text" }, String(first.answer)));
    }
    const sorted = [...group].sort(orders[order.value]);
    const samples = make("div", { class: "samples" }, ...sorted.map((r) => sample(r, best, worst)));
    view.replaceChildren(prompt, samples);
    // Rows of equal length: eight answers stand as 4 + 4, not as 5 + 3.
    const fit = Math.max(1, Math.floor((samples.clientWidth + 12) / 262));
    const columns = Math.ceil(group.length / Math.ceil(group.length / fit));
    samples.style.setProperty("grid-template-columns", `repeat(${columns}, minmax(0, 1fr))`);
  }
  function go(to) { at = Math.min(Math.max(to, 0), found.length - 1); show(); }
  before.addEventListener("click", () => go(at - 1));
  after.addEventListener("click", () => go(at + 1));
  slider.addEventListener("input", () => go(Number(slider.value)));
  order.addEventListener("change", show);
  search.addEventListener("input", () => {
    const wanted = search.value.toLowerCase();
    const has = (record) => `${record.prompt}\n${record.completion}\n${record.answer ?? ""}`.toLowerCase().includes(wanted);
    found = run.groups.filter((group) => group.some(has));
    go(found.length - 1);
  });
  document.addEventListener("keydown", (event) => {
    if (["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) return;
    if (event.key === "ArrowLeft") go(at - 1);
    if (event.key === "ArrowRight") go(at + 1);
  });
  go(found.length - 1);
}

function configuration() {
  const section = document.getElementById("config");
  section.hidden = !run.config;
  section.querySelector("pre").textContent = run.config;
}

header();
tiles();
charts();
trajectories();
configuration();
