"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const squares = [];
  for (const square of document.querySelectorAll("#map .s")) squares[square.dataset.i] = square;
  const letters = squares.map((s) => s.textContent);
  const labels = squares.map((s) => s.getAttribute("aria-label"));
  const classes = squares.map((s) => s.className);
  const axes = Object.fromEntries(data.axes.map((axis, i) => [axis.name, { ...axis, i }]));
  const state = { rows: data.rows, columns: data.columns, by: ["", ""], filters: Object.create(null), search: "", only: null };
  document.documentElement.classList.remove("no-js");

  // the table: the same as heatmap.py makes

  const make = (name, attributes = {}, ...children) => {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(key, value);
    element.append(...children);
    return element;
  };
  const value = (axis, rank) => axes[axis].values[rank];
  const rank = (cell, axis) => (axis === "" ? 0 : data.cells[cell].v[axes[axis].i]);

  function split(rest, shown) {
    const across = [];
    let width = Math.max(1, state.columns ? new Set(shown.map((c) => rank(c, state.columns))).size : 1);
    for (const axis of [...rest].reverse()) {
      width *= new Set(shown.map((c) => rank(c, axis))).size;
      if (width > data.width) break;
      across.unshift(axis);
    }
    return [rest.filter((axis) => !across.includes(axis)), across];
  }

  function bands(keys, first, others) {
    const compare = (a, b) => { for (let i = 0; i < a.length; i++) if (a[i] !== b[i]) return a[i] - b[i]; return 0; };
    const found = new Map();
    for (const key of [...keys.values()].sort(compare)) {
      if (!found.has(key[0])) found.set(key[0], []);
      found.get(key[0]).push(key.slice(1));
    }
    return [...found].map(([head, parts]) => ({
      value: first === "" ? "" : value(first, head), head, parts,
      labels: parts.map((part) => part.map((r, i) => value(others[i], r)).join(" · ")),
    }));
  }

  const side = (axis, within) => axis + (within.length ? `, within it ${within.join(", ")}` : "");

  const chosen = () => data.cells.map((_, i) => i).filter((i) =>
    Object.entries(state.filters).every(([axis, r]) => r === "" || rank(i, axis) === Number(r)));

  function draw(shown) {
    const rest = data.order.filter((a) => a !== state.rows && a !== state.columns
      && new Set(shown.map((c) => rank(c, a))).size > 1);
    const [lines, across] = split(rest, shown);
    const rowKeys = new Map(), columnKeys = new Map(), places = new Map();
    for (const cell of shown) {
      const row = [state.rows, ...lines].map((a) => rank(cell, a));
      const column = [state.columns, ...across].map((a) => rank(cell, a));
      const key = `${row}|${column}`;
      rowKeys.set(`${row}`, row);
      columnKeys.set(`${column}`, column);
      places.set(key, [...(places.get(key) ?? []), cell]);
    }
    const rows = bands(rowKeys, state.rows, lines), columns = bands(columnKeys, state.columns, across);
    const corner = () => make("td", { colspan: 2 });
    const span = (text) => { const s = make("span"); s.textContent = text; return s; };
    const first = (i) => (i === 0 ? "g" : null);
    const named = (label, attributes) => (label === "" ? make("td", { ...attributes, scope: null })
      : make("th", { ...attributes, title: label }, span(label)));
    const head = make("thead", {}, make("tr", {}, corner(), ...columns.map((band) =>
      named(band.value, { colspan: band.parts.length, scope: "colgroup" }))));
    if (across.length) head.append(make("tr", { class: "sub" }, corner(), ...columns.flatMap((band) =>
      band.labels.map((label, i) => named(label, { scope: "col", class: first(i) })))));
    const bodies = rows.map((band) => make("tbody", {}, ...band.parts.map((part, n) => make("tr", {},
      ...(n === 0 ? [named(band.value, { scope: "rowgroup", rowspan: band.parts.length })] : []),
      named(band.labels[n], { scope: "row", class: "line" }),
      ...columns.flatMap((column) => column.parts.map((other, i) => make("td", { class: first(i) },
        ...(places.get(`${[band.head, ...part]}|${[column.head, ...other]}`) ?? []).map((c) => squares[c]))))))));
    const caption = make("caption");
    caption.textContent = [`Rows: ${side(state.rows, lines)}`,
      state.columns && `Columns: ${side(state.columns, across)}`].filter(Boolean).join(". ");
    const table = make("table", { class: `${data.dense ? "map dense" : "map"}${state.by[0] === "number" ? " numbers" : ""}`, id: "map" }, caption, head, ...bodies);
    $("map").replaceWith(table);
  }

  // colours and numbers

  const short = (n) => (Math.abs(n) >= 10000 ? `${Math.round(n / 1000)}k` : Number.isInteger(n) ? `${n}`
    : Math.abs(n) >= 100 ? n.toFixed(0) : n.toFixed(Math.abs(n) >= 10 ? 1 : 2));

  function paint() {
    const [kind, name] = state.by;
    const number = kind === "number" ? data.numbers[name] : null, check = kind === "check" ? data.checks.indexOf(name) : -1;
    const values = number ? number.values.filter((n) => n !== null) : [];
    const low = Math.min(...values), high = Math.max(...values);
    const scale = (n) => (high > low ? Math.round(5 * Math.log1p(n - low) / Math.log1p(high - low)) : 0);
    squares.forEach((s, i) => {
      if (number) {
        const n = number.values[i];
        s.textContent = n === null ? "–" : short(n);
        s.className = `s ${n === null ? "skip" : `step${scale(n)}`} ${data.cells[i].d}`;
        s.setAttribute("aria-label", `${labels[i]}, ${number.name} ${n === null ? "not measured" : short(n)}`);
      } else if (check >= 0) {
        const verdict = data.verdicts[data.cells[i].c[check]] ?? "";
        s.textContent = verdict ? data.letters[verdict] : "–";
        s.className = `s ${verdict || "skip"} ${data.cells[i].d}`;
        s.setAttribute("aria-label", `${labels[i]}, ${name}: ${verdict || "not judged"}`);
      } else {
        s.textContent = letters[i];
        s.className = classes[i];
        s.setAttribute("aria-label", labels[i]);
      }
      s.title = s.getAttribute("aria-label");
    });
    $("ramp").hidden = !number;
    if (number) {
      $("least").textContent = values.length ? short(low) : "";
      $("most").textContent = values.length ? short(high) : "";
    }
  }

  // An article is a text until it is opened or searched: see document.py.
  const articles = [...document.querySelectorAll("#side > noscript")];
  const texts = [];
  const entities = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#x27;": "'" };
  const text = (i) => (texts[i] ??= articles[i].textContent.replace(/<[^>]*>/g, " ")
    .replace(/&[^;]*;/g, (entity) => entities[entity] ?? entity).replace(/\s+/g, " ").toLowerCase());

  function matches(i) {
    if (state.only && !state.only.has(i)) return false;
    if (document.querySelector(`.legend input[value="${data.cells[i].s}"]`)?.checked === false) return false;
    return state.search === "" || text(i).includes(state.search);
  }

  let shown = [], visible = [];
  function update() { // other cells, places or colours
    paint();
    shown = chosen();
    draw(shown);
    dim();
  }
  function dim() { // other matches among the same cells
    visible = shown.filter(matches);
    const bright = new Set(visible);
    for (const i of shown) squares[i].classList.toggle("dim", !bright.has(i));
    mark();
    const here = current();
    const first = document.querySelector("#map .s:not(.dim)") ?? document.querySelector("#map .s");
    stop(bright.has(here) ? here : first?.dataset.i);
    $("count").textContent = visible.length === data.cells.length ? `${data.cells.length} cells`
      : `${visible.length} of ${data.cells.length} cells`;
    $("all").hidden = state.only === null;
  }
  function stop(i) { // the one square that Tab leads to
    for (const s of squares) if (s.tabIndex !== -1) s.tabIndex = -1;
    if (i !== undefined) squares[i].tabIndex = 0;
  }

  // the open cell

  const byAnchor = new Map(data.cells.map((cell, i) => [cell.id, i]));
  function current() {
    let hash = location.hash.slice(1);
    try { hash = decodeURIComponent(hash); } catch { /* no escape of ours: as it is */ }
    return byAnchor.get(hash) ?? -1;
  }
  function mark() {
    const here = current();
    squares.forEach((s, i) => {
      if ((i === here) === s.classList.contains("now")) return;
      s.classList.toggle("now", i === here);
      if (i === here) s.setAttribute("aria-current", "true"); else s.removeAttribute("aria-current");
    });
  }
  function opened() {
    mark();
    const here = current();
    $("open").innerHTML = here < 0 ? "" : articles[here].textContent;
    if (here >= 0) {
      $("side").scrollTop = 0;
      $("open").firstElementChild.focus({ preventScroll: innerWidth > 960 });
    } else document.getElementById(location.hash.slice(1))?.scrollIntoView(); // it was hidden while a cell was open
  }
  function open(i) {
    location.hash = squares[i].getAttribute("href");
    stop(i);
  }
  function step(by) {
    const wanted = visible.filter((i) => data.failing.includes(data.cells[i].s));
    if (!wanted.length) return;
    const order = [...document.querySelectorAll("#map .s")].map((s) => Number(s.dataset.i)).filter((i) => wanted.includes(i));
    const at = order.indexOf(current());
    open(order[at < 0 ? (by > 0 ? 0 : order.length - 1) : (at + by + order.length) % order.length]);
  }

  // the keyboard

  function neighbour(from, key) {
    const box = from.getBoundingClientRect();
    const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
    let best = null, least = Infinity;
    for (const s of document.querySelectorAll("#map .s:not(.dim)")) {
      const b = s.getBoundingClientRect();
      const [dx, dy] = [b.x + b.width / 2 - x, b.y + b.height / 2 - y];
      const [along, beside] = { ArrowRight: [dx, dy], ArrowLeft: [-dx, dy], ArrowDown: [dy, dx], ArrowUp: [-dy, dx] }[key];
      const far = along + 4 * Math.abs(beside);
      if (along > 1 && far < least) [best, least] = [s, far];
    }
    return best;
  }
  function go(square) {
    if (!square) return;
    stop(Number(square.dataset.i));
    square.focus();
  }
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.matches("input, select");
    const onSquare = event.target.matches("#map .s");
    if (onSquare && event.key.startsWith("Arrow")) {
      go(neighbour(event.target, event.key));
    } else if (onSquare && (event.key === "Home" || event.key === "End")) {
      const row = [...event.target.closest("tr").querySelectorAll(".s:not(.dim)")];
      go(event.key === "Home" ? row[0] : row.at(-1));
    } else if (event.key === "Escape") {
      const here = current();
      if (here >= 0 && !typing) { location.hash = "#overview"; squares[here].focus(); } else event.target.blur();
    } else if (typing) return;
    else if (event.key === "n" || event.key === "p") step(event.key === "n" ? 1 : -1);
    else if (event.key === "/") { $("tools").open = true; $("search").focus(); }
    else return;
    event.preventDefault();
  });

  // the controls

  const option = (name, chosen) => { const o = new Option(name, name); o.selected = chosen; return o; };
  for (const [id, none] of [["rows", false], ["columns", true]]) {
    if (none && data.order.length < 2) $(id).append(option("", true));
    for (const axis of data.order) $(id).append(option(axis, state[id] === axis));
    $(id).addEventListener("change", () => {
      const other = id === "rows" ? "columns" : "rows";
      if (state[other] === $(id).value) { state[other] = state[id]; $(other).value = state[id]; }
      state[id] = $(id).value;
      update();
    });
  }
  for (const axis of data.order) {
    const select = make("select", { "data-axis": axis }, new Option("any", ""));
    axes[axis].values.forEach((v, r) => select.append(new Option(v === "" ? "(none)" : v, String(r))));
    select.addEventListener("change", () => { state.filters[axis] = select.value; update(); });
    const label = make("label", {}, document.createTextNode(axis), select);
    $("filters").append(label);
  }
  $("by").addEventListener("change", () => { 
    const [, kind, name] = $("by").value.match(/^(\w*) ?([^]*)$/);
    state.by = [kind, name];
    update();
  });
  $("search").addEventListener("input", () => { state.search = $("search").value.trim().toLowerCase(); dim(); });
  document.querySelector(".legend").addEventListener("change", dim);
  $("all").addEventListener("click", () => { state.only = null; dim(); });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-group]");
    if (button) { state.only = new Set(data.groups[Number(button.dataset.group)]); dim(); }
    const copy = event.target.closest(".copy");
    if (copy) copied(copy);
  });
  async function copied(button) {
    const code = button.parentElement.querySelector("code");
    try { await navigator.clipboard.writeText(code.textContent); button.textContent = "copied"; }
    catch { // no clipboard for this page: the text is selected, so that it takes one key
      getSelection().selectAllChildren(code);
      button.textContent = "press Ctrl-C";
    }
    setTimeout(() => { button.textContent = "copy"; }, 3000);
  }
  $("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch { /* a browser that keeps nothing */ }
  });
  try { const kept = localStorage.getItem("theme"); if (kept) document.documentElement.dataset.theme = kept; } catch { /* likewise */ }
  addEventListener("hashchange", opened);
  shown = chosen(); // the page comes with its first table
  dim();
  opened();
})();
