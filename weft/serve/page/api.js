/** API client: the key, the error envelope, event streams, and whether the server is reachable. */

const KEY = "weft-key";
let isReachable = true;

/** Dispatches "down" and "up" when the server becomes unreachable and reachable, "key" when it requires one, "unlocked". */
export const link = new EventTarget();

export class APIError extends Error {
  constructor(status, { message, code, param } = {}) {
    super(message || `The server answered ${status}.`);
    Object.assign(this, { status, code, param });
  }
}

export const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
/** Waits until the time is over, the page becomes visible, or the server is reachable again. */
export function nap(milliseconds) {
  const woken = new AbortController();
  const events = [[document, "visibilitychange"], [link, "up"], [link, "unlocked"]];
  return new Promise((done) => {
    for (const [target, name] of events) target.addEventListener(name, done, { signal: woken.signal });
    setTimeout(done, milliseconds);
  }).finally(() => woken.abort());
}

export const useKey = (value) => sessionStorage.setItem(KEY, value);

function setReachable(now) {
  if (now === isReachable) return;
  isReachable = now;
  link.dispatchEvent(new Event(now ? "up" : "down"));
}

/** Returns the response, or throws an APIError; its status is 0 if the server is unreachable. */
export async function request(path, { method = "GET", body, headers = {}, signal } = {}) {
  const key = sessionStorage.getItem(KEY);
  if (key) headers = { ...headers, Authorization: `Bearer ${key}` };
  if (body) headers = { ...headers, "Content-Type": "application/json" };
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  } catch (error) {
    if (signal?.aborted) throw error;
    setReachable(false);
    throw new APIError(0, { message: "The server does not answer." });
  }
  setReachable(true);
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  if (response.status === 401) link.dispatchEvent(new Event("key"));
  throw new APIError(response.status, error);
}

export const json = async (path, options) => (await request(path, options)).json();

/** Yields the server-sent events of a response: their names and data. */
async function* events(response) {
  const chunks = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await chunks.read();
      if (done) return;
      const blocks = (text + value).replaceAll("\r\n", "\n").split("\n\n");
      text = blocks.pop();
      yield* blocks.map(parse).filter(Boolean);
    }
  } finally {
    await chunks.cancel().catch(() => {});
  }
}

function parse(block) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    if (line.startsWith("data:")) data.push(line.slice(5));
  }
  return data.length ? { name, data: JSON.parse(data.join("\n")) } : null;
}

/** Yields the events of a job until it ends or is deleted; reconnects a broken stream. */
export async function* follow(path, signal) {
  for (let wait = 500; !signal.aborted; wait = Math.min(2 * wait, 5000)) {
    try {
      for await (const event of events(await request(path, { signal }))) {
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

/** Returns a URL that an <img> or <video> can load: with a key, a blob. */
export async function media(path) {
  return sessionStorage.getItem(KEY) ? URL.createObjectURL(await (await request(path)).blob()) : path;
}

export const home = (job) => `v1/${job.object}s/${job.id}`;

export const random = () => crypto.getRandomValues(new Uint32Array(1))[0];
