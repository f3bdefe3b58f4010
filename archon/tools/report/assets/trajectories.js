// Viewer of sampled trajectories: a list to search, filter and sort, next to the group of the selected trajectory.

// Lower bounds of the logprob classes: p = 0.9, 0.5, 0.2, 0.05 and 0.01.
const LOGPROB_CLASSES = [-0.105, -0.693, -1.609, -2.996, -4.605];
const ROWS = 200; // list rows added at a time
const COLORED = 20000; // maximum colored tokens; further answers are plain text

const ORDERS = {
  newest: ["newest step first", (r) => -value(r.step)],
  oldest: ["oldest step first", (r) => value(r.step)],
  best: ["highest reward first", (r) => -value(r.reward)],
  worst: ["lowest reward first", (r) => value(r.reward)],
  advantage: ["highest advantage first", (r) => -value(r.advantage)],
  disadvantage: ["lowest advantage first", (r) => value(r.advantage)],
  longest: ["longest first", (r) => -lengthOf(r)],
  shortest: ["shortest first", (r) => lengthOf(r)],
};

function value(number) {
  return number === null || number === undefined || number === "" ? NaN : Number(number);
}

function lengthOf(record) {
  return record.length === undefined ? String(record.completion ?? "").length : value(record.length);
}

// Stable sort; items without a number come last in every order.
function sorted(items, order) {
  const keyOf = ORDERS[order][1];
  const keyed = items.map((item) => [keyOf(item.record), item]);
  keyed.sort(([a], [b]) => (Number.isNaN(a) ? (Number.isNaN(b) ? 0 : 1) : Number.isNaN(b) ? -1 : a - b));
  return keyed.map(([, item]) => item);
}

function logprobClass(logprob) {
  const index = LOGPROB_CLASSES.findIndex((end) => logprob >= end);
  return index < 0 ? LOGPROB_CLASSES.length : index;
}

function percent(logprob) {
  return `${Number((100 * Math.exp(logprob)).toPrecision(3))} %`;
}

// Description of token i.
function reading(record, i) {
  const parts = [`token ${i + 1} of ${record.tokens.length}`, JSON.stringify(record.tokens[i])];
  const logprob = record.logprobs[i];
  parts.push(logprob === null ? "model input, not trained" : `logprob ${logprob}, p = ${percent(logprob)}`);
  if (record.turn_ids && record.turn_ids[i] >= 0) parts.push(`turn ${record.turn_ids[i] + 1}`);
  if (logprob !== null) {
    const version = record.versions ? record.versions[i] : record.version;
    if (version !== undefined && version !== null) parts.push(`version ${version}`);
  }
  return parts.join(" · ");
}

// Answer token by token; pointer and arrow keys pass the description of a token to `tell`.
function tokenText(record, tell) {
  const text = make("div", {
    class: "text tokens", tabindex: 0, role: "group",
    "aria-label": `answer of ${record.tokens.length} tokens; left and right arrow keys read them one by one`,
  });
  const hasParts = record.turn_ids !== undefined || record.logprobs.includes(null);
  let part = null, version = null;
  record.tokens.forEach((token, i) => {
    const isInput = record.logprobs[i] === null;
    const now = isInput ? -1 : record.turn_ids ? record.turn_ids[i] : 0;
    if (hasParts && now !== part) {
      text.append(make("span", { class: "turn" }, isInput ? "model input, not trained" : `turn ${now + 1}`));
      part = now;
    }
    if (record.versions && !isInput && record.versions[i] !== version) {
      version = record.versions[i];
      const title = `from here on, weights of version ${version}`;
      text.append(make("span", { class: "version", title }, `v${version}`));
    }
    const kind = isInput ? "token input" : `token p${logprobClass(record.logprobs[i])}`;
    text.append(make("span", { class: kind, "data-token": i }, token));
  });

  let current = null;
  function point(element) {
    if (current) current.classList.remove("current");
    current = element;
    if (!element) return;
    element.classList.add("current");
    const words = reading(record, Number(element.dataset.token));
    element.title = words;
    tell(words);
  }
  text.addEventListener("pointerover", (event) => {
    const element = event.target.closest(".token");
    if (element) point(element);
  });
  text.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const i = current ? Number(current.dataset.token) + by : 0;
    const next = text.querySelector(`[data-token="${i}"]`);
    if (next) {
      point(next);
      next.scrollIntoView({ block: "nearest" });
    }
  });
  return text;
}

function legend() {
  const ends = LOGPROB_CLASSES.map((end) => `≥ ${end.toFixed(1)}`.replace("-", "−"));
  const swatches = [...ends, "below"].map((text, i) => make("span", { class: `token p${i}` }, text));
  return make("div", { class: "scale" }, make("span", {}, "logprob of a token"), ...swatches,
    make("span", { class: "token input" }, "input, not trained"));
}

