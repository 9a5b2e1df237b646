/** The request form: its fields, examples, errors beside them, and the plan for its size. */

import { APIError, json, random, request } from "./api.js";
import { showPlan } from "./ranks.js";
import { node } from "./words.js";

const form = document.getElementById("ask");
const NAMES = ["prompt", "width", "height", "frames", "steps", "seed", "negative", "guidance", "fps"];
const field = Object.fromEntries(NAMES.map((name) => [name, form.elements[name]]));
const MAX_WORDS = 200; // a page with more is of no use
const PARAMS = { seconds: "num_frames", frames: "num_frames", steps: "num_inference_steps" };
let facts = {};
let unanswered = null; // the last request without a response: a retry is the same job

const kinds = form.elements.kind;
const kind = () => kinds.value;
const size = () => `${number("width")}x${number("height")}`;
const number = (name) => (field[name].value === "" ? null : Number(field[name].value));

/** Applies the limits and defaults of the model; keeps what was typed already. */
export function describe(model) {
  facts = model.weft ?? {};
  const able = facts.kinds ?? ["video", "image"];
  for (const choice of kinds) choice.disabled = !able.includes(choice.value);
  if (!able.includes(kind())) kinds.value = able[0];
  const [, down = 1, across = 1] = facts.multiple ?? [];
  Object.assign(field.width, { step: across, min: across });
  Object.assign(field.height, { step: down, min: down });
  for (const name of ["width", "height", "frames", "steps", "guidance", "fps"]) {
    field[name].value ||= facts[name] ?? "";
    field[name].defaultValue = facts[name] ?? "";
  }
  suggest();
  changed();
}

/** Offers the example prompts of the model, and its words if they are few. */
function suggest() {
  const { examples = [], vocabulary = [] } = facts;
  field.prompt.placeholder = examples[0] ?? "Describe it in a sentence";
  document.getElementById("examples").replaceChildren(...examples.map((text) => choice(text, () => text)));
  const add = (word) => () => `${field.prompt.value.trimEnd()} ${word}`.trimStart();
  document.querySelector("#vocabulary ul").replaceChildren(...vocabulary.map((word) => choice(word, add(word))));
  document.getElementById("vocabulary").hidden = !vocabulary.length || vocabulary.length > MAX_WORDS;
}

/** A button that sets the prompt to what `prompt` returns. */
function choice(text, prompt) {
  const [item, button] = [node("li"), node("button", text, { type: "button" })];
  button.addEventListener("click", () => {
    field.prompt.value = prompt();
    setError("prompt", "");
  });
  item.append(button);
  return item;
}

/** Fills the form with the settings of a job. */
export function reuse(job) {
  const [width, height] = job.size.split("x");
  kinds.value = job.object;
  const { num_steps: steps, seed, guidance_scale: guidance, negative_prompt: negative } = job.weft;
  const values = { prompt: job.prompt, width, height, steps, seed, guidance, negative };
  if (job.object === "video") Object.assign(values, { frames: job.weft.num_frames, fps: job.weft.fps });
  for (const [name, value] of Object.entries(values)) field[name].value = value ?? "";
  changed();
  form.scrollIntoView({ block: "start" });
  field.prompt.focus({ preventScroll: true });
}

function changed() {
  const video = kind() === "video";
  document.getElementById("frames-field").hidden = document.getElementById("fps-field").hidden = !video;
  document.getElementById("guidance-field").hidden = facts.guidance == null;
  document.getElementById("negative-field").hidden = !facts.takes?.includes("negative_prompt");
  document.getElementById("options").hidden = ![...document.querySelectorAll("#options .field")].some((each) => !each.hidden);
  document.getElementById("image-field").hidden = !(video && facts.takes?.includes("image"));
  document.getElementById("make").textContent = video ? "Make video" : "Make image";
  const seconds = number("fps") && number("frames") / number("fps");
  document.getElementById("seconds").textContent = seconds ? `${+seconds.toFixed(2)} s` : "";
  clearTimeout(changed.later);
  changed.later = setTimeout(plan, 250);
}

