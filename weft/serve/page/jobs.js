/** Queued and running jobs: the preview, and the cloth with one thread per step, colored by rank. */

import { follow, home, request } from "./api.js";
import { world } from "./ranks.js";
import { color, fromTemplate, ranks as named, roughly, shape } from "./words.js";

const STREAMS = 3; // a browser has six connections to a server, which the rest of the page needs too
const STRANDS = 16;
const THREADS = 60;
const CELL = 10;
const place = document.getElementById("jobs");
const cards = new Map();

export const active = (job) => ["queued", "in_progress"].includes(job.status);

function speak(text) {
  document.getElementById("spoken").textContent = text;
}

/** The cloth: each step adds a thread across the warps. */
class Cloth {
  constructor(svg, steps) {
    this.svg = svg;
    this.steps = steps;
    this.threads = steps > THREADS ? THREADS : steps * Math.round(THREADS / steps);
    this.laid = 0;
    svg.setAttribute("viewBox", `0 0 ${this.threads * CELL} ${STRANDS * CELL}`);
    for (let row = 0; row < STRANDS; row++) svg.append(this.warp(row, 0, this.threads * CELL));
  }

  warp(row, x, width) {
    return shape("rect", { class: "warp", x, width, y: row * CELL + 3.5, height: 3 });
  }

  /** Adds threads up to a step, in the colors of its ranks. */
  weave(step, ranks) {
    const until = Math.floor((step * this.threads) / this.steps);
    for (; this.laid < until; this.laid++) this.svg.append(this.thread(this.laid, ranks));
  }

  thread(column, ranks) {
    const thread = shape("g", { class: "pick" });
    const x = column * CELL;
    for (let row = 0; row < STRANDS; row++) {
      const [from, to] = [row, row + 1].map((strand) => Math.floor((strand * world) / STRANDS));
      const busy = ranks.some((rank) => rank === from || (rank > from && rank < to));
      const dye = ranks.length === 0 ? "plain" : busy ? color(from, world) : "rest";
      const wide = dye === "rest" ? 2 : CELL - 1;
      thread.append(shape("rect", { class: `weft ${dye}`, x: x + (CELL - wide) / 2, width: wide, y: row * CELL, height: CELL }));
      if ((row + column) % 2) thread.append(this.warp(row, x, CELL));
    }
    return thread;
  }
}

/** One job and its node on the page. */
class JobCard {
  constructor(job) {
    this.node = fromTemplate("job");
    this.node.dataset.id = job.id;
    this.at = (name) => this.node.querySelector(`.${name}`);
    this.cloth = new Cloth(this.at("cloth").firstChild, job.weft.num_steps);
    const [width, height] = job.size.split("x").map(Number);
    Object.assign(this.at("preview"), { width, height });
    this.node.classList.toggle("small", Math.max(width, height) <= 256);
    this.at("preview").setAttribute("aria-label", "Preview: not begun");
    this.at("prompt").textContent = job.prompt;
    this.at("cloth").setAttribute("aria-label", `Progress of ${job.object}: ${job.prompt}`);
    this.at("cancel").setAttribute("aria-label", `Cancel ${job.object}: ${job.prompt}`);
    this.at("cancel").addEventListener("click", () => this.cancel());
    this.stop = null;
    this.step = 0;
    this.quarter = 0;
    this.show(job);
  }

