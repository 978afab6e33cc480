// The table of slices of a label, sortable and searchable, with its middle folded; and the treemap of label pairs.
(() => {
  const panels = [...document.querySelectorAll(".panel")];
  if (!panels.length) return;
  const ENDS = 8, FOLDED = 24, NARROW = 860;
  const labelPick = $("slices-label"), targetPick = $("slices-target"), find = $("slices-find"), significantOnly = $("slices-significant");
  const states = panels.map(() => ({ open: false, key: null, ascending: true }));
  const currentLabel = () => (labelPick ? Number(labelPick.value) : 0);
  const target = () => targetPick?.value ?? "0";

  function value(row, key) {
    if (key === "name") return row.cells[0].textContent.toLowerCase();
    const cell = key === "rows" ? row.cells[1] : row.querySelector(key === "mean" ? "td[data-mean]" : `td[data-t="${key}"]`);
    return cell.dataset.v === "" ? Infinity : Number(cell.dataset.v);
  }

  function show() {
    panels.forEach((panel, label) => { panel.hidden = label !== currentLabel(); });
    const panel = panels[currentLabel()], state = states[currentLabel()], body = panel.querySelector("tbody"), only = target();
    const many = DATA.targets.length > 1;
    const key = state.key ?? (only === "" ? "mean" : only);
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [value(a, key), value(b, key)];
      return (x < y ? -1 : x > y ? 1 : 0) * (state.ascending ? 1 : -1);
    });
    const words = find.value.trim().toLowerCase();
    const matching = rows.filter((row) => {
      const significant = row.querySelector(only === "" ? "td.helps, td.hurts" : `td.helps[data-t="${only}"], td.hurts[data-t="${only}"]`);
      return (!words || row.cells[0].textContent.toLowerCase().includes(words)) && (!significantOnly.checked || significant);
    });
    const fold = !state.open && !words && !significantOnly.checked && matching.length > FOLDED;
    const shown = new Set(fold ? [...matching.slice(0, ENDS), ...matching.slice(-ENDS)] : matching);
    for (const row of rows) row.hidden = !shown.has(row);
    body.append(...rows);
    for (const cell of panel.querySelectorAll("[data-t]")) cell.hidden = only !== "" && cell.dataset.t !== only;
    for (const cell of panel.querySelectorAll("[data-mean]")) cell.hidden = only !== "";
    const table = panel.querySelector("table.slices");
    table.classList.toggle("single", !many || only !== "");
    for (const head of table.tHead.rows[0].cells) {
      head.removeAttribute("aria-sort");
      if (keyOf(head) === key) head.setAttribute("aria-sort", state.ascending ? "ascending" : "descending");
    }
    const more = panel.querySelector(".more");
    more.parentElement.hidden = matching.length <= FOLDED || Boolean(words) || significantOnly.checked;
    more.textContent = fold ? `Show all ${matching.length}` : "Show first and last only";
    $("slices-count").textContent = fold ? `first and last ${ENDS} of ${rows.length}` : `${matching.length} of ${rows.length}`;
    drawMap();
  }

  function keyOf(head) {
    if (head.dataset.t !== undefined) return head.dataset.t;
    return head.dataset.mean !== undefined ? "mean" : head.cellIndex ? "rows" : "name";
  }

  panels.forEach((panel, label) => {
    for (const head of panel.querySelectorAll("table.slices thead th"))
      head.firstChild.addEventListener("click", () => {
        const state = states[label], key = keyOf(head);
        state.ascending = head.getAttribute("aria-sort") === "descending" || (key !== "rows" && head.getAttribute("aria-sort") !== "ascending");
        state.key = key;
        show();
      });
    panel.querySelector(".more").addEventListener("click", () => { states[label].open = !states[label].open; show(); });
  });
  for (const control of [labelPick, targetPick, significantOnly]) control?.addEventListener("change", () => {
    if (control === targetPick) states.forEach((state) => { Object.assign(state, { key: null, ascending: true }); });
    show();
  });
  find.addEventListener("input", show);

  // --------------------------------------------------------------------------------------------- treemap

  // Squarified treemap (Bruls, Huizing, van Wijk 2000): boxes [x, y, width, height] with areas in proportion to sizes.
  function squarify(sizes, x, y, width, height) {
    const out = [];
    let start = 0, rest = sizes.reduce((sum, size) => sum + size, 0);
    while (start < sizes.length) {
      const along = Math.min(width, height), scale = (width * height) / rest;
      let stop = start, sum = 0, worst = Infinity;
      while (stop < sizes.length) {
        const next = sum + sizes[stop], thick = (next * scale) / along;
        const worse = Math.max(...[sizes[start], sizes[stop]].map((size) => {
          const long = (size * scale) / thick;
          return Math.max(long / thick, thick / long);
        }));
        if (worse > worst) break;
        [worst, sum] = [worse, next];
        stop += 1;
      }
      const thick = (sum * scale) / along;
      let offset = 0;
      for (; start < stop; start += 1) {
        const long = (sizes[start] * scale) / thick;
        out.push(width < height ? [x + offset, y, long, thick] : [x, y + offset, thick, long]);
        offset += long;
      }
      if (width < height) [y, height] = [y + thick, height - thick];
      else [x, width] = [x + thick, width - thick];
      rest -= sum;
    }
    return out;
  }

  let visible = false; // drawn only when it is scrolled into view

  function drawMap() {
    const map = $("map");
    if (!map || !visible || !map.clientWidth) return;
    const t = target(), [first, second] = DATA.labels;
    const mean = (values) => values.reduce((sum, x) => sum + x, 0) / values.length;
    const effects = DATA.map.map((cell) => (t === "" ? mean(cell.effect) : cell.effect[Number(t)]));
    const signs = DATA.map.map((cell) => (t === "" ? Math.sign(cell.sign.reduce((sum, x) => sum + x, 0)) : cell.sign[Number(t)]));
    const largest = Math.max(1e-9, ...effects.map(Math.abs));
    const groups = Map.groupBy ? Map.groupBy(DATA.map.keys(), (cell) => DATA.map[cell].at[0]) : new Map();
    if (!groups.size) DATA.map.forEach((cell, k) => groups.set(cell.at[0], [...(groups.get(cell.at[0]) ?? []), k]));
    const size = (cells) => cells.reduce((sum, k) => sum + DATA.map[k].rows, 0);
    const order = [...groups.keys()].sort((a, b) => size(groups.get(b)) - size(groups.get(a)));
    const boxes = squarify(order.map((a) => size(groups.get(a))), 0, 0, map.clientWidth, map.clientHeight);
    map.replaceChildren();
    order.forEach((a, rank) => {
      const [x, y, width, height] = boxes[rank], head = height > 44 && width > 50 ? 16 : 0;
      if (head) map.append(placed(element("div", { className: "group" }, first.slices[a].name), x, y, width, head));
      const cells = groups.get(a);
      const inner = squarify(cells.map((k) => DATA.map[k].rows), x, y + head, width, height - head);
      cells.forEach((k, i) => {
        const cell = DATA.map[k], names = `${first.slices[a].name} / ${second.slices[cell.at[1]].name}`;
        const description = `${names}: mean effect ${signed(effects[k], 2)} per row, ${grouped(cell.rows)} rows${signs[k] ? "" : ", not significant"}`;
        const [, , w, h] = inner[i];
        const box = placed(element("button", { type: "button", tabIndex: map.children.length > 1 ? -1 : 0 },
          w > 54 && h > 18 ? second.slices[cell.at[1]].name : ""), ...inner[i]);
        box.setAttribute("aria-label", description);
        if (signs[k] * effects[k] > 0) {
          const depth = Math.round(10 + 38 * Math.min(1, Math.abs(effects[k]) / largest)); // at most 48 %: text stays readable
          box.style.background = `color-mix(in srgb, var(--${effects[k] > 0 ? "help" : "hurt"}) ${depth}%, var(--panel))`;
        }
        box.addEventListener("pointerenter", () => { $("map-status").textContent = description; });
        box.addEventListener("focus", () => { $("map-status").textContent = description; });
        box.addEventListener("click", () => readRows(cell.at));
        map.append(box);
      });
    });
  }

  function placed(box, x, y, width, height) {
    Object.assign(box.style, { left: `${x}px`, top: `${y}px`, width: `${width}px`, height: `${height}px` });
    return box;
  }

  function readRows(slices) {
    document.dispatchEvent(new CustomEvent("slice", { detail: { slices, target: target() } }));
    $("rows").scrollIntoView();
    $("rows-target").focus({ preventScroll: true });
  }

  $("map")?.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const boxes = [...$("map").querySelectorAll("button")], focused = boxes.indexOf(document.activeElement);
    if (!step || focused < 0) return;
    event.preventDefault();
    boxes[(focused + step + boxes.length) % boxes.length].focus();
  });
  if ($("map")) {
    new ResizeObserver(() => requestAnimationFrame(drawMap)).observe($("map"));
    new IntersectionObserver((entries, observer) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      visible = true;
      observer.disconnect();
      drawMap();
    }, { rootMargin: "800px" }).observe($("map"));
    addEventListener("beforeprint", () => { visible = true; drawMap(); });
  }
  if (targetPick && innerWidth < NARROW) targetPick.value = "0"; // the columns of all targets do not fit
  show();
})();
