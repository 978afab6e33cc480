"use strict";
// Draws the figures when they come into view, in the colours of the page, light or dark, wide, narrow or on paper.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const plots = [...document.querySelectorAll(".plot[data-figure]")];
  const NARROW = 520, PAPER = 690, SHORT = 17; // pixels, pixels, characters
  const drawn = new Map(); // plot -> whether it was drawn narrow
  let ready = null;

  // The library is packed: a third of the size. Its checksum is in the content-security-policy.
  function load() {
    ready ??= (async () => {
      const bytes = Uint8Array.from(atob(document.getElementById("plotly").textContent.trim()), (c) => c.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
      const script = document.createElement("script");
      script.textContent = await new Response(stream).text();
      document.head.append(script);
      if (!window.Plotly) throw new Error("the library of the figures did not start");
    })();
    return ready;
  }

  // Only where a colour or a font stands: a slice may be called anything.
  function dressed(value, style, key = "") {
    if (Array.isArray(value)) {
      const deep = key === "colorscale" || (value[0] && typeof value[0] === "object" && !Array.isArray(value[0]));
      return deep ? value.map((item) => dressed(item, style, key)) : [...value];
    }
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, dressed(item, style, name)]));
    if (typeof value !== "string" || !/(color|scale|family)$/.test(key)) return value;
    const found = /^var\((--[a-z0-9-]+)\)$/.exec(value);
    if (found) return style.getPropertyValue(found[1]).trim();
    return value === "inherit" ? style.fontFamily : value;
  }

  function cut(names) {
    // entities are one character each; what is cut is cut between them
    return names.map((name) => {
      const parts = name.match(/&[a-z]+;|[^]/gu) ?? [];
      return parts.length > SHORT ? parts.slice(0, SHORT - 1).join("") + "\u2026" : name;
    });
  }

  function draw(plot, width) {
    const wide = width ?? plot.clientWidth;
    const narrow = wide < NARROW;
    const { data, layout } = dressed(figures[plot.dataset.figure], getComputedStyle(document.documentElement));
    layout.width = wide;
    layout.autosize = false;
    for (const axis of ["xaxis", "yaxis"])
      if ((narrow || layout.meta?.cut?.includes(axis)) && layout[axis]?.ticktext) layout[axis].ticktext = cut(layout[axis].ticktext);
    if (narrow) {
      layout.font.size = 11;
      if (data[0]?.type === "heatmap") {
        layout.xaxis.tickangle = -90;
        const bar = data[0].colorbar;
        Object.assign(bar, { orientation: "h", x: 0.5, y: 1, yanchor: "bottom", len: 1, thickness: 8 });
        bar.title.side = "top";
      }
    }
    drawn.set(plot, wide);
    Plotly.purge(plot); // a colour bar that lies down leaves the room that it took when it stood
    return Plotly.newPlot(plot, data, layout, { displayModeBar: false, scrollZoom: false, doubleClick: false });
  }

  function show(plot) {
    load().then(() => draw(plot)).catch((error) => {
      plot.textContent = "Figures need a browser of 2023 or later; the tables hold the same numbers. (" + error.message + ")";
    });
  }

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries)
      if (entry.isIntersecting && !drawn.has(entry.target)) {
        drawn.set(entry.target, 0);
        show(entry.target);
      }
  }, { rootMargin: "600px" });
  const sized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const width = drawn.get(target);
      if (window.Plotly && width && Math.abs(target.clientWidth - width) > 1 && target.clientWidth) draw(target);
    }
  });
  for (const plot of plots) {
    plot.style.minHeight = figures[plot.dataset.figure].layout.height + "px";
    seen.observe(plot);
    sized.observe(plot);
  }

  const redraw = () => { if (window.Plotly) for (const [plot, width] of drawn) if (width) draw(plot); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  // On paper: light, everything open, everything drawn.
  const opened = [];
  addEventListener("beforeprint", () => {
    document.documentElement.classList.add("light");
    for (const part of document.querySelectorAll("details.paper:not([open])")) { part.open = true; opened.push(part); }
    if (!window.Plotly) return;
    for (const plot of plots) draw(plot, plot.closest(".grid") ? PAPER / 2 - 10 : PAPER);
  });
  addEventListener("afterprint", () => {
    document.documentElement.classList.remove("light");
    for (const part of opened.splice(0)) part.open = false;
    redraw();
  });
  addEventListener("load", () => setTimeout(load, 0));
})();
