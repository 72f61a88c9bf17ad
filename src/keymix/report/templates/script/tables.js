// Part 2: tables that sort by any column, and the table of classes with its filter.

const AS_LISTED = "";

/** Read what a row is sorted by; null, when it has nothing there, goes last. */
function sortKey(row, column, kind) {
  const cell = row.cells[column];
  const value = cell.dataset.value;
  if (kind === "number") return value === undefined ? null : Number(value);
  return value === undefined ? cell.textContent.trim() : value;
}

function compareKeys(a, b, kind, sign) {
  if (a === null || b === null) return (a === null) - (b === null);
  return sign * (kind === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
}

class SortableTable {
  constructor(table) {
    this.table = table;
    this.body = table.tBodies[0];
    this.listed = [...this.body.rows];
    this.changed = () => {};
    this.columns = [...table.tHead.rows[0].cells].map((head, index) => ({
      head,
      index,
      kind: head.dataset.sort,
      first: head.dataset.first || "ascending",
      name: head.textContent.trim().replace(/\s+/g, " "),
    }));
    for (const column of this.columns) if (column.kind) this.addButton(column);
    this.addSelect();
  }

  addButton(column) {
    const button = make("button", { type: "button" }, ...column.head.childNodes);
    column.head.append(button);
    button.addEventListener("click", () => {
      const second = column.first === "ascending" ? "descending" : "ascending";
      const now = column.head.getAttribute("aria-sort");
      if (now === null) this.sort(column, column.first);
      else if (now === column.first) this.sort(column, second);
      else this.restore();
    });
  }

  addSelect() {
    const words = (kind, order) =>
      kind === "number"
        ? { ascending: "smallest first", descending: "largest first" }[order]
        : { ascending: "A to Z", descending: "Z to A" }[order];
    this.select = make("select", {}, make("option", { value: AS_LISTED }, this.table.dataset.listed || "as listed"));
    if (this.table.dataset.original) {
      this.select.append(make("option", { value: "original" }, this.table.dataset.original));
    }
    for (const column of this.columns) {
      if (!column.kind) continue;
      for (const order of ["ascending", "descending"]) {
        const text = `${column.name}, ${words(column.kind, order)}`;
        this.select.append(make("option", { value: `${column.index} ${order}` }, text));
      }
    }
    this.select.addEventListener("change", () => {
      const [index, order] = this.select.value.split(" ");
      if (index === AS_LISTED) this.restore();
      else if (index === "original") this.restoreOriginal();
      else this.sort(this.columns[Number(index)], order);
    });
    const label = make("label", { class: "sort-by no-print" }, "Sort by ", this.select);
    const place = this.table.closest("section, .part").querySelector(".sort-here");
    if (place && this.table.matches(".by-class")) place.append(label);
    else this.table.parentElement.before(label);
  }

  sort(column, order) {
    const sign = order === "ascending" ? 1 : -1;
    const keyed = this.listed.map((row) => [sortKey(row, column.index, column.kind), row]);
    keyed.sort(([a], [b]) => compareKeys(a, b, column.kind, sign));
    this.arrange(keyed.map(([, row]) => row), column, order, `${column.index} ${order}`);
  }

  restore() {
    this.arrange(this.listed, null, null, AS_LISTED);
  }

  restoreOriginal() {
    const rows = [...this.listed].sort((a, b) => a.dataset.number - b.dataset.number);
    this.arrange(rows, null, null, "original");
  }

  arrange(rows, sorted, order, chosen) {
    this.body.append(...rows);
    for (const column of this.columns) column.head.removeAttribute("aria-sort");
    if (sorted) sorted.head.setAttribute("aria-sort", order);
    this.select.value = chosen;
    this.changed();
  }
}

/** Show the rows that hold the filter's words, the first few of them until all are asked for. */
function startClasses(sortable) {
  const filter = byId("class-filter");
  const all = byId("class-all");
  const few = Number(sortable.table.dataset.firstRows);
  let showAll = all === null;
  const update = () => {
    const wanted = filter.value.trim().toLocaleLowerCase();
    let found = 0;
    let shown = 0;
    for (const row of sortable.body.rows) {
      const fits = row.cells[0].dataset.value.toLocaleLowerCase().includes(wanted);
      if (fits) found += 1;
      row.hidden = !fits || (!showAll && found > few);
      shown += row.hidden ? 0 : 1;
    }
    const total = sortable.listed.length;
    const which = wanted ? `${found} found of ${total} classes` : `${total} classes`;
    byId("class-count").textContent = shown < found ? `${which}, ${shown} shown.` : `${which}.`;
    if (all) {
      all.hidden = found <= few;
      all.textContent = showAll ? `Show the first ${few}` : `Show all ${found} classes`;
    }
  };
  filter.addEventListener("input", update);
  all?.addEventListener("click", () => {
    showAll = !showAll;
    update();
  });
  sortable.changed = update;
  update();
}

for (const table of document.querySelectorAll("table.sortable")) {
  const sortable = new SortableTable(table);
  if (table.matches(".by-class")) startClasses(sortable);
}
for (const details of document.querySelectorAll("details.unfold")) details.open = true;
