// Part 5 where images have masks: the Jaccard index by image and by class.

/** Say how two runs differ: a sentence, and two columns of figures. */
function contrast(a, b) {
  const { images, better, worse, halves } = compareShares(a, b, "By class", { equal: true });
  const lead = make("p", { class: "lead", role: "status" },
    `A, ${runName(a)}, reaches a mean IoU of ${scored(a.score)} and B, ${runName(b)}, ` +
    `${scored(b.score)}: a difference of ${changed(b.score - a.score)} (B minus A). Image by image, ` +
    `B overlaps better on ${count(better)} of ${count(images)}, worse on ${count(worse)} and equally on ` +
    `${count(images - better - worse)}.`);
  return [lead, halves];
}