async function plan() {
  const query = { size: size(), frames: kind() === "video" ? number("frames") : 1, steps: number("steps") };
  if (shown("guidance") && number("guidance") !== null) query.guidance_scale = number("guidance");
  if (!number("width") || !number("height") || !query.frames || !query.steps) return;
  plan.pending?.abort();
  plan.pending = new AbortController();
  try {
    const answer = await json(`v1/plan?${new URLSearchParams(query)}`, { signal: plan.pending.signal });
    for (const param of ["num_frames", "num_inference_steps", "guidance_scale"]) setError(param, "");
    setError("size", answer.refusal ?? ""); // what would be refused is said before it is sent
    showPlan(answer, query);
  } catch (error) {
    if (!(error instanceof APIError)) return;
    const isShown = error.status === 400 && setError(error.param, error.message);
    showPlan(null, query, isShown ? "" : error.message);
  }
}

const shown = (name) => !field[name].closest(".field").hidden;

/** Shows an error beside its field, or clears it; returns false if there is no such field. */
function setError(param, message) {
  const place = form.querySelector(`[data-param="${CSS.escape(PARAMS[param] ?? param ?? "")}"]`);
  if (!place) return false;
  place.querySelector(".error").textContent = message;
  if (message) place.closest("details")?.setAttribute("open", "");
  for (const input of place.querySelectorAll("input, textarea")) input.setAttribute("aria-invalid", Boolean(message));
  return true;
}

function report(error) {
  if (!setError(error.param, error.message)) document.getElementById("ask-error").textContent = error.message;
}

function clear() {
  for (const place of form.querySelectorAll("[data-param]")) setError(place.dataset.param, "");
  document.getElementById("ask-error").textContent = "";
}

/** Returns whether every field has a value for the server to check; shows an error at those that do not. */
function isFilled() {
  for (const input of Object.values(field)) {
    const { valueMissing, badInput } = input.validity;
    if (input.closest("[hidden]") || !(valueMissing || badInput)) continue;
    const message = input === field.prompt ? "Enter a prompt." : input.validationMessage;
    setError(input.closest("[data-param]").dataset.param, message);
  }
  if (!field.prompt.value.trim()) setError("prompt", "Enter a prompt.");
  return !form.querySelector("[aria-invalid=true]");
}

async function body() {
  const fields = { prompt: field.prompt.value, size: size(), num_inference_steps: number("steps") };
  if (number("seed") !== null) fields.seed = number("seed");
  if (shown("guidance") && number("guidance") !== null) fields.guidance_scale = number("guidance");
  if (shown("negative") && field.negative.value.trim()) fields.negative_prompt = field.negative.value;
  if (kind() === "image") return { ...fields, stream: true };
  const [picture] = document.getElementById("image-field").hidden ? [] : form.elements.image.files;
  if (picture) fields.input_reference = { image_url: await dataUrl(picture) };
  if (number("fps") !== null) fields.fps = number("fps");
  return { ...fields, num_frames: number("frames") };
}

function dataUrl(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

async function send(onJob) {
  const fields = await body();
  const text = kind() + JSON.stringify(fields);
  if (unanswered?.text !== text) unanswered = { text, key: `page-${random()}-${random()}` };
  const options = { method: "POST", body: fields, headers: { "Idempotency-Key": unanswered.key } };
  onJob(kind() === "video" ? await json("v1/videos", options) : await image(options));
  unanswered = null;
}

/** With an Idempotency-Key the image is made even if its response, which would hold a connection, is not read. */
async function image(options) {
  const response = await request("v1/images/generations", options);
  await response.body.cancel();
  return json(`v1/images/${response.headers.get("X-Job-Id")}`);
}

/** Calls `onJob` with each job that is accepted. */
export function start(onJob) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const make = document.getElementById("make");
    if (make.getAttribute("aria-disabled") === "true") return;
    clear();
    if (!facts.kinds) {
      report(new Error("The model is still loading. Try again when it is ready."));
    } else if (isFilled()) {
      make.setAttribute("aria-disabled", "true");
      await send(onJob).catch(report);
      make.removeAttribute("aria-disabled");
    } else {
      changed(); // shows the server's errors of other fields too
    }
    form.querySelector("[aria-invalid=true]")?.focus();
  });
  form.addEventListener("input", (event) => {
    const place = event.target.closest("[data-param]");
    if (place) setError(place.dataset.param, "");
    changed();
  });
  field.prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  document.getElementById("dice").addEventListener("click", () => {
    field.seed.value = random();
    setError("seed", "");
  });
}
