// The page's script, part 1: data, small makers of elements, numbers in words, theme, print.
const data = JSON.parse(document.getElementById("payload").textContent);
const MINUS = "\u2212";
const DASH = "\u2013";

const byId = (id) => document.getElementById(id);

/** Make an element; children are elements or texts, and texts stay texts. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Keep a name's writing direction to itself inside a sentence. */
const isolated = (name) => `\u2068${name}\u2069`;

const percent = (share, digits = 1) =>
  share === null || share === undefined || Number.isNaN(share) ? DASH : (share * 100).toFixed(digits);

function points(difference) {
  if (difference === null || Number.isNaN(difference)) return DASH;
  const body = Math.abs(difference * 100).toFixed(1);
  return body === "0.0" ? body : (difference < 0 ? MINUS : "+") + body;
}

const { score } = data; // of a comparison: what its runs are compared by

/** Write a number as the page's tables do: with its decimal places, or three digits. */
function digits(value, places) {
  if (places !== null) return value.toFixed(places);
  const size = Math.abs(value);
  return size >= 10 && size < 1e6 ? value.toFixed(1) : String(Number(value.toPrecision(3)));
}

/** Write a score with its unit. */
function scored(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return DASH;
  const text = digits(value * score.scale, score.places);
  return score.unit ? `${text}\u00a0${score.unit}` : text;
}

/** Write a difference of scores with its unit. */
function changed(difference) {
  const body = digits(Math.abs(difference * score.scale), score.places);
  const text = Number(body) === 0 ? body : (difference < 0 ? MINUS : "+") + body;
  return score.difference ? `${text} ${score.difference}` : text;
}

const count = (n) => n.toLocaleString("en-US");

function bytes(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

const colour = Object.fromEntries((data.mixers || []).map((mixer) => [mixer.label, mixer.colour]));

/** Let a long label break where the page's tables break it. */
function breakable(label) {
  const parts = label.split(/(?<=[(,/=_])/);
  return make("bdi", {}, ...parts.flatMap((part, i) => (i ? [make("wbr"), part] : [part])));
}

function title(label) {
  return make("h3", { class: `k-${colour[label]}` }, breakable(label));
}

function startTheme() {
  const button = byId("theme");
  const root = document.documentElement;
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
  const relabel = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", isDark() ? "Light: show the page in light colours" : "Dark: show the page in dark colours");
  };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    relabel();
  });
  prefersDark.addEventListener("change", relabel);
  relabel();
}

/** Open what is folded while the page is printed, and fold it again afterwards. */
function startPrint() {
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const details of opened) details.open = true;
  });
  addEventListener("afterprint", () => {
    for (const details of opened) details.open = false;
    opened = [];
  });
}

document.documentElement.classList.add("js");
startTheme();
startPrint();
