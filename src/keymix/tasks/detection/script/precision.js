// Part 5 where images have instances: AP by image and by class.

/** Say how two runs differ: a sentence, and two columns of figures. */
function contrast(a, b) {
  const { better, worse, halves } = compareShares(a, b, "By class: box AP");
  const lead = make("p", { class: "lead", role: "status" },
    `A, ${runName(a)}, reaches a box AP of ${scored(a.score)} and B, ${runName(b)}, ${scored(b.score)}: ` +
    `a difference of ${changed(b.score - a.score)} (B minus A). Of ${count(data.full)} test images with ` +
    `instances, B detects better on ${count(better)}, worse on ${count(worse)} and equally well on ` +
    `${count(data.full - better - worse)}, by the AP of the image alone at an IoU of 0.5.`);
  return [lead, halves];
}