  show(job) {
    if (this.job && job.weft.step < this.step && job.status === "in_progress") return; // an older response
    const first = !this.job;
    this.job = job;
    this.step = Math.max(this.step, job.weft.step);
    const { weft } = job;
    const queued = job.status === "queued" || (weft.step > 0 && !weft.ranks.length && weft.stage === "denoise");
    this.node.classList.toggle("waiting", queued && !weft.step);
    const steps = `Step ${weft.step} of ${weft.num_steps}`;
    const waits = weft.step ? `Paused after step ${weft.step}` : "Waiting";
    const ahead = weft.queue_position > 1 ? `${weft.queue_position - 1} before it` : "next";
    const stage = { encode: "Reading the prompt", decode: "Finishing" }[weft.stage];
    this.at("step").textContent = queued ? waits : (stage ?? steps);
    const eta = weft.eta_seconds == null ? "" : `about ${roughly(weft.eta_seconds)} left`;
    this.at("left").textContent = [queued && weft.queue_position ? ahead : "", eta].filter(Boolean).join(" · ");
    this.at("where").textContent = weft.ranks.length ? [named(weft.ranks), weft.plan].filter(Boolean).join(" · ") : "";
    this.cloth.weave(weft.step, first && weft.step > 1 ? [] : weft.ranks); // the ranks of earlier steps are unknown
    this.at("cloth").setAttribute("aria-valuenow", job.progress);
    this.at("cloth").setAttribute("aria-valuetext", `${this.at("step").textContent}, ${this.at("left").textContent}`);
    const quarter = Math.floor(job.progress / 25);
    if (quarter > this.quarter) speak(`${25 * quarter} percent: ${job.prompt}`);
    this.quarter = Math.max(quarter, this.quarter);
  }

  async preview({ step, b64_json }) {
    const data = Uint8Array.from(atob(b64_json), (letter) => letter.charCodeAt(0));
    const picture = await createImageBitmap(new Blob([data], { type: "image/png" }));
    const canvas = this.at("preview");
    Object.assign(canvas, { width: picture.width, height: picture.height });
    canvas.getContext("2d").drawImage(picture, 0, 0);
    canvas.dataset.step = step;
    canvas.setAttribute("aria-label", `Preview after step ${step}`);
  }

  /** Follows the events of the job; calls `ended` when it has ended. */
  async listen(ended) {
    const { signal } = (this.stop = new AbortController());
    for await (const { name, data } of follow(`${home(this.job)}/events`, signal)) {
      if (name === "preview") await this.preview(data).catch(() => {});
      else if (active(data)) this.show(data);
    }
    if (signal.aborted) return;
    this.stop = null;
    ended();
  }

  disconnect() {
    this.stop?.abort();
    this.stop = null;
  }

  async cancel() {
    this.at("cancel").disabled = true;
    this.disconnect();
    try {
      await request(home(this.job), { method: "DELETE" });
      speak("Cancelled.");
    } catch (error) {
      this.at("cancel").disabled = false;
      if (error.status !== 404) return void (this.at("error").textContent = error.message);
    }
    remove(this.job.id);
    document.getElementById("prompt").focus();
  }
}

function remove(id) {
  cards.get(id)?.disconnect();
  cards.get(id)?.node.remove();
  cards.delete(id);
  title();
}

function title() {
  document.getElementById("idle").hidden = cards.size > 0;
  const running = [...cards.values()].find((card) => card.job.status === "in_progress");
  document.title = running ? `${running.job.progress} % · weft` : "weft";
}

export const ids = () => [...cards.keys()];

/** Shows a job while it is queued or running. */
export function show(job, ended) {
  let card = cards.get(job.id);
  if (active(job) && !card) {
    card = new JobCard(job);
    cards.set(job.id, card);
    place.append(card.node);
  } else if (active(job)) {
    card.show(job);
  } else if (card) {
    speak(job.status === "completed" ? `Completed: ${job.prompt}` : `Failed: ${job.error?.message}`);
    remove(job.id);
  }
  if (active(job)) {
    const streams = [...cards.values()].filter((other) => other.stop).length;
    if (!job.weft.ranks.length) card.disconnect(); // streams are for running jobs
    else if (!card.stop && streams < STREAMS) card.listen(ended);
  }
  sort();
  title();
}

/** Sorts running jobs first, then by queue position, but not under the pointer or the focus. */
function sort() {
  if (place.matches(":hover, :focus-within")) return;
  const order = ({ job }) => (job.status === "in_progress" ? 0 : (job.weft.queue_position ?? 1e6));
  const sorted = [...cards.values()].sort((a, b) => order(a) - order(b) || (a.job.id.slice(6) < b.job.id.slice(6) ? -1 : 1));
  sorted.forEach(({ node }, index) => node !== place.children[index] && place.insertBefore(node, place.children[index]));
}

export const gone = remove;
