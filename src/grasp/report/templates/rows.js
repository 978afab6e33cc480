// Rows of a target or one of its questions, those of some slices if asked; their text is never markup.
(() => {
  const { rows, questions, n } = DATA.rows;
  const live = document.documentElement.dataset.live;
  const PAGE = 12;
  const [targetPick, questionPick, orderPick, find] = ["rows-target", "rows-question", "rows-order", "rows-find"].map($);
  const slicePicks = [...document.querySelectorAll(".rows-slice")];
  let shown = PAGE;

  function fillQuestions() {
    const own = questions.map((one, q) => [one, q]).filter(([one]) => one.target === Number(targetPick.value));
    questionPick.replaceChildren(element("option", { value: "" }, `all, on average`));
    for (const [one, q] of own) questionPick.append(element("option", { value: String(q) }, (one.prompt + one.answer).slice(-70)));
  }

  slicePicks.forEach((pick) => {
    pick.append(element("option", { value: "" }, "all"));
    DATA.labels[Number(pick.dataset.label)].slices.forEach((slice, g) => pick.append(element("option", { value: String(g) }, slice.name)));
  });

  // [row, effect, where it stands], in order
  function wanted() {
    const t = Number(targetPick.value), q = questionPick.value, sign = Number(orderPick.value);
    const list = q === ""
      ? rows.map((row) => [row, row.effect[t], row.rank[t] ? `rank ${grouped(row.rank[t])} of ${grouped(n)}` : "short"])
      : questions[Number(q)].rows.map(([k, effect]) => [rows[k], effect, ""]);
    const words = find.value.trim().toLowerCase();
    return list.filter(([row]) => slicePicks.every((pick) => pick.value === "" || row.at[Number(pick.dataset.label)] === Number(pick.value)))
      .filter(([row]) => !words || row.text.toLowerCase().includes(words) || row.id.toLowerCase().includes(words))
      .sort((a, b) => sign * (b[1] - a[1]));
  }

  // Tokens by what each adds: deeper is more, blue helps, orange hurts.
  function shaded(shades) {
    const most = Math.max(1e-12, ...shades.map(([, share]) => Math.abs(share ?? 0)));
    return shades.flatMap(([piece, share]) => {
      const depth = Math.round((46 * Math.abs(share ?? 0)) / most), word = piece.trimStart();
      if (depth < 4 || !word) return [piece];
      const mark = element("mark", { title: signed(share, 3) }, word);
      mark.style.background = `color-mix(in srgb, var(--${share > 0 ? "help" : "hurt"}) ${depth}%, transparent)`;
      return [piece.slice(0, piece.length - word.length), mark];
    });
  }

  function line([row, effect, rank]) {
    const tags = row.at.map((g, place) => element("span", { className: "tag" }, DATA.labels[place].slices[g].name));
    const meta = element("span", { className: "meta" }, element("b", {}, signed(effect, 2)),
      ` \u00b7 ${[rank, row.tokens > 1 && `${grouped(row.tokens)} tokens`].filter(Boolean).join(" \u00b7 ")} `, ...tags, ` \u00b7 ${row.id}`);
    const shades = row.shades?.[questionPick.value === "" ? `t${targetPick.value}` : `q${questionPick.value}`];
    const text = element("blockquote", { dir: "auto" });
    text.append(...(shades ? shaded(shades) : [row.text || "no text kept"]));
    const made = element("li", { className: effect > 0 ? "helps" : "hurts" }, meta, text);
    const pictures = questionPick.value === "" ? row.pictures?.[`t${targetPick.value}`] : undefined;
    if (pictures) made.append(beside(pictures));
    if (live && !shades && !pictures) made.append(why(row, text));
    return made;
  }

  // The row's own picture, then the trusted ones that it bears on most.
  function beside(pictures) {
    return element("div", { className: "pictures" }, ...pictures.map(([caption, url]) => element("figure", {},
      ...(url ? [element("img", { src: url, alt: "" })] : []), element("figcaption", {}, caption))));
  }

  // A server explains any row; the file holds what was explained when it was made.
  function why(row, text) {
    const button = element("button", { type: "button" }, "Why?");
    button.addEventListener("click", async () => {
      button.disabled = true;
      const q = questionPick.value, asked = new URLSearchParams({ target: DATA.targets[Number(targetPick.value)], row: row.id });
      if (q !== "") asked.set("unit", questions[Number(q)].id);
      const answer = await fetch(`${live}/explain?${asked}`).then((reply) => reply.json());
      if (answer.shades) text.replaceChildren(...shaded(answer.shades));
      if (answer.pictures) text.after(beside(answer.pictures));
      button.replaceWith(element("span", { className: "small" }, answer.error ?? ""));
    });
    return button;
  }

  function show() {
    const list = wanted(), q = questionPick.value;
    $("rows-asked").replaceChildren(...(q === "" ? [] : [questions[Number(q)].prompt + " ", element("b", {}, questions[Number(q)].answer)]));
    $("rows-count").textContent = `${grouped(Math.min(shown, list.length))} of the ${grouped(list.length)} held here`;
    $("rows-list").replaceChildren(...list.slice(0, shown).map(line));
    $("rows-more").hidden = shown >= list.length;
  }

  const again = () => { shown = PAGE; show(); };
  targetPick.addEventListener("change", () => { fillQuestions(); again(); });
  for (const pick of [questionPick, orderPick, ...slicePicks]) pick.addEventListener("change", again);
  find.addEventListener("input", again);
  $("rows-more").addEventListener("click", () => { shown += 2 * PAGE; show(); });
  document.addEventListener("slice", ({ detail }) => {
    slicePicks.forEach((pick, place) => { pick.value = detail.places[place] === undefined ? "" : String(detail.places[place]); });
    if (detail.target !== "") targetPick.value = detail.target;
    fillQuestions();
    again();
  });
  fillQuestions();
  show();
})();
