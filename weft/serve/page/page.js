/** Connects the form, the jobs, the results and the panel of ranks. */

import { json, link, nap, pause, useKey } from "./api.js";
import * as form from "./form.js";
import * as gallery from "./gallery.js";
import * as jobs from "./jobs.js";
import { watch } from "./ranks.js";

const notice = document.getElementById("notice");
const lock = document.getElementById("key");
let described = false;

async function begin() {
  const { data } = await json("v1/models");
  form.describe(data[0]);
  described = Boolean(data[0].weft?.kinds);
  await gallery.reload();
}

/** While jobs run, polls the lists for what streams do not have: queue positions and other jobs. */
async function pollJobs() {
  for (;;) {
    await nap(document.hidden ? 15_000 : 2000);
    if (jobs.ids().length) await gallery.poll().catch(() => {});
  }
}

link.addEventListener("down", () => {
  notice.textContent = "The server does not answer. Retrying; its jobs are kept.";
  notice.hidden = false;
  notice.classList.remove("good");
});

link.addEventListener("up", async () => {
  notice.textContent = "The server answers again.";
  notice.classList.add("good");
  begin().catch(() => {});
  await pause(4000);
  if (notice.classList.contains("good")) notice.hidden = true;
});

link.addEventListener("key", () => {
  document.getElementById("key-error").textContent = lock.dataset.tried ? "The key is wrong." : "";
  if (lock.hidden) {
    lock.hidden = false;
    document.querySelector("main").hidden = true;
    lock.elements["key-value"].focus();
  }
});

lock.addEventListener("submit", async (event) => {
  event.preventDefault();
  lock.dataset.tried = "yes";
  useKey(lock.elements["key-value"].value);
  try {
    await begin();
    lock.hidden = true;
    document.querySelector("main").hidden = false;
    link.dispatchEvent(new Event("unlocked"));
  } catch {
    // The "key" or "down" event has shown the reason.
  }
});

form.start(gallery.take);
begin().catch(() => {});
pollJobs();
watch((now) => {
  if (!described && now.status === "ok") begin().catch(() => {});
  const known = jobs.ids();
  for (const id of now.running.flatMap((batch) => batch.jobs)) if (!known.includes(id)) gallery.refresh(id);
});
