function niceTicks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const ticks = [];
  const first = Math.ceil(low / step);
  // Bounded by a count: beyond 2^53, adding a step may not change the number.
  for (let i = 0; i <= count + 1 && (first + i) * step <= high + step * 1e-9; i += 1) ticks.push((first + i) * step);
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

// Index of the nearest step, by bisection.
function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle; else high = middle;
  }
  return step - steps[low] < steps[high] - step ? low : high;
}

function chart(panel, width, height) {
  const left = 46, right = 18, top = 10, bottom = 22;
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
    const stroke = run.colors[index % run.colors.length];
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
    swatch.style.background = run.colors[index % run.colors.length];
    const value = make("b");
    legend.append(make("span", { title: series.about }, swatch, series.title, value));
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
  return make("article", { class: "chart" }, make("h3", panel.about ? { title: panel.about } : {}, panel.title, ...unit), svg, legend);
}
