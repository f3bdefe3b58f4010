function header() {
  const facts = [run.path, `written ${run.written}`].map((fact) => make("span", {}, fact));
  document.getElementById("header").append(make("h1", {}, run.name), make("div", { class: "facts" }, ...facts));
}

function summary() {
  const facts = run.summary.flatMap(([title, text]) => [make("dt", {}, title), make("dd", {}, text)]);
  document.getElementById("summary").append(...facts);
}

function tiles() {
  const tile = (label, value, was = "", about = "") =>
    make("div", { class: "tile", title: about }, make("div", { class: "label" }, label), make("div", { class: "value" }, value),
      make("div", { class: "was" }, was));
  const reward = run.panels.find((panel) => panel.title === "Reward");
  const shown = (reward ? reward.series : run.panels.flatMap((panel) => panel.series)).slice(0, 4);
  document.getElementById("tiles").append(
    ...shown.map((s) => tile(s.title, number(s.values[s.values.length - 1]), `at first ${number(s.values[0])}`, s.about)),
    tile("steps", number(run.steps)),
    tile("time", duration(run.seconds)),
  );
}

function charts() {
  document.getElementById("charts").append(...run.panels.map((panel) => chart(panel, 460, 220)));
  const fleet = document.getElementById("fleet");
  fleet.hidden = run.fleet.length === 0;
  fleet.querySelector("div").append(...run.fleet.map((panel) => chart(panel, 460, 220)));
  const further = document.getElementById("further");
  further.hidden = run.further.length === 0;
  further.querySelector("div").append(...run.further.map((panel) => chart(panel, 310, 160)));
}

function configuration() {
  const section = document.getElementById("config");
  section.hidden = !run.config;
  section.querySelector("pre").textContent = run.config;
}

header();
summary();
tiles();
charts();
trajectories();
configuration();
