// Part 4 where images have a share from 0 to 1 each, and classes: what two runs differ on.

const MOST = 10;

/** Unpack a run's share of every test image: little-endian uint16, 65535 is 1. */
function unpackShares(stored) {
  const raw = bytes(stored);
  const view = new DataView(raw.buffer);
  return Array.from({ length: raw.length / 2 }, (_, i) => view.getUint16(2 * i, true) / 65535);
}

/** Make a table of the largest differences, B minus A; rows are a name and two shares or nulls. */
function differences(id, what, rows, { equal = false } = {}) {
  const known = rows.map(([name, a, b]) => [name, a, b, a === null || b === null ? null : b - a])
    .filter((row) => equal || row[3])
    .sort((x, y) => Math.abs(y[3] ?? 0) - Math.abs(x[3] ?? 0));
  if (known.length === 0) return make("p", { class: "note" }, "None: both are equal everywhere.");
  return tableOf(id, [what, "A, %", "B, %", "B minus A, points"], known.slice(0, MOST).map(([name, a, b, d]) => [
    {}, [make("bdi", {}, name)], [percent(a), a], [percent(b), b], [points(d), d],
  ]));
}

/** Compare two runs: the shares of each, on how many images B's is better and worse, both tables. */
function compareShares(a, b, heading, { equal = false } = {}) {
  const [first, second] = [a, b].map((run) => unpackShares(run.shares));
  const [better, worse] = [1, -1].map((sign) => first.filter((share, i) => sign * (second[i] - share) > 0).length);
  const classes = data.classes.names.map((name, i) => [name, a.classes.score[i], b.classes.score[i]]);
  const images = first.map((share, i) => [data.names?.[i] ?? `number ${i + 1}`, share, second[i]]);
  const halves = make("div", { class: "split even" },
    make("div", {}, make("h3", {}, heading), differences("pair-classes", "class", classes, { equal })),
    make("div", {}, make("h3", {}, "Images they differ on most"), differences("pair-images", "test image", images)));
  return { images: first.length, better, worse, halves };
}