function answerCard(record, best, worst, colored, tell) {
  const differ = best > worst, reward = value(record.reward);
  const rank = differ && reward === best ? " best" : differ && reward === worst ? " worst" : "";
  const chips = [make("span", { class: "chip reward" }, `reward ${number(record.reward)}`)];
  const chip = (text) => chips.push(make("span", { class: "chip" }, text));
  if (record.rewards) for (const [name, part] of Object.entries(record.rewards)) chip(`${name} ${number(part)}`);
  if (record.advantage !== undefined) chip(`advantage ${number(record.advantage)}`);
  if (record.length !== undefined) chip(`${number(record.length)} tokens`);
  if (record.stop_reason) chip(String(record.stop_reason));
  if (record.turn_ids) chip(`${Math.max(...new Set(record.turn_ids)) + 1} turns`);
  if (record.versions) {
    const known = [...new Set(record.versions)].filter((version) => version >= 0);
    chip(`versions ${Math.min(...known)}–${Math.max(...known)}`);
  } else if (record.version !== undefined) chip(`version ${record.version}`);
  if (record.tokens_in_all) chip(`first ${number(record.tokens.length)} of ${number(record.tokens_in_all)} tokens`);
  let text;
  if (record.tokens && colored) text = tokenText(record, tell);
  else if (record.completion) text = make("div", { class: "text", tabindex: 0 }, String(record.completion));
  else text = make("div", { class: "empty" }, "empty answer");
  return make("article", { class: "sample" + rank }, make("div", { class: "chips" }, ...chips), text);
}

function choice(label, options) {
  const entries = options.map(([key, text]) => make("option", { value: key }, text));
  const select = make("select", { "aria-label": label }, ...entries);
  select.hidden = options.length < 3; // a single value needs no filter
  return select;
}

// Filters by the extremes of a number over all answers: [select, function that returns whether an item matches].
function extremes(label, items, numberOf, low, high, edges) {
  const numbers = items.map((item) => numberOf(item.record)).filter((x) => !Number.isNaN(x)).sort((a, b) => a - b);
  const [least, most] = numbers.length ? edges(numbers) : [NaN, NaN];
  const options = least < most ? [["high", high(most)], ["low", low(least)]] : [];
  const select = choice(label, [["", `any ${label}`], ...options]);
  return [select, (item) => !select.value ||
    (select.value === "high" ? numberOf(item.record) >= most : numberOf(item.record) <= least)];
}

