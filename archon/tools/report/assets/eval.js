const facts = run.facts.map((fact) => make("span", {}, fact));
document.getElementById("header").append(make("h1", {}, run.name), make("div", { class: "facts" }, ...facts));
document.getElementById("charts").append(...run.bars.filter((panel) => panel.bars.length).map(barChart));
for (const name of ["further", "tiles"]) document.getElementById(name).hidden = true;
trajectories();
document.getElementById("config").querySelector("pre").textContent = run.config;
