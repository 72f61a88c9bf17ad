// Part 4 where images have masks: the Jaccard index by image and by class.

const MOST = 10;

/** Unpack a run's mean Jaccard index of every test image: little-endian uint16, `levels` is 1. */
function unpackShares(stored) {
  const raw = bytes(stored);
  const view = new DataView(raw.buffer);
  return Array.from({ length: raw.length / 2 }, (_, i) => view.getUint16(2 * i, true) / data.levels);
}

/** Make a table of two overlaps and their difference. */
function overlapTable(id, what, rows) {
  return tableOf(id, [what, "A, %", "B, %", "B minus A, points"], rows.map(([name, first, second, difference]) => [
    {}, [make("bdi", {}, name)],
    [percent(first), first], [percent(second), second], [points(difference), difference],
  ]));
}

const minus = (b, a) => (a === null || b === null ? null : b - a);

function classTable(a, b) {
  const rows = data.classes.names.map((name, i) => [name, a.classes[i], b.classes[i], minus(b.classes[i], a.classes[i])])
    .sort((x, y) => Math.abs(y[3] ?? 0) - Math.abs(x[3] ?? 0));
  return overlapTable("pair-classes", "class", rows.slice(0, MOST));
}

function imageTable(first, second) {
  const rows = first.map((share, i) => [data.names?.[i] ?? `number ${i + 1}`, share, second[i], second[i] - share])
    .filter((row) => row[3] !== 0)
    .sort((x, y) => Math.abs(y[3]) - Math.abs(x[3]));
  if (rows.length === 0) return make("p", { class: "note" }, "None: both overlap equally on every image.");
  return overlapTable("pair-images", "test image", rows.slice(0, MOST));
}

/** Say how two runs differ: a sentence, and two columns of figures. */
function contrast(a, b) {
  const [first, second] = [a, b].map((run) => unpackShares(run.overlaps));
  const [better, worse] = [1, -1].map((sign) => first.filter((share, i) => sign * (second[i] - share) > 0).length);
  const lead = make("p", { class: "lead", role: "status" },
    `A, ${runName(a)}, reaches a mean IoU of ${scored(a.score)} and B, ${runName(b)}, ` +
    `${scored(b.score)}: a difference of ${changed(b.score - a.score)} (B minus A). Image by image, ` +
    `B overlaps better on ${count(better)} of ${count(first.length)}, worse on ${count(worse)} and equally on ` +
    `${count(first.length - better - worse)}.`);
  const halves = make("div", { class: "split even" },
    make("div", {}, make("h3", {}, "By class"), classTable(a, b)),
    make("div", {}, make("h3", {}, "Images they differ on most"), imageTable(first, second)));
  return [lead, halves];
}
