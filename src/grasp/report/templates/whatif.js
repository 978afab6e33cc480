"use strict";
// Predicts, while sliders move, what `grasp predict` says of the same weights: the formula of
// grasp.predict.slice_formula with its coefficients, f weights of the slices, n their rows, u = f or 1 - f by the side.
// For an additive protocol it is sum_g f_g relevance_g / sum_g f_g n_g. Intervals: grasp.predict.intervals.
(() => {
  const root = document.getElementById("whatif-app");
  if (!root) return;
  const { labels, nats } = JSON.parse(document.getElementById("whatif-data").textContent);
  const $ = (id) => document.getElementById(id);
  const MINUS = "\u2212", WHOLE = 100;

  // ------------------------------------------------------------------------------------------ prediction

  const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);
  const form = (u, gram) => u.reduce((sum, x, g) => sum + x * dot(gram[g], u), 0);

  function factor(model, f) {
    if (model.weighting === "count") return 1;
    const rows = model.slices.map((slice) => slice.rows);
    const mass = model.side === "retained" ? dot(f, rows) : dot(f.map((x) => Math.abs(1 - x)), rows);
    return mass > 0 ? 1 / mass : 0;
  }

  function centred(model, u) {
    const rows = model.slices.map((slice) => slice.rows);
    const shift = dot(u, rows) / rows.reduce((sum, x) => sum + x, 0);
    return u.map((x) => x - shift);
  }

  function changes(model, f) {
    const c = factor(model, f);
    const u = model.side === "retained" ? f : f.map((x) => 1 - x);
    let geometry = 0;
    for (const [half, weights] of Object.entries(model.quadratic)) {
      if (weights.raw) geometry += weights.raw * form(u, model.gram[half]);
      if (weights.cent) geometry += weights.cent * form(centred(model, u), model.gram[half]);
      if (weights.own) geometry += weights.own * dot(u.map((x) => x * x), model.norm[half]);
    }
    return model.targets.map((_, t) => {
      const relevance = dot(f, model.relevance.map((row) => row[t])) - model.taken[t];
      return c * relevance + c * c * geometry - model.corpus[t];
    });
  }

  // ------------------------------------------------------------------------------ intervals, what was covered

  function distances(model, f) {
    // squared, from the corpus: of the weights, and of the mean sketches
    const rows = model.slices.map((slice) => slice.rows), kept = dot(f, rows);
    const all = rows.reduce((sum, x) => sum + x, 0), found = {};
    for (const measure of Object.keys(nats.reach)) {
      if (measure === "weights") found[measure] = all * dot(f.map((x) => x * x), rows) / (kept * kept) - 1;
      else if (model.gram[measure]) found[measure] = form(centred(model, f), model.gram[measure]) / (kept * kept);
    }
    return found;
  }

  function largest(distance, against) {
    const ratios = Object.entries(distance).map(([measure, d]) => d / nats.reach[measure][against]);
    return Math.max(0, ...ratios.filter(Number.isFinite));
  }

  function outside(model, distance, predicted) {
    const times = Math.sqrt(largest(distance, "most")), parts = [];
    if (times > 1 + 1e-6) parts.push(`this is ${times.toFixed(1)} times as far from the corpus as any run`);
    const beyond = model.targets.filter((_, t) => {
      const line = nats.lines[t];
      return line && (predicted[t] < line.least - 1e-9 || predicted[t] > line.most + 1e-9);
    });
    if (beyond.length) parts.push(`the predicted change of ${beyond.join(", ")} is larger than that of any run`);
    return parts.join("; ");
  }

  // ---------------------------------------------------------------------------------------- command, link

  function quoted(text) {
    if (/^[A-Za-z0-9_@%+=:,.\/-]+$/.test(text)) return text;
    return /["$`\\!]/.test(text) ? "'" + text.replaceAll("'", `'"'"'`) + "'" : '"' + text + '"';
  }

  function command(model, percent) {
    const either = (members) => members.map((g) => model.slices[g].expression).join(" OR ");
    const where = (test) => percent.map((p, g) => (test(p) ? g : -1)).filter((g) => g >= 0);
    const off = where((p) => p === 0), on = where((p) => p === WHOLE);
    let flags;
    if (off.length === percent.length) return "# nothing is kept";
    if (on.length === percent.length) return "# the whole corpus is kept: no change";
    if (off.length + on.length === percent.length)
      flags = on.length < off.length ? `--keep ${quoted(either(on))}` : `--drop ${quoted(either(off))}`;
    else
      flags = [...new Set(percent)].filter((p) => p !== WHOLE).sort((a, b) => a - b)
        .map((p) => `--weight ${quoted(`${either(where((q) => q === p))}: ${p / WHOLE}`)}`).join(" ");
    return [model.before, flags, model.after].filter(Boolean).join(" ");
  }

  function fragment(model, percent) {
    const state = new URLSearchParams({ by: model.label });
    percent.forEach((p, g) => { if (p !== WHOLE) state.set("." + model.slices[g].name, p); });
    return "#" + state.toString();
  }

  function parsed(hash) {
    const state = new URLSearchParams(hash.replace(/^#/, ""));
    const place = labels.findIndex((model) => model.label === state.get("by"));
    if (place < 0) return null;
    const percent = labels[place].slices.map((slice) => {
      const value = Number(state.get("." + slice.name) ?? WHOLE);
      return Number.isFinite(value) ? Math.min(WHOLE, Math.max(0, Math.round(value))) : WHOLE;
    });
    return { place, percent };
  }

  // ------------------------------------------------------------------------------------------------- page

  const signed = (x, digits = 3) => {
    const text = Math.abs(x).toFixed(digits);
    return (Number(text) === 0 ? "" : x < 0 ? MINUS : "+") + text;
  };
  const grouped = (x) => Math.round(x).toLocaleString("en-US");
  const states = labels.map((model) => model.slices.map(() => WHOLE));
  const before = labels.map((model) => model.slices.map(() => WHOLE)); // where a switch goes back to
  let now = 0, rows = [], spoken = 0, planned = 0;

  function element(tag, properties = {}, ...children) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  }

  function breakable(text) {
    // a place to break after every underscore or slash
    return text.split(/(?<=[_\/])/).flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part]));
  }

  function build() {
    const model = labels[now];
    const list = $("whatif-sliders");
    list.replaceChildren();
    rows = [];
    for (const g of model.order) {
      const slice = model.slices[g], id = `slice-${g}`;
      const box = element("input", { type: "checkbox", id, checked: true });
      const range = element("input", { type: "range", min: 0, max: WHOLE, step: 1, value: WHOLE });
      range.setAttribute("aria-label", `percent of ${slice.name} kept`);
      box.setAttribute("aria-label", `keep ${slice.name}`);
      const label = element("label", { htmlFor: id }, slice.name + " ", element("small", {}, `${grouped(slice.rows)} rows`));
      const shown = element("output");
      const line = element("li", {}, box, label, range, shown);
      range.addEventListener("input", () => set(g, Number(range.value)));
      box.addEventListener("change", () => set(g, box.checked ? before[now][g] || WHOLE : 0));
      list.append(line);
      rows[g] = { box, range, shown, line };
    }
    const body = $("whatif-results");
    body.replaceChildren();
    model.targets.forEach((name) => {
      body.append(element("tr", {},
        element("th", { scope: "row" }, ...breakable(name)),
        element("td", { className: "bar" }, element("span", { className: "gauge" }, element("i"))),
        element("td", { className: "num" })));
    });
    $("whatif-nats").textContent = nats ? `Below each change: ${nats.title}.` : "";
    $("whatif-nats").hidden = !nats;
  }

  function set(g, percent) {
    if (percent > 0) before[now][g] = percent;
    states[now][g] = percent;
    refresh();
  }

  function refresh() {
    const model = labels[now], percent = states[now], f = percent.map((p) => p / WHOLE);
    percent.forEach((p, g) => {
      const row = rows[g];
      row.range.value = p;
      row.box.checked = p > 0;
      row.line.classList.toggle("off", p === 0);
      row.shown.textContent = `${p} %`;
    });
    const size = (name) => dot(f, model.slices.map((slice) => slice[name]));
    const all = (name) => model.slices.reduce((sum, slice) => sum + slice[name], 0);
    const kept = size("rows");
    $("whatif-kept").textContent = kept
      ? `${grouped(kept)} of ${grouped(all("rows"))} rows (${((100 * kept) / all("rows")).toFixed(1)} %), `
        + `${grouped(size("tokens"))} tokens`
      : "Nothing is kept: there is no prediction.";
    const predicted = kept ? changes(model, f) : model.targets.map(() => NaN);
    const distance = kept && nats ? distances(model, f) : null;
    results(model, predicted, distance);
    const warning = distance ? outside(model, distance, predicted) : "";
    $("whatif-warning").hidden = !warning;
    $("whatif-warning").textContent = warning ? `Outside of what the runs covered, so the interval is wider: ${warning}.` : "";
    $("whatif-command").textContent = command(model, percent);
    speak(model, predicted, kept / all("rows"));
  }

  function results(model, predicted, distance) {
    const most = Math.max(1e-9, ...predicted.filter(Number.isFinite).map(Math.abs));
    [...$("whatif-results").rows].forEach((row, t) => {
      const [, bar, change] = row.cells, x = predicted[t], known = Number.isFinite(x);
      row.dataset.target = model.targets[t];
      row.dataset.change = known ? x : "";
      const mark = bar.firstChild.firstChild, width = known && signed(x) !== "0.000" ? (50 * Math.abs(x)) / most : 0;
      mark.className = x < 0 ? "down" : "";
      mark.style.width = `${width}%`;
      mark.style.left = `${x < 0 ? 50 - width : 50}%`;
      change.textContent = known ? signed(x) : "\u2013";
      const line = distance ? nats.lines[t] : null;
      if (line) {
        const expected = line.slope * x;
        const half = line.spread * Math.sqrt((x * x) / line.scatter + largest(distance, "mean"));
        const [e, low, high] = [expected, expected - half, expected + half].map((value) => signed(value, 4));
        change.append(element("span", { className: "nats" }, `${e} [${low}, ${high}] nats`));
      }
    });
  }

  function speak(model, predicted, share) {
    clearTimeout(spoken);
    spoken = setTimeout(() => {
      const said = model.targets.map((name, t) => `${name} ${Number.isFinite(predicted[t]) ? signed(predicted[t], 2) : "unknown"}`);
      $("whatif-says").textContent = `${Math.round(100 * share)} % kept: ${said.join(", ")}`;
    }, 700);
  }

  function link() {
    return location.href.replace(/#.*$/, "") + fragment(labels[now], states[now]);
  }

  async function copy(text, button) {
    let done = true;
    try {
      await navigator.clipboard.writeText(text);
    } catch (error) {
      const area = element("textarea", { value: text });
      document.body.append(area);
      area.select();
      done = document.execCommand("copy");
      area.remove();
      button.focus();
    }
    const label = button.dataset.label ?? button.textContent;
    button.dataset.label = label;
    button.textContent = done ? "Copied" : "Could not copy";
    setTimeout(() => { button.textContent = label; }, 1600);
  }

  function choose(place) {
    now = place;
    $("whatif-label").value = String(place);
    build();
    refresh();
  }

  function remember() {
    // the address follows the sliders, so that it can be sent as it stands
    clearTimeout(planned);
    planned = setTimeout(() => history.replaceState(null, "", fragment(labels[now], states[now])), 250);
  }

  function fromAddress() {
    const found = parsed(location.hash);
    if (!found) return false;
    states[found.place] = found.percent;
    before[found.place] = found.percent.map((p) => p || WHOLE);
    choose(found.place);
    return true;
  }

  function all(percent) {
    states[now].fill(percent);
    if (percent) before[now].fill(percent);
    refresh();
    remember();
  }

  const select = $("whatif-label");
  labels.forEach((model, place) => select.append(element("option", { value: String(place) }, model.title)));
  $("whatif-choice").hidden = labels.length < 2;
  select.addEventListener("change", () => { choose(Number(select.value)); remember(); });
  $("whatif-sliders").addEventListener("input", remember);
  $("whatif-sliders").addEventListener("change", remember);
  $("whatif-all").addEventListener("click", () => all(WHOLE));
  $("whatif-none").addEventListener("click", () => all(0));
  $("whatif-copy").addEventListener("click", (event) => copy($("whatif-command").textContent, event.currentTarget));
  $("whatif-link").addEventListener("click", (event) => copy(link(), event.currentTarget));
  addEventListener("hashchange", fromAddress);
  root.hidden = false;
  if (!fromAddress()) choose(0);
  else $("whatif").scrollIntoView();
})();
