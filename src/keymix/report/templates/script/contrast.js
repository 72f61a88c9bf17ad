// Part 4 where a task brings none of its own: the scores of two runs.

/** Say how two runs differ: a sentence, and nothing below. */
function contrast(a, b) {
  const name = score.name;
  const verb = (x, y) => (x === y ? "as good as" : (score.better === "more") === (x > y) ? "better than" : "worse than");
  const known = a.score !== null && b.score !== null;
  const difference = known
    ? `: a difference of ${changed(b.score - a.score)} (B minus A). B is ${verb(b.score, a.score)} A here.`
    : ".";
  const lead = make("p", { class: "lead", role: "status" },
    `A, ${runName(a)}, has a ${name} of ${scored(a.score)} and B, ${runName(b)}, of ${scored(b.score)}${difference}`);
  return [lead, ""];
}
