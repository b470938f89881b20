// Building blocks of the page. Every text goes in as a text node: nothing that a producer wrote can become markup.

/** Make an element. `attributes` may hold `class`, `on` (listeners), `text`, `dataset` and plain attributes. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = String(value);
    else if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "dataset") Object.assign(node.dataset, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

export function state(name) {
  return el("span", { class: "state", dataset: { state: name }, text: name });
}

/** A time that ages by itself: `tick` rewrites all of them once a second. */
export function ago(iso) {
  if (!iso) return el("span", { class: "dim", text: "–" });
  const node = el("time", { datetime: iso, title: iso, dataset: { ago: iso } });
  node.textContent = since(iso);
  return node;
}

export function tick() {
  for (const node of document.querySelectorAll("time[data-ago]")) {
    const text = since(node.dataset.ago);
    if (node.textContent !== text) node.textContent = text;
  }
}

function since(iso) {
  const seconds = (Date.now() - Date.parse(iso)) / 1000;
  return seconds < -1 ? `in ${length(-seconds)}` : seconds < 1 ? "now" : `${length(seconds)} ago`;
}

/** A length of time in a word. */
export function length(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

export function between(from, to) {
  return from && to ? length(Math.max(Date.parse(to) - Date.parse(from), 0) / 1000) : "–";
}

export function cut(text, limit = 300) {
  const whole = String(text ?? "");
  return whole.length > limit ? `${whole.slice(0, limit)}…` : whole;
}

export function taskLink(task) {
  return `#/task/${encodeURIComponent(task.key)}`;
}

/** A table; `rows` are arrays of cells, a cell is a node, a text, or `[node or text, class]`. */
export function table(heads, rows, empty) {
  if (!rows.length) return el("div", { class: "table" }, el("p", { class: "empty", text: empty }));
  const cell = (value) => (Array.isArray(value) ? el("td", { class: value[1] }, value[0]) : el("td", {}, value));
  return el("div", { class: "table" },
    el("table", {},
      el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col", text: head })))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell))))));
}

/** A button that asks once more before it acts. */
export function careful(label, act, attributes = {}) {
  const button = el("button", { type: "button", class: "small danger", ...attributes, text: label });
  let armed = 0;
  button.addEventListener("click", async () => {
    if (!armed) {
      armed = setTimeout(() => { armed = 0; button.textContent = label; button.classList.remove("armed"); }, 3000);
      button.textContent = "Sure?";
      button.classList.add("armed");
      return;
    }
    clearTimeout(armed);
    armed = 0;
    button.disabled = true;
    button.classList.remove("armed");
    try { await act(); } finally { button.disabled = false; button.textContent = label; }
  });
  return button;
}

export function toast(text) {
  document.querySelector(".toast")?.remove();
  const node = el("div", { class: "toast", role: "status", text });
  document.body.append(node);
  setTimeout(() => node.remove(), 3500);
}
