"use strict";
// Predicts, while sliders move, what `grasp predict` says of the same weights. The formula is that of
// grasp.predict.slice_model.SliceFormula: f weights of the slices, n their rows, u = f or 1 - f by the side.
(() => {
  const root = document.getElementById("whatif-app");
  if (!root) return;
  const { labels } = JSON.parse(document.getElementById("whatif-data").textContent);
  const $ = (id) => document.getElementById(id);
  const MINUS = "\u2212", WHOLE = 100, NAMED = 3;

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

  function utilities(model, f) {
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
      return c * relevance + c * c * geometry - model.constant[t];
    });
  }

  // ------------------------------------------------------------------------------ intervals, what was covered

  function between(grid, values, x) {
    // linear between the places of the grid, and beyond its ends
    let k = 1;
    while (k < grid.length - 1 && grid[k] < x) k += 1;
    const width = grid[k] - grid[k - 1];
    const share = width > 0 ? (x - grid[k - 1]) / width : 0;
    return values[k - 1] + share * (values[k] - values[k - 1]);
  }

  function outside(model, f, predicted) {
    const rows = model.slices.map((slice) => slice.rows), total = rows.reduce((sum, x) => sum + x, 0);
    const kept = dot(f, rows), share = kept / total, { least, most, distance } = model.nats;
    const percent = (x) => (100 * x).toFixed(1) + " %", short = (x) => signed(x, Math.abs(x) >= 1 ? 1 : 2);
    const parts = [], beyond = model.targets.flatMap((name, t) => {
      const [low, high] = model.nats.predicted[t] ?? [-Infinity, Infinity], v = predicted[t];
      const slack = 1e-9 * Math.max(Math.abs(low), Math.abs(high));
      return v < low - slack || v > high + slack
        ? [`${name} is predicted ${short(v)}, the retrained subsets ${short(low)} to ${short(high)}`] : [];
    });
    if (beyond.length > NAMED) beyond.splice(NAMED, Infinity, `and ${beyond.length - NAMED} more targets`);
    if (share < least - 1e-9 || share > most + 1e-9)
      parts.push(`it keeps ${percent(share)} of the rows, the retrained subsets ${percent(least)} to ${percent(most)}`);
    const far = Object.entries(distance).map(([half, reach]) => {
      const found = form(centred(model, f), model.gram[half]) / (kept * kept);
      return found > reach * (1 + 1e-9) ? Math.sqrt(found / reach) : 0;
    });
    const times = Math.max(0, ...far);
    if (times) parts.push(`its mean sketch is ${times.toFixed(1)} times as far from the corpus as any of them`);
    return [...parts, ...beyond].join("; ");
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
    if (off.length === percent.length) return "";
    if (!off.length && on.length === percent.length) flags = "--keep true";
    else if (off.length + on.length === percent.length)
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
        element("td", { className: "num" }), element("td", { className: "num wide" })));
    });
    const nats = $("whatif-nats");
    nats.textContent = model.nats ? `Below each change: expected change of the realized utility, ${model.nats.title}.` : "";
    nats.hidden = !model.nats;
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
    const changes = kept ? utilities(model, f).map((v, t) => v - model.whole[t]) : model.targets.map(() => NaN);
    results(model, changes);
    const warning = kept && model.nats && kept < all("rows") ? outside(model, f, changes.map((x, t) => x + model.whole[t])) : "";
    $("whatif-warning").hidden = !warning;
    $("whatif-warning").textContent = warning ? `Outside of what was retrained: ${warning}. Trust the numbers less.` : "";
    $("whatif-command").textContent = command(model, percent) || "# nothing is kept";
    speak(model, changes, kept / all("rows"));
  }

  function results(model, changes) {
    const most = Math.max(1, ...changes.filter(Number.isFinite).map(Math.abs));
    [...$("whatif-results").rows].forEach((row, t) => {
      const [, bar, change, utility] = row.cells, x = changes[t], known = Number.isFinite(x);
      row.dataset.target = model.targets[t];
      row.dataset.change = known ? x : "";
      row.dataset.utility = known ? x + model.whole[t] : "";
      const mark = bar.firstChild.firstChild, width = known ? (50 * Math.abs(x)) / most : 0;
      mark.className = x < 0 ? "down" : "";
      mark.style.width = `${width}%`;
      mark.style.left = `${x < 0 ? 50 - width : 50}%`;
      change.textContent = known ? signed(x) : "\u2013";
      utility.textContent = known ? signed(x + model.whole[t]) : "\u2013";
      const line = known ? model.nats?.lines[t] : null;
      if (line) {
        const [e, low, high] = ["expected", "low", "high"].map((name) => signed(between(line.change, line[name], x), 4));
        change.append(element("span", { className: "nats" }, `${e} [${low}, ${high}] nats`));
      }
    });
  }

  function speak(model, changes, share) {
    clearTimeout(spoken);
    spoken = setTimeout(() => {
      const said = model.targets.map((name, t) => `${name} ${Number.isFinite(changes[t]) ? signed(changes[t], 2) : "unknown"}`);
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
