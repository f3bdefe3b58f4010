function table(heads, rows) {
  const row = (cells, tag) => make("tr", {}, ...cells.map((cell) => make(tag, {}, cell)));
  return make("div", { class: "wide" }, make("table", {}, make("thead", {}, row(heads, "th")),
    make("tbody", {}, ...rows.map((cells) => row(cells, "td")))));
}

function section(title, note, ...content) {
  const made = make("section", { "aria-label": title }, make("h2", {}, title));
  if (note) made.append(make("p", { class: "note" }, note));
  made.append(...content);
  return made;
}

function prompts(entries) {
  return entries.map(({ split, prompt, answers }) => {
    const [before, after] = answers.map((answer) => number(answer.reward));
    const cards = answers.map((answer, i) => make("article", { class: "sample" },
      make("div", { class: "chips" }, make("span", { class: "chip reward" }, `reward ${number(answer.reward)}`),
        make("span", { class: "chip" }, `${run.runs[i]}, step ${number(answer.step)}`),
        make("span", { class: "chip" }, answer.count === 1 ? "one answer" : `the first of ${number(answer.count)}`)),
      make("div", { class: "text" }, answer.text)));
    const title = `${before} → ${after}: ${prompt.replace(/\s+/g, " ").slice(0, 100)}`;
    const inner = make("div", { class: "inner" }, make("p", { class: "note" }, `split ${split}`),
      make("div", { class: "text" }, prompt), make("div", { class: "samples" }, ...cards));
    return make("details", {}, make("summary", {}, title), inner);
  });
}

const facts = [...run.paths, `written ${run.written}`].map((fact) => make("span", {}, fact));
document.getElementById("header").append(make("h1", {}, run.name), make("div", { class: "facts" }, ...facts));
document.getElementById("summary").before(section("What was trained", "", table(["", ...run.runs], run.facts)));
document.getElementById("charts").append(...run.panels.map((panel) => chart(panel, 460, 220)));
const end = document.getElementById("config");
const alone = run.alone.map((names, i) => (names.length ? `Only ${run.runs[i]} has ${names.join(", ")}.` : ""));
if (alone.join("")) end.before(make("p", { class: "note" }, alone.filter(Boolean).join(" ")));
end.before(section("Settings that differ", run.settings.length ? "" : "None, the run's folder aside.",
  ...(run.settings.length ? [table(["setting", ...run.runs], run.settings)] : [])));
const same = run.prompts - run.n_better - run.n_worse;
end.before(section("Prompts", run.prompts
  ? `Both runs answered ${number(run.prompts)} prompts. At the last step of each prompt, the mean reward of ${run.runs[1]} is ` +
    `higher for ${number(run.n_better)}, lower for ${number(run.n_worse)} and equal for ${number(same)}.`
  : "The runs have no prompt in common."));
for (const [title, entries, count] of [["Better", run.better, run.n_better], ["Worse", run.worse, run.n_worse]]) {
  if (!count) continue;
  const note = entries.length < count ? `The ${number(entries.length)} largest differences of ${number(count)}.` : "";
  end.before(section(`${title} in ${run.runs[1]}`, note, ...prompts(entries)));
}
for (const name of ["tiles", "further", "trajectories", "config"]) document.getElementById(name).hidden = true;
