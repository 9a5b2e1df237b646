/** Talks to the server: the key, the one error envelope, streams, and whether it answers at all. */

const KEY = "weft-key";
let answering = true;

/** Tells "down" when the server stops answering, "up" when it does again, "key" when it wants one, "unlocked". */
export const link = new EventTarget();

export class Refused extends Error {
  constructor(status, { message, code, param } = {}) {
    super(message || `The server answered ${status}.`);
    Object.assign(this, { status, code, param });
  }
}

export const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
/** Until the time is over, the page is looked at again, or the server answers again. */
export function nap(milliseconds) {
  return new Promise((done) => {
    const end = () => {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", end);
      for (const name of ["up", "unlocked"]) link.removeEventListener(name, end);
      done();
    };
    const timer = setTimeout(end, milliseconds);
    document.addEventListener("visibilitychange", end);
    for (const name of ["up", "unlocked"]) link.addEventListener(name, end);
  });
}

export const keyed = () => Boolean(sessionStorage.getItem(KEY));

export function useKey(value) {
  sessionStorage.setItem(KEY, value);
}

function tell(now) {
  if (now === answering) return;
  answering = now;
  link.dispatchEvent(new Event(now ? "up" : "down"));
}

/** The answer, or an error that says why there is none; status 0 is a server that cannot be reached. */
export async function ask(path, { method = "GET", body, headers = {}, signal } = {}) {
  const key = sessionStorage.getItem(KEY);
  if (key) headers = { ...headers, Authorization: `Bearer ${key}` };
  if (body) headers = { ...headers, "Content-Type": "application/json" };
  let answer;
  try {
    answer = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  } catch (error) {
    if (signal?.aborted) throw error;
    tell(false);
    throw new Refused(0, { message: "The server does not answer." });
  }
  tell(true);
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  if (answer.status === 401) link.dispatchEvent(new Event("key"));
  throw new Refused(answer.status, said.error);
}

export const json = async (path, options) => (await ask(path, options)).json();

/** The server-sent events of an answer, as they come: their name and what they carry. */
export async function* events(answer) {
  const lines = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await lines.read();
      if (done) return;
      const parts = (text + value).replaceAll("\r\n", "\n").split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        const event = read(part);
        if (event) yield event;
      }
    }
  } finally {
    await lines.cancel().catch(() => {});
  }
}

function read(part) {
  let name = "message";
  const data = [];
  for (const line of part.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    if (line.startsWith("data:")) data.push(line.slice(5));
  }
  return data.length ? { name, data: JSON.parse(data.join("\n")) } : null;
}

/** What happens to a job until it has ended or is gone; a stream that breaks is opened again. */
export async function* follow(path, signal) {
  for (let wait = 500; !signal.aborted; wait = Math.min(2 * wait, 5000)) {
    try {
      for await (const event of events(await ask(path, { signal }))) {
        wait = 500;
        yield event;
        if (event.name === "done") return;
      }
    } catch (error) {
      if (signal.aborted || [401, 404].includes(error.status)) return;
    }
    await pause(wait);
  }
}

/** An address that an <img> or <video> can load: with a key, the bytes themselves. */
export async function media(path) {
  return keyed() ? URL.createObjectURL(await (await ask(path)).blob()) : path;
}

export const home = (job) => `v1/${job.object}s/${job.id}`;

export function random() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}
