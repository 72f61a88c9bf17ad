// Part 3: the picker of attention maps.

/** Unpack a mixer's maps: little-endian uint16, [image][layer][mean, head 1, ...][patch]. */
function unpackMaps(stored) {
  const raw = bytes(stored.weights);
  const view = new DataView(raw.buffer);
  const [height, width] = stored.grid;
  const patches = height * width;
  const slices = 1 + stored.heads;
  const layers = data.attention.layers.length;
  return (image, layer, head) => {
    const start = ((image * layers + layer) * slices + head) * patches;
    const weights = new Float64Array(patches);
    for (let i = 0; i < patches; i += 1) {
      weights[i] = (view.getUint16(2 * (start + i), true) / data.attention.levels) * stored.scale;
    }
    return { weights, height, width };
  };
}

/** The weights at which a picture is clear and full orange: its own, or the same for all. */
function heatScale({ weights }, even, kind, shared) {
  if (!shared) return [Math.min(...weights), Math.max(...weights)];
  return [0, kind === "mask" ? 1 : data.attention.full * even];
}

function drawHeat(map, [low, high]) {
  const { heat, opacity } = data.attention;
  const canvas = make("canvas", { class: "heat", width: map.width, height: map.height });
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(map.width, map.height);
  map.weights.forEach((weight, i) => {
    const share = high > low ? Math.min(1, (weight - low) / (high - low)) : 0;
    pixels.data.set([...heat, Math.round(opacity * share)], 4 * i);
  });
  context.putImageData(pixels, 0, 0);
  return canvas;
}

function answerOf(label, image) {
  const answer = data.attention.said[label]?.[image];
  if (!answer) return [];
  const [mark, word] = answer.right ? ["\u2713", "right"] : ["\u2717", "wrong"];
  return [make("p", { class: `said ${word}` },
    make("span", { class: "mark", "aria-hidden": "true" }, mark),
    make("span", { class: "visually-hidden" }, `${word}: `), "predicts ", breakable(answer.text))];
}

function mapCell(map, image, label, shared) {
  const { kind } = data.attention.maps[label];
  const even = map.weights.reduce((sum, weight) => sum + weight, 0) / map.weights.length;
  const peak = map.weights.reduce((best, weight, i) => (weight > map.weights[best] ? i : best), 0);
  const row = Math.floor(peak / map.width);
  const column = peak % map.width;
  const frame = make("div", { class: "peak" });
  frame.style.left = `${(100 * column) / map.width}%`;
  frame.style.top = `${(100 * row) / map.height}%`;
  frame.style.width = `${100 / map.width}%`;
  frame.style.height = `${100 / map.height}%`;
  const seen = kind === "mask" ? "tokens that pass" : "attention";
  const text = `${seen} of ${label} on test image ${data.attention.images[image].label}`;
  const picture = make("div", { class: "cell", role: "img", "aria-label": text },
    make("div", { class: `under p${image}` }), drawHeat(map, heatScale(map, even, kind, shared)), frame);
  const readout = make("p", { class: "readout" }, kind === "mask"
    ? `${percent(even)}\u00a0% of tokens pass, over time steps; most often that in row ${row + 1}, column ${column + 1}.`
    : `Strongest patch ${percent(map.weights[peak])}\u00a0% in row ${row + 1}, column ${column + 1}; ` +
      `even attention would be ${percent(even)}\u00a0%.`);
  return [picture, ...answerOf(label, image), readout];
}

function startAttention() {
  const stage = byId("map-stage");
  if (!stage) return;
  const { maps, missing, images } = data.attention;
  const unpacked = {};
  const [mixer, layer, head, scale] = ["map-mixer", "map-layer", "map-head", "map-scale"].map(byId);
  const radios = [...document.querySelectorAll("input[name=map-image]")];

  const tile = (label, image) => {
    if (!Object.hasOwn(maps, label)) return make("div", {}, title(label), make("p", { class: "why" }, missing[label]));
    if (Number(head.value) > maps[label].heads) {
      const heads = `It has ${maps[label].heads} ${maps[label].heads === 1 ? "head" : "heads"}.`;
      return make("div", {}, title(label), make("p", { class: "why" }, heads));
    }
    unpacked[label] ??= unpackMaps(maps[label]);
    const map = unpacked[label](image, Number(layer.value), Number(head.value));
    return make("div", {}, title(label), ...mapCell(map, image, label, scale.value === "shared"));
  };

  const draw = () => {
    const image = Number(radios.find((radio) => radio.checked).value);
    const labels = mixer.value ? [mixer.value] : [...mixer.options].slice(1).map((o) => o.value);
    stage.classList.toggle("one", labels.length === 1);
    byId("map-shared").hidden = scale.value !== "shared";
    stage.replaceChildren(...labels.map((label) => tile(label, image)));
    if (labels.length === 1) {
      const { label, id } = images[image];
      stage.append(make("div", { class: "plain" }, make("h3", {}, "test image"),
        make("div", { class: `cell p${image}`, role: "img", "aria-label": `test image, ${data.kind} ${label}` }),
        make("p", {}, `${data.kind[0].toUpperCase()}${data.kind.slice(1)} `, make("bdi", {}, label), ", ", make("bdi", {}, id))));
    }
  };

  const step = (select, by) => {
    const to = select.selectedIndex + by;
    if (to < 0 || to >= select.options.length) return;
    select.selectedIndex = to;
    draw();
  };
  const keys = {
    ArrowLeft: () => step(layer, -1),
    ArrowRight: () => step(layer, 1),
    ArrowUp: () => step(head, -1),
    ArrowDown: () => step(head, 1),
  };
  stage.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  for (const control of [mixer, layer, head, scale, ...radios]) control.addEventListener("change", draw);
  draw();
}

startAttention();
