// Part 3: the navigation marks where one is, text is copied, charts are saved, the cost is chosen.

const COPIED_MS = 1600;

/** Copy text; on pages from plain http, which have no clipboard, by a selected field. */
async function copyText(text) {
  if (navigator.clipboard && isSecureContext) return navigator.clipboard.writeText(text);
  const field = make("textarea", { "aria-hidden": "true", tabindex: "-1" });
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  if (!done) throw new Error("not copied");
}

/** Say on a button what became of it, for a while. */
function report(button, text) {
  button.dataset.label ||= button.textContent;
  button.textContent = text;
  setTimeout(() => { button.textContent = button.dataset.label; }, COPIED_MS);
}

function saveFile(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = make("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Write a chart as a file of its own: the colours that it has now, on the page's paper. */
function asFile(chart) {
  const style = getComputedStyle(document.documentElement);
  const copy = chart.cloneNode(true);
  const [, , width, height] = chart.getAttribute("viewBox").split(" ").map(Number);
  copy.prepend(makeSvg("rect", { width, height, fill: "var(--paper)" }));
  copy.setAttribute("width", 2 * width);
  return new XMLSerializer().serializeToString(copy).replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name));
}

function startCopies() {
  for (const button of document.querySelectorAll("button.copy")) {
    button.addEventListener("click", () => {
      copyText(button.dataset.text).then(() => report(button, "Copied"), () => report(button, "Not copied"));
    });
  }
  for (const button of document.querySelectorAll("button.save-text")) {
    button.addEventListener("click", () => saveFile(button.dataset.file, button.dataset.text, "text/csv"));
  }
}

/** Give every chart a button that saves it. */
function startSaves() {
  for (const chart of document.querySelectorAll("figure > svg[aria-label]")) {
    const name = chart.getAttribute("aria-label");
    const button = make("button", { type: "button", class: "save no-print", "aria-label": `Save as SVG: ${name}` }, "Save as SVG");
    const file = `${name.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 60)}.svg`;
    button.addEventListener("click", () => saveFile(file, asFile(chart), "image/svg+xml"));
    chart.after(button);
  }
}

function startCosts() {
  const select = byId("cost-axis");
  if (!select) return;
  const figures = [...byId("costs").children];
  const update = () => figures.forEach((figure, i) => { figure.classList.toggle("other", i !== Number(select.value)); });
  select.addEventListener("change", update);
  update();
}

/** Mark in the navigation the last section whose top has passed. */
function startContents() {
  const links = [...document.querySelectorAll(".contents a")];
  const update = () => {
    const passed = links.filter((link) => byId(link.hash.slice(1)).getBoundingClientRect().top < 140);
    for (const link of links) link.toggleAttribute("aria-current", link === passed.at(-1));
  };
  addEventListener("scroll", update, { passive: true });
  update();
}

startCopies();
startSaves();
startCosts();
startContents();
