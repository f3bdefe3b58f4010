function timeline(lanes) {
  const row = 26, left = 60, width = 1200, height = lanes.length * row + 24;
  const last = Math.max(...lanes.flat().map(([, start, length]) => start + length)) || 1;
  const x = (ms) => left + (ms / last) * (width - left - 10);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "A step of every rank" });
  lanes.forEach((lane, rank) => {
    const y = 2 + rank * row;
    svg.append(make("text", { x: left - 8, y: y + 15, "text-anchor": "end" }, `rank ${rank}`));
    for (const [name, start, length, fill] of lane) {
      const title = make("title", {}, `${name}, ${number(length)} ms from ${number(start)} ms`);
      const size = { x: x(start), y: y + 2, width: Math.max(x(start + length) - x(start), 0.2), height: row - 5, fill };
      svg.append(make("rect", size, title));
    }
  });
  for (const tick of niceTicks(0, last, 8)) {
    svg.append(make("text", { x: x(tick), y: height - 5, "text-anchor": "middle" }, `${number(tick)} ms`));
  }
  const legend = make("div", { class: "legend" });
  for (const [name, fill] of new Map(lanes.flat().map(([name, , , fill]) => [name, fill]))) {
    const swatch = make("i");
    swatch.style.background = fill;
    legend.append(make("span", {}, swatch, name));
  }
  return make("div", { class: "chart" }, make("h3", {}, "A step of every rank"), svg, legend);
}

function points() {
  const section = document.getElementById("further");
  for (const point of run.points) {
    const title = point.status === "ok" ? point.name : `${point.name}: ${point.status}`;
    const shown = make("details", point.lanes.length ? { open: "" } : {}, make("summary", {}, title));
    if (point.lanes.length) shown.append(timeline(point.lanes));
    shown.append(make("pre", {}, point.text));
    section.before(shown);
  }
  for (const name of ["further", "config", "tiles", "trajectories"]) document.getElementById(name).hidden = true;
}

const facts = [run.command, run.where, run.written].map((fact) => make("span", {}, fact));
document.getElementById("header").append(make("h1", {}, run.name), make("div", { class: "facts" }, ...facts));
const drawn = run.bars.filter((panel) => panel.bars.length);
document.getElementById("charts").append(...drawn.map(barChart));
points();
