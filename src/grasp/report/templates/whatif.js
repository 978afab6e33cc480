// Predicts, while sliders move, what `grasp predict` says of the same weights: the formula of
// grasp.predict.slices.SliceFormula, f weights of the slices, n their rows:
// sum_g x_g (effect_g + b n_g) / N - b, x the exposures, N the rows kept.
(() => {
  const root = $("whatif-app");
  if (!root) return;
  const { labels, targets } = DATA;
  const WHOLE = 100, MOST = 400;

  // ------------------------------------------------------------------------------------------ prediction

  const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);

  const keptRows = (model, f) => model.slices.reduce((sum, slice, g) => sum + (f[g] > 0 ? slice.rows : 0), 0);

  // grasp.predict.predictor.RepetitionLaw: effective weight of the rows of each slice; 1 if seen once.
  function exposed(model, f, rows, kept) {
    const { repeatWorth } = model.exposure, times = kept / dot(f, rows);
    const seen = (x) => (x <= 1 ? x : 1 - repeatWorth * Math.expm1(-(x - 1) / repeatWorth));
    return f.map((weight) => seen(weight * times));
  }

  function changes(model, percent, f) {
    if (model.priced) return placed(model, model.priced, percent)?.change ?? targets.map(() => NaN);
    const rows = model.slices.map((slice) => slice.rows), kept = keptRows(model, f), x = exposed(model, f, rows, kept);
    const taken = (1 - dot(x, rows) / kept) * model.exposure.anyText;
    return targets.map((_, t) => dot(x, model.effect.map((row) => row[t])) / kept - taken);
  }

  // ------------------------------------------------------------------------------------ what runs expect

  // By target the change, and of runs half of its interval, where the page holds them: at a preset, and where at most
  // one slider is moved, on lines between the places that were computed. Elsewhere null: the command says it.
  function placed(model, held, percent) {
    const { places, alone, presets } = held;
    const given = model.presets.findIndex((preset) => preset.percent.every((p, g) => p === percent[g]));
    if (given >= 0) return presets[given];
    const moved = percent.flatMap((p, g) => (p === WHOLE ? [] : [g]));
    if (moved.length > 1) return null;
    const g = moved[0] ?? 0, k = Math.max(1, places.findIndex((place) => place >= percent[g]));
    const part = (percent[g] - places[k - 1]) / (places[k] - places[k - 1]), [a, b] = alone[g].slice(k - 1, k + 1);
    const between = (name) => a[name]?.map((x, t) => (x === null ? null : x + part * (b[name][t] - x)));
    return { change: between("change"), half: between("half"), beyond: (part > 0.5 ? b : a).beyond };
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
      return Number.isFinite(value) ? Math.min(MOST, Math.max(0, Math.round(value))) : WHOLE;
    });
    return { place, percent };
  }

  // ------------------------------------------------------------------------------------------------ files

  const yaml = (text) => JSON.stringify(text); // a double-quoted scalar
  const FILES = {
    csv: (model, mix) => ["value,now,proposed,times_as_often",
      ...mix.map((one) => [`"${one.name.replaceAll('"', '""')}"`, one.now, one.share, one.times].join(","))].join("\n"),
    datatrove: (model, mix) => ["# datatrove: a reader a value, SamplerFilter(rate: part of its documents) behind it, repeated as often as copies says",
      `${yaml(model.label)}:`, ...mix.map((one) => {
        const copies = Math.max(1, Math.ceil(one.times));
        return `  ${yaml(one.name)}: {rate: ${Number((one.times / copies).toFixed(4))}, copies: ${copies}}`;
      })].join("\n"),
    olmix: (model, mix) => ["# Olmix: weights are shares of tokens, sources named as in data.sources", "mix:",
      ...mix.filter((one) => one.share > 0).map((one) =>
        `  ${yaml(one.name)}: {weight: ${one.ofTokens}, repetition_factor: ${Math.max(1, one.times)}}`)].join("\n"),
    axolotl: (model, mix) => ["# Axolotl: a file a value; set path and type to yours", "datasets:",
      ...mix.flatMap((one) => {
        const part = Math.round(100 * (one.times % 1)), whole = Math.floor(one.times);
        const splits = [...Array(whole).fill("train"), ...(part ? [`train[:${part}%]`] : [])];
        return splits.map((split) => `  - {path: ${yaml(`data/${one.name}.jsonl`)}, type: completion, split: ${yaml(split)}}`);
      })].join("\n"),
  };

  function file(model, f) {
    const all = model.slices.reduce((sum, slice) => sum + slice.rows, 0), kept = dot(f, model.slices.map((slice) => slice.rows));
    const short = (x) => Number(x.toFixed(6));
    const tokens = dot(f, model.slices.map((slice) => slice.tokens));
    const mix = model.slices.map((slice, g) => ({
      name: slice.name, now: short(slice.rows / all), times: f[g], share: kept ? short((f[g] * slice.rows) / kept) : 0,
      ofTokens: tokens ? short((f[g] * slice.tokens) / tokens) : 0,
    }));
    return FILES[$("mix-format").value](model, mix);
  }

  // ------------------------------------------------------------------------------------------------- page

  const states = labels.map((model) => model.slices.map(() => WHOLE));
  const weights = targets.map(() => 1);
  let now = 0, lines = [], spoken = 0, planned = 0;

  function breakable(text) {
    // a place to break after every underscore or slash
    return text.split(/(?<=[_\/])/).flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part]));
  }

  function build() {
    const model = labels[now];
    lines = [];
    $("whatif-sliders").replaceChildren(...model.order.map((g) => {
      const slice = model.slices[g];
      const range = element("input", { type: "range", id: `slice-${g}`, min: 0, max: MOST, step: 1, value: WHOLE });
      range.setAttribute("aria-label", `percent of ${slice.name}`);
      const label = element("label", { htmlFor: range.id }, ...breakable(slice.name));
      const shares = [element("i"), element("i")], shown = element("output");
      const share = element("span", { className: "share" }, ...shares);
      share.setAttribute("aria-hidden", "true");
      range.addEventListener("input", () => { states[now][g] = Number(range.value); refresh(); });
      const line = element("li", {}, label, share, range, shown);
      lines[g] = { range, shown, line, shares };
      return line;
    }));
    $("whatif-presets").replaceChildren(...model.presets.map((preset) => {
      const button = element("button", { type: "button" }, preset.name);
      button.addEventListener("click", () => { states[now] = [...preset.percent]; refresh(); remember(); });
      return button;
    }));
  }

  function buildResults() {
    const line = (name, weight) => element("tr", {}, element("th", { scope: "row" }, ...breakable(name)),
      element("td", { hidden: targets.length === 1 }, weight),
      element("td", { className: "plot" }, element("span", { className: "bar" }, element("i"), element("b"))),
      element("td", {}, element("span", { className: "num" }), element("small", { className: "ci num" })));
    const several = targets.length > 1;
    $("whatif-results").replaceChildren(...targets.map((name, t) => {
      const weight = element("input", { type: "number", min: 0, step: 0.5, value: 1 });
      weight.setAttribute("aria-label", `weight of ${name}`);
      weight.addEventListener("input", () => { weights[t] = Math.max(0, Number(weight.value) || 0); refresh(); });
      return line(name, several ? weight : "");
    }), ...(several ? [Object.assign(line("weighted mean", ""), { className: "mean" })] : []));
  }

  function refresh() {
    const model = labels[now], percent = states[now], f = percent.map((p) => p / WHOLE);
    const size = (name) => dot(f, model.slices.map((slice) => slice[name]));
    const all = (name) => model.slices.reduce((sum, slice) => sum + slice[name], 0);
    const kept = size("rows"), whole = all("rows");
    const shares = model.slices.map((slice, g) => [slice.rows / whole, kept ? (f[g] * slice.rows) / kept : 0]);
    const widest = Math.max(...shares.flat());
    percent.forEach((p, g) => {
      const line = lines[g];
      line.range.value = p;
      line.line.classList.toggle("moved", p !== WHOLE);
      line.shown.textContent = `${p} %`;
      line.shares.forEach((mark, i) => { mark.style.width = `${(100 * shares[g][i]) / widest}%`; });
    });
    $("whatif-kept").textContent = kept
      ? `${grouped(kept)} rows against ${grouped(whole)} (${((100 * kept) / whole).toFixed(1)} %), ${grouped(size("tokens"))} tokens`
      : "Nothing is kept: there is no prediction.";
    const predicted = kept ? changes(model, percent, f) : targets.map(() => NaN);
    results(predicted, kept && model.expected ? placed(model, model.expected, percent) : null);
    $("whatif-command").textContent = command(model, percent);
    $("mix-file").textContent = kept ? file(model, f) : "";
    speak(predicted, kept / whole);
  }

  // In nats where all targets have runs; else in the unit of the formula, and what runs say of some stands below.
  function results(predicted, runs) {
    const known = targets.map((_, t) => runs !== null && runs.change[t] !== null), inNats = known.every(Boolean);
    const ends = (t) => (known[t] ? [runs.change[t] - runs.half[t], runs.change[t] + runs.half[t]] : [NaN, NaN]);
    const lines = predicted.map((x, t) => (inNats ? [runs.change[t], ...ends(t)] : [x, NaN, NaN]));
    if (lines.length > 1) lines.push([weighted(lines.map(([x]) => x)), NaN, NaN]);
    const most = scaleOf(lines.map(([x]) => x));
    [...$("whatif-results").rows].forEach((row, t) => {
      const [, , plot, change] = row.cells, [x, low, high] = lines[t], there = Number.isFinite(x);
      const [from, to] = ends(t), drawn = there && Number(x.toFixed(3)) ? x : 0, moved = drawn !== 0;
      if (t < targets.length) row.dataset.target = targets[t];
      row.dataset.change = t < targets.length && Number.isFinite(predicted[t]) ? predicted[t] : "";
      plot.firstChild.className = `bar ${moved ? sure(from, to) : "unsure"}`;
      const [bar, whisker] = plot.firstChild.children;
      span(bar, Math.min(0, drawn), Math.max(0, drawn), most);
      whisker.hidden = !moved || !Number.isFinite(low);
      if (!whisker.hidden) span(whisker, low, high, most);
      change.firstChild.textContent = there ? signed(x) : "\u2013";
      const said = known[t] ? `[${signed(from)}, ${signed(to)}]` : "";
      change.lastChild.textContent = inNats || !said ? said : `${signed(runs.change[t])} ${DATA.runsUnit} ${said}`;
    });
    $("whatif-warning").hidden = !runs?.beyond;
    $("whatif-warning").textContent = `Beyond the runs, so the interval is wider: ${runs?.beyond}.`;
    $("whatif-unit").textContent = `Change against the whole corpus, ${inNats ? DATA.runsUnit : DATA.plainUnit}`;
    $("whatif-note").textContent = labels[now].priced && !predicted.every(Number.isFinite) && !runs ? "The command below says it."
      : !DATA.runsUnit ? "Grey: without retrained models there is no interval."
      : runs ? `Intervals: ${DATA.title}. Grey: the interval holds zero, or there is none.`
        : `Several sliders are moved: the command below says it in ${DATA.runsUnit}, with an interval.`;
  }

  function weighted(values) {
    const mass = weights.reduce((sum, x) => sum + x, 0);
    return mass ? dot(weights, values) / mass : NaN;
  }

  function speak(predicted, share) {
    clearTimeout(spoken);
    spoken = setTimeout(() => {
      const said = targets.map((name, t) => `${name} ${Number.isFinite(predicted[t]) ? signed(predicted[t], 2) : "unknown"}`);
      $("whatif-says").textContent = `${Math.round(100 * share)} % kept: ${said.join(", ")}`;
    }, 700);
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
    choose(found.place);
    return true;
  }

  function all(percent) {
    states[now].fill(percent);
    refresh();
    remember();
  }

  $("whatif-choice").hidden = labels.length < 2;
  $("whatif-label").addEventListener("change", (event) => { choose(Number(event.target.value)); remember(); });
  $("whatif-sliders").addEventListener("input", remember);
  $("whatif-all").addEventListener("click", () => all(WHOLE));
  $("whatif-none").addEventListener("click", () => all(0));
  $("whatif-link").addEventListener("click", (event) =>
    copy(location.href.replace(/#.*$/, "") + fragment(labels[now], states[now]), event.currentTarget));
  $("mix-format").addEventListener("change", refresh);
  addEventListener("hashchange", fromAddress);
  root.hidden = false;
  buildResults();
  const given = labels.findIndex((model) => model.presets.some((preset) => preset.given));
  if (!fromAddress()) choose(Math.max(0, given)); // the label of the mixture, if there is one
  else $("whatif").scrollIntoView();
})();
