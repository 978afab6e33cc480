// Shared by all sections: data, DOM elements, number formatting, bars and copy buttons.
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const MINUS = "\u2212", MARGIN = 1.15;

function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

const signed = (x, digits = 3) => {
  const fixed = Math.abs(x).toFixed(digits), roundsToZero = Number(fixed) === 0 && Math.abs(x) > 1e-9;
  const text = roundsToZero ? String(Number(Math.abs(x).toPrecision(1))) : fixed;
  return (Number(text) === 0 ? "" : x < 0 ? MINUS : "+") + text;
};
const grouped = (x) => Math.round(x).toLocaleString("en-US");
const significance = (low, high) => (low > 0 ? "helps" : high < 0 ? "hurts" : "unsure");
const barScale = (values) => MARGIN * Math.max(1e-9, ...values.filter(Number.isFinite).map(Math.abs));

function span(mark, low, high, scale) {
  const [left, right] = [low, high].map((end) => 50 + 50 * Math.max(-1, Math.min(1, end / scale)));
  mark.style.left = `${left}%`;
  mark.style.width = `${right - left}%`;
}

async function copy(text, button) {
  let copied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch (error) {
    const area = element("textarea", { value: text });
    document.body.append(area);
    area.select();
    copied = document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const label = button.dataset.label ?? button.textContent;
  button.dataset.label = label;
  button.textContent = copied ? "Copied" : "Could not copy";
  setTimeout(() => { button.textContent = label; }, 1600);
}

for (const button of document.querySelectorAll("[data-copy]"))
  button.addEventListener("click", () => copy($(button.dataset.copy).textContent, button));
for (const part of document.querySelectorAll(".needs-js")) part.hidden = false;

// Open all details elements for printing, and close them afterwards.
const opened = [];
addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details:not([open])")) {
    part.removeAttribute("name"); // only one of the elements with the same name can be open
    part.open = true;
    opened.push(part);
  }
});
addEventListener("afterprint", () => {
  for (const part of opened.splice(0)) {
    part.open = false;
    if (part.className === "target") part.setAttribute("name", "answer");
  }
});
