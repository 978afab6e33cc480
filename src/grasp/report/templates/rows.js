// Example rows of a target or of one of its questions, filtered by slices. Row text is never parsed as markup.
(() => {
  const { rows, questions, n } = DATA.rows;
  const live = document.documentElement.dataset.live;
  const PAGE_SIZE = 12;
  const [targetPick, questionPick, orderPick, find] = ["rows-target", "rows-question", "rows-order", "rows-find"].map($);
  const slicePicks = [...document.querySelectorAll(".rows-slice")];
  let shown = PAGE_SIZE;

  function fillQuestions() {
    questionPick.replaceChildren(element("option", { value: "" }, "mean over all questions"));
    questions.forEach((question, q) => {
      if (question.target !== Number(targetPick.value)) return;
      questionPick.append(element("option", { value: String(q) }, (question.prompt + question.answer).slice(-70)));
    });
  }

  slicePicks.forEach((pick) => {
    pick.append(element("option", { value: "" }, "all"));
    DATA.labels[Number(pick.dataset.label)].slices.forEach((slice, g) => pick.append(element("option", { value: String(g) }, slice.name)));
  });

  // Matching rows in order, each as [row, effect, rank].
  function matchingRows() {
    const t = Number(targetPick.value), q = questionPick.value, sign = Number(orderPick.value);
    const list = q === ""
      ? rows.map((row) => [row, row.effect[t], row.rank[t] ? `rank ${grouped(row.rank[t])} of ${grouped(n)}` : "short"])
      : questions[Number(q)].rows.map(([k, effect]) => [rows[k], effect, ""]);
    const words = find.value.trim().toLowerCase(), isFiltered = words || q !== "" || slicePicks.some((pick) => pick.value !== "");
    return list.filter(([row]) => isFiltered || row.distinct[t]).filter(([row]) => slicePicks.every((pick) => pick.value === "" || row.at[Number(pick.dataset.label)] === Number(pick.value)))
      .filter(([row]) => !words || row.text.toLowerCase().includes(words) || row.id.toLowerCase().includes(words))
      .sort((a, b) => sign * (b[1] - a[1]));
  }

  // Words shaded by their contributions: blue helps, orange hurts; the largest magnitude has the deepest colour.
  function shaded(words) {
    const largest = Math.max(1e-12, ...words.map(([, contribution]) => Math.abs(contribution ?? 0)));
    return words.flatMap(([piece, contribution]) => {
      const depth = Math.round((46 * Math.abs(contribution ?? 0)) / largest), word = piece.trimStart();
      if (depth < 4 || !word) return [piece];
      const mark = element("mark", { title: signed(contribution, 3) }, word);
      mark.style.background = `color-mix(in srgb, var(--${contribution > 0 ? "help" : "hurt"}) ${depth}%, transparent)`;
      return [piece.slice(0, piece.length - word.length), mark];
    });
  }

  function line([row, effect, rank]) {
    const tags = row.at.map((g, label) => element("span", { className: "tag" }, DATA.labels[label].slices[g].name));
    const meta = element("span", { className: "meta" }, element("b", {}, signed(effect, 2)),
      ` \u00b7 ${[rank, row.tokens > 1 && `${grouped(row.tokens)} tokens`].filter(Boolean).join(" \u00b7 ")} `, ...tags, ` \u00b7 ${row.id}`);
    const key = questionPick.value === "" ? `t${targetPick.value}` : `q${questionPick.value}`, shades = row.shades?.[key];
    const text = element("blockquote", { dir: "auto" });
    text.append(...(shades ? shaded(shades) : [row.text || "no text stored"]));
    const notes = (row.notes?.[key] ?? []).map((note) => element("p", { className: "small" }, `Note: ${note}`));
    const item = element("li", { className: effect > 0 ? "helps" : "hurts" }, meta, text, ...notes);
    if (live && !shades) item.append(explainButton(row, text));
    return item;
  }

  // A live page can request the explanation of any row; a file only has those that were computed with it.
  function explainButton(row, text) {
    const button = element("button", { type: "button" }, "Explain");
    button.addEventListener("click", async () => {
      button.disabled = true;
      const q = questionPick.value, query = new URLSearchParams({ target: DATA.targets[Number(targetPick.value)], row: row.id });
      if (q !== "") query.set("unit", questions[Number(q)].id);
      const answer = await fetch(`${live}/explain?${query}`).then((reply) => reply.json());
      if (answer.shades) text.replaceChildren(...shaded(answer.shades));
      button.replaceWith(element("span", { className: "small" }, answer.error ?? ""));
    });
    return button;
  }

  function show() {
    const list = matchingRows(), q = questionPick.value;
    $("rows-prompt").replaceChildren(...(q === "" ? [] : [questions[Number(q)].prompt + " ", element("b", {}, questions[Number(q)].answer)]));
    $("rows-count").textContent = `${grouped(Math.min(shown, list.length))} of ${grouped(list.length)} matching rows on this page`;
    $("rows-list").replaceChildren(...list.slice(0, shown).map(line));
    $("rows-more").hidden = shown >= list.length;
  }

  const showFirstPage = () => { shown = PAGE_SIZE; show(); };
  targetPick.addEventListener("change", () => { fillQuestions(); showFirstPage(); });
  for (const pick of [questionPick, orderPick, ...slicePicks]) pick.addEventListener("change", showFirstPage);
  find.addEventListener("input", showFirstPage);
  $("rows-more").addEventListener("click", () => { shown += 2 * PAGE_SIZE; show(); });
  fillQuestions();
  show();
})();
