// The gallery of masks: two mixers over one picture, with a divider that is dragged.

function startSlider() {
  const scenes = [...document.querySelectorAll("#masks .scenes > li")].map((item) => ({
    name: [...item.querySelector("h3").children].map((part) => part.textContent).join(", "),
    figures: Object.fromEntries([...item.querySelectorAll("figure[data-mixers]")].map((each) => [each.dataset.mixers, each])),
  }));
  const labels = Object.keys(scenes[0]?.figures ?? {});
  if (labels.length < 2) return;
  const choice = (name, options, chosen) => {
    const select = make("select", {}, ...options.map((option, value) => make("option", { value }, option)));
    select.value = chosen;
    select.addEventListener("change", draw);
    fields.append(make("label", {}, name, select));
    return select;
  };
  const slider = make("input", { type: "range", min: 0, max: 100, value: 50, step: 1 });
  const picture = make("div", { class: "picture" });
  const captions = make("div", { class: "sides" });
  const fields = make("div", { class: "fields" });
  const move = () => picture.style.setProperty("--at", `${slider.value}%`);
  function draw() {
    const figures = sides.map((side) => scenes[image.value].figures[labels[side.value]]);
    const [under, over] = figures.map((each) => each.querySelector(".cell").cloneNode(true));
    over.classList.add("over");
    picture.className = `picture ${under.classList.item(1)}`; // its shape
    slider.setAttribute("aria-label", `Divider: ${labels[sides[0].value]} left, ${labels[sides[1].value]} right`);
    picture.replaceChildren(under, over, make("span", { class: "divider" }), slider);
    captions.replaceChildren(...figures.map((each) => each.querySelector("figcaption").cloneNode(true)));
  }
  const image = choice("Image", scenes.map((scene) => scene.name), 0);
  const first = Math.max(labels.indexOf(data.baseline), 0);
  const others = labels.filter((_, i) => i !== first); // the mixer that the page is about, against the baseline
  const second = labels.indexOf(others.includes(data.subject) ? data.subject : others[0]);
  const sides = [choice("Left", labels, first), choice("Right", labels, second)];
  slider.addEventListener("input", move);
  move();
  draw();
  document.querySelector("#masks .scenes").before(
    make("div", { class: "slider no-print" }, fields,
      make("div", { class: "panels" }, make("figure", {}, picture, captions))));
}

startSlider();
