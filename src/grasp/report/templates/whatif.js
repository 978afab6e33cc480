// Predicts the same changes as `grasp predict` for the weights of the sliders, by the formula of
// grasp.report.payload:
//   sum_g x_g (effect_g + b n_g) / N - b
// where x are the exposures of the slices, n their numbers of rows, N the rows with a weight above 0, and b the value
// of a new row.
(() => {
  const root = $("whatif-app");
  if (!root) return;
  const { labels, targets } = DATA;
  const WHOLE = 100, MAX_PERCENT = 400, TARGET_STEPS = 10;

  // ------------------------------------------------------------------------------------------ prediction

  const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);

  const distinctRows = (model, f) => model.slices.reduce((sum, slice, g) => sum + (f[g] > 0 ? slice.rows : 0), 0);

  // Effective number of times that a row of each slice is seen, with diminishing value of repetitions:
  // grasp.predict.weights.
  function exposures(model, f, rows, nRows) {
    const { repeatWorth } = model.exposure, epochs = nRows / dot(f, rows);
    const effective = (x) => (x <= 1 ? x : 1 - repeatWorth * Math.expm1(-(x - 1) / repeatWorth));
    return f.map((weight) => effective(weight * epochs));
  }

  function changes(model, percent, f) {
    if (model.tabulated) return lookUp(model, model.tabulated, percent)?.change ?? targets.map(() => NaN);
    const rows = model.slices.map((slice) => slice.rows), nRows = distinctRows(model, f);
    const x = exposures(model, f, rows, nRows);
    const repetitionLoss = (1 - dot(x, rows) / nRows) * model.exposure.newRowValue;
    return targets.map((_, t) => dot(x, model.effect.map((row) => row[t])) / nRows - repetitionLoss);
  }

  // ------------------------------------------------------------------------------------ tabulated predictions

  // Change per target and, for runs, half the width of its interval: tabulated for the presets and, on a grid, for a
  // single moved slider, with linear interpolation. null for other mixtures, which only the command can predict.
  function lookUp(model, table, percent) {
    const { grid, single, presets } = table;
    const preset = model.presets.findIndex((candidate) => candidate.percent.every((p, g) => p === percent[g]));
    if (preset >= 0) return presets[preset];
    const moved = percent.flatMap((p, g) => (p === WHOLE ? [] : [g]));
    if (moved.length > 1) return null;
    const g = moved[0] ?? 0, k = Math.max(1, grid.findIndex((point) => point >= percent[g]));
    const part = (percent[g] - grid[k - 1]) / (grid[k] - grid[k - 1]), [a, b] = single[g].slice(k - 1, k + 1);
    const interpolated = (name) => a[name]?.map((x, t) => (x === null ? null : x + part * (b[name][t] - x)));
    return { change: interpolated("change"), half_width: interpolated("half_width"), beyond: (part > 0.5 ? b : a).beyond };
  }

  // ---------------------------------------------------------------------------------------- command, link

  function quoted(text) {
    if (/^[A-Za-z0-9_@%+=:,.\/-]+$/.test(text)) return text;
    return /["$`\\!]/.test(text) ? "'" + text.replaceAll("'", `'"'"'`) + "'" : '"' + text + '"';
  }

  function command(model, percent) {
    const union = (members) => members.map((g) => model.slices[g].expression).join(" OR ");
    const where = (test) => percent.map((p, g) => (test(p) ? g : -1)).filter((g) => g >= 0);
    const off = where((p) => p === 0), on = where((p) => p === WHOLE);
    let flags;
    if (off.length === percent.length) return "# all slices are dropped: no prediction";
    if (on.length === percent.length) return "# the whole corpus is kept: no change";
    if (off.length + on.length === percent.length)
      flags = on.length < off.length ? `--keep ${quoted(union(on))}` : `--drop ${quoted(union(off))}`;
    else
      flags = [...new Set(percent)].filter((p) => p !== WHOLE).sort((a, b) => a - b)
        .map((p) => `--weight ${quoted(`${union(where((q) => q === p))}: ${p / WHOLE}`)}`).join(" ");
    return [model.before, flags, model.after].filter(Boolean).join(" ");
  }

  function fragment(model, percent) {
    const state = new URLSearchParams({ by: model.label });
    percent.forEach((p, g) => { if (p !== WHOLE) state.set("." + model.slices[g].name, p); });
    return "#" + state.toString();
  }

  function parsed(hash) {
    const state = new URLSearchParams(hash.replace(/^#/, ""));
    const label = labels.findIndex((model) => model.label === state.get("by"));
    if (label < 0) return null;
    const percent = labels[label].slices.map((slice) => {
      const value = Number(state.get("." + slice.name) ?? WHOLE);
      return Number.isFinite(value) ? Math.min(MAX_PERCENT, Math.max(0, Math.round(value))) : WHOLE;
    });
    return { label, percent };
  }

  // ------------------------------------------------------------------------------------------------ files

  const yaml = (text) => JSON.stringify(text); // a double-quoted scalar
  const FILES = {
    csv: (model, mix) => ["value,now,proposed,times_as_often",
      ...mix.map((slice) => [`"${slice.name.replaceAll('"', '""')}"`, slice.now, slice.share, slice.times].join(","))].join("\n"),
    datatrove: (model, mix) => ["# datatrove: one reader per value, followed by SamplerFilter(rate); run the reader `copies` times",
      `${yaml(model.label)}:`, ...mix.map((slice) => {
        const copies = Math.max(1, Math.ceil(slice.times));
        return `  ${yaml(slice.name)}: {rate: ${Number((slice.times / copies).toFixed(4))}, copies: ${copies}}`;
      })].join("\n"),
    olmix: (model, mix) => ["# Olmix: weights are shares of tokens; source names are those of data.sources", "mix:",
      ...mix.filter((slice) => slice.share > 0).map((slice) =>
        `  ${yaml(slice.name)}: {weight: ${slice.tokenShare}, repetition_factor: ${Math.max(1, slice.times)}}`)].join("\n"),
    axolotl: (model, mix) => ["# Axolotl: one file per value; adjust path and type", "datasets:",
      ...mix.flatMap((slice) => {
        const part = Math.round(100 * (slice.times % 1)), whole = Math.floor(slice.times);
        const splits = [...Array(whole).fill("train"), ...(part ? [`train[:${part}%]`] : [])];
        return splits.map((split) => `  - {path: ${yaml(`data/${slice.name}.jsonl`)}, type: completion, split: ${yaml(split)}}`);
      })].join("\n"),
  };

  function file(model, f) {
    const all = model.slices.reduce((sum, slice) => sum + slice.rows, 0), nRows = dot(f, model.slices.map((slice) => slice.rows));
    const rounded = (x) => Number(x.toFixed(6));
    const tokens = dot(f, model.slices.map((slice) => slice.tokens));
    const mix = model.slices.map((slice, g) => ({
      name: slice.name, now: rounded(slice.rows / all), times: f[g], share: nRows ? rounded((f[g] * slice.rows) / nRows) : 0,
      tokenShare: tokens ? rounded((f[g] * slice.tokens) / tokens) : 0,
    }));
    return FILES[$("mix-format").value](model, mix);
  }

  // ------------------------------------------------------------------------------------------------- page

  const states = labels.map((model) => model.slices.map(() => WHOLE));
  let current = 0, lines = [], announcement = 0, addressUpdate = 0; // label, its sliders, timers
  let targetLines = [], steps = [], base = []; // sliders over targets, their positions, the mixture if all are at 0

  function breakable(text) {
    // a line-break opportunity after every underscore and slash
    return text.split(/(?<=[_\/])/).flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part]));
  }

  function slider(id, name, about, min, max, move) {
    const range = element("input", { type: "range", id, min, max, step: 1 });
    range.setAttribute("aria-label", `${about} ${name}`);
    const label = element("label", { htmlFor: id }, ...breakable(name));
    const shares = [element("i"), element("i")], shown = element("output");
    const share = element("span", { className: "share" }, ...shares);
    share.setAttribute("aria-hidden", "true");
    range.addEventListener("input", () => move(Number(range.value)));
    return { range, shown, line: element("li", {}, label, share, range, shown), shares };
  }

  function build() {
    const model = labels[current];
    lines = [];
    $("whatif-sliders").replaceChildren(...model.order.map((g) => {
      lines[g] = slider(`slice-${g}`, model.slices[g].name, "percent of", 0, MAX_PERCENT, (value) => {
        states[current][g] = value;
        refresh();
      });
      return lines[g].line;
    }));
    targetLines = model.targetSteps.map(({ gain }, t) => {
      const line = slider(`target-${t}`, targets[t], "improvement of", -TARGET_STEPS, TARGET_STEPS, (value) => {
        steps[t] = value;
        moveByTargets();
      });
      line.range.disabled = !gain;
      line.shares.forEach((mark) => mark.remove());
      return line;
    });
    $("whatif-targets").replaceChildren(...targetLines.map(({ line }) => line));
    $("whatif-by-target").hidden = !targetLines.length;
    $("whatif-presets").replaceChildren(...model.presets.map((preset) => {
      const button = element("button", { type: "button" }, preset.name);
      button.addEventListener("click", () => { states[current] = [...preset.percent]; refresh(); updateAddress(); });
      return button;
    }));
  }

  function buildResults() {
    $("whatif-results").replaceChildren(...targets.map((name) => element("tr", {}, element("th", { scope: "row" }, ...breakable(name)),
      element("td", { className: "plot" }, element("span", { className: "bar" }, element("i"), element("b"))),
      element("td", {}, element("span", { className: "num" }), element("small", { className: "ci num" })))));
  }

  // Adds the steps of the targets, in shares of all data, to the mixture at which their sliders were at 0.
  function moveByTargets() {
    const { slices, targetSteps } = labels[current], rows = slices.map((slice) => slice.rows);
    const amount = dot(base, rows) / rows.reduce((sum, n) => sum + n) / WHOLE;
    states[current] = base.map((p, g) => {
      const change = steps.reduce((sum, step, t) => sum + Math.abs(step) * targetSteps[t][step > 0 ? "up" : "down"][g], 0);
      return Math.round(Math.min(MAX_PERCENT, Math.max(0, p + amount * change)));
    });
    refresh(true);
  }

  function refresh(byTargets = false) {
    const model = labels[current], percent = states[current], f = percent.map((p) => p / WHOLE);
    if (!byTargets) [base, steps] = [[...percent], model.targetSteps.map(() => 0)];
    targetLines.forEach(({ range, shown, line }, t) => {
      range.value = steps[t];
      line.classList.toggle("moved", steps[t] !== 0);
      shown.textContent = signed(steps[t] * model.targetSteps[t].gain);
    });
    const size = (name) => dot(f, model.slices.map((slice) => slice[name]));
    const all = (name) => model.slices.reduce((sum, slice) => sum + slice[name], 0);
    const nRows = size("rows"), whole = all("rows");
    const shares = model.slices.map((slice, g) => [slice.rows / whole, nRows ? (f[g] * slice.rows) / nRows : 0]);
    const widest = Math.max(...shares.flat());
    percent.forEach((p, g) => {
      const line = lines[g];
      line.range.value = p;
      line.line.classList.toggle("moved", p !== WHOLE);
      line.shown.textContent = `${p} %`;
      line.shares.forEach((mark, i) => { mark.style.width = `${(100 * shares[g][i]) / widest}%`; });
    });
    $("whatif-size").textContent = nRows
      ? `${grouped(nRows)} of ${grouped(whole)} rows (${((100 * nRows) / whole).toFixed(1)} %), ${grouped(size("tokens"))} tokens`
      : "All slices are dropped: no prediction.";
    const predicted = nRows ? changes(model, percent, f) : targets.map(() => NaN);
    showResults(predicted, nRows && model.expected ? lookUp(model, model.expected, percent) : null);
    $("whatif-command").textContent = command(model, percent);
    $("mix-export").hidden = !nRows || percent.every((p) => p === WHOLE); // the corpus as it is needs no file
    if (nRows) $("mix-file").textContent = file(model, f);
    announce(predicted, nRows / whole);
  }

  // Shows changes in the unit of the runs if all targets have runs, else in that of the formula, followed by the
  // predictions from runs of the targets that have some.
  function showResults(predicted, runs) {
    const hasRuns = targets.map((_, t) => runs !== null && runs.change[t] !== null), inRunsUnit = hasRuns.every(Boolean);
    const ends = (t) => (hasRuns[t] ? [runs.change[t] - runs.half_width[t], runs.change[t] + runs.half_width[t]] : [NaN, NaN]);
    const lines = predicted.map((x, t) => (inRunsUnit ? [runs.change[t], ...ends(t)] : [x, NaN, NaN]));
    const scale = barScale(lines.map(([x]) => x));
    [...$("whatif-results").rows].forEach((row, t) => {
      const [, plot, change] = row.cells, [x, low, high] = lines[t], isKnown = Number.isFinite(x);
      const [from, to] = ends(t), drawn = isKnown && Number(x.toFixed(3)) ? x : 0, moved = drawn !== 0;
      row.dataset.target = targets[t];
      row.dataset.change = Number.isFinite(predicted[t]) ? predicted[t] : "";
      plot.firstChild.className = `bar ${moved ? significance(from, to) : "unsure"}`;
      const [bar, whisker] = plot.firstChild.children;
      span(bar, Math.min(0, drawn), Math.max(0, drawn), scale);
      whisker.hidden = !moved || !Number.isFinite(low);
      if (!whisker.hidden) span(whisker, low, high, scale);
      // sums of rounded numbers of the page leave a remainder if nothing is moved
      change.firstChild.textContent = isKnown ? signed(Math.abs(x) < 1e-6 ? 0 : x) : "\u2013";
      const interval = hasRuns[t] ? `[${signed(from)}, ${signed(to)}]` : "";
      change.lastChild.textContent = inRunsUnit || !interval ? interval : `${signed(runs.change[t])} ${DATA.runsUnit} ${interval}`;
    });
    const shown = lines.map(([x]) => x), { weights } = DATA; // the mean over the targets, if they have different weights
    $("whatif-weighted").textContent = weights.some((weight) => weight !== weights[0]) && shown.every(Number.isFinite)
      ? `Weighted mean: ${signed(dot(shown, weights))} (${targets.map((name, t) => `${name} ${Math.round(100 * weights[t])} %`).join(", ")})` : "";
    $("whatif-warning").hidden = !runs?.beyond;
    $("whatif-warning").textContent = `Extrapolates beyond the runs, so the interval is wider: ${runs?.beyond}.`;
    $("whatif-unit").textContent = `Change relative to the whole corpus, ${inRunsUnit ? DATA.runsUnit : DATA.effectUnit}`;
    $("whatif-note").textContent = labels[current].tabulated && !predicted.every(Number.isFinite) && !runs
      ? "No prediction on this page for this mixture: run the command below."
      : !DATA.runsUnit ? "Grey: no interval without retrained models."
      : runs ? `Intervals: ${DATA.intervals}. Grey: the interval contains zero, or there is none.`
        : `Several sliders are moved: run the command below for a prediction in ${DATA.runsUnit} with an interval.`;
  }

  // Text for screen readers, once the sliders are at rest.
  function announce(predicted, share) {
    clearTimeout(announcement);
    announcement = setTimeout(() => {
      const changes = targets.map((name, t) => `${name} ${Number.isFinite(predicted[t]) ? signed(predicted[t], 2) : "unknown"}`);
      $("whatif-status").textContent = `${Math.round(100 * share)} % kept: ${changes.join(", ")}`;
    }, 700);
  }

  function showLabel(label) {
    current = label;
    $("whatif-label").value = String(label);
    build();
    refresh();
  }

  function updateAddress() {
    // the URL encodes the state of the sliders, so that it can be shared
    clearTimeout(addressUpdate);
    addressUpdate = setTimeout(() => history.replaceState(null, "", fragment(labels[current], states[current])), 250);
  }

  function fromAddress() {
    const state = parsed(location.hash);
    if (!state) return false;
    states[state.label] = state.percent;
    showLabel(state.label);
    return true;
  }

  function setAll(percent) {
    states[current].fill(percent);
    refresh();
    updateAddress();
  }

  $("whatif-pick").hidden = labels.length < 2;
  $("whatif-label").addEventListener("change", (event) => { showLabel(Number(event.target.value)); updateAddress(); });
  for (const id of ["whatif-sliders", "whatif-targets"]) $(id).addEventListener("input", updateAddress);
  $("whatif-all").addEventListener("click", () => setAll(WHOLE));
  $("whatif-none").addEventListener("click", () => setAll(0));
  $("whatif-link").addEventListener("click", (event) =>
    copy(location.href.replace(/#.*$/, "") + fragment(labels[current], states[current]), event.currentTarget));
  $("mix-format").addEventListener("change", () => refresh(true));
  addEventListener("hashchange", fromAddress);
  root.hidden = false;
  buildResults();
  const mixtureLabel = labels.findIndex((model) => model.presets.some((preset) => preset.fromMixture));
  if (!fromAddress()) showLabel(Math.max(0, mixtureLabel)); // the label of the mixture, if there is one
  else $("whatif").scrollIntoView();
})();
