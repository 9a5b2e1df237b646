/** The panel: ranks and their load, the last attention, and the plan with its reason. */

import { json, nap } from "./api.js";
import { bytes, color, node, ranks as named, seconds, shape } from "./words.js";

const at = (id) => document.getElementById(id);
const MAX_LANES = 16; // ranks in the timeline
const MAX_SPANS = 4000; // more would make the page slow

/** The number of ranks, once the server has sent it. */
export let world = 1;

/** Shows the plan for a size, or the reason why there is none. */
export function showPlan(plan, query, reason = "") {
  const size = query.size.replace("x", "×");
  at("plan-for").textContent = `for ${size}${query.frames > 1 ? `, ${query.frames} frames` : ""}, ${query.steps} steps`;
  at("plan-name").textContent = plan?.plan ?? "–";
  at("plan-reason").textContent = plan?.reason ?? reason;
  const times = Object.entries(plan?.seconds_by_ranks ?? {});
  const most = Math.max(...times.map(([, time]) => time));
  at("plan-ranks").replaceChildren(
    ...times.map(([count, time]) => {
      const row = node("div", "", Number(count) === plan.ranks ? { class: "chosen" } : {});
      const bar = node("span", "", { class: "bar", "aria-hidden": "true" });
      bar.style.setProperty("--part", time / most);
      const value = node("dd");
      value.append(bar, node("span", seconds(time)));
      row.append(node("dt", `${count} rank${count === "1" ? "" : "s"}`), value);
      return row;
    }),
  );
  at("estimate").textContent = plan?.seconds ? `about ${seconds(plan.seconds)} on ${plan.ranks} rank${plan.ranks > 1 ? "s" : ""}` : "";
}

function showFigures(now) {
  const figures = {
    imbalance: now.imbalance ? `${now.imbalance.toFixed(2)}×` : "–",
    exposed: now.exposed == null ? "–" : `${Math.round(100 * now.exposed)} %`,
    waiting: `${now.queued}`,
    restarts: `${now.restarts}`,
  };
  const place = at("figures");
  for (const [name, value] of Object.entries(figures)) {
    let row = place.querySelector(`[data-name=${name}]`);
    if (!row) {
      row = node("div", "", { "data-name": name });
      row.append(node("dt", name), node("dd"));
      place.append(row);
    }
    row.lastChild.textContent = value;
  }
}

function rankRow(rank) {
  const row = node("li", "", { class: `rank ${color(rank.rank, world)}` });
  const load = node("span", "", { class: "load", role: "meter", "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": `load of rank ${rank.rank}` });
  row.append(node("span", `rank ${rank.rank}`, { class: "name" }), load, node("span", "", { class: "percent" }), node("span", "", { class: "note memory" }));
  return row;
}

function showRanks(list, status) {
  const place = at("ranks");
  if (place.children.length !== list.length) {
    place.replaceChildren(...list.map(rankRow));
    place.classList.toggle("many", list.length > MAX_LANES);
    if (list.length > MAX_LANES) place.tabIndex = 0; // scrollable by keys too
  }
  list.forEach((rank, index) => {
    const [, load, percent, memory] = place.children[index].children;
    const share = rank.alive ? rank.load : 0;
    place.children[index].classList.toggle("lost", !rank.alive && status !== "starting");
    load.style.setProperty("--part", share);
    load.setAttribute("aria-valuenow", Math.round(100 * share));
    percent.textContent = !rank.alive ? "down" : `${Math.round(100 * share)} %`;
    memory.textContent = rank.memory ? bytes(rank.memory) + (rank.limit ? ` of ${bytes(rank.limit)}` : "") : "";
  });
}

/** Draws a lane for each rank: compute above, sends below, waits hatched between them. */
function showTimeline(timeline) {
  at("attention").hidden = !timeline?.spans?.length;
  if (at("attention").hidden || showTimeline.drawn === JSON.stringify(timeline)) return;
  showTimeline.drawn = JSON.stringify(timeline);
  const [spans, label] = [timeline.spans.slice(0, MAX_SPANS), timeline.label];
  const some = [...new Set(spans.map((span) => span.rank))].sort((a, b) => a - b).slice(0, MAX_LANES);
  const first = Math.min(...spans.map((span) => span.start));
  const took = Math.max(...spans.map((span) => span.end)) - first || 1;
  const [left, width, tall] = [22, 338, 22];
  const x = (time) => left + ((time - first) / took) * width;
  const svg = at("timeline");
  const bottom = some.length * tall;
  svg.setAttribute("viewBox", `0 0 ${left + width} ${bottom + 16}`);
  const hatch = shape("pattern", { id: "hatch", width: 4, height: 4, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  hatch.append(shape("rect", { class: "hatch", width: 1.4, height: 4 }));
  const drawn = [hatch];
  for (const fraction of [0, 0.25, 0.5, 0.75, 1]) {
    drawn.push(shape("line", { class: "tick", x1: left + fraction * width, x2: left + fraction * width, y1: 0, y2: bottom }));
  }
  drawn.push(shape("text", { x: left, y: bottom + 12 }, "0"), shape("text", { x: left + width, y: bottom + 12, "text-anchor": "end" }, seconds(took)));
  some.forEach((rank, row) => drawn.push(shape("text", { x: 0, y: row * tall + 12 }, String(rank))));
  for (const span of spans) {
    const row = some.indexOf(span.rank);
    if (row < 0) continue;
    const send = span.lane === "send";
    const box = { x: x(span.start), y: row * tall + (send ? 14 : 2), height: send ? 3 : 10, width: Math.max(0.6, x(span.end) - x(span.start) - 0.5) };
    const bar = shape("rect", { ...box, class: `${span.lane} ${color(span.rank, world)}` });
    bar.append(shape("title", {}, `rank ${span.rank}: ${span.name}, ${seconds(span.end - span.start)}`));
    drawn.push(bar);
  }
  svg.replaceChildren(...drawn);
  at("attention-label").textContent = label ?? "";
  const waits = spans.filter((span) => span.lane === "wait").reduce((sum, span) => sum + span.end - span.start, 0);
  svg.setAttribute("aria-label", `Timeline of ${named(some)} over ${seconds(took)}; they wait ${seconds(waits)} together.`);
}

const WORDS = { ok: "ready", starting: "starting: the model is loading", draining: "stopping: no new work", failed: "failed: see the log of the server" };

function show(now) {
  world = now.world || now.ranks.length || 1;
  at("health").textContent = WORDS[now.status] ?? now.status;
  at("health").dataset.state = now.status;
  at("model").textContent = now.model;
  showFigures(now);
  showRanks(now.ranks, now.status);
  showTimeline(now.timeline);
  at("trouble").textContent = now.trouble ?? "";
}

/** Polls the status each second while the page is visible; calls `onStatus` with each. */
export async function watch(onStatus) {
  for (;;) {
    try {
      const now = await json("v1/status");
      show(now);
      onStatus(now);
    } catch (error) {
      at("health").dataset.state = "down";
      at("health").textContent = error.status === 401 ? "key required" : error.status ? "not ready" : "no answer";
      if (error.status === 401) await nap(3600_000);
    }
    await nap(document.hidden ? 15_000 : 1000);
  }
}