function trajectories() {
  const section = document.getElementById("trajectories");
  section.append(make("h2", {}, "Sampled trajectories"));
  if (run.groups.length === 0) {
    section.append(make("div", { class: "empty" }, "This run has no trajectories."));
    return;
  }
  const items = run.groups.flatMap((group) => group.map((record) => ({ record, group, text: null })));
  // Fields shared by all answers to a prompt are stored with the first answer.
  const shared = (item, name) => item.record[name] ?? item.group[0][name];
  const textOf = (item) => item.text ??=
    [shared(item, "prompt"), item.record.completion, (item.record.tokens ?? []).join(""), shared(item, "answer")]
      .map((part) => part ?? "").join("\n").toLowerCase();
  const distinct = (name) => [...new Set(items.map((item) => item.record[name]).filter((key) => key !== undefined))];

  const search = make("input", { type: "search", placeholder: "search prompts and answers", "aria-label": "search" });
  const option = (key, text) => [JSON.stringify(key), text];
  const splits = choice("split", [["", "all splits"], ...distinct("split").map((key) => option(key, String(key)))]);
  const stepOptions = distinct("step").map((key) => option(key, `step ${number(key)}`));
  const steps = choice("step", [["", "all steps"], ...stepOptions]);
  const [rewards, rewardMatches] = extremes("reward", items, (record) => value(record.reward),
    (least) => `lowest reward, ${number(least)}`, (most) => `highest reward, ${number(most)}`,
    (numbers) => [numbers[0], numbers[numbers.length - 1]]);
  const [lengths, lengthMatches] = extremes("length", items, lengthOf,
    (least) => `shortest quarter, up to ${number(least)}`, (most) => `longest quarter, from ${number(most)}`,
    (numbers) => [0.25, 0.75].map((part) => numbers[Math.floor(part * (numbers.length - 1))]));
  const endOptions = distinct("stop_reason").map((key) => option(key, `ended by ${key}`));
  const ends = choice("end", [["", "any end"], ...endOptions]);
  const order = make("select", { "aria-label": "order" },
    ...Object.entries(ORDERS).map(([key, [text]]) => make("option", { value: key }, text)));
  const count = make("span", { class: "where", "aria-live": "polite" });
  const list = make("ol", { class: "list", "aria-label": "trajectories" });
  const view = make("div", { class: "view" });
  const told = make("div", { class: "reading", "aria-live": "polite" });
  const tell = (words) => { told.textContent = words; };
  section.append(make("p", { class: "note" }, run.selection),
    make("div", { class: "bar" }, search, splits, steps, rewards, lengths, ends, order, count),
    make("div", { class: "browse" }, list, view));

  let matches = [], shown = 0, chosen = null, promptOpen = null;
  const buttons = () => [...list.querySelectorAll("button.row")];

  function row(item, i) {
    const { record } = item;
    const preview = String(record.completion || "").slice(0, 120).replace(/\s+/g, " ") || "empty answer";
    const facts = [`step ${number(record.step)}`, `reward ${number(record.reward)}`];
    if (record.advantage !== undefined) facts.push(`advantage ${number(record.advantage)}`);
    if (record.length !== undefined) facts.push(`${number(record.length)} tokens`);
    const button = make("button", { type: "button", class: "row", tabindex: i === 0 ? 0 : -1 },
      make("span", { class: "facts" }, facts.join(" · ")),
      make("span", { class: "preview" }, preview));
    button.addEventListener("click", () => choose(i));
    return make("li", {}, button);
  }

  function addRows() {
    list.querySelector(".more")?.remove();
    const until = Math.min(shown + ROWS, matches.length);
    list.append(...matches.slice(shown, until).map((item, i) => row(item, shown + i)));
    shown = until;
    if (shown === matches.length) return;
    const more = make("button", { type: "button" }, `show ${Math.min(ROWS, matches.length - shown)} more`);
    more.addEventListener("click", () => { const first = shown; addRows(); buttons()[first].focus(); });
    list.append(make("li", { class: "more" }, more));
  }

  function choose(i) {
    const rows = buttons();
    rows.forEach((button, j) => {
      button.tabIndex = j === i ? 0 : -1;
      if (j === i) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    });
    chosen = matches[i];
    showGroup();
  }

  function promptBox(item) {
    const prompt = String(shared(item, "prompt") ?? "");
    const heading = make("summary", {}, `prompt (${number(prompt.length)} characters)`);
    const box = make("details", { class: "prompt" }, heading, make("div", { class: "text", tabindex: 0 }, prompt));
    const images = (shared(item, "images") ?? []).map((url, i) => url === null
      ? make("div", { class: "label" }, `image ${i + 1} is not shown`)
      : make("img", { class: "image", src: url, alt: `image ${i + 1} of the prompt` }));
    if (images.length) box.append(make("div", { class: "images" }, ...images));
    box.open = promptOpen ?? (prompt.length <= 800 || images.length > 0);
    heading.addEventListener("click", () => { promptOpen = !box.open; });
    const answer = shared(item, "answer");
    if (answer !== undefined && answer !== null) {
      box.append(make("div", { class: "label" }, "expected"), make("div", { class: "text" }, String(answer)));
    }
    return box;
  }

  function showGroup() {
    tell("Point at a token, or move over an answer's tokens with the arrow keys.");
    if (!chosen) {
      view.replaceChildren();
      return;
    }
    const { group, record } = chosen;
    const rewards = group.map((other) => value(other.reward)).filter((reward) => !Number.isNaN(reward));
    const best = Math.max(...rewards), worst = Math.min(...rewards);
    let left = COLORED;
    const cards = sorted(group.map((other) => ({ record: other })), order.value)
      .sort((a, b) => (b.record === record) - (a.record === record))
      .map(({ record: other }) => {
        const fits = other.tokens !== undefined && (other === record || other.tokens.length <= left);
        if (fits) left -= other.tokens.length;
        const card = answerCard(other, best, worst, fits, tell);
        if (other === record) card.classList.add("chosen");
        return card;
      });
    const title = `step ${number(record.step)}${record.split ? ` (${record.split})` : ""}, ${group.length} answers`;
    const parts = [make("h3", {}, title), promptBox(chosen)];
    if (group.some((other) => other.tokens)) parts.push(legend(), told);
    const samples = make("div", { class: "samples" }, ...cards);
    view.replaceChildren(...parts, samples);
    // Rows of equal length: eight answers as 4 + 4, not 5 + 3.
    const fit = Math.max(1, Math.floor((samples.clientWidth + 12) / 262));
    const columns = Math.ceil(group.length / Math.ceil(group.length / fit));
    samples.style.setProperty("grid-template-columns", `repeat(${columns}, minmax(0, 1fr))`);
  }

  function refresh() {
    const query = search.value.toLowerCase();
    matches = sorted(items.filter((item) =>
      (!splits.value || JSON.stringify(item.record.split) === splits.value) &&
      (!steps.value || JSON.stringify(item.record.step) === steps.value) &&
      (!ends.value || JSON.stringify(item.record.stop_reason) === ends.value) &&
      rewardMatches(item) && lengthMatches(item) &&
      (!query || textOf(item).includes(query))), order.value);
    count.textContent = `${number(matches.length)} of ${number(items.length)} match`;
    shown = 0;
    list.replaceChildren();
    addRows();
    choose(0);
  }

  list.addEventListener("keydown", (event) => {
    const rows = buttons(), at = rows.indexOf(document.activeElement);
    const to = { ArrowUp: at - 1, ArrowDown: at + 1, Home: 0, End: rows.length - 1 }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    if (!rows[to]) return;
    rows[to].focus();
    choose(to);
  });
  let waiting;
  search.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(refresh, 120); });
  for (const select of [splits, steps, rewards, lengths, ends, order]) select.addEventListener("change", refresh);
  refresh();
}
