// The page: one request for each view, then what the event stream says. No library, no build.
import { ago, between, careful, cut, el, length, state, table, taskLink, tick, toast } from "./render.js";

const STATES = ["queued", "held", "scheduled", "processing", "retrying", "completed", "failed", "cancelled", "expired"];
const MAX_ROWS = 200;
const main = document.getElementById("main");
const live = document.getElementById("live");
const liveText = document.getElementById("live-text");
const chosen = { state: "", queue: "", q: "" };
let view = null; // what is shown: { refresh, onEvents, poll, every }
let stream = null;
let lastSeq = null;
let paused = false;
let epoch = 0; // counts the views that were opened: what an earlier one asked for is dropped

const undecided = () => document.querySelector("button.armed") !== null; // do not redraw under a finger

async function api(path, options) {
  const response = await fetch(path, options);
  const body = await response.json();
  if (!response.ok) throw new Error(body.detail || body.title || `HTTP ${response.status}`);
  return body;
}

function post(path, body = {}) {
  return api(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}

async function act(said, path, body) {
  try {
    const answer = await post(path, body);
    toast(typeof said === "function" ? said(answer) : said);
  } catch (error) {
    toast(error.message);
  }
}

// --- the live stream ---------------------------------------------------------------------------

function setLive(name) {
  live.dataset.state = name;
  liveText.textContent = name;
}

function follow() {
  stream?.close();
  stream = new EventSource(lastSeq === null ? "v1/stream" : `v1/stream?last_event_id=${lastSeq}`);
  stream.onopen = () => setLive("live");
  stream.onerror = () => setLive(stream.readyState === EventSource.CLOSED ? "offline" : "reconnecting");
  for (const kind of ["task", "info"]) stream.addEventListener(kind, heard);
  stream.addEventListener("reset", () => view?.refresh());
}

let heap = [];
function heard(message) {
  lastSeq = message.lastEventId;
  heap.push(JSON.parse(message.data));
  if (heap.length === 1) requestAnimationFrame(flush);
}

function flush() {
  const events = heap;
  heap = [];
  view?.onEvents?.(events);
}

live.addEventListener("click", () => {
  paused = !paused;
  if (paused) {
    stream?.close();
    setLive("paused");
  } else {
    lastSeq = null;
    follow();
    view?.refresh();
  }
});
setInterval(() => {
  if (!paused && stream?.readyState === EventSource.CLOSED) follow(); // a browser gives up after some errors
}, 4000);
setInterval(tick, 1000);

function soon(work, delay) {
  let timer = 0;
  return () => {
    if (!timer) timer = setTimeout(() => { timer = 0; work(); }, delay);
  };
}

// --- queues and tasks --------------------------------------------------------------------------

function tasksView() {
  const queues = el("div", { class: "queues" });
  const rows = new Map();
  const body = el("tbody");
  const count = el("span", { class: "dim" });
  const note = el("p", { class: "empty", hidden: true });
  const more = el("div", { class: "more", hidden: true }, el("button", { type: "button", text: "Show more", on: { click: () => load(true) } }));
  const search = el("input", { type: "search", placeholder: "Title, id or type", "aria-label": "Search", maxlength: 128, value: chosen.q });
  const chips = el("div", { class: "filters", role: "group", "aria-label": "State" });
  let next = null;
  let asked = 0;
  const mine = epoch;

  search.addEventListener("input", soon(() => { chosen.q = search.value.trim(); load(); }, 300));

  function drawChips() {
    const chip = (name) => el("button", {
      type: "button", class: "chip", "aria-pressed": String(chosen.state === name), text: name || "all",
      on: { click: () => { chosen.state = name; drawChips(); load(); } },
    });
    chips.replaceChildren(chip(""), ...STATES.map(chip), search);
  }

  function matches(task) {
    return (!chosen.state || task.state === chosen.state) && (!chosen.queue || task.queue === chosen.queue);
  }

  async function load(append = false) {
    const query = new URLSearchParams({ limit: "50" });
    for (const [name, value] of Object.entries(chosen)) if (value) query.set(name, value);
    if (append && next) query.set("cursor", next);
    const turn = ++asked;
    try {
      const page = await api(`v1/tasks?${query}`);
      if (turn !== asked) return; // a later question was asked meanwhile
      if (!append) { rows.clear(); body.replaceChildren(); }
      for (const task of page.items) put(task, false);
      next = page.next;
      more.hidden = !next;
      count.textContent = `${page.total.toLocaleString("en")} in all`;
      note.hidden = rows.size > 0;
      note.textContent = "No task matches. Send one: millstream send TYPE JSON";
    } catch (error) {
      note.hidden = false;
      note.textContent = error.message;
    }
  }

  function put(task, first) {
    const known = rows.get(task.key);
    const merged = { ...known?.task, ...task };
    const row = line(merged);
    rows.set(task.key, { task: merged, row });
    if (known) known.row.replaceWith(row);
    else if (first) body.prepend(row);
    else body.append(row);
    note.hidden = true;
  }

  function onEvents(events) {
    const latest = new Map();
    for (const event of events) latest.set(event.key, { ...latest.get(event.key), ...changeOf(event) });
    for (const [key, change] of latest) {
      const known = rows.get(key);
      if (known && matches({ ...known.task, ...change })) put(change, true);
      else if (known) { known.row.remove(); rows.delete(key); }
      else if (!chosen.q && matches(change)) put(change, true);
    }
    while (rows.size > MAX_ROWS) {
      const row = body.lastElementChild;
      rows.delete(row.dataset.key);
      row.remove();
    }
    countSoon();
  }

  async function loadQueues() {
    try {
      const { items } = await api("v1/queues");
      if (mine !== epoch || undecided()) return;
      queues.replaceChildren(...items.map(card));
      if (!items.length) queues.append(el("p", { class: "dim", text: "No queue has seen a task yet." }));
      const sums = items.filter((item) => !chosen.queue || item.queue === chosen.queue);
      const total = sums.reduce((sum, item) => sum + (chosen.state ? item.states[chosen.state] || 0 : item.total), 0);
      if (!chosen.q) count.textContent = `${total.toLocaleString("en")} in all`;
    } catch { /* the live mark shows it */ }
  }

  function card(item) {
    const { batch, states } = item;
    const sum = (value, name) => el("div", {}, el("b", { text: value.toLocaleString("en") }), el("span", { text: name }));
    const waits = (states.queued || 0) + (states.scheduled || 0) + (states.retrying || 0) + (states.held || 0);
    const aged = item.oldest_ready_age_s === null ? `${item.total.toLocaleString("en")} in history` : `oldest ready ${length(item.oldest_ready_age_s)}`;
    const path = `v1/queues/${encodeURIComponent(item.queue)}/cancel`;
    return el("section", { class: chosen.queue === item.queue ? "card chosen" : "card", "aria-label": `Queue ${item.queue}` },
      el("header", {},
        el("button", { type: "button", text: item.queue, title: "Show only this queue", on: { click: () => { chosen.queue = chosen.queue === item.queue ? "" : item.queue; load(); loadQueues(); } } }),
        el("span", { class: "dim", text: batch.total ? `${batch.completed + batch.failed} of ${batch.total}` : "idle" })),
      el("div", { class: "sums" }, sum(batch.queued, "queued"), sum(batch.processing, "running"), sum(batch.completed, "completed"), sum(batch.failed, "failed")),
      el("progress", { max: Math.max(batch.total, 1), value: batch.completed + batch.failed, "aria-label": "Done in this batch" }),
      el("footer", {}, el("span", { text: aged }),
        waits ? careful("Cancel waiting", () => act((answer) => `${answer.cancelled} cancelled`, path)) : ""));
  }

  const countSoon = soon(loadQueues, 1000);
  drawChips();
  main.replaceChildren(
    el("h2", { text: "Queues" }), queues,
    el("h2", {}, "Tasks · ", count), chips,
    el("div", { class: "table tasks" },
      el("table", {}, el("thead", {}, el("tr", {}, ["Task", "State", "Queue", "Attempt", "Since"].map((head) => el("th", { scope: "col", text: head })))), body),
      note),
    more);
  return { refresh: () => { load(); loadQueues(); }, onEvents, every: 5000, poll: loadQueues };
}

function changeOf(event) {
  const change = { ...event, since: event.at };
  delete change.detail;
  if (event.kind === "progress") change.said = event.detail;
  else if (["attempt_failed", "failed", "cancelled", "expired", "parked"].includes(event.kind)) change.said = event.detail;
  else if (event.kind === "completed" || event.kind === "queued") change.said = "";
  return change;
}

function line(task) {
  const said = task.said ?? (task.error ? task.error.message || task.error.type || task.error.reason : task.progress?.message ?? "");
  return el("tr", { dataset: { key: task.key } },
    el("td", { class: "name" }, el("a", { href: taskLink(task), text: cut(task.title || task.task_type || task.task_id, 160) }),
      el("div", { class: "dim", text: cut([task.title ? task.task_type : "", task.task_id === task.key ? "" : task.task_id].filter(Boolean).join(" · "), 200) }),
      said ? el("div", { class: "dim", text: cut(said, 200) }) : ""),
    el("td", {}, state(task.state)),
    el("td", { class: "optional", text: task.queue }),
    el("td", { class: "optional", text: task.attempt }),
    el("td", { class: "when" }, ago(task.since || task.created_at)));
}

// --- one task ----------------------------------------------------------------------------------

function taskView(key) {
  const path = `v1/tasks/${encodeURIComponent(key)}`;
  const mine = epoch;
  let known = key; // the address may hold the task's id; events carry its key
  async function refresh() {
    try {
      const [task, why] = await Promise.all([api(path), api(`${path}/why`).catch(() => null)]);
      known = task.key;
      const result = task.state === "completed" ? await (await fetch(`${path}/result`)).text() : null;
      if (mine === epoch && !undecided()) main.replaceChildren(...detail(task, why, result));
    } catch (error) {
      if (mine === epoch) main.replaceChildren(el("p", { class: "note", text: error.message }), el("p", { class: "note" }, el("a", { href: "#/", text: "All tasks" })));
    }
  }
  const refreshSoon = soon(refresh, 250);
  return { refresh, onEvents: (events) => { if (events.some((event) => event.key === known)) refreshSoon(); }, every: 5000, poll: refresh };
}

function detail(task, why, result) {
  const over = ["completed", "failed", "cancelled", "expired"].includes(task.state);
  const path = `v1/tasks/${encodeURIComponent(task.key)}`;
  const fact = (name, value) => (value === null || value === undefined || value === "" ? "" : el("div", {}, el("dt", { text: name }), el("dd", {}, value)));
  const usage = [`${task.usage.tokens_in} in, ${task.usage.tokens_out} out`, `$${task.usage.cost_usd.toFixed(4)}`, length(task.usage.runtime_s)].join(" · ");
  const error = task.error;
  return [
    el("p", {}, el("a", { href: "#/", text: "← All tasks" })),
    el("div", { class: "head" }, el("h1", { text: task.title || task.task_type || task.task_id }), state(task.state),
      el("div", { class: "acts" },
        over ? "" : careful("Cancel", () => act("Cancel was sent", `${path}/cancel`)),
        task.state === "failed" ? careful("Replay", () => act("Replay was sent", "v1/dlq/replay", { ids: [task.key] })) : "")),
    task.progress ? el("progress", { max: 1, value: task.progress.fraction, "aria-label": "Progress" }) : "",
    why ? el("div", { class: "why" }, why.why, el("div", { class: "dim", text: `Read from: ${why.source}` })) : "",
    error ? el("div", { class: "error" }, el("b", { text: [error.reason, error.type].filter(Boolean).join(" · ") }),
      el("p", { text: error.message }), error.traceback ? el("details", {}, el("summary", { text: "Traceback" }), el("pre", { text: error.traceback })) : "") : "",
    el("dl", { class: "facts" },
      fact("Task id", el("code", { text: task.task_id })), fact("Type", task.task_type), fact("Queue", `${task.queue} · ${task.priority}`),
      fact("Tenant", task.tenant_id), fact("Run", task.run_id), fact("Trace", el("code", { text: task.trace_id })),
      fact("Attempt", task.max_attempts ? `${task.attempt} of ${task.max_attempts}` : String(task.attempt)),
      fact("Errors · crashes · interruptions · throttles", `${task.errors} · ${task.crashes} · ${task.interruptions} · ${task.throttles}`),
      fact("Limits", task.limits.join(", ")),
      fact("Held", task.held_at ? ago(task.held_at) : task.held_s >= 0.1 ? length(task.held_s) : ""),
      fact("Created", ago(task.created_at)), fact("Started", task.started_at ? ago(task.started_at) : ""),
      fact("Due", task.due_at ? ago(task.due_at) : ""), fact("Ended", task.ended_at ? ago(task.ended_at) : ""),
      fact("Ran for", task.started_at && task.ended_at ? between(task.started_at, task.ended_at) : ""),
      fact("Usage", usage), fact("Worker", task.worker_id),
      task.tags.length ? fact("Tags", el("span", {}, task.tags.map((tag) => el("span", { class: "tag", text: tag })))) : "",
      task.infos.unknown_fields.length ? fact("Unknown fields", task.infos.unknown_fields.join(", ")) : "",
      task.infos.duplicates || task.infos.conflicts ? fact("Duplicates · conflicts", `${task.infos.duplicates} · ${task.infos.conflicts}`) : ""),
    result === null ? "" : el("h2", { text: "Result" }), result === null ? "" : el("pre", { text: cut(result, 65536) }),
    el("h2", { text: "Timeline" }),
    table(["When", "Event", "State", "Attempt", "Detail"], task.timeline.map((entry) => [
      [el("time", { datetime: entry.at, title: entry.at, text: entry.at.slice(11, 23) }), "when mono"], entry.kind.replaceAll("_", " "), state(entry.state), String(entry.attempt), [cut(entry.detail), "name"],
    ]), "No event yet."),
    el("h2", { text: "Attempts" }),
    table(["Attempt", "Outcome", "Worker", "Took", "Error"], task.attempts.map((each) => [
      each.generation > 1 ? `${each.attempt} (run ${each.generation})` : String(each.attempt), each.outcome, each.worker_id,
      [each.ended_at ? between(each.started_at, each.ended_at) : `since ${ago(each.started_at)}`, "when"],
      [cut([each.error_type || each.reason, each.message].filter(Boolean).join(": ")), "name"],
    ]), "It has not started yet."),
  ].filter((node) => node !== "");
}

// --- dead letters, limits, workers -------------------------------------------------------------

function listView(path, draw, every) {
  const mine = epoch;
  async function refresh() {
    let drawn;
    try { drawn = draw(await api(path)); } catch (error) { drawn = [el("p", { class: "note", text: error.message })]; }
    if (mine === epoch && !undecided()) main.replaceChildren(...drawn);
  }
  return { refresh, every, poll: refresh };
}

function dlqView() {
  const made = listView("v1/dlq?limit=100", ({ items, total }) => [
    el("h2", { text: `Dead letters · ${total.toLocaleString("en")}` }),
    table(["Task", "Reason", "Error", "Queue", "Failed", ""], items.map((item) => [
      [el("a", { href: taskLink(item), text: cut(item.title || item.task_type || item.task_id, 160) }), "name"],
      item.reason,
      [el("div", {}, cut([item.error?.type, item.error?.message].filter(Boolean).join(": ")), el("div", { class: "dim mono", text: item.fingerprint })), "name"],
      item.queue, [ago(item.failed_at), "when"],
      careful("Replay", () => act("Replay was sent", "v1/dlq/replay", { ids: [item.key] })),
    ]), "No dead letter. Good."),
  ], 10000);
  const refreshSoon = soon(made.refresh, 1000);
  return { ...made, onEvents: (events) => { if (events.some((event) => event.state === "failed" || event.generation > 1)) refreshSoon(); } };
}

function limitsView() {
  const number = (value) => Number(value.toFixed(value < 10 ? 2 : 0)).toLocaleString("en");
  const orNone = (value) => [value === null ? "–" : number(value), "num"];
  const per = (each) => (each.window_s ? ` / ${length(each.window_s)}` : each.period ? ` in ${each.period}` : "");
  const lines = (item, said) => [item.dimensions.map((each) => el("div", { text: said(each) })), "num"];
  const marks = (item) => [item.shadow ? `shadow: ${number(item.would_have_waited)} would have waited` : "", item.template && item.template !== item.key ? `of ${item.template}` : ""].filter(Boolean).join(" · ");
  const stop = (item) => (item.paused_until ? el("div", {}, ago(item.paused_until), el("div", { class: "dim", text: item.paused_why })) : "no");
  return listView("v1/limits", ({ items, fault }) => [
    el("h2", { text: "Limits" }),
    fault ? el("p", { class: "note", text: `A newer configuration was not taken: ${fault}` }) : "",
    table(["Limit", "Allows", "Now", "Used", "In flight", "Waiting", "Paused", "Breaker", "Granted", "Throttled"], items.map((item) => [
      el("div", {}, el("b", { text: item.key }), el("div", { class: "dim", text: marks(item) })),
      lines(item, (each) => `${number(each.configured)} ${each.dimension.replaceAll("_", " ")}${per(each)}`), lines(item, (each) => number(each.effective)), lines(item, (each) => number(each.used)),
      orNone(item.in_use), orNone(item.waiting), stop(item), item.breaker.replaceAll("_", " "), orNone(item.granted_total), orNone(item.throttled_total),
    ]), "No limit is configured."),
  ].filter((node) => node !== ""), 1000);
}

function workersView() {
  return listView("v1/workers", ({ items }) => [
    el("h2", { text: "Workers" }),
    table(["Worker", "Queues", "Slots", "Running", "Task types", "Seen", "Up since"], items.map((item) => [
      [el("div", {}, el("b", { text: item.worker_id }), el("div", { class: "dim", text: `${item.host} · ${item.pid} · ${item.version}${item.draining ? " · draining" : ""}` })), "name"],
      item.queues.join(", "), [String(item.slots), "num"], [String(item.running.length), "num"],
      [cut(item.handlers.map((handler) => handler.task_type).join(", ")), "name"], [ago(item.seen_at), "when"], [ago(item.started_at), "when"],
    ]), "No worker is alive. Start one: millstream worker module:app"),
  ], 2000);
}

// --- routes ------------------------------------------------------------------------------------

function route() {
  clearInterval(view?.timer);
  epoch += 1;
  const [, name = "", rest = ""] = location.hash.split("/");
  const views = { "": tasksView, dlq: dlqView, limits: limitsView, workers: workersView };
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === (name === "task" ? "tasks" : name || "tasks")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  main.replaceChildren();
  let key = "";
  try { key = decodeURIComponent(rest); } catch { /* not an address of ours */ }
  view = name === "task" && key ? taskView(key) : (views[name] ?? tasksView)();
  view.refresh();
  const { poll, every } = view;
  view.timer = setInterval(() => { if (!paused && !document.hidden) poll(); }, every);
}

window.addEventListener("hashchange", route);
document.addEventListener("visibilitychange", () => { if (!document.hidden && !paused) view?.refresh(); });
follow();
route();
