// What all sections use: the data, elements, numbers, bars, and buttons that copy.
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const MINUS = "\u2212", ROOM = 1.15;

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const signed = (x, digits = 3) => {
  const fixed = Math.abs(x).toFixed(digits), lost = Number(fixed) === 0 && Math.abs(x) > 1e-9;
  const text = lost ? String(Number(Math.abs(x).toPrecision(1))) : fixed;
  return (Number(text) === 0 ? "" : x < 0 ? MINUS : "+") + text;
};
const grouped = (x) => Math.round(x).toLocaleString("en-US");
const sure = (low, high) => (low > 0 ? "helps" : high < 0 ? "hurts" : "unsure");
const scaleOf = (values) => ROOM * Math.max(1e-9, ...values.filter(Number.isFinite).map(Math.abs));

function span(mark, low, high, most) {
  const [left, right] = [low, high].map((end) => 50 + 50 * Math.max(-1, Math.min(1, end / most)));
  mark.style.left = `${left}%`;
  mark.style.width = `${right - left}%`;
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

for (const button of document.querySelectorAll("[data-copy]"))
  button.addEventListener("click", () => copy($(button.dataset.copy).textContent, button));
for (const part of document.querySelectorAll(".needs-js")) part.hidden = false;

// On paper everything is open.
const opened = [];
addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details:not([open])")) {
    part.removeAttribute("name"); // of those with one name only one can be open
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
