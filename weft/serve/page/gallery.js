/** Results: videos and images together, the newest first; older ones page by page. */

import { home, json, media, request } from "./api.js";
import * as form from "./form.js";
import * as jobs from "./jobs.js";
import { bytes, fromTemplate, node, seconds } from "./words.js";

const PAGE = matchMedia("(max-width: 56rem)").matches ? 6 : 12;
const KINDS = ["videos", "images"];
const AUTOPLAY_BYTES = 8 * 2 ** 20; // loading a larger one would hold a connection, of which a browser has six
const STAGES = ["queue", "encode", "denoise", "decode", "media"];
const place = document.getElementById("results");
const results = new Map();
const age = (job) => job.id.slice(6); // ids sort by time after their kind

/** The next pages of one kind, fetched only as far as merging with the other kind needs. */
class Older {
  constructor(kind) {
    Object.assign(this, { kind, jobs: [], after: null, more: true });
  }

  async head() {
    if (!this.jobs.length && this.more) {
      const after = this.after ? `&after=${encodeURIComponent(this.after)}` : "";
      const page = await json(`v1/${this.kind}?limit=${PAGE}&order=desc${after}`);
      Object.assign(this, { jobs: page.data, after: page.last_id, more: page.has_more });
    }
    return this.jobs[0];
  }
}

let pages;

/** Replaces the results shown by those that the server has now. */
export async function reload() {
  const current = (pages = KINDS.map((kind) => new Older(kind)));
  const stale = new Set(results.keys());
  for (const id of await older()) stale.delete(id);
  if (pages !== current) return; // another reload began meanwhile
  for (const id of stale) remove(id);
  for (const id of jobs.ids()) await refresh(id);
}

async function older() {
  const [ids, from] = [[], pages];
  while (ids.length < PAGE) {
    const heads = await Promise.all(from.map((page) => page.head()));
    const newest = heads.reduce((best, job) => (job && (!best || age(job) > age(best)) ? job : best), undefined);
    if (!newest) break;
    from.find((page) => page.jobs[0] === newest).jobs.shift();
    take(newest);
    ids.push(newest.id);
  }
  document.getElementById("more").hidden = !from.some((page) => page.jobs.length || page.more);
  document.getElementById("none").hidden = results.size > 0;
  return ids;
}

/** Shows a job: as in progress, and here once it has ended. */
export function take(job) {
  jobs.show(job, () => refresh(job.id));
  if (jobs.active(job) || results.has(job.id)) return;
  const card = result(job);
  results.set(job.id, { job, card });
  const next = [...place.children].find((other) => other.dataset.id.slice(6) < age(job));
  place.insertBefore(card, next ?? null);
  document.getElementById("none").hidden = true;
}

/** Fetches and shows a job by its id, which begins with its kind. */
export async function refresh(id) {
  try {
    take(await json(home({ id, object: id.slice(0, 5) })));
  } catch (error) {
    if (error.status === 404) jobs.gone(id);
  }
}

/** Refreshes the newest jobs of each kind, and those in progress that are not among them. */
export async function poll() {
  const lists = await Promise.all(KINDS.map((kind) => json(`v1/${kind}?limit=${PAGE}&order=desc`)));
  const newest = lists.flatMap((page) => page.data).sort((a, b) => (age(a) < age(b) ? -1 : 1));
  newest.forEach(take);
  const listed = new Set(newest.map((job) => job.id));
  for (const id of jobs.ids()) if (!listed.has(id)) await refresh(id);
}

function result(job) {
  const card = fromTemplate("result");
  const at = (name) => card.querySelector(`.${name}`);
  card.dataset.id = job.id;
  at("prompt").textContent = at("prompt").title = job.prompt;
  const { weft } = job;
  const facts = [
    job.size.replace("x", "×"), job.object === "video" && `${weft.num_frames} frames`, `${weft.num_steps} steps`,
    weft.guidance_scale != null && `guidance ${weft.guidance_scale}`, `seed ${weft.seed}`, weft.negative_prompt && `without: ${weft.negative_prompt}`,
  ];
  at("facts").textContent = facts.filter(Boolean).join(" · ");
  if (job.status === "completed") {
    show(card, job);
    times(card, weft.timings);
  } else {
    at("frame").remove();
    at("time").remove();
    at("download").remove();
    card.classList.add("failed");
    at("error").textContent = job.error?.code === "cancelled" ? "Cancelled." : (job.error?.message ?? "Failed.");
  }
  for (const name of ["again", "delete"]) at(name).setAttribute("aria-label", `${at(name).textContent}: ${job.prompt}`);
  at("again").addEventListener("click", () => form.reuse(job));
  confirmed(at("delete"), () => discard(job, card));
  return card;
}

