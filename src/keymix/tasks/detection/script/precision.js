// Part 4 where images have instances: AP by image and by class.

const MOST = 10;

/** Unpack the AP of every test image of a run: little-endian uint16, `levels` is 1. */
function unpackPrecision(stored) {
  const raw = bytes(stored);
  const view = new DataView(raw.buffer);
  return Array.from({ length: raw.length / 2 }, (_, i) => view.getUint16(2 * i, true) / data.levels);
}

/** Make a table of the largest differences, B minus A; rows are a name and two values. */
function differences(id, what, rows) {
  const known = rows.filter(([, a, b]) => a !== null && b !== null && a !== b)
    .map(([name, a, b]) => [name, a, b, b - a])
    .sort((x, y) => Math.abs(y[3]) - Math.abs(x[3]));
  if (known.length === 0) return make("p", { class: "note" }, "None: both are equal everywhere.");
  return tableOf(id, [what, "A, %", "B, %", "B minus A, points"], known.slice(0, MOST).map(([name, a, b, d]) => [
    {}, [make("bdi", {}, name)], [percent(a), a], [percent(b), b], [points(d), d],
  ]));
}

/** Say how two runs differ: a sentence, and two columns of figures. */
function contrast(a, b) {
  const [first, second] = [a, b].map((run) => unpackPrecision(run.images));
  const [better, worse] = [1, -1].map((sign) => first.filter((ap, i) => sign * (second[i] - ap) > 0).length);
  const lead = make("p", { class: "lead", role: "status" },
    `A, ${runName(a)}, reaches a box AP of ${scored(a.score)} and B, ${runName(b)}, ${scored(b.score)}: ` +
    `a difference of ${changed(b.score - a.score)} (B minus A). Of ${count(data.full)} test images with ` +
    `instances, B detects better on ${count(better)}, worse on ${count(worse)} and equally well on ` +
    `${count(data.full - better - worse)}, by the AP of the image alone at an IoU of 0.5.`);
  const classes = data.classes.names.map((name, i) => [name, a.classes[i], b.classes[i]]);
  const images = first.map((ap, i) => [data.names?.[i] ?? `number ${i + 1}`, ap, second[i]]);
  const halves = make("div", { class: "split even" },
    make("div", {}, make("h3", {}, "By class: box AP"), differences("pair-classes", "class", classes)),
    make("div", {}, make("h3", {}, "Images they differ on most"), differences("pair-images", "test image", images)));
  return [lead, halves];
}
