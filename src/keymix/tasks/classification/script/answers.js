// Part 4 where images have a class: answers by image, McNemar's exact test, classes.

/** Probability, both tails, of so uneven a split of b + c disputed images by fair coins. */
function mcnemar(b, c) {
  const n = b + c;
  const smaller = Math.min(b, c);
  if (b === c) return 1;
  let log = -n * Math.LN2; // of C(n, smaller) / 2^n
  for (let i = 1; i <= smaller; i += 1) log += Math.log((n - smaller + i) / i);
  let term = 1;
  let tail = 1;
  for (let k = smaller; k > 0 && term > tail * 1e-18; k -= 1) {
    term *= k / (n - k + 1);
    tail += term;
  }
  return Math.min(1, 2 * tail * Math.exp(log));
}

function inWords(p) {
  if (p < 0.001) return "p < 0.001";
  return `p = ${p.toFixed(p < 0.1 ? 3 : 2)}`;
}

const BITS = Uint8Array.from({ length: 256 }, (_, byte) => [...byte.toString(2)].filter((b) => b === "1").length);

/** Count test images by who had them right; the packed bits' padding is zero in both. */
function agreement(a, b) {
  const [first, second] = [bytes(a.correct), bytes(b.correct)];
  let both = 0;
  let onlyA = 0;
  let onlyB = 0;
  first.forEach((byte, i) => {
    both += BITS[byte & second[i]];
    onlyA += BITS[byte & ~second[i] & 255];
    onlyB += BITS[~byte & second[i] & 255];
  });
  return { both, onlyA, onlyB, neither: data.testImages - both - onlyA - onlyB };
}

function agreementTable(counts) {
  const rows = [
    ["both", "both right", counts.both],
    ["a", "only A right", counts.onlyA],
    ["b", "only B right", counts.onlyB],
    ["neither", "neither right", counts.neither],
  ];
  const bar = make("div", { class: "share", "aria-hidden": "true" });
  for (const [kind, , n] of rows) {
    const part = make("i", { class: kind });
    part.style.flexGrow = n;
    bar.append(part);
  }
  const table = tableOf("pair-agreement", ["answers", "images", "share, %"], rows.map(([kind, name, n]) => {
    const share = n / data.testImages;
    return [{ "data-kind": kind }, [make("span", { class: `key ${kind}` }), name], [count(n), n], [percent(share), share]];
  }));
  return [bar, table];
}

const MOST = 10;

function classTable(a, b) {
  const rows = data.classes.names
    .map((name, i) => ({ name, n: data.classes.test_images[i], a: a.class_correct[i], b: b.class_correct[i] }))
    .filter((row) => row.a !== row.b)
    .sort((x, y) => Math.abs(y.b - y.a) / y.n - Math.abs(x.b - x.a) / x.n)
    .slice(0, MOST);
  if (rows.length === 0) return make("p", { class: "note" }, "None: both have as many right in every class.");
  const heads = ["class", "test images", "A, %", "B, %", "B minus A, points"];
  return tableOf("pair-classes", heads, rows.map(({ name, n, a: first, b: second }) => [
    {}, [make("bdi", {}, name)],
    [count(n), n], [percent(first / n), first / n], [percent(second / n), second / n],
    [points((second - first) / n), (second - first) / n],
  ]));
}

/** Say how two runs differ: a sentence, and two columns of figures. */
function contrast(a, b) {
  const counts = agreement(a, b);
  const p = mcnemar(counts.onlyA, counts.onlyB);
  const lead = make("p", { class: "lead", role: "status" },
    `A, ${runName(a)}, has ${scored(a.score)} right and B, ${runName(b)}, ${scored(b.score)}: ` +
    `a difference of ${changed(b.score - a.score)} (B minus A). They disagree on who is right for ` +
    `${count(counts.onlyA + counts.onlyB)} of ${count(data.testImages)} ${data.inputs}; McNemar's exact test gives `,
    make("data", { id: "pair-p", value: p }, inWords(p)), ".");
  const halves = make("div", { class: "split even" },
    make("div", {}, make("h3", {}, "Who was right"), ...agreementTable(counts)),
    make("div", {}, make("h3", {}, "Classes they differ on most"), classTable(a, b)));
  return [lead, halves];
}
