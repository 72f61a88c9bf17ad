// Part 5: two runs side by side: who did better where, as part 4 says it, curves, environments.

const runName = (run) => `${isolated(run.mixer)}, seed ${run.seed}`;

function cells(row) {
  return row.map(([label, text, value]) => make("td", { "data-label": label, "data-value": value }, text));
}

/** Make a table; a row is its attributes, the pieces of its heading, and [text, value] by column. */
function tableOf(id, heads, rows) {
  const head = make("thead", {}, make("tr", {}, ...heads.map((t) => make("th", { scope: "col" }, t))));
  const body = rows.map(([attributes, heading, ...row]) =>
    make("tr", attributes, make("th", { scope: "row" }, ...heading),
      ...cells(row.map((cell, i) => [heads[i + 1], ...cell]))));
  return make("table", { id }, head, make("tbody", {}, ...body));
}

function ticks(low, high) {
  if (!(high > low)) return [low];
  const raw = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) found.push(i * step);
  return found;
}

const plain = (value) => String(Number(value.toPrecision(6)));

/** Draw both runs' curves of one quantity; a chart like those of the page, 400 units wide. */
function curveChart(a, b, { key, label, percent: isPercent }) {
  const factor = isPercent ? 100 : 1;
  const lines = [[a, "run-a"], [b, "run-b"]].map(([run, kind]) => ({
    kind,
    spots: run.epochs.map((x, i) => [x, run.history[key][i]]).filter(([, y]) => y !== null).map(([x, y]) => [x, y * factor]),
  }));
  const all = lines.flatMap((line) => line.spots);
  if (all.length === 0) return null;
  const range = (values, room) => {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const pad = (high - low) * room || Math.abs(high) * 0.05 || 1;
    return room === 0 && high > low ? [low, high] : [low - pad, high + pad];
  };
  const [xLow, xHigh] = range(all.map(([x]) => x), 0);
  const [yLow, yHigh] = range(all.map(([, y]) => y), 0.06);
  const rows = ticks(yLow, yHigh).map((y) => [y, plain(y)]);
  // the labels of the ticks keep clear of the axis title
  const left = Math.max(54, 28 + 6.5 * Math.max(...rows.map(([, label]) => label.length)));
  const [right, top, foot] = [390, 12, 236];
  const toX = (x) => left + ((x - xLow) / (xHigh - xLow)) * (right - left);
  const toY = (y) => foot - ((y - yLow) / (yHigh - yLow)) * (foot - top);
  const text = (x, y, content, anchor, kind) => makeSvg("text", { x, y, "text-anchor": anchor, class: kind }, content);
  const svg = makeSvg("svg", { viewBox: "0 0 400 280", role: "img", "aria-label": `${label} by epoch, both runs` });
  for (const [y, label] of rows) {
    svg.append(makeSvg("line", { x1: left, x2: right, y1: toY(y), y2: toY(y), class: "grid" }),
      text(left - 6, toY(y) + 4, label, "end", "tick"));
  }
  for (const x of ticks(xLow, xHigh).filter(Number.isInteger)) svg.append(text(toX(x), foot + 17, plain(x), "middle", "tick"));
  svg.append(makeSvg("line", { x1: left, x2: right, y1: foot, y2: foot, class: "axis" }),
    text((left + right) / 2, foot + 36, "epoch", "middle", "title"),
    makeSvg("text", { "text-anchor": "middle", class: "title", transform: "translate(11 124) rotate(-90)" }, label));
  for (const { kind, spots } of lines) {
    if (spots.length === 1) { // one epoch is a point, not a curve
      const [[x, y]] = spots;
      svg.append(makeSvg("circle", { cx: toX(x), cy: toY(y), r: 4.5, class: `dot ${kind}` }));
      continue;
    }
    const drawn = spots.map(([x, y], i) => `${i ? "L" : "M"}${toX(x).toFixed(2)} ${toY(y).toFixed(2)}`).join("");
    svg.append(makeSvg("path", { d: drawn, class: `curve ${kind}` }));
  }
  return make("figure", {}, svg);
}

function environmentLines(a, b) {
  const [first, second] = [a, b].map((run) => data.environments[run.environment]);
  const list = make("dl", {});
  for (const key of new Set([...Object.keys(first), ...Object.keys(second)])) {
    const [x, y] = [first[key] ?? DASH, second[key] ?? DASH];
    list.append(make("dt", {}, key), x === y
      ? make("dd", {}, x)
      : make("dd", {}, make("b", {}, "A "), x, make("br"), make("b", {}, "B "), y));
  }
  const text = a.environment === b.environment
    ? "Both were trained with the same environment."
    : "They were trained with different environments; where there are two lines, they differ.";
  return [make("p", { class: "note" }, text), list];
}

function legend(a, b) {
  const item = (kind, letter, run) =>
    make("li", {}, make("span", { class: `key ${kind}` }), make("span", {}, `${letter}: `, breakable(run.mixer), `, seed ${run.seed}`));
  return make("ul", { class: "legend" }, item("a", "A", a), item("b", "B", b));
}

function compareRuns(a, b) {
  const [lead, halves] = contrast(a, b);
  const charts = data.curves.map((curve) => curveChart(a, b, curve)).filter((chart) => chart);
  return [lead, legend(a, b), halves, make("div", { class: "grid3" }, ...charts),
    make("h3", {}, "What they were trained with"), ...environmentLines(a, b)];
}

function startPair() {
  const result = byId("pair-result");
  if (!result) return;
  const selects = [byId("pair-a"), byId("pair-b")];
  for (const select of selects) {
    for (const { label } of data.mixers) {
      const group = make("optgroup", { label });
      data.runs.forEach((run, i) => {
        if (run.mixer !== label) return;
        const option = make("option", { value: i }, runName(run) + (run.done ? "" : ` (${run.status})`));
        option.disabled = !run.done;
        group.append(option);
      });
      select.append(group);
    }
  }
  const done = data.runs.filter((run) => run.done);
  const first = done.find((run) => run.mixer === data.baseline) ?? done[0];
  const others = done.filter((run) => run !== first);
  const beside = others.filter((run) => run.mixer !== first.mixer && run.seed === first.seed);
  // the mixer that the page is about, against the baseline
  const second = beside.find((run) => run.mixer === data.subject) ?? beside[0] ?? others[0];
  const chosen = () => selects.map((select) => data.runs[Number(select.value)]);
  const draw = () => result.replaceChildren(...compareRuns(...chosen()));
  [first, second].forEach((run, i) => { selects[i].value = data.runs.indexOf(run); });
  for (const select of selects) select.addEventListener("change", draw);
  byId("pair-swap").addEventListener("click", () => {
    [selects[0].value, selects[1].value] = [selects[1].value, selects[0].value];
    draw();
  });
  draw();
}

startPair();
