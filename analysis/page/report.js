// Tables sort by their headings and filter by words; without this script the page holds the same, in the order of the rows.
"use strict";

const numeric = (cell) => ("value" in cell.dataset ? Number.parseFloat(cell.dataset.value) : NaN);

function compare(one, other, descending) {
  const [x, y] = [numeric(one), numeric(other)];
  if ("value" in one.dataset) {
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y); // undefined stands last either way
    return descending ? y - x : x - y;
  }
  const order = one.textContent.localeCompare(other.textContent, "en", { numeric: true });
  return descending ? -order : order;
}

function sortBy(table, heading) {
  const descending = heading.getAttribute("aria-sort") === "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const body = table.tBodies[0];
  const rows = [...body.rows].sort((a, b) => compare(a.cells[heading.cellIndex], b.cells[heading.cellIndex], descending));
  body.append(...rows);
}

function addSorting(table) {
  for (const heading of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    button.addEventListener("click", () => sortBy(table, heading));
    heading.append(button);
  }
}

function addFilter(table) {
  const [label, input, count] = ["label", "input", "output"].map((name) => document.createElement(name));
  const rows = [...table.tBodies[0].rows];
  input.type = "search";
  input.id = `filter-${table.id}`;
  input.setAttribute("aria-controls", table.id);
  label.htmlFor = input.id;
  label.textContent = "Filter by words";
  const apply = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  };
  input.addEventListener("input", apply);
  apply();
  const line = document.createElement("div");
  line.className = "filter";
  line.append(label, input, count);
  table.closest(".scroll").before(line);
}

for (const table of document.querySelectorAll("table.sortable")) {
  if (table.tBodies[0].rows.length < 2) continue;
  addSorting(table);
  if (table.tBodies[0].rows.length > 5) addFilter(table);
}
