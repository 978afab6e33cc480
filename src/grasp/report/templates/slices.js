// The table of slices of a label, sortable and searchable, with its middle folded.
(() => {
  const panels = [...document.querySelectorAll(".panel")];
  if (!panels.length) return;
  const ENDS = 8, FOLDED = 24, NARROW = 860;
  const labelPick = $("slices-label"), targetPick = $("slices-target"), find = $("slices-find"), significantOnly = $("slices-significant");
  const states = panels.map(() => ({ open: false, key: null, ascending: false }));
  const originals = panels.map((panel) => [...panel.querySelector("tbody").rows]); // by the weighted mean of the targets
  const currentLabel = () => (labelPick ? Number(labelPick.value) : 0);
  const target = () => targetPick?.value ?? "0";

  function value(row, key) {
    if (key === "name") return row.cells[0].textContent.toLowerCase();
    const cell = key === "rows" ? row.cells[1] : row.querySelector(`td[data-t="${key}"]`);
    return cell.dataset.v === "" ? -Infinity : Number(cell.dataset.v);
  }

  function show() {
    panels.forEach((panel, label) => { panel.hidden = label !== currentLabel(); });
    const panel = panels[currentLabel()], state = states[currentLabel()], body = panel.querySelector("tbody"), only = target();
    const many = DATA.targets.length > 1;
    const key = state.key ?? only;
    const rows = key === "" ? [...originals[currentLabel()]] : [...body.rows].sort((a, b) => {
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
  }

  function keyOf(head) {
    if (head.dataset.t !== undefined) return head.dataset.t;
    return head.cellIndex ? "rows" : "name";
  }

  panels.forEach((panel, label) => {
    for (const head of panel.querySelectorAll("table.slices thead th"))
      head.firstChild.addEventListener("click", () => {
        const state = states[label], key = keyOf(head);
        state.ascending = key === "name" ? head.getAttribute("aria-sort") !== "ascending" : head.getAttribute("aria-sort") === "descending";
        state.key = key;
        show();
      });
    panel.querySelector(".more").addEventListener("click", () => { states[label].open = !states[label].open; show(); });
  });
  for (const control of [labelPick, targetPick, significantOnly]) control?.addEventListener("change", () => {
    if (control === targetPick) states.forEach((state) => { Object.assign(state, { key: null, ascending: false }); });
    show();
  });
  find.addEventListener("input", show);

  if (targetPick && innerWidth < NARROW) targetPick.value = "0"; // the columns of all targets do not fit
  show();
})();
