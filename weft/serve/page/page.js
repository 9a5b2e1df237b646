/** Joins the parts: what is asked, what is on its way, what was made, and the machine. */

import { json, link, nap, pause, useKey } from "./api.js";
import * as form from "./form.js";
import * as gallery from "./gallery.js";
import * as loom from "./loom.js";
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

/** While there is something on the loom, the lists say what the streams do not: places in the queue, other jobs. */
async function keepUp() {
  for (;;) {
    await nap(document.hidden ? 15_000 : 2000);
    if (loom.ids().length) await gallery.poll().catch(() => {});
  }
}

link.addEventListener("down", () => {
  notice.textContent = "The server does not answer. Trying again; what was asked for is kept there.";
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
  document.getElementById("key-error").textContent = lock.dataset.tried ? "That is not the key of this server." : "";
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
    // The server has said why: that it wants another key, or nothing at all.
  }
});

form.start(gallery.take);
begin().catch(() => {});
keepUp();
watch((now) => {
  if (!described && now.status === "ok") begin().catch(() => {});
  const known = loom.ids();
  for (const id of now.running.flatMap((batch) => batch.jobs)) if (!known.includes(id)) gallery.look(id);
});