/** Shows the image or video. */
async function show(card, job) {
  const [width, height] = job.size.split("x").map(Number);
  const view = node(job.object === "video" ? "video" : "img", "", { width, height });
  view.classList.toggle("small", Math.max(width, height) <= 256);
  const source = await media(`${home(job)}/content`).catch(() => null);
  if (!source) return;
  if (job.object === "image") Object.assign(view, { alt: job.prompt, loading: "lazy" });
  else playable(view, job);
  view.src = source;
  card.querySelector(".frame").classList.add(job.object);
  card.querySelector(".frame").append(view);
  const link = card.querySelector(".download");
  Object.assign(link, { href: source, download: `${job.id}.${job.weft.output_format}` });
  link.setAttribute("aria-label", `Download, ${bytes(job.weft.bytes)}: ${job.prompt}`);
  link.title = bytes(job.weft.bytes);
}

/** Plays videos while they are visible, where the browser allows it. */
const visible = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) isIntersecting ? target.play().catch(() => {}) : target.pause();
}, { threshold: 0.5 });

function playable(video, job) {
  // Until it plays, a video is a thumbnail.
  Object.assign(video, { muted: true, loop: true, playsInline: true, preload: "none", tabIndex: 0 });
  video.setAttribute("aria-label", `Video: ${job.prompt}`);
  media(`${home(job)}/content?variant=thumbnail`).then((picture) => (video.poster = picture), () => {});
  // The controls would hide a small video: they appear with the pointer or the focus.
  for (const name of ["pointerenter", "focus"]) video.addEventListener(name, () => (video.controls = true));
  for (const name of ["pointerleave", "blur"]) {
    video.addEventListener(name, () => (video.controls = video.matches(":hover, :focus")));
  }
  for (const name of ["play", "pause"]) {
    video.addEventListener(name, () => video.parentElement.classList.toggle("playing", !video.paused));
  }
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (!still && job.weft.bytes <= AUTOPLAY_BYTES) visible.observe(video);
}

/** Shows the seconds of each stage, as one thread and as text. */
function times(card, timings) {
  const known = STAGES.filter((stage) => timings[stage]);
  const total = known.reduce((sum, stage) => sum + timings[stage], 0);
  for (const stage of known) {
    const bar = node("i", "", { class: stage });
    bar.style.setProperty("--part", timings[stage] / total);
    card.querySelector(".thread").append(bar);
  }
  const text = known.map((stage) => `${stage} ${seconds(timings[stage])}`).join(", ");
  card.querySelector(".timings").textContent = `${seconds(total)}: ${text}`;
}

/** Acts on the second press; the first asks for confirmation. */
function confirmed(button, act) {
  const [text, label] = [button.textContent, button.getAttribute("aria-label")];
  const reset = () => {
    button.textContent = text;
    button.setAttribute("aria-label", label);
    button.classList.remove("sure");
  };
  button.addEventListener("blur", reset);
  button.addEventListener("click", () => {
    if (button.classList.contains("sure")) return act();
    button.textContent = "Really delete";
    button.setAttribute("aria-label", `Really delete? ${label}`);
    button.classList.add("sure");
  });
}

async function discard(job, card) {
  try {
    await request(home(job), { method: "DELETE" });
  } catch (error) {
    if (error.status !== 404) return void (card.querySelector(".error").textContent = error.message);
  }
  const next = card.nextElementSibling ?? card.previousElementSibling;
  remove(job.id);
  (next?.querySelector("button") ?? document.getElementById("results-title")).focus();
}

function remove(id) {
  const { card } = results.get(id) ?? {};
  const view = card?.querySelector("img, video");
  const source = view?.src ?? "";
  if (view) visible.unobserve(view);
  if (source.startsWith("blob:")) URL.revokeObjectURL(source);
  card?.remove();
  results.delete(id);
  document.getElementById("none").hidden = results.size > 0;
}

document.getElementById("more").addEventListener("click", async () => {
  const last = place.lastElementChild;
  await older().catch(() => {}); // the notice shows that the server is unreachable
  last?.nextElementSibling?.querySelector("button")?.focus();
});
