function barChart(panel) {
  const row = 26, left = 250, right = 70, width = 700, height = panel.bars.length * row + 8;
  const most = Math.max(...panel.bars.map((bar) => bar.max)) || 1;
  const x = (value) => left + (value / most) * (width - left - right);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": panel.title });
  panel.bars.forEach((bar, i) => {
    const y = 4 + i * row;
    svg.append(
      make("text", { x: left - 8, y: y + 15, "text-anchor": "end" }, bar.name),
      make("rect", { x: left, y: y + 3, width: Math.max(x(bar.value) - left, 1), height: row - 8, fill: "#0072B2" }),
      make("text", { x: x(bar.max) + 6, y: y + 15 }, number(bar.value)),
    );
    if (bar.max > bar.min) {
      svg.append(make("line", { class: "spread", x1: x(bar.min), x2: x(bar.max), y1: y + 12, y2: y + 12 }));
    }
  });
  const title = make("h3", {}, panel.title, " ", make("span", { class: "unit" }, panel.unit));
  return make("article", { class: "chart" }, title, svg);
}
