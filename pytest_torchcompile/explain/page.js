"use strict";
document.documentElement.classList.remove("no-js");

const hint = document.getElementById("hint"), begin = hint.textContent;
const values = (row, name) => (row.getAttribute("data-" + name) || "").split(" ").filter(Boolean);

function clear() {
  for (const row of document.querySelectorAll(".lit, .same")) row.classList.remove("lit", "same");
  for (const part of document.querySelectorAll(".dim")) part.classList.remove("dim");
  hint.textContent = begin;
}

/* Rows of the same line of the user's, and among them those of the same node. */
function light(chosen) {
  const places = new Set(values(chosen, "p")), nodes = new Set(values(chosen, "n"));
  const part = chosen.closest(".compile");
  clear();
  let lines = 0, same = 0;
  for (const row of part.querySelectorAll(".row")) {
    const isSame = row === chosen || values(row, "n").some((node) => nodes.has(node));
    if (isSame) { row.classList.add("same"); same++; }
    else if (values(row, "p").some((place) => places.has(place))) { row.classList.add("lit"); lines++; }
  }
  part.querySelector(".columns").classList.add("dim");
  for (const column of part.querySelectorAll(".rows")) {
    const first = column.querySelector(".same") || column.querySelector(".lit");
    if (first && !column.contains(chosen)) column.scrollTop = first.offsetTop - column.offsetTop - 40;
  }
  hint.textContent =
    `${same} of the same operators (dark), ${lines} more of the same lines (light). Esc ends it.`;
}

document.addEventListener("click", (event) => {
  if (event.target.closest("summary, details pre, details table, details p")) return;
  const row = event.target.closest(".row");
  if (row) light(row);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") clear();
  else if (event.key === "Enter" && event.target.classList.contains("row")) light(event.target);
});
