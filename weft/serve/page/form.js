/** What is asked for: the form, its errors where they belong, and what the planner says of its size. */

import { Refused, ask, json, random } from "./api.js";
import { showPlan } from "./ranks.js";

const form = document.getElementById("ask");
const field = Object.fromEntries(["prompt", "width", "height", "frames", "steps", "seed"].map((name) => [name, form.elements[name]]));
const places = { seconds: "num_frames", frames: "num_frames", steps: "num_inference_steps" };
let facts = {};
let once = null; // what was sent last without an answer: sent again, it is the same job

const kinds = form.elements.kind;
const kind = () => kinds.value;
const size = () => `${number("width")}x${number("height")}`;
const number = (name) => (field[name].value === "" ? null : Number(field[name].value));

/** What the model can make; what was typed already stays. */
export function describe(model) {
  facts = model.weft ?? {};
  const able = facts.kinds ?? ["video", "image"];
  for (const choice of kinds) choice.disabled = !able.includes(choice.value);
  if (!able.includes(kind())) kinds.value = able[0];
  const [, down = 1, across = 1] = facts.multiple ?? [];
  Object.assign(field.width, { step: across, min: across });
  Object.assign(field.height, { step: down, min: down });
  for (const name of ["width", "height", "frames", "steps"]) {
    field[name].value ||= facts[name] ?? "";
    field[name].defaultValue = facts[name] ?? "";
  }
  changed();
}

/** The settings of a job that was made, to make it again or another like it. */
export function reuse(job) {
  const [width, height] = job.size.split("x");
  kinds.value = job.object;
  const said = { prompt: job.prompt, width, height, steps: job.weft.num_steps, seed: job.weft.seed };
  if (job.object === "video") said.frames = job.weft.num_frames;
  for (const [name, value] of Object.entries(said)) field[name].value = value;
  changed();
  form.scrollIntoView({ block: "start" });
  field.prompt.focus({ preventScroll: true });
}

function changed() {
  const video = kind() === "video";
  document.getElementById("frames-field").hidden = !video;
  document.getElementById("image-field").hidden = !(video && facts.takes?.includes("image"));
  document.getElementById("make").textContent = video ? "Make video" : "Make image";
  const seconds = facts.fps && number("frames") / facts.fps;
  document.getElementById("seconds").textContent = seconds ? `${+seconds.toFixed(2)} s` : "";
  clearTimeout(changed.later);
  changed.later = setTimeout(plan, 250);
}

async function plan() {
  const asked = { size: size(), frames: kind() === "video" ? number("frames") : 1, steps: number("steps") };
  if (!number("width") || !number("height") || !asked.frames || !asked.steps) return;
  plan.asked?.abort();
  plan.asked = new AbortController();
  try {
    showPlan(await json(`v1/plan?${new URLSearchParams(asked)}`, { signal: plan.asked.signal }), asked);
    for (const param of ["size", "num_frames", "num_inference_steps"]) complain(param, "");
  } catch (error) {
    if (!(error instanceof Refused)) return;
    showPlan(null, asked, error.message);
    if (error.status === 400) blame(error);
  }
}

/** Writes an error beside its field; nothing takes it away. True if there is such a field. */
function complain(param, message) {
  const place = form.querySelector(`[data-param="${CSS.escape(places[param] ?? param ?? "")}"]`);
  if (!place) return false;
  place.querySelector(".error").textContent = message;
  for (const input of place.querySelectorAll("input, textarea")) input.setAttribute("aria-invalid", Boolean(message));
  return true;
}

function blame(error) {
  if (!complain(error.param, error.message)) document.getElementById("ask-error").textContent = error.message;
}

function clear() {
  for (const place of form.querySelectorAll("[data-param]")) complain(place.dataset.param, "");
  document.getElementById("ask-error").textContent = "";
}

/** True if every field has something a server could judge; else says what is missing. */
function filled() {
  for (const input of Object.values(field)) {
    const { valueMissing, badInput } = input.validity;
    if (input.closest("[hidden]") || !(valueMissing || badInput)) continue;
    const said = input === field.prompt ? "Say what to make." : input.validationMessage;
    complain(input.closest("[data-param]").dataset.param, said);
  }
  const blank = !field.prompt.value.trim();
  if (blank) complain("prompt", "Say what to make.");
  return !form.querySelector("[aria-invalid=true]");
}

async function body() {
  const said = { prompt: field.prompt.value, size: size(), num_inference_steps: number("steps") };
  if (number("seed") !== null) said.seed = number("seed");
  if (kind() === "image") return { ...said, stream: true };
  const [picture] = document.getElementById("image-field").hidden ? [] : form.elements.image.files;
  if (picture) said.input_reference = { image_url: await dataUrl(picture) };
  return { ...said, num_frames: number("frames") };
}

function dataUrl(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

async function send(tell) {
  const said = await body();
  const text = kind() + JSON.stringify(said);
  if (once?.text !== text) once = { text, key: `page-${random()}-${random()}` };
  const options = { method: "POST", body: said, headers: { "Idempotency-Key": once.key } };
  tell(kind() === "video" ? await json("v1/videos", options) : await image(options));
  once = null;
}

/** With a key of ours the image is made even if nobody reads its answer, which would keep a connection busy. */
async function image(options) {
  const answer = await ask("v1/images/generations", options);
  await answer.body.cancel();
  return json(`v1/images/${answer.headers.get("X-Job-Id")}`);
}

/** `tell` gets each job that was accepted. */
export function start(tell) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const make = document.getElementById("make");
    if (make.getAttribute("aria-disabled") === "true") return;
    clear();
    if (!facts.kinds) {
      blame(new Error("The model is still being loaded. The form is ready when it is."));
    } else if (filled()) {
      make.setAttribute("aria-disabled", "true");
      await send(tell).catch(blame);
      make.removeAttribute("aria-disabled");
    } else {
      changed(); // what the server has to say of the others is to be seen too
    }
    form.querySelector("[aria-invalid=true]")?.focus();
  });
  form.addEventListener("input", (event) => {
    const place = event.target.closest("[data-param]");
    if (place) complain(place.dataset.param, "");
    changed();
  });
  field.prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  document.getElementById("dice").addEventListener("click", () => {
    field.seed.value = random();
    complain("seed", "");
  });
}
